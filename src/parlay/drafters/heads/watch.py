"""Watches whether a head is right as often here as on held-out texts. A head that is not only costs time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from parlay.heads.artefact import HeadArtefact
from parlay.heads.layouts.layout import LAYOUT
from parlay.types import Observation

ENOUGH = 64
"""How many first guesses are seen before a head is judged."""
_LITTLE = 0.2
"""Share of the expected acceptance below which a head is reported."""

_LEAST = 0.05
"""A head with a lower share of right first guesses is useless."""

_log = logging.getLogger(__name__)


class AcceptanceWatch:
    """Compares a head's acceptance of first guesses with its artefact's, once.

    Heads in published layouts have no such number, so they are only reported if hardly any guess is right. Artefacts of
    earlier versions have none either and are not judged.
    """

    def __init__(self, source: str, artefact: HeadArtefact) -> None:
        self._source, self._expected = source, artefact.expected
        self._layout = artefact.settings.get(LAYOUT)
        self._seen = self._right = 0

    def see(self, observation: Observation) -> None:
        """Count one step. After `ENOUGH` of them, warn if too few guesses were right."""
        if self._seen >= ENOUGH:
            return
        draft, path = observation.draft, observation.verdict.path
        real = zip(draft.tree.parents[: len(draft) - draft.probes], draft.sources, strict=False)
        first = [node for node, (parent, source) in enumerate(real) if parent < 0 and source == self._source]
        if first:
            self._seen += 1
            self._right += bool(path) and path[0] in first
        if self._seen == ENOUGH and self._layout is not None:
            self._judge_unknown(self._layout)
        elif self._seen == ENOUGH:
            self._judge()

    def _judge(self) -> None:
        if self._right < _LITTLE * self._expected * ENOUGH:
            _log.warning(
                "strategy %s: %.0f %% of the head's first guesses were right, and %.0f %% on held-out texts. "
                "Most likely it was trained for another version of this model, or for texts of another kind or chat "
                "template. The output is not affected, but drafting gains nothing: train a head on such texts, or "
                "choose another strategy",
                self._source,
                100 * self._right / ENOUGH,
                100 * self._expected,
            )

    def _judge_unknown(self, layout: str) -> None:
        if self._right < _LEAST * ENOUGH:
            _log.warning(
                "strategy %s: %.0f %% of the first guesses of a head in the layout of %s were right. Most likely it "
                "was trained for another model or version of it, or its config counts the target's layers in another "
                "way. The output is not affected, but drafting gains nothing: choose another head or strategy",
                self._source,
                100 * self._right / ENOUGH,
                layout,
            )


class StepRecord(Protocol):
    """A drafter's record of each sequence's steps."""

    def take(self, observation: Observation) -> None:
        """Take in an observed step."""
        ...

    def release(self, sequence: int) -> None:
        """Forget the sequence. Unknown names are ignored."""
        ...


class Watched:
    """The observing part of a drafter: records steps, and watches how often the head is right."""

    def __init__(self, source: str, artefact: HeadArtefact, kept: StepRecord) -> None:
        self._watch, self._kept = AcceptanceWatch(source, artefact), kept

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._watch.see(observation)
            self._kept.take(observation)

    def release(self, sequence: int) -> None:
        self._kept.release(sequence)
