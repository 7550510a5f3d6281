"""The base of all rules that compare distributions: one sequence at a time, greedy requests by exact match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from parlay.sampling.rules.case import Case, case_of
from parlay.sampling.rules.shared_noise import check_law, follow
from parlay.types import Draft, Exactness, Fault, Law, ParlayError, Verdict, View


@dataclass(frozen=True, slots=True)
class Judge:
    """A rule that looks at distributions. Subclasses decide what is committed in one case.

    ``matches_greedy``: greedy requests have only one text, which exact match finds however their drafts were chosen.
    """

    exactness: ClassVar[Exactness] = Exactness.DISTRIBUTION
    laws: ClassVar[frozenset[Law]] = frozenset()
    matches_greedy: ClassVar[bool] = True

    def verdict(self, case: Case) -> Verdict:
        """What is committed. Raises ParlayError if not even the first token can be drawn."""
        raise NotImplementedError

    def accept(
        self, views: Sequence[View], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        """See `Rule.accept`. Raises ValueError for a draft that was chosen in a way that the rule can't handle."""
        for draft in drafts:
            check_law(self, draft)
        matched = [place for place, view in enumerate(views) if self._matches(view)]
        found = _followed(matched, views, drafts, logits_RV, roots) if matched else {}
        return [
            found[place] if place in found else self._attempt(case_of(view, draft, logits_RV, root))
            for place, (view, draft, root) in enumerate(zip(views, drafts, roots, strict=True))
        ]

    def _matches(self, view: View) -> bool:
        return self.matches_greedy and view.request.params.greedy

    def _attempt(self, case: Case) -> Verdict | Fault:
        try:
            return self.verdict(case)
        except ParlayError as error:
            return Fault(str(error))


def _followed(
    places: Sequence[int], views: Sequence[View], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
) -> dict[int, Verdict | Fault]:
    verdicts = follow(
        [views[place] for place in places],
        [drafts[place] for place in places],
        logits_RV,
        [roots[place] for place in places],
    )
    return dict(zip(places, verdicts, strict=True))
