"""Wraps a drafter to record its errors, its misuse of the protocol, and the number of nodes that it proposes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from parlay.types import BesideDrafter, Draft, Drafter, Needs, Observation, SequenceView, Strategy


class WatchedDrafter:
    """Passes all calls on to ``inner``.

    ``fault`` describes the first fault: an error that the drafter raised, or a view whose tokens it changed. Changed
    tokens are put back, because the engine would otherwise decode another text. ``nodes`` counts the proposed nodes.
    """

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.fault = ""
        self.nodes = 0

    @property
    def needs(self) -> Needs:
        return self._inner.needs

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        with self._watching("propose", views):
            drafts = self._inner.propose(views, budgets)
            if len(drafts) != len(views):
                raise ValueError(f"it gave {len(drafts)} drafts for {len(views)} views")
        self.nodes += sum(len(draft.tree) for draft in drafts)
        return drafts

    def observe(self, observations: Sequence[Observation]) -> None:
        with self._watching("observe", [each.view for each in observations]):
            self._inner.observe(observations)

    def release(self, sequence: int) -> None:
        self._inner.release(sequence)

    @contextmanager
    def _watching(self, call: str, views: Sequence[SequenceView]) -> Iterator[None]:
        before = [list(view.tokens) for view in views]
        try:
            yield
            if any(list(view.tokens) != tokens for view, tokens in zip(views, before, strict=True)):
                raise ValueError("it changed the tokens of a view, which are the engine's: copy them first")
        except Exception as error:
            self.fault = self.fault or f"{call}: {type(error).__name__}: {error}"
            raise
        finally:
            for view, tokens in zip(views, before, strict=True):
                if list(view.tokens) != tokens:
                    cast("list[int]", view.tokens)[:] = tokens


def watched(strategy: Strategy) -> tuple[Strategy, tuple[WatchedDrafter, ...]]:
    """Return the strategy with its drafters wrapped, and the wrapped drafters. A `BesideDrafter` is not wrapped,
    because the engine recognizes it by its class."""
    drafters = tuple(
        drafter if isinstance(drafter, BesideDrafter) else WatchedDrafter(drafter) for drafter in strategy.drafters
    )
    seen = tuple(drafter for drafter in drafters if isinstance(drafter, WatchedDrafter))
    return replace(strategy, drafters=drafters), seen
