"""The score of certificates: how far a lossy answer agrees with the exact one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parlay.types import Tokenizer

SCORE = "agreement"
"""Its name in certificates."""


def agreement(answer: Sequence[int], exact: Sequence[int]) -> float:
    """1 for equal answers; else 1 less the edits that turn one into the other, over the tokens of the longer one.

    An edit inserts, deletes or replaces a token (Levenshtein 1966).
    """
    if tuple(answer) == tuple(exact):
        return 1.0
    return 1 - _edits(answer, np.array(exact, dtype=np.int64)) / max(len(answer), len(exact))


def text_agreement(tokenizer: Tokenizer, answer: str, exact: str) -> float:
    """The `agreement` of two texts in the tokens of one tokenizer."""
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (answer, exact))
    return agreement(first, second)


def _edits(first: Sequence[int], second: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """By rows of the usual table. In a row, going right costs one each: a running minimum of cost less column."""
    columns = np.arange(len(second) + 1)
    costs = columns.copy()
    for token in first:
        above = costs + 1
        above[1:] = np.minimum(above[1:], costs[:-1] + (second != token))
        costs = np.minimum.accumulate(above - columns) + columns
    return int(costs[-1])
