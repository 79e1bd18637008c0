"""Makes the bundled tiny hybrid pair out of the bundled dense one, on a CPU, in half an hour.

Six of the dense target's eight attentions are replaced by Gated-DeltaNet mixers, the other two get
a gate; everything else is kept, so little has to be learnt:

1. each new mixer imitates the attention that it replaces, on the dense target's own activations;
2. the whole model learns the corpus' answers, its layers' outputs held to the dense target's;
3. the dense pair's drafter learns the hybrid's taps (random anchors, block mask, as train_tiny.py).

    python tools/train_tiny_hybrid.py --out graphengine/assets/tiny-hybrid --seconds 2400
    python tools/train_tiny_hybrid.py --out out/tiny-hybrid --seconds 60 --exchanges 4000

The last line of the output is one JSON object. What was saved is evaluated by transformers' model
of the target and a dense decoding loop that shares no code with the engine.

Legend: B batch, T tokens.
Source: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from result_file import parser_of
from tiny_corpus import CATEGORIES
from tiny_drafter import Drafter, Layer, Target, rope
from tiny_hybrid import LAYER_TYPES, Hybrid, begin, target_config
from tiny_pair import (
    BLOCK_SIZE,
    DRAFT,
    END_OF_TEXT,
    IM_END,
    TAPS,
    TARGET,
    Stream,
    load,
    make_corpus,
    make_stream,
    save,
    token_id,
)
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_tiny import block_loss, measured, optimizer_for, schedule, update

DENSE = Path(__file__).parents[1] / "graphengine" / "assets" / "tiny"


def batches(stream: Stream, args: argparse.Namespace, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, labels) [B, T] of packed chats; labels are -100 where nobody answers."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(stream.starts), (args.rows,), generator=generator)
        at = (stream.starts[chosen][:, None] + torch.arange(args.width + 1)) % len(stream.tokens)
        ids, is_answer = stream.tokens[at], stream.is_answer[at[:, 1:]]
        yield ids[:, :-1], torch.where(is_answer, ids[:, 1:], -100)


def imitate(dense: Target, hybrid: Hybrid, stream: Stream, args: argparse.Namespace) -> float:
    """Stage 1: returns the mean share of the attentions' variance that is not explained."""
    mixers = {
        i: x.linear_attn for i, x in enumerate(hybrid.model.layers) if hasattr(x, "linear_attn")
    }
    module = nn.ModuleList(mixers.values())
    optimizer = optimizer_for(module, args.lr, "cpu")
    source, average = batches(stream, args, 1), 0.0
    for step in schedule(optimizer, args.lr, args.seconds * 0.2):
        ids, _ = next(source)
        with torch.no_grad():
            x, seen = dense.model.embed_tokens(ids), {}
            cos_sin = rope(torch.arange(ids.shape[1])[None], TARGET)
            for i, layer in enumerate(dense.model.layers):
                assert isinstance(layer, Layer)
                h = layer.input_layernorm(x)
                attended = layer.self_attn.attend(
                    layer.self_attn.q(h, cos_sin), *layer.self_attn.kv(h, cos_sin), None
                )
                seen[i] = h, attended
                x = x + attended
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        losses = [
            F.mse_loss(mixer(seen[i][0]), seen[i][1]) / seen[i][1].var()
            for i, mixer in mixers.items()
        ]
        loss = torch.stack(losses).mean()
        update(module, optimizer, loss)
        average = loss.item() if not step else 0.95 * average + 0.05 * loss.item()
        if step % 20 == 0:
            each = [round(x.item(), 2) for x in losses]
            print(f"imitate {step}: {average:.3f} {each}", flush=True)
    return average


def learn(dense: Target, hybrid: Hybrid, stream: Stream, args: argparse.Namespace) -> float:
    """Stage 2: returns the loss of the answers' tokens."""
    optimizer = optimizer_for(hybrid, args.lr / 2, "cpu")
    source, average = batches(stream, args, 2), 0.0
    for step in schedule(optimizer, args.lr / 2, args.seconds * 0.5):
        ids, labels = next(source)
        with torch.no_grad():
            _, taps = dense(ids, range(len(LAYER_TYPES)))
            assert taps is not None
            wanted = taps.chunk(len(LAYER_TYPES), -1)
        found = hybrid.layers(ids)
        answers = F.cross_entropy(hybrid.head(found[-1]).flatten(0, 1), labels.flatten())
        apart = [F.mse_loss(a, b) / b.var() for a, b in zip(found, wanted, strict=True)]
        update(hybrid, optimizer, answers + args.hold * torch.stack(apart).mean())
        average = answers.item() if not step else 0.95 * average + 0.05 * answers.item()
        if step % 20 == 0:
            print(f"learn {step}: {average:.4f} apart {torch.stack(apart).mean():.3f}", flush=True)
    return average


