"""Lossy rules, which accept tokens that are good enough, or all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np

from parlay.sampling.distributions import Vector
from parlay.sampling.rules.distribution_rule import DistributionRule
from parlay.sampling.rules.rule_input import RuleInput
from parlay.types import DraftKind, Exactness, ParlayError, SequenceView, Verdict, trees

GoodEnough = Callable[[Vector], Callable[[int], bool]]
"""Makes a test of tokens from a distribution: whether each passes."""


def longest(inputs: RuleInput, good_enough: GoodEnough, last_token: Callable[[Vector, int], int]) -> Verdict:
    """Accept the longest path on which all tokens pass (the likeliest if several), then ``last_token``'s choice.

    ``last_token(distribution, level)`` returns the token after the path.
    """
    tree = inputs.draft.tree
    families = trees.children(tree)
    real = len(tree) - inputs.draft.probes
    reached = [(-1, 0, 0.0)]  # node, depth, log-probability of the path
    best, best_rank, best_V = -1, (-1, 0.0), None
    for node, depth, logprob in reached:
        try:
            probs_V = inputs.target(node)
        except ParlayError:
            if node == -1:
                raise
            continue  # no token can be drawn after this node, so no path may end or continue there
        if (depth, logprob) > best_rank:
            best, best_rank, best_V = node, (depth, logprob), probs_V
        passes = good_enough(probs_V)
        for child in families[node]:
            token = tree.tokens[child]
            if child < real and probs_V[token] > 0 and passes(token):
                reached.append((child, depth + 1, logprob + math.log(probs_V[token])))
    assert best_V is not None
    path = trees.path_to(tree, best)
    return Verdict(path, (*(tree.tokens[node] for node in path), last_token(best_V, len(path))))


def _next(inputs: RuleInput, probs_V: Vector, level: int) -> int:
    """The token after a path: drawn, or the best one for a greedy request."""
    return int(probs_V.argmax()) if inputs.greedy else inputs.rng.draw(probs_V, level)


@dataclass(frozen=True, slots=True)
class _LossyRule(DistributionRule):
    """A rule for fixed guesses that promises nothing about the text, and judges greedy requests like others."""

    exactness: ClassVar[Exactness] = Exactness.LOSSY
    kinds: ClassVar[frozenset[DraftKind]] = frozenset({"point"})
    matches_greedy: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Threshold(_LossyRule):
    """Relaxed verification of blockwise drafts, by rank and distance.

    GAD++ (Xia et al. 2022, arXiv:2203.16487; Stern et al. 2018, arXiv:1811.03115, section 5). A token passes if it is
    among the ``beta`` best and its logit is at most ``tau`` below the best one. ``beta=1`` is exact match for greedy
    requests. An infinite ``tau`` accepts by rank alone, and a very large ``beta`` by the ratio p(x) / max p >=
    exp(-tau). The rule was made for greedy requests, which it judges by logits before temperature. The token after the
    path is drawn from p, or is the best token for a greedy request.
    """

    beta: int = 5
    tau: float = 3.0

    def verdict(self, inputs: RuleInput) -> Verdict:
        return longest(inputs, self._good_enough, partial(_next, inputs))

    def _good_enough(self, probs_V: Vector) -> Callable[[int], bool]:
        floor = probs_V.max() * math.exp(-self.tau)

        def passes(token: int) -> bool:
            better = (probs_V > probs_V[token]).sum() + (probs_V[:token] == probs_V[token]).sum()
            return bool(probs_V[token] >= floor and better < self.beta)

        return passes


@dataclass(frozen=True, slots=True)
class Rollback(_LossyRule):
    """The rollback of big-little decoding (BiLD, Kim et al. 2023, arXiv:2302.07863).

    A token passes if its cross-entropy under the target, -log p(x), is at most ``nats``, or if it is the target's best
    token. With ``nats=0`` greedy requests get exact match, and with infinity nothing is rolled back. The token after
    the path is drawn from p, or is the best token for a greedy request. ``by_kind``: other limits for some kinds of
    requests.
    """

    nats: float = 2.0
    by_kind: Mapping[str, float] = field(default_factory=dict)

    def matches(self, view: SequenceView) -> bool:
        """See `AcceptRule.matches`."""
        return view.request.params.greedy and self._nats_of(view.request.kind) == 0

    def _nats_of(self, kind: str) -> float:
        return self.by_kind.get(kind, self.nats)

    def verdict(self, inputs: RuleInput) -> Verdict:
        def good_enough(probs_V: Vector) -> Callable[[int], bool]:
            least, best = math.exp(-self._nats_of(inputs.kind)), int(probs_V.argmax())
            return lambda token: bool(probs_V[token] >= least or token == best)

        return longest(inputs, good_enough, partial(_next, inputs))


@dataclass(frozen=True, slots=True)
class Typical(_LossyRule):
    """Typical acceptance (Medusa, Cai et al. 2024, arXiv:2401.10774).

    A token passes if p(x) > min(eps, delta exp(-H(p))): the less certain the target is, the lower the threshold. The
    longest path that passes is accepted (the likeliest if several), and the next token is drawn from p. Greedy requests
    get exact match.
    """

    matches_greedy: ClassVar[bool] = True
    eps: float = 0.09
    delta: float = 0.3

    def verdict(self, inputs: RuleInput) -> Verdict:
        return longest(inputs, self._good_enough, lambda probs_V, level: inputs.rng.draw(probs_V, level))

    def _good_enough(self, probs_V: Vector) -> Callable[[int], bool]:
        floor = min(self.eps, self.delta * float(np.exp(-entropy(probs_V))))
        return lambda token: bool(probs_V[token] > floor)


def entropy(probs_V: Vector) -> float:
    """The entropy of a distribution, in nats."""
    some = probs_V[probs_V > 0]
    return float(-(some * np.log(some)).sum())


@dataclass(frozen=True, slots=True)
class Step(_LossyRule):
    """Accepts whole steps of reasoning (SpecReason, Pan et al. 2025, arXiv:2504.07891).

    The target's score of a step is the mean log-probability of its tokens, which the verifying forward computes. (In
    the paper the target grades a step from 0 to 9, which takes another prompt.) A step with a score of at least
    -``nats`` is accepted as a whole. From any other step, the target keeps the tokens that it would have written
    itself, and continues from there. So ``nats=0`` is exact match, which for greedy requests gives the text of plain
    decoding.
    """

    nats: float = 0.4

    def matches(self, view: SequenceView) -> bool:
        """See `AcceptRule.matches`."""
        return view.request.params.greedy and self.nats == 0

    def verdict(self, inputs: RuleInput) -> Verdict:
        path, laws = _first_path(inputs)
        tokens = [inputs.draft.tree.tokens[node] for node in path]
        surprise = [-math.log(probs_V[token]) for probs_V, token in zip(laws, tokens, strict=False)]
        real = len(inputs.draft) - inputs.draft.probes
        if path and self.nats > 0 and len(path) == real and sum(surprise) <= self.nats * len(path):
            return _whole(inputs, path, laws)
        for level, probs_V in enumerate(laws):
            token = _next(inputs, probs_V, level)
            if level == len(tokens) or token != tokens[level] or level + 1 == len(laws):
                return Verdict(tuple(path[:level]), (*tokens[:level], token))
        raise AssertionError("the root has a distribution")


def _first_path(inputs: RuleInput) -> tuple[list[int], list[Vector]]:
    """The path of first children, up to a token that the request forbids, and the distribution before each token.

    If anything may follow the path, the distribution after it comes last.
    """
    tree, real = inputs.draft.tree, len(inputs.draft) - inputs.draft.probes
    path: list[int] = []
    node, laws = -1, [inputs.target(-1)]
    while (child := next((n for n in range(node + 1, real) if tree.parents[n] == node), None)) is not None:
        if not laws[-1][tree.tokens[child]]:
            break
        path.append(child)
        try:
            laws.append(inputs.target(child))
        except ParlayError:
            break
        node = child
    return path, laws


def _whole(inputs: RuleInput, path: Sequence[int], laws: Sequence[Vector]) -> Verdict:
    """Accept the whole path and one token after it. If nothing may follow, the path's last token ends the text."""
    tokens = tuple(inputs.draft.tree.tokens[node] for node in path)
    if len(laws) == len(path):
        return Verdict(tuple(path[:-1]), tokens)
    return Verdict(tuple(path), (*tokens, _next(inputs, laws[-1], len(path))))


@dataclass(frozen=True, slots=True)
class Unverified(_LossyRule):
    """Accepts the drafter's text (DynaMo, Tuli et al. 2024, arXiv:2405.00888): the target draws only the next token.

    In a tree, the path of first children is accepted, up to a token that the request forbids by a mask, a schema or
    truncation.
    """

    def verdict(self, inputs: RuleInput) -> Verdict:
        path, laws = _first_path(inputs)
        return _whole(inputs, path, laws)
