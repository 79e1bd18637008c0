"""What the bundled tiny pair is made of: shapes, corpus, tokenizer, training chats and its files.

Why apart: the dense pair and its hybrid share a tokenizer and a corpus; how each is trained is in
train_tiny.py and train_tiny_hybrid.py.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny_corpus import Exchange, exchanges
from tiny_drafter import Shape
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT, IM_START, IM_END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE, NUM_BPE_TOKENS = 2048, 2040
# Digits stand alone, so that sums have one token per digit; a word keeps the space before it.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
SYSTEM = "You are a helpful assistant."
TARGET = Shape(
    vocab_size=VOCAB_SIZE,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
)
DRAFT = dataclasses.replace(TARGET, num_hidden_layers=3)
BLOCK_SIZE, TAPS = 16, (1, 3, 5, 6)


class Stream(NamedTuple):
    """All training chats as one token stream; exchange c is tokens[starts[c]:ends[c]]."""

    tokens: Tensor  # int64 [n]
    is_answer: Tensor  # bool [n]: predicted by the loss
    starts: Tensor  # int64 [m]
    answers: Tensor  # int64 [m]: first answer token
    ends: Tensor  # int64 [m]


# ---- corpus and tokenizer ---------------------------------------------------------------------


def _shard(job: tuple[int, int]) -> list[Exchange]:
    return list(exchanges(job[0], job[1], heldout=False))


def make_corpus(seed: int, count: int) -> list[Exchange]:
    """`count` training exchanges from 16 seeded shards (the same on any number of processes)."""
    jobs = [(seed * 16 + i, count // 16) for i in range(16)]
    with multiprocessing.get_context("spawn").Pool() as pool:
        corpus = [ex for shard in pool.map(_shard, jobs) for ex in shard]
    random.Random(seed).shuffle(corpus)
    return corpus


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    value = tokenizer.token_to_id(token)
    assert value is not None, token
    return value


def make_tokenizer(corpus: list[Exchange]) -> Tokenizer:
    """Byte-level BPE of NUM_BPE_TOKENS tokens; the special tokens follow, then unused rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = (text for ex in corpus for text in (ex.prompt, ex.answer))
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != NUM_BPE_TOKENS:
        raise ValueError(f"corpus has only {tokenizer.get_vocab_size()} tokens; make it larger")
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return tokenizer


def prompt_text(prompt: str) -> str:
    """A one-turn chat up to the point where the assistant speaks; equals the chat template."""
    return f"{IM_START}user\n{prompt}{IM_END}\n{IM_START}assistant\n"


def make_stream(tokenizer: Tokenizer, corpus: list[Exchange], seed: int) -> Stream:
    """Tokenize the corpus; some exchanges open a new chat, some of those with a system message."""
    r = random.Random(seed)
    prompts = tokenizer.encode_batch([prompt_text(ex.prompt) for ex in corpus])
    answers = tokenizer.encode_batch([ex.answer + IM_END for ex in corpus])
    newline = tokenizer.encode("\n").ids
    system = tokenizer.encode(f"{IM_START}system\n{SYSTEM}{IM_END}\n").ids
    new_chat = [token_id(tokenizer, END_OF_TEXT)]
    tokens: list[int] = []
    marks: list[tuple[int, int, int]] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        opens = r.random() < 0.3
        tokens += new_chat if opens else []
        start = len(tokens)
        tokens += system if opens and r.random() < 0.3 else []
        tokens += prompt.ids
        marks.append((start, len(tokens), len(tokens) + len(answer.ids)))
        tokens += answer.ids + newline
    starts, first, ends = torch.tensor(marks).unbind(1)
    delta = torch.zeros(len(tokens) + 1, dtype=torch.int8)
    delta[first] += 1
    delta[ends] -= 1
    is_answer = delta[:-1].cumsum(0) > 0
    return Stream(torch.tensor(tokens), is_answer, starts, first, ends)


# ---- checkpoints ------------------------------------------------------------------------------


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")


def save(model: nn.Module, folder: Path, config: dict[str, object]) -> None:
    """Write bf16 model.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.named_parameters()
    }
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", config)


def flat_config(shape: Shape, architecture: str, stop: int) -> dict[str, object]:
    """The flat Qwen3 keys of a config.json."""
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        **dataclasses.asdict(shape),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": stop,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "max_window_layers": shape.num_hidden_layers,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer, its chat template and the generation config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="ascii")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    ids = [token_id(tokenizer, t) for t in (IM_END, END_OF_TEXT)]
    _write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": ids, "pad_token_id": ids[1]},
    )


def load(model: nn.Module, folder: Path, device: str) -> None:
    """Load saved (bf16-rounded) weights; computes in bf16 on a GPU, in fp32 on a CPU."""
    model.load_state_dict(load_file(str(folder / "model.safetensors")))
    model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).requires_grad_(False)
