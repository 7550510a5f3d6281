"""Inference with reference (Yang et al. 2023): drafts what follows the output's last tokens in a given text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from parlay.drafters.copying.alignment import LOST, Alignment, copied
from parlay.drafters.copying.ngram_index import END, Indexes, NgramIndex
from parlay.drafters.per_sequence import OneByOne
from parlay.drafters.resources import Resources
from parlay.drafters.state_room import StateBytes
from parlay.options import Options, UsageError, option
from parlay.types import NO_DRAFT, Draft, SequenceView

SOURCE = "reference-copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCopyOptions(Options):
    """Options of copying references: which matches count, and whether copying resumes after an edit."""

    max_ngram: int = option(5, "longest match that is looked for", low=1, high=32)
    min_ngram: int = option(1, "minimum tokens of a match", low=1, high=32)
    resync: bool = option(
        False,
        "treat the first reference as a prediction: draft from its start, and find the place again after each edit",
    )


class ReferenceCopy(OneByOne):
    """Inference with reference, LLMA (Yang et al. 2023, arXiv:2304.04487).

    Searches the request's references for the last n tokens of the output (without the prompt), for n from ``max_ngram``
    down to ``min_ngram``. It uses the longest match, at the first document and position where something follows. The
    draft is the ``k`` tokens after it, up to the end of the document. The paper uses matches of 5 tokens down to 1 and
    blocks of k = 20; the first token of a block is the root, so a draft has 19 nodes.

    ``resync`` is for references that predict the output itself (an edited file, OpenAI's predicted outputs). Copying
    starts at the beginning of the first reference, before there is any output to match, and continues while the output
    agrees. When the output departs from the reference, the drafter takes the longest match, the one nearest after the
    place of departure if there is one and else the one nearest before it. So a line that occurs often is copied from
    the right place.
    """

    def __init__(self, resources: Resources, options: ReferenceCopyOptions) -> None:
        if options.min_ngram > options.max_ngram:
            raise UsageError(
                f"strategy {SOURCE}: min_ngram {options.min_ngram} is more than max_ngram {options.max_ngram}"
            )
        self._longest = options.max_ngram
        self._shortest = options.min_ngram
        self._resync = options.resync
        self._indexes = Indexes(options.max_ngram, resources.vocab_size, resources.room)
        self._alignments: dict[int, Alignment] = {}
        self._bytes = StateBytes(resources.room, self._alignments)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        self._indexes.begin(budgets)
        return super().propose(views, budgets)

    def _propose(self, view: SequenceView, budget: int) -> Draft:
        references = view.request.references
        if not references:
            return NO_DRAFT
        index = self._indexes.ready(view.sequence, references)
        if index is None:
            return NO_DRAFT
        if self._resync:
            place, length = self._follow(view, index)
        else:
            latest = view.tokens[max(view.prompt_length, len(view.tokens) - self._longest) :]
            place, length = _first(index, latest, self._shortest)
        return copied(index, place, length, budget, SOURCE)

    def _follow(self, view: SequenceView, index: NgramIndex) -> tuple[int, int]:
        """The output's place in the first reference, and how many tokens before it agree."""
        alignment = self._alignments.get(view.sequence)
        if alignment is None or alignment.source is not index:
            reenter = partial(_nearest, shortest=self._shortest)
            alignment = self._alignments[view.sequence] = Alignment(index, reenter, view.prompt_length)
        place, length, _ = alignment.follow(view.tokens)
        self._bytes.set(view.sequence, alignment.nbytes)
        return place, length

    def release(self, sequence: int) -> None:
        self._alignments.pop(sequence, None)
        self._bytes.release(sequence)
        self._indexes.release(sequence)


def _first(index: NgramIndex, output: Sequence[int], shortest: int) -> tuple[int, int]:
    """The first place with a next token after the longest match, and the match's length."""
    found = index.places(output)
    for length in range(len(found), shortest - 1, -1):
        for place in found[length - 1]:
            if index.text[place] != END:
                return place, length
    return LOST, 0


def _nearest(index: NgramIndex, output: Sequence[int], anchor: int, *, shortest: int) -> tuple[int, int]:
    """The place after a longest match: the first one at or after ``anchor``, or else the last before it."""
    found = index.places(output)
    if len(found) < shortest:
        return LOST, 0
    places = found[-1]
    return places[min(bisect_left(places, anchor), len(places) - 1)], len(found)
