"""The mathematics of certificates: exact binomial bounds, tests in a fixed order, and a sequential test.

All functions are pure. They assume that the ``n`` answers are independent, and that each is good with the same unknown
probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from parlay.types import Tokenizer

_BISECTIONS = 60
"""Bisection steps of `lower_bound`: enough for the full precision of a float."""
_BETS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""Stakes of the sequential test, as shares of the largest possible stake 1 / (1 - floor), which one good answer loses
whole. The evidence is the mean of the wealth over these stakes."""


def at_least(good: int, n: int, chance: float) -> float:
    """Return P(X >= ``good``) for X ~ Binomial(``n``, ``chance``).

    This is the p-value of ``good`` successes under the hypothesis that an answer is good with at most this chance.
    """
    if good <= 0 or chance >= 1:
        return 1.0
    if good > n or chance <= 0:
        return 0.0
    steps = np.log(np.arange(n, 0, -1)) - np.log(np.arange(1, n + 1))
    logs = np.concatenate(([0.0], np.cumsum(steps)))[good:]
    counts = np.arange(good, n + 1)
    return min(1.0, float(np.exp(logs + counts * math.log(chance) + (n - counts) * math.log1p(-chance)).sum()))


def lower_bound(good: int, n: int, confidence: float) -> float:
    """Return the one-sided Clopper-Pearson lower bound (Clopper & Pearson 1934) of the chance of a good answer.

    It is above the true chance in at most a share 1 - ``confidence`` of calibrations, whatever that chance is.
    """
    low, high = 0.0, good / n if n else 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if at_least(good, n, middle) <= 1 - confidence else (low, middle)
    return low


def fixed_sequence(p_values: Sequence[float], confidence: float) -> int:
    """Return how many hypotheses are rejected before the first one that can't be rejected.

    The order of the hypotheses must be fixed before the data are seen. This is Learn then Test with a fixed sequence
    (Angelopoulos et al. 2021, arXiv:2110.01052, section 2.2): each hypothesis is tested at the full level, and the
    chance of any wrong rejection is at most 1 - ``confidence``.
    """
    rejected = [p <= 1 - confidence for p in p_values]
    return [*rejected, False].index(False)


def log_evidence(bad: int, n: int, floor: float) -> float:
    """Return the log of the evidence that fewer than a share ``floor`` of answers are good.

    The evidence comes from ``n`` answers, ``bad`` of them bad.

    A gambler who bets a share b of the wealth on "bad" each time, at odds that are fair if exactly ``floor`` are good,
    turns 1 into W = (1 + b (1 - a))^bad (1 - b a)^(n - bad), with a = 1 - ``floor``. As long as the floor holds, W is a
    supermartingale, so the chance that it ever reaches 1 / d is at most d (Ville 1939; Waudby-Smith & Ramdas 2020,
    arXiv:2010.09686). So the test may be made after every answer. The evidence is the mean of W over a few stakes b.
    """
    bad_share = 1 - floor
    if bad_share <= 0:
        return math.inf if bad else 0.0
    stakes = [share / bad_share for share in _BETS]
    logs = [bad * math.log1p(b * (1 - bad_share)) + (n - bad) * math.log1p(-b * bad_share) for b in stakes]
    return float(np.logaddexp.reduce(logs)) - math.log(len(logs))


def contradicts(bad: int, n: int, floor: float, confidence: float) -> bool:
    """Tell whether the answers so far refute the floor.

    If the floor holds, the chance that it is ever refuted is at most 1 - ``confidence``, however often this is called
    as answers come in.
    """
    return log_evidence(bad, n, floor) >= -math.log(1 - confidence)


SCORE = "agreement"
"""Name of the score in certificates."""


def agreement(answer: Sequence[int], exact: Sequence[int]) -> float:
    """Return 1 for equal answers; else 1 minus the edits that turn one into the other, per token of the longer one.

    An edit inserts, deletes or replaces a token (Levenshtein 1966).
    """
    if tuple(answer) == tuple(exact):
        return 1.0
    return 1 - _edits(answer, np.array(exact, dtype=np.int64)) / max(len(answer), len(exact))


def text_agreement(tokenizer: Tokenizer, answer: str, exact: str) -> float:
    """Return the `agreement` of two texts in the tokens of one tokenizer."""
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (answer, exact))
    return agreement(first, second)


def _edits(first: Sequence[int], second: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return the edit distance of two token sequences, computed row by row (Wagner & Fischer 1974).

    A step to the right within a row costs one, so a row's final costs are the running minimum of cost minus column,
    plus the column.
    """
    columns = np.arange(len(second) + 1)
    costs = columns.copy()
    for token in first:
        above = costs + 1
        above[1:] = np.minimum(above[1:], costs[:-1] + (second != token))
        costs = np.minimum.accumulate(above - columns) + columns
    return int(costs[-1])
