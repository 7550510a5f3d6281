"""Options of strategies made of others. They stand apart so that reading them loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.options import Options, option

CASCADE = "cascade"
HORIZONTAL = "horizontal"
CS_DRAFTING = "cs-drafting"


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeOptions(Options):
    """Which levels there are, and when the last one stops."""

    levels: tuple[str, ...] = option(
        ("prompt-lookup", "draft-model(k=16)"),
        "drafters from the cheapest to the most expensive, joined by +; models from the second on",
        strategies=True,
    )
    enough: int = option(0, "tokens after which the last level stops; 0: its k", low=0, high=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizontalOptions(Options):
    """Which drafters write one after the other."""

    levels: tuple[str, ...] = option(
        ("draft-model(k=5)", "prompt-lookup(k=10)"),
        "drafters from the most expensive to the cheapest, joined by +; each drafts up to its own k",
        strategies=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CsDraftingOptions(Options):
    """Which drafters there are, and how many tokens each writes for which other."""

    drafters: tuple[str, ...] = option(
        ("draft-model", "prompt-lookup"), "from the most expensive to the cheapest, joined by +", strategies=True
    )
    matrix: tuple[str, ...] = option(("5/10", "0/10"), "tokens each drafter (column) writes, row by row, joined by +")
