"""The formats of stored weights: ggml's, and two of our own. This module imports neither torch nor numpy."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from parlay.types import ParlayError

if TYPE_CHECKING:
    import torch


class Format(Enum):
    """A storage format: ``(number in ggml and GGUF files, weights per block, bytes per block)``."""

    F32 = (0, 1, 4)
    F16 = (1, 1, 2)
    Q4_0 = (2, 32, 18)
    Q4_1 = (3, 32, 20)
    Q5_0 = (6, 32, 22)
    Q5_1 = (7, 32, 24)
    Q8_0 = (8, 32, 34)
    Q2_K = (10, 256, 84)
    Q3_K = (11, 256, 110)
    Q4_K = (12, 256, 144)
    Q5_K = (13, 256, 176)
    Q6_K = (14, 256, 210)
    IQ1_S = (19, 256, 50)
    IQ1_M = (29, 256, 56)
    IQ2_XXS = (16, 256, 66)
    IQ2_XS = (17, 256, 74)
    IQ2_S = (22, 256, 82)
    IQ3_XXS = (18, 256, 98)
    IQ3_S = (21, 256, 110)
    IQ4_NL = (20, 32, 18)
    IQ4_XS = (23, 256, 136)
    BF16 = (30, 1, 2)
    MXFP4 = (39, 32, 17)
    Q4_Z = (63, 32, 20)
    Q4_Z128 = (62, 128, 68)
    """Our own, in no file: a float16 scale, an int8 zero, an unused byte, then codes of 32 or 128 weights."""

    def __init__(self, number: int, block: int, block_bytes: int) -> None:
        self.number, self.block, self.block_bytes = number, block, block_bytes

    @property
    def plain(self) -> torch.dtype | None:
        """The torch dtype of a format of plain numbers, else None."""
        import torch  # here, as files are read before torch is imported, which takes a second

        return {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(self.name)

    @property
    def bits(self) -> float:
        """Bits per weight, including its share of the scales."""
        return 8 * self.block_bytes / self.block

    def row_bytes(self, length: int) -> int:
        """Bytes of a row of ``length`` weights. Raises ValueError unless the row consists of whole blocks."""
        if length % self.block:
            raise ValueError(f"a row of {length} weights is not a whole number of {self.name} blocks of {self.block}")
        return length // self.block * self.block_bytes


FORMATS = {format.number: format for format in Format if format not in (Format.Q4_Z, Format.Q4_Z128)}
"""Formats by their number in GGUF files."""
INDEXED = frozenset(format for format in Format if format.name.startswith(("IQ1", "IQ2", "IQ3")))
"""Formats with indices into tables; kernels read them in another form (`parlay.models.weights.grids`)."""


class DamagedWeights(ParlayError):
    """Raised for weights that are infinite or NaN; ``origin`` names the tensor."""

    def __init__(self, origin: str) -> None:
        super().__init__(f"{origin} holds numbers that are not finite: the file is damaged")