def train_drafter(
    hybrid: Hybrid, drafter: Drafter, stream: Stream, args: argparse.Namespace, mask: int
) -> float:
    """Stage 3: returns the weighted loss of slots 1 .. 15."""
    optimizer = optimizer_for(drafter, args.lr / 3, "cpu")
    offsets, average = torch.arange(1, BLOCK_SIZE), 0.0
    source, generator = batches(stream, args, 3), torch.Generator().manual_seed(4)
    for step in schedule(optimizer, args.lr / 3, args.seconds * 0.3):
        ids, labels = next(source)
        with torch.no_grad():
            taps = torch.cat([x for i, x in enumerate(hybrid.layers(ids)) if i in TAPS], -1)
            is_answer = torch.cat([torch.zeros(len(ids), 1).bool(), labels[:, :-1] >= 0], 1)
            draw = torch.rand(is_answer.shape, generator=generator)
            count = args.width // BLOCK_SIZE
            anchors = draw.masked_fill(~is_answer, -1.0).topk(count, 1).indices
            at = anchors[..., None] + offsets
            inside = at < args.width
            at = at.clamp(max=args.width - 1)
            same = is_answer[:, None].expand(-1, count, -1).gather(2, at)
            goes_on = (same & inside).long().cumprod(-1).bool()
            wanted = ids[:, None].expand(-1, count, -1).gather(2, at)
            wanted = wanted.masked_fill(~goes_on, -100)
            blocks = torch.full((len(ids), count, BLOCK_SIZE), mask)
            blocks[..., 0] = ids.gather(1, anchors)
            embedded = hybrid.model.embed_tokens(blocks)
        hidden = drafter(taps, anchors, embedded)[:, :, 1:]
        logits = F.linear(hidden, hybrid.model.embed_tokens.weight)
        loss = block_loss(logits, wanted)
        update(drafter, optimizer, loss)
        average = loss.item() if not step else 0.95 * average + 0.05 * loss.item()
        if step % 20 == 0:
            print(f"drafter {step}: {average:.4f}", flush=True)
    return average


# ---- evaluation -------------------------------------------------------------------------------


class Theirs:
    """transformers' model of a saved target, as a `Target` is called."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model = self._model.model

    def __call__(self, ids: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        out = self.model(ids, output_hidden_states=True, use_cache=False)
        features = [out.hidden_states[tap + 1] for tap in taps]
        return out.last_hidden_state, torch.cat(features, -1) if features else None

    def head(self, h: Tensor) -> Tensor:
        """Logits of final hidden states."""
        return self._model.lm_head(h)


def evaluate(out: Path, count: int, limit: int) -> dict[str, object]:
    """What `measured` says of the saved pair, by prompts of which each category has `count`."""
    tokenizer = Tokenizer.from_file(str(out / "target" / "tokenizer.json"))
    target: Any = Theirs(out / "target")
    drafter = Drafter(DRAFT, len(TAPS), BLOCK_SIZE)
    load(drafter, out / "draft", "cpu")
    return measured(target, drafter, tokenizer, count * len(CATEGORIES), limit, show=1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets target/ and draft/")
    parser.add_argument("--seconds", type=float, default=2400, help="of training in all")
    parser.add_argument("--exchanges", type=int, default=60_000)
    parser.add_argument("--rows", type=int, default=8, help="chats of a step")
    parser.add_argument("--width", type=int, default=256, help="tokens of a chat")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hold", type=float, default=0.5, help="weight of the dense outputs")
    parser.add_argument("--eval-prompts", type=int, default=8, help="of each category")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(DENSE / "target" / "tokenizer.json"))
    stream = make_stream(tokenizer, make_corpus(7, args.exchanges), 7)
    dense = Target(TARGET)
    load(dense, DENSE / "target", "cpu")
    hybrid, report = begin(dense), dict[str, Any]()
    report["imitation_loss"] = imitate(dense, hybrid, stream, args)
    report["target_loss"] = learn(dense, hybrid, stream, args)
    stop, mask = token_id(tokenizer, IM_END), tokenizer.get_vocab_size()
    save(hybrid, args.out / "target", target_config(stop))
    load(hybrid, args.out / "target", "cpu")  # the drafter learns the taps of what was saved
    kept = "tokenizer.json tokenizer_config.json generation_config.json chat_template.jinja"
    for name in kept.split():
        shutil.copy(DENSE / "target" / name, args.out / "target")
    drafter = Drafter(DRAFT, len(TAPS), BLOCK_SIZE)
    load(drafter, DENSE / "draft", "cpu")
    drafter.requires_grad_()
    report["draft_loss"] = train_drafter(hybrid, drafter, stream, args, mask)
    save(drafter, args.out / "draft", json.loads((DENSE / "draft" / "config.json").read_text()))
    assert token_id(tokenizer, END_OF_TEXT) != mask
    report |= evaluate(args.out, args.eval_prompts, args.max_new_tokens)
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in report.items()}))


if __name__ == "__main__":
    main()
