"""CS Drafting (Chen et al. 2023): vertical and horizontal cascades, laid out by one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parlay.drafters import catalogue
from parlay.drafters.combined import cascade, horizontal, members
from parlay.drafters.entries import Resources, StrategySpec, UsageError
from parlay.types import Drafter

NAME = "cs-drafting"

Matrix = Sequence[Sequence[int]]


def cs_drafting(resources: Resources, *, drafters: tuple[str, ...], matrix: tuple[str, ...]) -> Drafter:
    """Cascade speculative drafting (Chen et al. 2023, arXiv:2312.11462).

    ``drafters`` go from the dearest to the cheapest. Row 0 of ``matrix`` says how many tokens each writes for the
    target (horizontal cascade), row i how many those from i on write for drafter i - 1, which verifies them (vertical
    cascade). As there, a drafter that verifies stops after the forward with which it has its number, and what that
    forward verified beyond it is not wasted; the last drafter writes at most its own. The paper's example is
    ``5/14/10+0/1/10+0/0/10``. Its lenience between drafters has no counterpart: levels share the request's noise.
    """
    counts = _read(matrix, len(drafters))
    return members.build(NAME, _layout([catalogue.parse(text) for text in drafters], counts, 0), resources)


def _layout(specs: Sequence[StrategySpec], matrix: Matrix, row: int) -> StrategySpec:
    """What drafts by one row of the matrix, from the column of the row's number on."""
    columns = [column for column in range(row, len(specs)) if matrix[row][column]]
    levels = [_drafter(specs, matrix, column, matrix[row][column]).nested for column in columns]
    return catalogue.parse(levels[0] if len(levels) == 1 else f"{horizontal.NAME}(levels={'+'.join(levels)})")


def _drafter(specs: Sequence[StrategySpec], matrix: Matrix, column: int, count: int) -> StrategySpec:
    """One drafter that writes ``count`` tokens, with the cascade that writes for it."""
    ahead = sum(matrix[column + 1][column + 1 :]) if column + 1 < len(specs) else 0
    most = count + ahead  # the last forward may verify all that lies ahead of it
    alone = replace(specs[column], parameters=tuple(sorted({**dict(specs[column].parameters), "k": most}.items())))
    if not ahead:
        return alone
    inner = _layout(specs, matrix, column + 1)
    return catalogue.parse(f"{cascade.NAME}(enough={count},k={most},levels={inner.nested}+{alone.nested})")


def _read(matrix: Sequence[str], size: int) -> Matrix:
    """The numbers; UsageError where they are no square matrix of the drafters, or lie where none can be drafted."""
    text = f"strategy {NAME}: matrix={'+'.join(matrix)}"
    try:
        rows = [[int(number) for number in row.split("/")] for row in matrix]
    except ValueError:
        raise UsageError(f"{text}: expected rows of whole numbers, such as 5/10+0/10") from None
    if not size or len(rows) != size or any(len(row) != size for row in rows):
        raise UsageError(f"{text}: expected {size} rows of {size} numbers, one for each of the drafters")
    if any(number < 0 for row in rows for number in row) or any(any(row[:place]) for place, row in enumerate(rows)):
        raise UsageError(f"{text}: no number may be negative, and none left of the diagonal other than 0")
    if not any(rows[0]):
        raise UsageError(f"{text}: the first row lets nobody draft")
    return rows
