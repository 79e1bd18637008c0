"""The tiny hybrid pair's target in plain torch, as train_tiny_hybrid.py trains it, and its config.

Legend: B batch, T tokens, D hidden, N / K heads / head dim of the recurrence.
Source: Gated Delta Networks (arXiv 2412.06464).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny_drafter import Attention, Mlp, Target, rope, rotate
from tiny_pair import TARGET
from torch import Tensor, nn

RECURRENT, PAGED = "linear_attention", "full_attention"
LAYER_TYPES = (RECURRENT, RECURRENT, RECURRENT, PAGED) * 2
KEY_HEADS, VALUE_HEADS, WIDTH, NUM_TAPS, CHUNK = 2, 4, 32, 4, 64
KEYS, VALUES = KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH


class OffsetNorm(nn.Module):
    """RMS norm times `1 + w`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, TARGET.rms_norm_eps)


class GatedDelta(nn.Module):
    """A Gated-DeltaNet mixer; parameter names are those of published files."""

    def __init__(self) -> None:
        super().__init__()
        hidden, channels = TARGET.hidden_size, 2 * KEYS + VALUES
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, VALUES, bias=False)
        self.in_proj_b = nn.Linear(hidden, VALUE_HEADS, bias=False)
        self.in_proj_a = nn.Linear(hidden, VALUE_HEADS, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, NUM_TAPS, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(VALUE_HEADS))
        # Decays of 0.7, 0.07, 0.007 and 0.0007 a token at softplus(0): half a word to a chat.
        self.A_log = nn.Parameter(torch.logspace(0, -3, VALUE_HEADS).log())
        self.norm = nn.RMSNorm(WIDTH, TARGET.rms_norm_eps)
        self.out_proj = nn.Linear(VALUES, hidden, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif "conv1d" in name:
                nn.init.normal_(parameter, std=0.3)
                parameter.data[:, :, -1] += 1.0

    def forward(self, x: Tensor) -> Tensor:
        m = F.pad(self.in_proj_qkv(x).mT, (NUM_TAPS - 1, 0))
        q, k, v = F.silu(self.conv1d(m)).mT.split([KEYS, KEYS, VALUES], -1)
        q, k = (self._keys(part) for part in (q, k))
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)
        beta = self.in_proj_b(x).sigmoid()
        v = v.unflatten(-1, (VALUE_HEADS, WIDTH)).transpose(1, 2)
        o = delta_rule(q * WIDTH**-0.5, k, v, g.mT, beta.mT).transpose(1, 2)
        return self.out_proj(self.norm(o).flatten(2) * F.silu(self.in_proj_z(x)))

    def _keys(self, flat: Tensor) -> Tensor:
        x = flat.unflatten(-1, (KEY_HEADS, WIDTH))
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(VALUE_HEADS // KEY_HEADS, 2).transpose(1, 2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Outputs [B, N, T, K] of the gated delta rule from a zero state, chunk by chunk: q, k, v
    [B, N, T, K], g and beta [B, N, T]."""
    state, found = v.new_zeros(*v.shape[:2], WIDTH, WIDTH), []
    parts = (x.split(CHUNK, 2) for x in (q, k, v, g, beta))
    for qc, kc, vc, gc, bc in zip(*parts, strict=True):
        total = gc.cumsum(-1)
        length = total.shape[-1]
        order = torch.ones(length, length, dtype=torch.bool).tril()
        apart = total[..., :, None] - total[..., None, :]
        decay = apart.masked_fill(~order, -torch.inf).exp()
        fading = total.exp()[..., None]
        behind = (bc[..., None] * (kc @ kc.mT) * decay).tril(-1)
        wanted = bc[..., None] * (vc - fading * (kc @ state))
        update = torch.linalg.solve_triangular(
            behind + torch.eye(length), wanted, upper=False, unitriangular=True
        )
        found.append(fading * (qc @ state) + ((qc @ kc.mT) * decay) @ update)
        left = (total[..., -1:] - total).exp()[..., None]
        state = fading[..., -1:, :] * state + (left * kc).mT @ update
    return torch.cat(found, 2)


class GatedAttention(Attention):
    """The dense pair's attention with a gate on what it gives."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        hidden, heads, width = TARGET.hidden_size, TARGET.num_attention_heads, TARGET.head_dim
        self.q_proj = nn.Linear(hidden, 2 * heads * width, bias=False)
        self.q_norm, self.k_norm = OffsetNorm(width), OffsetNorm(width)

    def mix(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """The gated attention of x [B, T, D]."""
        both = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim))
        q, gate = both.chunk(2, -1)
        k, v = self.kv(x, cos_sin)
        k, v = (t.repeat_interleave(self.groups, 2).transpose(1, 2) for t in (k, v))
        q = rotate(self.q_norm(q), cos_sin).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.o_proj((out * gate.sigmoid()).flatten(2))


class HybridLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.input_layernorm = OffsetNorm(TARGET.hidden_size)
        if kind == RECURRENT:
            self.linear_attn = GatedDelta()
        else:
            self.self_attn = GatedAttention()
        self.post_attention_layernorm = OffsetNorm(TARGET.hidden_size)
        self.mlp = Mlp(TARGET)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        h = self.input_layernorm(x)
        is_paged = hasattr(self, "self_attn")
        x = x + (self.self_attn.mix(h, cos_sin) if is_paged else self.linear_attn(h))
        return x + self.mlp(self.post_attention_layernorm(x))


class Hybrid(nn.Module):
    """The target; parameter names are those of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(TARGET.vocab_size, TARGET.hidden_size)
        self.model.layers = nn.ModuleList(map(HybridLayer, LAYER_TYPES))
        self.model.norm = OffsetNorm(TARGET.hidden_size)

    def layers(self, ids: Tensor) -> list[Tensor]:
        """Outputs of every layer, [B, T, D]."""
        x, found = self.model.embed_tokens(ids), []
        cos_sin = rope(torch.arange(ids.shape[1])[None], TARGET)
        for layer in self.model.layers:
            x = layer(x, cos_sin)
            found.append(x)
        return found

    def head(self, h: Tensor) -> Tensor:
        """Logits of a last layer's outputs."""
        return F.linear(self.model.norm(h), self.model.embed_tokens.weight)


@torch.no_grad()
def begin(dense: Target) -> Hybrid:
    """The dense target's weights where there is a place for them. A gate of zeros halves what
    attention gives, so its projection back is doubled."""
    hybrid, known = Hybrid(), dict(dense.named_parameters())
    width = TARGET.head_dim
    for name, parameter in hybrid.named_parameters():
        if "linear_attn" in name:
            continue
        given = known[name]
        if name.endswith("norm.weight"):
            given = given - 1
        elif "q_proj" in name:
            heads = given.unflatten(0, (-1, width))
            given = torch.cat([heads, 0.02 * torch.randn_like(heads)], 1).flatten(0, 1)
        elif "o_proj" in name:
            given = 2 * given
        parameter.copy_(given)
    return hybrid


def target_config(stop: int) -> dict[str, Any]:
    """As published text-only files have it."""
    s = TARGET
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": stop,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "layer_types": list(LAYER_TYPES),
        "linear_conv_kernel_dim": NUM_TAPS,
        "linear_key_head_dim": WIDTH,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_value_head_dim": WIDTH,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 4096,
        "num_attention_heads": s.num_attention_heads,
        "num_hidden_layers": s.num_hidden_layers,
        "num_key_value_heads": s.num_key_value_heads,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 1.0,
            "rope_theta": s.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": s.vocab_size,
    }
