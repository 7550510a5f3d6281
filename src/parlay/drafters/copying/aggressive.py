"""Input-guided aggressive decoding (Sun et al. 2021, Ge et al. 2022): the whole rest of the input is the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.copying.alignment import LOST, Alignment, copied
from parlay.drafters.copying.ngram_index import Indexes, NgramIndex, Texts
from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.options import Options, option
from parlay.types import NO_DRAFT, Draft, Request, SequenceView

SOURCE = "aggressive"


@dataclass(frozen=True, slots=True, kw_only=True)
class AggressiveOptions(Options):
    """Options of aggressive copying: how it finds its place in the source after the output has left it."""

    ngram: int = option(3, "longest n-gram that is looked up in the source to find where to copy from", low=1, high=32)


class Aggressive(OneByOne):
    """Input-guided aggressive decoding, IAD (Sun et al. 2021; Ge et al. 2022, arXiv:2205.10350).

    Assumes that the output repeats its source, as when grammar is corrected. From the first token on, the draft is the
    rest of the source from the place that the output has reached, at most ``k`` nodes. When the output departs from the
    source, nothing is drafted until the output's last n tokens occur in the source exactly once. The search tries
    n = 1 to ``ngram`` (3 in the authors' code) and stops when the source does not have the n tokens at all. Drafting
    continues after that occurrence.

    The source is the request's references, one after the other. Without references it is the prompt.
    """

    def __init__(self, resources: Resources, options: AggressiveOptions) -> None:
        self._indexes = Indexes(options.ngram, resources.vocab_size, resources.room)
        self._copies: dict[int, _Copy] = {}
        self._bytes = StateBytes(resources.room, self._copies)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._indexes.begin(budgets)
        return super().propose(views, budgets)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        copy = self._copies.get(view.sequence)
        if copy is None or copy.request is not view.request:
            texts = view.request.references or (view.request.prompt,)
            copy = self._copies[view.sequence] = _Copy(view.request, texts)
        index = self._indexes.ready(view.sequence, copy.texts)
        if index is None:
            return NO_DRAFT
        if copy.alignment is None or copy.alignment.source is not index:
            copy.alignment = Alignment(index, _only_occurrence, view.prompt_length)
        place, run, _ = copy.alignment.follow(view.tokens)
        self._bytes.set(view.sequence, copy.alignment.nbytes)
        return copied(index, place, run, budget, SOURCE)

    def release(self, sequence: int) -> None:
        self._copies.pop(sequence, None)
        self._bytes.release(sequence)
        self._indexes.release(sequence)


@dataclass(slots=True)
class _Copy:
    """The state of one sequence: the source, and where the output stands in it once the source is indexed."""

    request: Request
    texts: Texts
    alignment: Alignment | None = None


def _only_occurrence(source: NgramIndex, output: Sequence[int], anchor: int) -> tuple[int, int]:
    """The place after the shortest suffix of the output that occurs once in the source, and the suffix's length."""
    for length, places in enumerate(source.places(output), start=1):
        if len(places) == 1:
            return places[0], length
    return LOST, 0
