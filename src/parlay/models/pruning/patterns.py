"""Patterns of zeros in a matrix: a share of each row, or all but N of each M neighbours."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.types import FieldError, ParlayError

_NEIGHBOURS = re.compile(r"(\d{1,3}):(\d{1,3})")
_EXAMPLES = "give a share of zeros such as 0.5, or N:M such as 2:4, where N of M neighbours stay"


@dataclass(frozen=True, slots=True)
class Pattern:
    """``zeros`` is the share of weights that become zero; with ``group`` above 0 it applies to each group of that many
    neighbours."""

    text: str
    zeros: float
    group: int = 0

    @staticmethod
    def read(text: str) -> Pattern:
        """Parse a share or N:M. Raises UsageError for any other text."""
        if found := _NEIGHBOURS.fullmatch(text):
            kept, group = int(found[1]), int(found[2])
            if not 0 < kept < group:
                raise FieldError("pattern", f"{text}: N:M needs 0 < N < M; {_EXAMPLES}")
            return Pattern(text, 1 - kept / group, group)
        try:
            share = float(text)
        except ValueError:
            raise FieldError("pattern", f"{text:.40}: {_EXAMPLES}") from None
        if not 0 < share < 1:
            raise FieldError("pattern", f"{text:.40}: {_EXAMPLES}; a share lies between 0 and 1")
        return Pattern(text, share)

    def check(self, name: str, inputs: int) -> None:
        """Raises ParlayError for a matrix whose rows are not whole groups."""
        if self.group and inputs % self.group:
            raise ParlayError(
                f"pattern {self.text}: the rows of {name} have {inputs} inputs, which {self.group} does not divide; "
                "give a share such as 0.5",
                "pattern",
            )

    def applied(self, weight_OI: Tensor, scores_OI: Tensor) -> Tensor:
        """``weight_OI`` with zeros where the scores of its row, or of its group, are lowest."""
        outputs, inputs = weight_OI.shape
        group = self.group or inputs
        grouped = scores_OI.reshape(outputs, inputs // group, group)
        lowest = grouped.argsort(dim=-1, stable=True)[..., : round(self.zeros * group)]
        kept = torch.ones(grouped.shape, dtype=torch.bool).scatter_(-1, lowest, False)
        return weight_OI * kept.view(outputs, inputs)
