"""An independent dense reference of DFlash decoding, and a way to force acceptance lengths.

Why: greedy speculative output equals plain output whatever the drafter does, so a drafter that is
wired wrongly only shows as lost acceptance. Here the target is transformers' own model and the
drafter is written from the paper (arXiv 2602.06036) without caches, pages or buffers: every call
recomputes everything from the token ids. Shares no code with graphengine.
Invariant: context rows are strictly before the anchor; the block (anchor, MASK..) sees all context
rows and all of itself, but for layers with a window or a causal mask; slot j predicts the token at
its own position and slot 0 is dropped, or, anchor first, slot j predicts the token behind it.

`force_drafts` puts known drafts in front of an engine's verification, so that tests can ask for
every acceptance length, which a drafter with random weights never gives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from graphengine.decode.buffers import StepBuffers
from graphengine.decode.request import Request
from graphengine.drafters.forced import Forced as ForcedDrafts
from graphengine.drafters.forced import right_at_first


class TargetRun(NamedTuple):
    """A dense target forward: logits [T, V] and every layer's output, [T, D] each."""

    logits: Tensor
    layers: list[Tensor]


def load_target(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model with eager attention."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def run_target(model: Any, ids: Sequence[int]) -> TargetRun:
    """One forward over all ids, without a cache; the last layer's output is after the final norm,
    as z-lab's code takes it."""
    out = model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
    return TargetRun(out.logits[0], [h[0] for h in out.hidden_states[1:]])


_PLAIN: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
"""(a model's content, a prompt) -> its longest continuation so far; many files ask for the same."""


def plain_generate(model: Any, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy continuation, every token from a forward over the whole prefix."""
    content = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.state_dict().items():
        content.update(name.encode())
        content.update(weight.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    known = _PLAIN.setdefault((content.digest(), tuple(prompt_ids)), [])
    while len(known) < num_tokens:
        known.append(int(run_target(model, [*prompt_ids, *known]).logits[-1].argmax()))
    return known[:num_tokens]


@dataclass
class DraftReference:
    """A drafter as raw tensors and raw JSON: z-lab, speculators or DeepSpec."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    target: Any

    @classmethod
    def load(cls, directory: Path, target: Any) -> DraftReference:
        tensors = {k: v.float() for k, v in load_file(directory / "model.safetensors").items()}
        return cls(tensors, json.loads((directory / "config.json").read_text()), target)

    def dflash(self, key: str) -> Any:
        """A DFlash key: inside dflash_config, else at the top level."""
        nested = self.config.get("dflash_config", {})
        value: Any = nested[key] if key in nested else self.config.get(key)
        return value

    @property
    def block_size(self) -> int:
        return self.dflash("block_size")

    @property
    def layer_keys(self) -> dict[str, Any]:
        """The drafter's own stack as a Qwen3 config."""
        return self.config.get("transformer_layer_config", self.config)

    @property
    def anchor_first(self) -> bool:
        """Whether row j predicts the token behind it instead of its own."""
        deepspec = self.config["architectures"] == ["Qwen3DSparkModel"]
        return deepspec or bool(self.dflash("sample_from_anchor"))

    @property
    def num_drafts(self) -> int:
        """Tokens proposed a step."""
        return self.block_size - (0 if self.anchor_first else 1)

    def shorten(self, fewer: int) -> None:
        """Takes mask rows from the block. Mutates: config."""
        nested = self.config.get("dflash_config", {})
        (nested if "block_size" in nested else self.config)["block_size"] -= fewer

    def taps(self, run: TargetRun) -> Tensor:
        """[T, taps * D]: outputs of the listed layers, in the listed order."""
        if "speculators_model_type" in self.config:
            layers = [i - 1 for i in self.config["aux_hidden_state_layer_ids"]]
        else:
            layers = self.dflash("target_layer_ids")
        return torch.cat([run.layers[t] for t in layers], dim=-1)

    def mask(self, layer: int, start: int) -> Tensor:
        """[B, start + B]: which positions each block row of a layer sees."""
        keys, config = self.layer_keys, self.config
        types = keys.get("layer_types")
        sliding = bool(self.dflash("use_swa")) if types is None else "sliding" in types[layer]
        if "speculators_model_type" in config:
            causal = sliding and not config["sliding_window_non_causal"]
        else:
            causal = config.get("is_causal", config.get("dflash_config", {}).get("causal"))
            if causal is None:
                causal = sliding and types is not None
        ahead = (
            torch.arange(start + self.block_size) - (torch.arange(self.block_size) + start)[:, None]
        )
        seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
        return seen & (ahead.abs() < keys["sliding_window"]) if sliding else seen

    def target_ids(self) -> Tensor:
        """Draft id -> target id."""
        head = self.tensors.get("lm_head.weight")
        rows = len(self.target.get_output_embeddings().weight if head is None else head)
        return torch.arange(rows) + self.tensors.get("d2t", torch.zeros(1)).long()

    def drafts(self, logits: Tensor) -> list[int]:
        """Target ids that the rows of logits propose."""
        return self.target_ids()[logits.argmax(-1)].tolist()

    @torch.no_grad()
    def draft_logits(
        self, taps: Tensor, anchor: int, *, shift: int = 0, causal: bool = False
    ) -> Tensor:
        """Logits [drafts, draft ids] of the block whose anchor stands at position `len(taps)`.

        Args:
            taps: [start, C], one row per committed token before the anchor.
            shift: added to the block's positions; non-zero is a deliberate mistake.
            causal: mask the block causally; a deliberate mistake.
        """
        config, weights = self.layer_keys, self.tensors
        start, block = len(taps), self.block_size
        eps, head_dim = config["rms_norm_eps"], config["head_dim"]
        ids = torch.tensor([anchor] + [self.dflash("mask_token_id")] * (block - 1))
        embed: Tensor = self.target.get_input_embeddings().weight
        x = weights.get("embed_tokens.weight", embed)[ids].float()
        ctx = _norm(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
        cos, sin = self._rope(torch.cat([torch.arange(start), torch.arange(block) + start + shift]))
        for layer in range(config["num_hidden_layers"]):
            p = f"layers.{layer}."
            mask = self.mask(layer, start)
            if causal:
                mask = mask.tril(start)

            def project(rows: Tensor, name: str, p: str = p) -> Tensor:
                name = f"{p}self_attn.{name}_proj"
                return F.linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

            h = _norm(x, weights[f"{p}input_layernorm.weight"], eps)
            q = project(h, "q").unflatten(-1, (-1, head_dim))
            k = torch.cat([project(ctx, "k"), project(h, "k")]).unflatten(-1, (-1, head_dim))
            v = torch.cat([project(ctx, "v"), project(h, "v")]).unflatten(-1, (-1, head_dim))
            q = _rotate(
                _norm(q, weights[f"{p}self_attn.q_norm.weight"], eps), cos[start:], sin[start:]
            )
            k = _rotate(_norm(k, weights[f"{p}self_attn.k_norm.weight"], eps), cos, sin)
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("qnh,knh->nqk", q, k) * head_dim**-0.5
            scores = scores.masked_fill(~mask, float("-inf"))
            attended = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1)
            x = x + project(attended, "o")
            n = _norm(x, weights[f"{p}post_attention_layernorm.weight"], eps)
            gate, up = (n @ weights[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ weights[f"{p}mlp.down_proj.weight"].T
        y = _norm(x if self.anchor_first else x[1:], weights["norm.weight"], eps)
        head: Tensor = self.target.get_output_embeddings().weight
        return y @ weights.get("lm_head.weight", head).float().T

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, H] from transformers' own rotary class, amplitude included."""
        known = {
            k: v for k, v in self.layer_keys.items() if k not in ("architectures", "dflash_config")
        }
        rotary = _rotary(json.dumps(known))
        cos, sin = rotary(torch.zeros(1, 1), positions[None])
        return cos[0], sin[0]


def speculative_generate(
    drafter: DraftReference, prompt_ids: Sequence[int], num_tokens: int
) -> tuple[list[int], list[int]]:
    """Greedy DFlash decoding: (at least `num_tokens` new tokens, accepted drafts of each step)."""
    ids, counts = list(prompt_ids), []
    ids.append(int(run_target(drafter.target, ids).logits[-1].argmax()))
    while len(ids) - len(prompt_ids) < num_tokens:
        taps = drafter.taps(run_target(drafter.target, ids[:-1]))
        drafts = drafter.drafts(drafter.draft_logits(taps, ids[-1]))
        choices = (
            run_target(drafter.target, ids + drafts).logits[len(ids) - 1 :].argmax(-1).tolist()
        )
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        ids += choices[: accepted + 1]
        counts.append(accepted)
    return ids[len(prompt_ids) :], counts


@cache
def _rotary(config: str) -> Any:
    """transformers' own class for a Qwen3 config's JSON; making one takes as long as a draft."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    return Qwen3RotaryEmbedding(Qwen3Config(**json.loads(config)))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps) ** -0.5 * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


# --- forcing acceptance lengths on an engine ---

Lengths = Callable[[Any, int], int]
"""(request, its step number) -> how many drafts shall be accepted, 0 .. G-1."""


class DraftedBlock(NamedTuple):
    """What the engine's own drafter proposed, before it was overwritten."""

    run: int  # which forward of the drafter, 0-based
    row: int
    request_id: int
    start: int
    ids: list[int]  # anchor, d_1 .. d_{G-1}


@dataclass
class Forced:
    """The record of a forced run."""

    drafted: list[DraftedBlock] = field(default_factory=list)  # on the CPU alone
    expected: dict[int, list[int]] = field(default_factory=dict)
    """Request id -> acceptance lengths asked for, of all steps that it might have run."""
    num_runs: int = 0


def force_drafts(engine: Any, truth: dict[tuple[int, ...], list[int]], lengths: Lengths) -> Forced:
    """Makes an engine verify drafts that are right exactly `lengths(request, step)` times: its
    proposer is wrapped in a `drafters.forced` one.

    Args:
        truth: each prompt's plain greedy continuation; longer than what will be generated by at
            least a block, so that no accepted run reads past its end. Several steps in flight may
            run past it; what they draft there is never committed.
    """
    loop, forced = engine._built.loop, Forced()
    lane = loop.first

    def tokens(request: Request, block: int, width: int) -> list[int]:
        said = truth[tuple(request.prompt_ids)]
        found, asked = right_at_first(request, said, partial(lengths, request), block, width)
        known = forced.expected.get(request.request_id, [])
        forced.expected[request.request_id] = known[: request.acceptance.num_steps] + asked
        return found

    def seen(buffers: StepBuffers) -> None:
        if not buffers.start_B.is_cuda:
            _note_drafts(forced, lane, buffers)

    proposer = lane.builder.pair.proposer
    lane.rebuild(
        ForcedDrafts(
            inner=proposer.inner if isinstance(proposer, ForcedDrafts) else proposer,
            num_positions=loop.config.max_model_len + 4 * loop.block,
            tokens=tokens,
            seen=seen,
        )
    )
    return forced


def _note_drafts(forced: Forced, lane: Any, buffers: StepBuffers) -> None:
    starts, drafts = buffers.start_B.tolist(), buffers.draft_ids_BG.tolist()
    for row, request in enumerate(lane.rows):
        if request is not None and starts[row]:
            block = DraftedBlock(forced.num_runs, row, request.request_id, starts[row], drafts[row])
            forced.drafted.append(block)
    forced.num_runs += 1
