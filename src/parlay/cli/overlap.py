"""How much of an output goes on with earlier text, token by token: where it does, copying drafters have their hour.

It is told, and chooses nothing: scores of copies know how long a match is, and say nearly as much (see the lab notes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_MATCH = 2  # tokens that must stand there before the one that goes on


def going_on(output: Sequence[int], prompt: Sequence[int], references: Sequence[Sequence[int]] = ()) -> list[bool]:
    """For each token of the output whether it, and the two before it, followed each other somewhere earlier.

    That is in a reference, in the prompt, or in the output so far.
    """
    seen = {run for text in (*references, prompt) for run in _runs(text)}
    told: list[bool] = []
    for run in _runs([*prompt[-_MATCH:], *output]):
        told.append(run in seen)
        seen.add(run)
    return [False] * (len(output) - len(told)) + told  # the first tokens behind a prompt of less than two


def _runs(text: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Each token but the first two, behind these."""
    return zip(*(text[start:] for start in range(_MATCH + 1)), strict=False)
