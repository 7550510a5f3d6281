"""Searches for the sub-layers to leave out, during generation, on committed text."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from parlay.drafters.self_speculation.skipping import layers_of
from parlay.sampling.sampler import ranked
from parlay.types import DraftForm, SequenceView, Skip, Sublayer
from parlay.types.requests import FixedText

_STARTUP = 10  # random sets to try before the estimator is used
_GOOD = 0.2  # share of the tried sets that count as good
_DRAWS = 24  # sets drawn from the distribution of good ones; the most promising is tried
_LATEST = 256  # the estimator uses only this many of the latest sets, so that steps do not become slower


class ParzenSearch:
    """Proposes sets of sub-layers: Bayesian optimisation with a tree-structured Parzen estimator (Bergstra 2011).

    The tried sets are divided into the better ones and the others; each part gives every sub-layer a probability of
    being in a set. New sets are drawn with the probabilities of the better part, and the one with the highest
    likelihood ratio is tried. This suits yes-or-no choices and noisy values better than the papers' Gaussian processes,
    and takes less than a millisecond. ``size``: how many sub-layers each set has; None: any number.
    """

    def __init__(self, sublayers: Sequence[Sublayer], size: int | None = None, seed: int = 0) -> None:
        self._sublayers = tuple(sublayers)
        self._size = size
        self._chance = random.Random(seed)
        self._tried: dict[Skip, float] = {}
        self._latest: deque[Skip] = deque(maxlen=_LATEST)

    def learn(self, skip: Skip, value: float) -> None:
        self._tried[skip] = value
        self._latest.append(skip)

    def random(self) -> Skip:
        """A random set; if sizes are free, each size is equally likely."""
        size = self._size if self._size is not None else self._chance.randint(0, len(self._sublayers))
        return frozenset(self._chance.sample(self._sublayers, size))

    def likely(self) -> Skip:
        """An untried set that resembles the good ones more than the others; a random one if none is found."""
        if len(self._tried) < _STARTUP:
            return self.random()
        order = sorted(dict.fromkeys(self._latest), key=self._tried.__getitem__, reverse=True)
        split = max(1, round(_GOOD * len(order)))
        good, others = self._chances(order[:split]), self._chances(order[split:])
        drawn = [skip for _ in range(_DRAWS) if (skip := self._draw(good)) not in self._tried]
        return max(drawn, key=lambda skip: self._evidence(skip, good, others), default=None) or self.random()

    def _chances(self, sets: Sequence[Skip]) -> dict[Sublayer, float]:
        """The smoothed probability of each sub-layer to be in such a set: one more set has it, one more lacks it."""
        counts = Counter(sublayer for skip in sets for sublayer in skip)
        return {sublayer: (counts[sublayer] + 1) / (len(sets) + 2) for sublayer in self._sublayers}

    def _draw(self, chances: dict[Sublayer, float]) -> Skip:
        if self._size is None:
            return frozenset(sublayer for sublayer, chance in chances.items() if self._chance.random() < chance)
        # Weighted draws without replacement: the largest u^(1/w), with odds as weights (Efraimidis and Spirakis 2006).
        keys = {each: math.log(self._chance.random()) * (1 - p) / p for each, p in chances.items()}
        return frozenset(sorted(keys, key=keys.__getitem__, reverse=True)[: self._size])

    def _evidence(self, skip: Skip, good: dict[Sublayer, float], others: dict[Sublayer, float]) -> float:
        return sum(
            math.log(good[each] / others[each] if each in skip else (1 - good[each]) / (1 - others[each]))
            for each in self._sublayers
        )


@dataclass(frozen=True, slots=True)
class Halt:
    """When a search ends: after ``probes`` sets, ``patience`` sets without a better one, or with a set this good."""

    probes: int
    patience: int
    enough: float = math.inf


class OnlineSearch:
    """Tries one set per call on the latest output of one sequence, and keeps the best one for all later sequences.

    The first set is ``start``; then every ``every``-th set is the estimator's, and the others are random. ``worth``
    values a set by its agreement. Values come from different texts, so the best set may have been lucky; but sets only
    affect speed, never the text. Requests that no store may learn from are not used.
    """

    def __init__(
        self,
        start: Skip,
        search: ParzenSearch,
        halt: Halt,
        *,
        every: int,
        window: int,
        worth: Callable[[float, Skip], float] = lambda agreed, _: agreed,
    ) -> None:
        self.best = start
        self.value = -math.inf
        self.probes = 0
        self._search, self._halt, self._worth = search, halt, worth
        self._every, self._window = every, window
        self._stale = 0

    @property
    def over(self) -> bool:
        halt = self._halt
        return self.probes >= halt.probes or self._stale >= halt.patience or self.value >= halt.enough

    def step(self, views: Sequence[SequenceView]) -> None:
        """Try one set, if the search is not over and an output is long enough."""
        if self.over:
            return
        view = next(
            (view for view in views if (view.request.store and len(view.tokens) - view.prompt_length >= self._window)),
            None,
        )
        if view is None:
            return
        skip = self._candidate()
        value = self._worth(agreement(view, self._window, skip), skip)
        self._search.learn(skip, value)
        self.probes += 1
        self._stale += 1
        if value > self.value:
            self.best, self.value, self._stale = skip, value, 0

    def _candidate(self) -> Skip:
        if self.probes == 0:
            return self.best
        return self._search.likely() if self.probes % self._every == 0 else self._search.random()


def agreement(view: SequenceView, window: int, skip: Skip) -> float:
    """The share of the last ``window`` output tokens that the request's sampler chooses again without ``skip``.

    It takes one forward. Each row sees the true tokens before it, the latest of them computed without ``skip``, too.
    """
    logits_RV = layers_of(view).forward([view], [()], DraftForm(skip), rows=window + 1)[:-1]
    start = len(view.tokens) - window
    past = FixedText(view.sequence, view.request, view.tokens[:start], view.prompt_length)
    truth = list(view.tokens[start:])
    chosen = ranked(logits_RV, [past] * window, [truth[:end] for end in range(window)], 1)
    return sum(tokens == (token,) for tokens, token in zip(chosen, truth, strict=True)) / window


def speedup(agreed: float, skip: Collection[Sublayer], layers: int, most: int = 8) -> float:
    """Expected speed relative to plain decoding, with the best chain length (Leviathan et al. 2023, eq. 3).

    ``most``: the longest chain. A row costs as much as the sub-layers that it passes. In Llama-like models, an MLP
    costs about twice an attention.
    """
    cost = 1 - sum(2 if half == "mlp" else 1 for half, _ in skip) / (3 * layers)
    return max(sum(agreed**i for i in range(length + 1)) / (length * cost + 1) for length in range(1, most + 1))
