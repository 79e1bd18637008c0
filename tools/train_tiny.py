"""Train the bundled tiny pair from nothing: corpus, tokenizer, Qwen3 target, DFlash drafter.

The pair lets everybody run, and CI measure, real speculative decoding without a download. Stages:
a byte-level BPE on the corpus; the target on packed chats; the target's own greedy answers; the
drafter on those answers (random anchors, block mask, cross-entropy weighted exp(-(k-1)/7)); and an
evaluation by a dense loop that shares no code with the engine.

Invariant: everything after the target's training uses the bf16-rounded weights that were saved. A
drafter trained on the taps of fp32 weights would meet slightly different features when bundled.

    python tools/train_tiny.py --out graphengine/assets/tiny --compile    # one GPU, 7 minutes
    python tools/train_tiny.py --out out/tiny --smoke --device cpu        # minutes, poor weights

The last line of the output is one JSON object: sizes, losses, acceptance. On one H200 (2026-11-20,
seed 0) the bundled pair gave 256 of 256 exact held-out answers and a mean acceptance length of
13.98 (with the bonus token, bf16). The corpus is narrow and its answers follow from the prompts, so
this shows a working pipeline; it says nothing about drafting for a large model on open text. The
drafter saw chats of at most 1024 tokens (DRAFT_LENGTHS) and accepts far less beyond them.
Source: DFlash, arXiv 2602.06036 (training recipe, block size 16, gamma 7).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tiny_corpus import CATEGORIES, heldout_set
from tiny_drafter import Drafter, Target, decode
from tiny_pair import (
    BLOCK_SIZE,
    DRAFT,
    END_OF_TEXT,
    IM_END,
    TAPS,
    TARGET,
    VOCAB_SIZE,
    Stream,
    flat_config,
    load,
    make_corpus,
    make_stream,
    make_tokenizer,
    prompt_text,
    save,
    save_tokenizer,
    token_id,
)
from tokenizers import Tokenizer
from torch import Tensor, nn

GAMMA = 7.0
ROW_LENGTHS = (512, 2048)  # half of the steps start chats at position 0, half run to long contexts
DRAFT_LENGTHS = (128, 192, 256, 384, 512, 1024)


# ---- training ---------------------------------------------------------------------------------


def optimizer_for(model: nn.Module, lr: float, device: str) -> torch.optim.AdamW:
    """AdamW with decay on matrices only (the embedding and the norms are left alone)."""
    decay = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device.startswith("cuda"))


def schedule(
    optimizer: torch.optim.AdamW, lr: float, seconds: float, steps: int | None = None
) -> Iterator[int]:
    """Yield step numbers with warm-up and a cosine to zero, until `seconds` or `steps` are over."""
    begin, step, progress = time.monotonic(), 0, 0.0
    warmup = 20 if steps is None else max(1, min(200, steps // 10))
    while progress < 1.0:
        warm = min(1.0, (step + 1) / warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr * warm * 0.5 * (1 + math.cos(math.pi * progress))
        yield step
        step += 1
        progress = max(step / (steps or math.inf), (time.monotonic() - begin) / seconds)


def update(model: nn.Module, optimizer: torch.optim.AdamW, loss: Tensor) -> None:
    """One step of the optimizer. Mutates: model, optimizer."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def block_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of slots k = 1, 2, .. of blocks, weighted exp(-(k - 1) / GAMMA).

    Args:
        logits: [B, A, slots, V].
        labels: int64 [B, A, slots]; -100 where nothing is asked.
    """
    losses = F.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), reduction="none")
    weights = torch.exp(-torch.arange(labels.shape[-1], device=labels.device) / GAMMA)
    weights = weights * (labels >= 0)
    return (losses.view_as(weights) * weights).sum() / weights.sum()


def train_target(stream: Stream, args: argparse.Namespace) -> tuple[Target, float]:
    """Next-token cross-entropy on answer tokens of packed chats; returns (fp32 model, loss)."""
    torch.manual_seed(args.seed)
    model = Target(TARGET).to(args.device)
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer, begin = optimizer_for(model, args.lr, args.device), time.monotonic()
    tokens, is_answer, starts = (t.to(args.device) for t in stream[:3])
    generator, average = torch.Generator(args.device).manual_seed(args.seed), None
    for step in schedule(optimizer, args.lr, args.target_seconds, args.target_steps):
        width = ROW_LENGTHS[step % 2]
        rows = max(1, args.batch_tokens // width)
        chosen = torch.randint(len(starts), (rows,), device=args.device, generator=generator)
        at = starts[chosen][:, None] + torch.arange(width + 1, device=args.device)
        at %= len(tokens)
        ids = tokens[at]
        labels = torch.where(is_answer[at[:, 1:]], ids[:, 1:], -100)
        with torch.autocast(args.device.split(":")[0], torch.bfloat16):
            hidden, _ = model(ids[:, :-1])
            logits = model.head(hidden)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        update(model, optimizer, loss)
        average = loss.detach() if average is None else average.lerp(loss.detach(), 0.02)
        if step % 100 == 0 or step + 1 == args.target_steps:
            print(f"target step {step} loss {average.item():.4f} {time.monotonic() - begin:.0f} s")
    assert average is not None
    return model, average.item()


class Answered(NamedTuple):
    """Chats whose last answer the target wrote, padded to one length."""

    ids: Tensor  # int64 [n, L]
    first: Tensor  # int64 [n]: first generated position = first possible anchor
    last: Tensor  # int64 [n]: last token's position


def generate_answers(
    target: Target, stream: Stream, args: argparse.Namespace, stop: int, new_chat: int
) -> list[Answered]:
    """The target's greedy answers to training prompts, three in ten after earlier turns."""
    r, tokens = random.Random(args.seed + 1), stream.tokens.tolist()
    starts, firsts = stream.starts.tolist(), stream.answers.tolist()
    prompts = []
    for _ in range(args.prompts):
        c = r.randrange(8, len(starts))
        turns = r.randint(1, 5) if r.random() < 0.3 else 0
        prompt = tokens[starts[c - turns] : firsts[c]]
        prompts.append([t for t in prompt if t != new_chat][-600:])
    prompts.sort(key=len)
    by_length: dict[int, list[tuple[list[int], int]]] = {n: [] for n in DRAFT_LENGTHS}
    begin, limit, size = time.monotonic(), args.max_new_tokens, args.generation_batch
    for i in range(0, len(prompts), size):
        group = prompts[i : i + size]
        width = max(map(len, group)) + limit
        for prompt, answer in zip(group, target.generate(group, stop, limit, width), strict=True):
            chat = (prompt + answer)[: DRAFT_LENGTHS[-1]]
            if len(chat) >= len(prompt) + 2:
                fits = next(n for n in DRAFT_LENGTHS if n >= len(chat))
                by_length[fits].append((chat, len(prompt)))
        print(f"generated {i + len(group)} answers {time.monotonic() - begin:.0f} s")
    groups = []
    for width, chats in by_length.items():
        if chats:
            ids = torch.tensor([chat + [stop] * (width - len(chat)) for chat, _ in chats])
            first = torch.tensor([n for _, n in chats])
            last = torch.tensor([len(chat) - 1 for chat, _ in chats])
            groups.append(Answered(ids, first, last))
    return groups


