"""The tiny pair in plain torch: a Qwen3 target, a DFlash drafter, and the dense decoding loop.

Training needs autograd, and the acceptance of the bundled pair must be measured by code that shares
nothing with the engine: no KV cache, no pages, no graph. So this file writes both models once more,
with parameter names equal to the checkpoint's tensor names, and decodes by recomputing everything.

Invariant: a drafter row sees context rows strictly before its anchor and the rows of its own block,
nothing else. With the anchor's own features visible the drafter would read what it must guess: the
training loss would be excellent and the acceptance in the engine poor.

Legend: B batch, T tokens, A anchors per sequence, G block size, D hidden, N/K query/kv heads,
H head_dim, C = taps * D.
Source: DFlash, arXiv 2602.06036; Qwen3 technical report, arXiv 2505.09388.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Widths of a Qwen3-style decoder; the same fields as in its config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


class Norm(nn.Module):
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight, computed in fp32 and rounded once."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight.float()).to(x.dtype)


def rope(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """fp32 (cos, sin), each [*positions.shape, H/2], of position * theta^(-2i/H)."""
    half = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions.float()[..., None] * shape.rope_theta ** (-half / shape.head_dim)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Half-split rotation of x [B, T, heads, H] by tables [B or 1, T, H/2]."""
    cos, sin = (t[:, :, None] for t in cos_sin)
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention's projections, with per-head norms of q and k before the rotation."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.head_dim, self.groups = s.head_dim, s.num_attention_heads // s.num_key_value_heads
        q_width, kv_width = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.q_proj = nn.Linear(s.hidden_size, q_width, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, s.hidden_size, bias=False)
        self.q_norm = Norm(s.head_dim, s.rms_norm_eps)
        self.k_norm = Norm(s.head_dim, s.rms_norm_eps)

    def q(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Queries [B, T, N, H]."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos_sin)

    def kv(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, each [B, T, K, H]."""
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos_sin)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(H)) v, causal if `mask` is None (True = visible)."""
        k, v = (t.repeat_interleave(self.groups, 2).transpose(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer; `context` rows are further keys that skip the layer's input norm."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden_size, s.rms_norm_eps)
        self.mlp = Mlp(s)

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        context: Tensor | None = None,
        context_cos_sin: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        h = self.input_layernorm(x)
        q = self.self_attn.q(h, cos_sin)
        k, v = self.self_attn.kv(h, cos_sin)
        if context is not None and context_cos_sin is not None:
            k_ctx, v_ctx = self.self_attn.kv(context, context_cos_sin)
            k, v = torch.cat([k_ctx, k], 1), torch.cat([v_ctx, v], 1)
        x = x + self.self_attn.attend(q, k, v, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.norm = Norm(s.hidden_size, s.rms_norm_eps)


class Target(nn.Module):
    """A Qwen3 decoder with tied embeddings; parameter names are Hugging Face's."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape, self.model = s, Decoder(s)
        _initialise(self)

    def forward(self, ids: Tensor, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Args: ids [B, T]. Returns: final hidden [B, T, D]; outputs of `taps` layers [B, T, C]."""
        cos_sin = rope(torch.arange(ids.shape[1], device=ids.device)[None], self.shape)
        x, outputs = self.model.embed_tokens(ids), {}
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos_sin)
            outputs[i] = x
        tapped = torch.cat([outputs[i] for i in taps], -1) if taps else None
        return self.model.norm(x), tapped

    def head(self, h: Tensor) -> Tensor:
        """Logits [..., V] of final hidden states: h @ embedding^T."""
        return F.linear(h, self.model.embed_tokens.weight)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], stop: int, limit: int, width: int) -> list[list]:
        """Greedy continuations (with the stop token), batched over a dense KV cache of `width`."""
        device, s = self.model.embed_tokens.weight.device, self.shape
        dtype, rows = self.model.embed_tokens.weight.dtype, len(prompts)
        longest = max(map(len, prompts))
        ids = torch.full((rows, longest), stop)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        ids, at = ids.to(device), torch.tensor([len(p) for p in prompts], device=device)
        row = torch.arange(rows, device=device)
        shape = (s.num_hidden_layers, 2, rows, width, s.num_key_value_heads, s.head_dim)
        cache = torch.zeros(shape, device=device, dtype=dtype)
        x, cos_sin = self.model.embed_tokens(ids), rope(torch.arange(longest)[None], s)
        cos_sin = cos_sin[0].to(device), cos_sin[1].to(device)
        for i, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            cache[i, 0, :, :longest], cache[i, 1, :, :longest] = layer.self_attn.kv(
                layer.input_layernorm(x), cos_sin
            )
            x = layer(x, cos_sin)
        token = self.head(self.model.norm(x[row, at - 1])).argmax(-1)
        produced, done = [token], token == stop
        for step in range(limit - 1):
            if step % 16 == 0 and bool(done.all()):
                break
            end = min(width, longest + step + 1)
            seen = (torch.arange(end, device=device)[None] <= at[:, None])[:, None, None]
            x, cos_sin = self.model.embed_tokens(token)[:, None], rope(at[:, None], s)
            for i, layer in enumerate(self.model.layers):
                assert isinstance(layer, Layer)
                attn, h = layer.self_attn, layer.input_layernorm(x)
                k, v = attn.kv(h, cos_sin)
                cache[i, 0, row, at], cache[i, 1, row, at] = k[:, 0], v[:, 0]
                q = attn.q(h, cos_sin)[:, 0].unflatten(1, (-1, attn.groups))
                keys, values = (cache[i, j, :, :end].transpose(1, 2) for j in (0, 1))
                scores = torch.matmul(q, keys.transpose(-1, -2)).float() * s.head_dim**-0.5
                p = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(dtype)
                x = x + attn.o_proj(torch.matmul(p, values).flatten(1))[:, None]
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            token = torch.where(done, stop, self.head(self.model.norm(x[:, 0])).argmax(-1))
            produced.append(token)
            done = done | (token == stop)
            at = (at + 1).clamp(max=width - 1)
        answers = torch.stack(produced, 1).tolist()
        return [a[: a.index(stop) + 1] if stop in a else a for a in answers]


class Drafter(nn.Module):
    """A DFlash drafter; parameter names are those of z-lab checkpoints."""

    def __init__(self, s: Shape, num_taps: int, block_size: int) -> None:
        super().__init__()
        self.shape, self.block_size = s, block_size
        self.fc = nn.Linear(num_taps * s.hidden_size, s.hidden_size, bias=False)
        self.hidden_norm = Norm(s.hidden_size, s.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.norm = Norm(s.hidden_size, s.rms_norm_eps)
        _initialise(self)

    def forward(self, taps: Tensor, anchors: Tensor, blocks: Tensor) -> Tensor:
        """Final hidden states of A blocks per sequence.

        Args:
            taps: [B, T, C] target features of positions 0..T-1.
            anchors: [B, A] int64 positions of the blocks' first rows.
            blocks: [B, A, G, D] target embeddings of (anchor, MASK, ..., MASK).
        Returns:
            [B, A, G, D]; row j speaks about position anchor + j.
        """
        width, size = taps.shape[1], self.block_size
        context = self.hidden_norm(self.fc(taps))
        where = torch.arange(width, device=taps.device)
        positions = (anchors[..., None] + torch.arange(size, device=taps.device)).flatten(1)
        owner = torch.arange(positions.shape[1], device=taps.device) // size
        start = anchors.repeat_interleave(size, 1)
        before = where[None, None] < start[..., None]
        own = (owner[:, None] == owner[None]).expand(len(taps), -1, -1)
        mask = torch.cat([before, own], -1)[:, None]
        tables, context_tables = rope(positions, self.shape), rope(where[None], self.shape)
        x = blocks.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, tables, context, context_tables, mask)
        return self.norm(x).unflatten(1, (-1, size))


def _initialise(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02 if "o_proj" not in name else 0.01)


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    taps: Sequence[int],
    prompts: list[list[int]],
    *,
    mask_token: int,
    stop: int,
    limit: int,
) -> tuple[list[list[int]], Tensor, int]:
    """Greedy speculative decoding of all prompts, recomputing every row in every step.

    Returns:
        answers: per prompt the produced tokens, cut after `stop` or at `limit`.
        accepted: int64 [G], accepted[a] = number of steps that accepted exactly a drafts.
        produced: number of tokens in all answers, for tokens per step with the cut applied.
    """
    device, size = target.model.embed_tokens.weight.device, drafter.block_size
    width = max(map(len, prompts)) + limit + 2 * size
    ids = torch.full((len(prompts), width), mask_token)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    ids = ids.to(device)
    first = torch.tensor([len(p) for p in prompts], device=device)
    start, row = first.clone(), torch.arange(len(prompts), device=device)
    final, features = target(ids, taps)
    ids[row, start] = target.head(final[row, start - 1]).argmax(-1)
    alive = ids[row, start] != stop
    accepted = torch.zeros(size, dtype=torch.int64, device=device)
    offsets = torch.arange(size, device=device)
    while bool(alive.any()):
        assert features is not None
        block = torch.full((len(prompts), size), mask_token, device=device)
        block[:, 0] = ids[row, start]
        y = drafter(features, start[:, None], target.model.embed_tokens(block)[:, None])[:, 0]
        block[:, 1:] = target.head(y[:, 1:]).argmax(-1)
        at = start[:, None] + offsets
        ids = torch.where(alive[:, None], ids.scatter(1, at, block), ids)
        final, features = target(ids, taps)
        choice = target.head(final[row[:, None], at]).argmax(-1)
        match = (block[:, 1:] == choice[:, :-1]).long().cumprod(1)
        num = match.sum(1)
        accepted += torch.bincount(num[alive], minlength=size)
        bonus = choice[row, num]
        ids = torch.where(
            alive[:, None], ids.scatter(1, (start + num + 1)[:, None], bonus[:, None]), ids
        )
        emitted = torch.where(offsets[None] <= num[:, None], choice, -1)
        start = torch.where(alive, start + num + 1, start)
        alive &= ~(emitted == stop).any(1) & (start - first + 1 < limit)
    answers = []
    for prompt, tokens, end in zip(prompts, ids.tolist(), (start + 1).tolist(), strict=True):
        answer = tokens[len(prompt) : end][:limit]
        answers.append(answer[: answer.index(stop) + 1] if stop in answer else answer)
    return answers, accepted.cpu(), sum(map(len, answers)) - len(answers)
