"""Acceptance of all that was drafted, which is lossy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.rule_input import RuleInput
from parlay.types import DraftKind, Exactness, ParlayError, Verdict


@dataclass(frozen=True, slots=True)
class Unverified(DistributionRule):
    """The drafter's own text (DynaMo, Tuli et al. 2024, arXiv:2405.00888): the target draws only the token after it.

    Of a tree the path of first children is taken, up to a token that the request rules out: by a mask, a schema or its
    truncation.
    """

    exactness: ClassVar[Exactness] = Exactness.LOSSY
    kinds: ClassVar[frozenset[DraftKind]] = frozenset({"point"})
    matches_greedy: ClassVar[bool] = False

    def verdict(self, given: RuleInput) -> Verdict:
        tree, path = given.draft.tree, list[int]()
        node, real = -1, len(given.draft) - given.draft.probes
        probs_V = given.target(node)
        while (child := next((n for n in range(node + 1, real) if tree.parents[n] == node), None)) is not None:
            token = tree.tokens[child]
            if not probs_V[token]:
                break
            try:
                probs_V = given.target(child)
            except ParlayError:  # nothing may follow: the text ends with this token
                return Verdict(tuple(path), (*(tree.tokens[step] for step in path), token))
            path.append(child)
            node = child
        last = int(probs_V.argmax()) if given.greedy else given.rng.draw(probs_V, len(path))
        return Verdict(tuple(path), (*(tree.tokens[step] for step in path), last))
