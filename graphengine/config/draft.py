"""What a DFlash drafter is, whatever its file looked like, and how its layers attend.

Invariant: what decides the numerics (taps, mask id, block size, causality, windows) was read or
refused (`draft_formats`), never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

from graphengine.config.model import ModelConfig

DraftFormat = Literal["z-lab-old", "z-lab", "speculators", "deepspec"]
SlotConvention = Literal["anchor-dropped", "anchor-first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """Which keys a row of a layer sees. The row stands at position p, the key at position k:

    `(k <= p or not causal) and (window is None or |p - k| < window)`
    """

    causal: bool
    window: int | None = None


CAUSAL = AttentionRule(causal=True)
FULL_NON_CAUSAL = AttentionRule(causal=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A DFlash drafter: its own Qwen3-style layers plus what ties it to a target.

    `target_layer_ids` are 0-based target layers, tapped at the layer's output (the last layer's
    behind the final norm), whatever the file counts from. `block_size` is the number of rows of a
    draft forward, the anchor among them; `slot_convention` says what a row predicts: the token at
    its own position, the anchor's row being dropped ("anchor-dropped"), or the one behind it
    ("anchor-first"). Buffers, budgets and verification go by `num_draft_tokens` and
    `num_verify_rows`.
    `layer_attention`: one rule a layer; empty, every layer is full and non-causal.
    `target_hidden_size`, `draft_vocab_size`: None where they are the drafter's own hidden and
    vocabulary size. `verifier`: the target that the file names.
    `format`, `block_size_source` and `notes` say what was detected and where; two drafters that
    differ only there are equal.
    """

    model: ModelConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    slot_convention: SlotConvention = "anchor-dropped"
    layer_attention: tuple[AttentionRule, ...] = ()
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    verifier: str | None = None
    format: DraftFormat = field(default="z-lab", compare=False)
    block_size_source: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """The stacks that run a step's drafts."""
        return (self.model,)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed a step."""
        return self.block_size - (self.slot_convention == "anchor-dropped")

    @property
    def num_verify_rows(self) -> int:
        """Rows that the target runs a step: the anchor and every draft."""
        return self.num_draft_tokens + 1

    def shortened(self, num_draft_tokens: int) -> Self:
        """The same drafter with fewer mask rows in its block, so that it proposes fewer tokens."""
        fewer = self.num_draft_tokens - num_draft_tokens
        assert 0 <= fewer < self.num_draft_tokens
        return replace(self, block_size=self.block_size - fewer)

    @property
    def attention_rules(self) -> tuple[AttentionRule, ...]:
        """The rule of every layer."""
        return self.layer_attention or (FULL_NON_CAUSAL,) * self.model.num_hidden_layers

    @property
    def num_draft_ids(self) -> int:
        """Rows of the drafter's head."""
        return self.draft_vocab_size or self.model.vocab_size

    @property
    def tap_size(self) -> int:
        """Width of one tap: the target's hidden size."""
        return self.target_hidden_size or self.model.hidden_size

    @property
    def num_taps(self) -> int:
        """Number of target layers whose output feeds the drafter."""
        return len(self.target_layer_ids)

    def check_target(self, target: ModelConfig, source: str = "drafter") -> None:
        """Refuses a target that this drafter was not made for.

        Raises:
            ValueError: depth, hidden size, vocabulary, taps or mask id do not fit.
        """
        depth, vocab, taps = target.num_hidden_layers, target.vocab_size, self.target_layer_ids

        def refusal(text: str) -> ValueError:
            return ValueError(f"{source}: {text}; pass the drafter of this target")

        if (made_for := self.num_target_layers) not in (None, depth):
            raise refusal(f"made for a target of {made_for} layers, this one has {depth}")
        if max(taps) >= depth:
            raise refusal(f"target_layer_ids {list(taps)} reach past the target's {depth} layers")
        if self.tap_size != target.hidden_size:
            key = "hidden_size" if self.target_hidden_size is None else "target_hidden_size"
            raise refusal(f"{key} {self.tap_size} differs from the target's {target.hidden_size}")
        if self.model.vocab_size != vocab:
            raise refusal(f"vocab_size {self.model.vocab_size} differs from the target's {vocab}")
        if self.mask_token_id >= vocab:
            raise refusal(
                f"mask_token_id {self.mask_token_id} lies outside the target's embedding of "
                f"{vocab} rows"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Prompt look-up (`drafters.ngram`): no file, no weights, any target."""

    num_draft_tokens: int = 15
    shortest: int = 2
    longest: int = 4
    models: tuple[ModelConfig, ...] = ()
    attention_rules: tuple[AttentionRule, ...] = ()

    @property
    def block_size(self) -> int:
        """Rows of a request that a draft is as large as."""
        return self.num_verify_rows

    @property
    def num_verify_rows(self) -> int:
        """Rows that the target runs a step: the anchor and every draft."""
        return self.num_draft_tokens + 1

    def shortened(self, num_draft_tokens: int) -> Self:
        """The same with fewer drafts."""
        assert 1 <= num_draft_tokens <= self.num_draft_tokens
        return replace(self, num_draft_tokens=num_draft_tokens)


DraftSpec = DraftConfig | NgramConfig
"""A drafter before anything is loaded."""
