"""CS Drafting (Chen et al. 2023): vertical and horizontal cascades, laid out by one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parlay.drafters.combined import members
from parlay.drafters.combined.cascade import level_above
from parlay.drafters.combined.horizontal import Horizontal
from parlay.drafters.combined.members import Member
from parlay.drafters.options import CS_DRAFTING as SOURCE
from parlay.drafters.options import CsDraftingOptions
from parlay.drafters.resources import Resources
from parlay.options import UsageError

Matrix = Sequence[Sequence[int]]
MOST = 1024
"""The most tokens that one drafter may write."""


def cs_drafting(resources: Resources, options: CsDraftingOptions) -> Member:
    """Cascade speculative drafting (Chen et al. 2023, arXiv:2312.11462).

    ``drafters`` go from the most expensive to the cheapest. Row 0 of ``matrix`` says how many tokens each one writes
    for the target (horizontal cascade). Row i says how many tokens the drafters from i on write for drafter i - 1,
    which verifies them (vertical cascade). As in the paper, a drafter that verifies stops after the forward that brings
    it to its number, and keeps what that forward verified beyond it. The paper's example is ``5/14/10+0/1/10+0/0/10``.
    The paper's lenience between drafters is not needed here, because all levels share the request's noise.
    """
    steps = layout(_read(options.matrix, len(options.drafters)))
    return _horizontal(steps, resources)


@dataclass(frozen=True, slots=True)
class Step:
    """One drafter of a row, which drafts at most ``k`` tokens. If there are drafters ``below``, it verifies what they
    write and stops once it has ``enough`` tokens.
    """

    drafter: int
    k: int
    enough: int = 0
    below: tuple[Step, ...] = ()


def layout(matrix: Matrix, row: int = 0) -> tuple[Step, ...]:
    """The drafters of one row of the matrix, in order, each with the drafters that write for it."""
    return tuple(
        _step(matrix, column, matrix[row][column]) for column in range(row, len(matrix)) if matrix[row][column]
    )


def _step(matrix: Matrix, column: int, count: int) -> Step:
    """Make a step.

    Its ``k`` is ``count`` plus what the drafters below may propose: the last forward may verify all of that.
    """
    ahead = sum(matrix[column + 1][column + 1 :]) if column + 1 < len(matrix) else 0
    if count + ahead > MOST:
        raise UsageError(f"strategy {SOURCE}: drafter {column + 1} would write {count + ahead} tokens; at most {MOST}")
    return Step(column, count + ahead, count, layout(matrix, column + 1)) if ahead else Step(column, count)


def _horizontal(steps: Sequence[Step], resources: Resources) -> Member:
    levels = [_member(step, resources) for step in steps]
    return levels[0] if len(levels) == 1 else Member(Horizontal(levels), sum(step.k for step in steps))


def _member(step: Step, resources: Resources) -> Member:
    """Build a drafter for one place in the matrix. The same strategy has a drafter for each of its places."""
    nested = replace(resources.nested[step.drafter], k=step.k)
    if not step.below:
        return members.build(SOURCE, nested)
    return level_above(_horizontal(step.below, resources), nested, resources, nested.name, step.enough)


def _read(matrix: Sequence[str], size: int) -> Matrix:
    """Parse the matrix. Raises UsageError if it is not upper triangular with one row per drafter."""
    text = f"strategy {SOURCE}: matrix={'+'.join(matrix)}"
    try:
        rows = [[int(number) for number in row.split("/")] for row in matrix]
    except ValueError:
        raise UsageError(f"{text}: write rows of whole numbers, such as 5/10+0/10") from None
    if not size or len(rows) != size or any(len(row) != size for row in rows):
        raise UsageError(f"{text} must have {size} rows of {size} numbers, one for each drafter")
    if any(number < 0 for row in rows for number in row) or any(any(row[:place]) for place, row in enumerate(rows)):
        raise UsageError(f"{text} must have numbers of at least 0, and only 0 left of the diagonal")
    if not any(rows[0]):
        raise UsageError(f"{text} must have a number above 0 in its first row, or nothing is drafted")
    return rows
