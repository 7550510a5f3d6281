"""Declares the cases before anything is measured: shapes that no calibration sees, and ten cells with four strategies.

A cell is a model's size, the acceptance of drafts of either kind, the number of sequences and their length. Weights are
random and the acceptance is imposed, so a cell does not assess a drafter. It tests whether the cost model ranks the
strategies as the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from parlay.cost.roofline import ForwardShape, ModelShape
from parlay.cost.speed import DraftPlan

_BASE = ModelShape(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=704,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    tie_embeddings=True,
)

HELD_OUT = {
    "2 M": replace(
        _BASE, vocab_size=2048, hidden_size=192, intermediate_size=512, num_layers=4, num_heads=3, num_kv_heads=1
    ),
    "7 M": _BASE,
    "24 M": replace(_BASE, hidden_size=448, intermediate_size=1216, num_layers=9, num_heads=14, head_dim=32),
    "52 M": replace(_BASE, hidden_size=512, intermediate_size=2048, num_layers=12, num_heads=8, num_kv_heads=8),
    "95 M": replace(_BASE, hidden_size=768, intermediate_size=2048, num_layers=14, num_heads=12, num_kv_heads=4),
}
"""The shapes that are predicted and timed, by number of parameters. One has as many KV heads as heads, one has groups
of seven."""

HELD_OUT_WORKS = tuple(
    ForwardShape(rows=rows, context=context) for context in (256, 1024, 4096) for rows in (1, 2, 4, 8, 12, 16)
)
"""The forwards that are predicted and timed for each shape."""

TARGETS = {
    "small": _BASE,
    "medium": replace(_BASE, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8),
    "large": HELD_OUT["95 M"],
}
_LITTLE = replace(_BASE, hidden_size=128, intermediate_size=320, num_layers=2, num_heads=2, num_kv_heads=1)
DRAFTS = {
    "small": _LITTLE,
    "medium": _LITTLE,
    "large": replace(_BASE, num_layers=2),
}

PLAIN, COPY_4, COPY_16, WRITE_4 = "none", "copying 4", "copying 16", "draft model 4"
BUDGETS = {PLAIN: 0, COPY_4: 4, COPY_16: 16, WRITE_4: 4}
"""The strategies, and how many nodes each drafts in every step, as one chain."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. ``copied`` and ``written`` are the probabilities that a drafted token is right: by copying, and by a
    draft model."""

    size: str
    batch: int
    context: int
    copied: float
    written: float
    tokens: int = 96

    @property
    def name(self) -> str:
        return (
            f"{self.size}, batch {self.batch}, context {self.context}, {self.copied:g} copied, {self.written:g} written"
        )

    def chance(self, strategy: str) -> float:
        return self.written if strategy == WRITE_4 else self.copied

    def plan(self, strategy: str, draft: ModelShape) -> DraftPlan:
        """Return the strategy as the cost model sees it. ``draft`` has the types in which its runner keeps weights."""
        return DraftPlan(
            name=strategy,
            nodes=BUDGETS[strategy],
            ranks=(self.chance(strategy),),
            drafter=draft if strategy == WRITE_4 else None,
            adapts=False,
        )


CELLS = (
    Cell("small", 1, 1024, 0.05, 0.3),
    Cell("small", 16, 1024, 0.2, 0.5, tokens=48),
    Cell("small", 1, 1024, 0.95, 0.8),
    Cell("medium", 1, 1024, 0.6, 0.6),
    Cell("medium", 16, 1024, 0.2, 0.5, tokens=48),
    Cell("medium", 16, 256, 0.6, 0.6, tokens=48),
    Cell("large", 1, 1024, 0.3, 0.85),
    Cell("large", 16, 256, 0.2, 0.5, tokens=32),
    Cell("large", 4, 256, 0.2, 0.85, tokens=64),
    Cell("large", 1, 256, 0.95, 0.6),
)
