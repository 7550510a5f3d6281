"""Steps of reasoning that a draft model writes, one per draft, each judged as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.draft_models.best_first import BestChains
from parlay.drafters.draft_models.draft_sequences import DraftSequences
from parlay.drafters.draft_models.opening import draft_name, open_draft
from parlay.drafters.options import SPEC_REASON as SOURCE
from parlay.drafters.options import SpecReasonOptions
from parlay.drafters.per_sequence import FromText
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, SequenceView, Tokenizer

_SENTENCE_ENDS = (".", "!", "?", ":", ";")


class StepEnds:
    """The tokens that end a step: those with a line break, and optionally those that end a sentence."""

    def __init__(self, tokenizer: Tokenizer, until: str) -> None:
        self._tokenizer = tokenizer
        self._sentences = until == "sentence"
        self._known: dict[int, bool] = {}

    def __contains__(self, token: object) -> bool:
        if not isinstance(token, int):
            return False
        if token not in self._known:
            text: str = self._tokenizer.decode([token])
            self._known[token] = "\n" in text or (self._sentences and text.rstrip().endswith(_SENTENCE_ENDS))
        return self._known[token]


@dataclass(frozen=True, slots=True)
class _Proposed:
    """The tokens last drafted for a sequence, and the length of its text at that time."""

    start: int
    tokens: tuple[int, ...]


class SpecReason(FromText):
    """SpecReason (Pan et al. 2025, arXiv:2504.07891): a small model writes steps of reasoning, the target judges them.

    A draft is one step: up to the end of a line or of a sentence, or as long as the budget allows. The rule accepts it
    as a whole if the target scores it high enough. Otherwise the target writes the step: nothing is drafted until it
    has ended.
    """

    def __init__(self, resources: Resources, options: SpecReasonOptions) -> None:
        if resources.tokenizer is None:
            raise UsageError(f"strategy {SOURCE}: steps end where lines do, and this model came without a tokenizer")
        runner = open_draft(SOURCE, resources, draft_name(SOURCE, resources, options.model))
        self._ends = StepEnds(resources.tokenizer, options.until)
        self._sequences = DraftSequences(runner)
        self._writer = BestChains(runner, self._sequences, SOURCE, 0.0, self._ends)
        self._proposed: dict[int, _Proposed] = {}

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        allowed = [0 if self._rewriting(view) else budget for view, budget in zip(views, budgets, strict=True)]
        jobs = self._sequences.jobs(views, allowed)
        drafts = dict(zip(jobs, self._writer.write(list(jobs.values())), strict=True))
        for place, draft in drafts.items():
            self._proposed[views[place].sequence] = _Proposed(len(views[place].tokens), draft.tree.tokens)
        return [drafts.get(place, NO_DRAFT) for place in range(len(views))]

    def _rewriting(self, view: SequenceView) -> bool:
        """Whether the target is writing this step, after it rejected a draft of it."""
        last = self._proposed.get(view.sequence)
        if last is None:
            return False
        written = view.tokens[last.start :]
        pairs = enumerate(zip(written, last.tokens, strict=False))
        changed = next((place for place, (token, drafted) in pairs if token != drafted), None)
        return changed is not None and not any(token in self._ends for token in written[changed:])

    def release(self, sequence: int) -> None:
        self._proposed.pop(sequence, None)
        self._sequences.release(sequence)
