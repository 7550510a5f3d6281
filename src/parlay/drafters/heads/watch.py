"""Whether a head does here what it did on held-out texts: one that fits badly changes no text, it only costs time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from parlay.heads.artefact import HeadArtefact
from parlay.types import Observation

ENOUGH = 64
"""First guesses after which a head is judged."""
_LITTLE = 0.2
"""Of the share that was expected."""

_log = logging.getLogger(__name__)


class AcceptanceWatch:
    """Compares how often one of a head's first guesses is accepted with what its artefact says, once.

    Artefacts of earlier versions don't say it; they are not judged.
    """

    def __init__(self, source: str, held: HeadArtefact) -> None:
        self._source, self._expected = source, float(held.settings.get("expected", 0.0))
        self._seen = self._right = 0

    def see(self, observation: Observation) -> None:
        """One step. Warns after `ENOUGH` of them if nearly nothing was right."""
        if self._seen >= ENOUGH:
            return
        draft, path = observation.draft, observation.verdict.path
        real = zip(draft.tree.parents[: len(draft) - draft.probes], draft.sources, strict=False)
        first = [node for node, (parent, source) in enumerate(real) if parent < 0 and source == self._source]
        if first:
            self._seen += 1
            self._right += bool(path) and path[0] in first
        if self._seen == ENOUGH and self._right < _LITTLE * self._expected * ENOUGH:
            _log.warning(
                "strategy %s: %.0f %% of the head's first guesses were right, and %.0f %% on held-out texts. "
                "Most likely it was trained for another version of this model, or for texts of another kind or chat "
                "template. The output is not affected, but drafting gains nothing: train a head on such texts, or "
                "choose another strategy",
                self._source,
                100 * self._right / ENOUGH,
                100 * self._expected,
            )


class Kept(Protocol):
    """What a drafter keeps of each sequence's steps."""

    def take(self, observation: Observation) -> None:
        """What a step shows."""
        ...

    def release(self, sequence: int) -> None:
        """Unknown names are ignored."""
        ...


class Watched:
    """The part of a drafter that sees steps: it keeps what they show, and how often the head was right."""

    def __init__(self, source: str, held: HeadArtefact, kept: Kept) -> None:
        self._watch, self._kept = AcceptanceWatch(source, held), kept

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self._watch.see(observation)
            self._kept.take(observation)

    def release(self, sequence: int) -> None:
        self._kept.release(sequence)
