"""The base of all rules that compare distributions: one sequence at a time, exact match for greedy requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from parlay.sampling.rules.rule_input import RuleInput, rule_input
from parlay.sampling.rules.shared_noise import check_kind, follow
from parlay.types import Draft, DraftKind, Exactness, Fault, ParlayError, SequenceView, Verdict


@dataclass(frozen=True, slots=True)
class DistributionRule:
    """A rule that compares distributions. Subclasses judge one sequence.

    ``matches_greedy``: greedy requests have only one text, which exact match finds, however their drafts were chosen.
    """

    exactness: ClassVar[Exactness] = Exactness.DISTRIBUTION
    kinds: ClassVar[frozenset[DraftKind]] = frozenset()
    matches_greedy: ClassVar[bool] = True

    def verdict(self, inputs: RuleInput) -> Verdict:
        """Judge one sequence. Raises ParlayError if not even the first token can be drawn."""
        raise NotImplementedError

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        """See `AcceptRule.accept`. Raises ValueError for a draft of a kind that the rule can't handle."""
        for draft in drafts:
            check_kind(self, draft)
        matched = [place for place, view in enumerate(views) if self.matches(view)]
        found = _followed(matched, views, drafts, logits_RV, roots) if matched else {}
        return [
            found[place] if place in found else self._attempt(rule_input(view, draft, logits_RV, root))
            for place, (view, draft, root) in enumerate(zip(views, drafts, roots, strict=True))
        ]

    def matches(self, view: SequenceView) -> bool:
        """See `AcceptRule.matches`."""
        return self.matches_greedy and view.request.params.greedy

    def _attempt(self, inputs: RuleInput) -> Verdict | Fault:
        try:
            return self.verdict(inputs)
        except ParlayError as error:
            return Fault(str(error))


def _followed(
    places: Sequence[int],
    views: Sequence[SequenceView],
    drafts: Sequence[Draft],
    logits_RV: Tensor,
    roots: Sequence[int],
) -> dict[int, Verdict | Fault]:
    verdicts = follow(
        [views[place] for place in places],
        [drafts[place] for place in places],
        logits_RV,
        [roots[place] for place in places],
    )
    return dict(zip(places, verdicts, strict=True))