def train_drafter(
    target: Target, groups: list[Answered], args: argparse.Namespace, mask_token: int
) -> tuple[Drafter, float]:
    """Cross-entropy of slots 1..15 at random anchors; returns (fp32 model, weighted loss)."""
    torch.manual_seed(args.seed + 2)
    model = Drafter(DRAFT, len(TAPS), BLOCK_SIZE).to(args.device)
    if args.compile:
        torch.compiler.config.recompile_limit = 64  # DRAFT_LENGTHS shapes, with and without grad
        for layer in model.layers:
            layer.compile(dynamic=False)
    optimizer, begin = optimizer_for(model, args.draft_lr, args.device), time.monotonic()
    groups = [Answered(*(t.to(args.device) for t in group)) for group in groups]
    shares = [group.ids.numel() for group in groups]
    r, generator = random.Random(args.seed), torch.Generator(args.device).manual_seed(args.seed)
    offsets = torch.arange(1, BLOCK_SIZE, device=args.device)
    average = None
    for step in schedule(optimizer, args.draft_lr, args.draft_seconds, args.draft_steps):
        group = r.choices(groups, shares)[0]
        width = group.ids.shape[1]
        rows, num_anchors = max(1, args.draft_tokens // width), width // BLOCK_SIZE
        chosen = torch.randint(len(group.ids), (rows,), device=args.device, generator=generator)
        ids, first, last = (t[chosen] for t in group)
        draw = torch.rand(rows, num_anchors, device=args.device, generator=generator)
        anchors = first[:, None] + (draw * (last - first)[:, None]).long()
        at = anchors[..., None] + offsets
        labels = ids[:, None].expand(-1, num_anchors, -1).gather(2, at.clamp(max=width - 1))
        labels = torch.where(at <= last[:, None, None], labels, -100)
        with torch.no_grad():
            _, taps = target(ids, TAPS)
            blocks = torch.full((rows, num_anchors, BLOCK_SIZE), mask_token, device=args.device)
            blocks[..., 0] = ids.gather(1, anchors)
            embedded = target.model.embed_tokens(blocks)
        assert taps is not None
        with torch.autocast(args.device.split(":")[0], torch.bfloat16):
            logits = target.head(model(taps, anchors, embedded)[:, :, 1:])
        loss = block_loss(logits, labels)
        update(model, optimizer, loss)
        average = loss.detach() if average is None else average.lerp(loss.detach(), 0.02)
        if step % 100 == 0 or step + 1 == args.draft_steps:
            print(f"drafter step {step} loss {average.item():.4f} {time.monotonic() - begin:.0f} s")
    assert average is not None
    return model, average.item()


# ---- evaluation -------------------------------------------------------------------------------


@torch.no_grad()
def near_ties(target: Target, chats: list[tuple[list[int], list[int]]]) -> dict[str, float]:
    """Shares of greedy tokens whose two best logits are equal, or closer than 0.25."""
    exact = close = total = 0
    for prompt, answer in chats:
        ids = torch.tensor([prompt + answer], device=target.model.embed_tokens.weight.device)
        rows = target(ids)[0][0, len(prompt) - 1 : -1]
        best = target.head(rows).float().topk(2).values
        margin = best[:, 0] - best[:, 1]
        exact, close = exact + int((margin == 0).sum()), close + int((margin < 0.25).sum())
        total += len(answer)
    return {"tokens": total, "equal": exact / total, "closer_than_0.25": close / total}


def evaluate(out: Path, device: str, count: int, limit: int, show: int) -> dict[str, object]:
    """What `measured` says of the saved pair."""
    target, drafter = Target(TARGET), Drafter(DRAFT, len(TAPS), BLOCK_SIZE)
    load(target, out / "target", device)
    load(drafter, out / "draft", device)
    tokenizer = Tokenizer.from_file(str(out / "target" / "tokenizer.json"))
    return measured(target, drafter, tokenizer, count, limit, show)


def measured(
    target: Target, drafter: Drafter, tokenizer: Tokenizer, count: int, limit: int, show: int
) -> dict[str, object]:
    """Greedy DFlash decoding of `count` held-out prompts; acceptance statistics."""
    stop = token_id(tokenizer, IM_END)
    accepted, result, chats = torch.zeros(BLOCK_SIZE, dtype=torch.int64), {}, []
    tokens = exact = 0
    heldout = heldout_set()[:count]
    for category in CATEGORIES:
        chosen = [ex for ex in heldout if ex.category == category]
        prompts = [tokenizer.encode(prompt_text(ex.prompt)).ids for ex in chosen]
        answers, histogram, produced = decode(
            target,
            drafter,
            TAPS,
            prompts,
            stop=stop,
            mask_token=tokenizer.get_vocab_size(),
            limit=limit,
        )
        texts = [tokenizer.decode(answer) for answer in answers]
        right = sum(text == ex.answer for text, ex in zip(texts, chosen, strict=True))
        steps = int(histogram.sum())
        mean = float((histogram * torch.arange(1, BLOCK_SIZE + 1)).sum()) / steps
        result[category] = {
            "prompts": len(chosen),
            "mean_acceptance_length": round(mean, 3),
            "tokens_per_step": round(produced / steps, 3),
            "exact_answers": round(right / len(chosen), 3),
            "mean_tokens": round(sum(map(len, answers)) / len(chosen), 1),
        }
        print(f"{category}: {result[category]}")
        for ex, text in list(zip(chosen, texts, strict=True))[:show]:
            print(f"  [user] {ex.prompt}\n  [{'same' if text == ex.answer else 'DIFFERS'}] {text}")
        accepted, tokens, exact = accepted + histogram, tokens + produced, exact + right
        chats += zip(prompts, answers, strict=True)
    steps = int(accepted.sum())
    reached = accepted.flip(0).cumsum(0).flip(0)[1:]
    mean = 1 + float(reached.sum()) / steps
    return {
        "mean_acceptance_length": round(mean, 4),
        "tokens_per_step": round(tokens / steps, 4),
        "per_position": [round(float(n) / steps, 4) for n in reached],
        "steps": steps,
        "exact_answers": round(exact / len(heldout), 4),
        "categories": result,
        "ties": near_ties(target, chats),
    }


def main() -> None:
    """Command line."""
    p = argparse.ArgumentParser(
        description="Train the bundled tiny target and DFlash drafter.",
        epilog="example: python tools/train_tiny.py --out out/tiny --smoke",
    )
    p.add_argument("--out", type=Path, required=True, help="folder that gets target/ and draft/")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--smoke", action="store_true", help="tiny sizes, to try the script on a CPU")
    p.add_argument("--eval-only", action="store_true", help="measure an existing pair in --out")
    p.add_argument("--compile", action="store_true", help="torch.compile the layers for training")
    p.add_argument("--exchanges", type=int, default=240_000, help="training exchanges")
    p.add_argument("--batch-tokens", type=int, default=32_768, help="target tokens per step")
    p.add_argument("--target-steps", type=int, default=6500)
    p.add_argument("--target-seconds", type=float, default=1e9, help="end the schedule earlier")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--prompts", type=int, default=32_768, help="prompts the target answers")
    p.add_argument("--generation-batch", type=int, default=4096)
    p.add_argument("--max-new-tokens", type=int, default=400)
    p.add_argument("--draft-tokens", type=int, default=32_768, help="drafter block rows per step")
    p.add_argument("--draft-steps", type=int, default=4000)
    p.add_argument("--draft-seconds", type=float, default=1e9, help="end the schedule earlier")
    p.add_argument("--draft-lr", type=float, default=2e-3)
    p.add_argument("--eval-prompts", type=int, default=256)
    p.add_argument("--show", type=int, default=2, help="sample answers to print per category")
    args = p.parse_args()
    if args.eval_prompts < (least := len(CATEGORIES)):
        p.error(f"--eval-prompts {args.eval_prompts}: pass {least} or more, one of each category")
    if args.smoke:
        args.exchanges, args.batch_tokens, args.target_steps = 8000, 4096, 12
        args.prompts, args.generation_batch, args.max_new_tokens = 64, 32, 24
        args.draft_tokens, args.draft_steps, args.eval_prompts = 2048, 12, 10
    torch.set_float32_matmul_precision("high")
    report: dict[str, object] = {}
    if not args.eval_only:
        report = train(args)
    report |= evaluate(args.out, args.device, args.eval_prompts, args.max_new_tokens, args.show)
    files = [f for f in sorted(args.out.rglob("*")) if f.is_file()]
    report["bytes"] = {str(f.relative_to(args.out)): f.stat().st_size for f in files}
    report["total_bytes"] = sum(f.stat().st_size for f in files)
    print(json.dumps(report))


def train(args: argparse.Namespace) -> dict[str, object]:
    """All training stages; writes the pair and returns losses and seconds."""
    begin = time.monotonic()
    corpus = make_corpus(args.seed, args.exchanges)
    tokenizer = make_tokenizer(corpus[:40_000])
    stream = make_stream(tokenizer, corpus, args.seed)
    lengths = (stream.ends - stream.answers).float()
    print(
        f"corpus: {len(corpus)} exchanges, {len(stream.tokens)} tokens, answers mean "
        f"{lengths.mean():.0f} max {lengths.max():.0f}, {time.monotonic() - begin:.0f} s"
    )
    stop, new_chat = (token_id(tokenizer, t) for t in (IM_END, END_OF_TEXT))
    mask_token = tokenizer.get_vocab_size()  # the first row that no token uses
    assert mask_token < VOCAB_SIZE
    trained, target_loss = train_target(stream, args)
    save(trained, args.out / "target", flat_config(TARGET, "Qwen3ForCausalLM", stop))
    save_tokenizer(tokenizer, args.out / "target")
    target = Target(TARGET)
    load(target, args.out / "target", args.device)
    groups = generate_answers(target, stream, args, stop, new_chat)
    drafter, draft_loss = train_drafter(target, groups, args, mask_token)
    save(
        drafter,
        args.out / "draft",
        {
            **flat_config(DRAFT, "DFlashDraftModel", stop),
            "block_size": BLOCK_SIZE,
            "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": list(TAPS)},
            "layer_types": ["full_attention"] * DRAFT.num_hidden_layers,
            "num_target_layers": TARGET.num_hidden_layers,
        },
    )
    return {
        "target_loss": round(target_loss, 4),
        "draft_loss": round(draft_loss, 4),
        "seconds": round(time.monotonic() - begin),
    }


if __name__ == "__main__":
    main()
