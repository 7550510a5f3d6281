"""Inputs that rows of a forward read in place of tokens, and trained states that they see or begin from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Prefix:
    """Keys and values ``[L, 2, K, P, D]`` of P rows that have no position: of each layer, keys first, for its K heads.

    Runners keep what they make of it for as long as it lives, so a drafter has one.
    """

    states: Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Join:
    """Rows that begin at the input of ``layer``, from the state x there of their anchor, as x + down(x) up.

    Both matrices are float32 and contiguous. The anchor is the last of their ancestors that runs from the first layer
    on.
    """

    layer: int
    down_RH: Tensor
    up_RH: Tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Inputs ``[K, H]`` of the last K rows that a segment runs.

    The model reads them in place of the embeddings of these rows' tokens or, with ``added``, adds them to these. With a
    ``prefix`` the rows see that, too, and no other row does. With a ``join`` they are added to what the rows begin
    with; layers before that do not run them, and taps of such layers hold nothing for them. No row descends from one
    that has a prefix or joins, unless it has, too.
    """

    rows_KH: Tensor
    added: bool = False
    prefix: Prefix | None = None
    join: Join | None = None

    def __len__(self) -> int:
        return len(self.rows_KH)

    def of(self, rows: Sequence[int]) -> Features:
        """Pick some rows, numbered from the first of these."""
        return replace(self, rows_KH=self.rows_KH[list(rows)])
