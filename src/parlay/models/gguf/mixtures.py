"""Chooses the format of each tensor of a file by llama.cpp's mixtures, whose names end in _S, _M and _L.

Some matrices lose more than others when quantized: the LM head, attention's values, and the down projection of some
layers. A mixture gives them more bits. If a tensor's rows are not whole blocks of a format, it gets the one that
llama.cpp falls back to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parlay.models.weights.formats import Format

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
"""Norms and routers, which stay float32."""
_WIDE = 80
"""Number of layers at which llama.cpp assumes a model of 70 B weights, with eight query heads per value head."""


@dataclass(frozen=True, slots=True)
class FileType:
    """A mixture: its ``number`` in ``general.file_type``, and the ``usual`` format of matrices."""

    name: str
    number: int
    usual: Format


_TYPES = (
    FileType("F16", 1, Format.F16),
    FileType("BF16", 32, Format.BF16),
    FileType("Q8_0", 7, Format.Q8_0),
    FileType("Q6_K", 18, Format.Q6_K),
    FileType("Q5_K_M", 17, Format.Q5_K),
    FileType("Q5_K_S", 16, Format.Q5_K),
    FileType("Q5_1", 9, Format.Q5_1),
    FileType("Q5_0", 8, Format.Q5_0),
    FileType("Q4_K_M", 15, Format.Q4_K),
    FileType("Q4_K_S", 14, Format.Q4_K),
    FileType("Q4_1", 3, Format.Q4_1),
    FileType("Q4_0", 2, Format.Q4_0),
    FileType("IQ4_NL", 25, Format.IQ4_NL),
    FileType("IQ4_XS", 30, Format.IQ4_XS),
    FileType("Q3_K_L", 13, Format.Q3_K),
    FileType("Q3_K_M", 12, Format.Q3_K),
    FileType("Q3_K_S", 11, Format.Q3_K),
    FileType("Q2_K", 10, Format.Q2_K),
)
FILE_TYPES: Mapping[str, FileType] = {kind.name: kind for kind in _TYPES}
"""Mixtures by name, the most bits first."""
_FALLBACKS = {
    Format.IQ4_XS: Format.IQ4_NL,
    Format.Q2_K: Format.Q4_0,
    Format.Q3_K: Format.Q4_0,
    Format.Q4_K: Format.Q5_0,
    Format.Q5_K: Format.Q5_1,
    Format.Q6_K: Format.Q8_0,
}
_OF_ATTENTION = {"Q2_K": Format.Q3_K, "Q3_K_M": Format.Q4_K, "Q3_K_L": Format.Q5_K}
"""Formats of attention's output projection, where they differ from the usual one."""
_OF_FUSED = {"Q3_K_M": Format.Q4_K, "Q3_K_L": Format.Q4_K, "Q4_K_M": Format.Q5_K, "Q5_K_M": Format.Q6_K}
"""Formats of a fused query, key and value matrix, where they differ from the usual one."""
_OF_DOWN = {"Q2_K": Format.Q3_K, "Q3_K_L": Format.Q5_K}


@dataclass(frozen=True, slots=True)
class Mixed:
    """A mixture for one model; ``sharing`` is the number of query heads per key head, and ``weighed`` says whether
    importance is known."""

    kind: FileType
    layers: int
    sharing: int
    tied: bool
    weighed: bool

    def format_of(self, name: str, shape: tuple[int, ...]) -> Format:
        """The format of the tensor with the GGUF name ``name``; vectors and norms stay float32."""
        if len(shape) < 2 or not name.endswith(".weight") or name.endswith(_KEPT):
            return Format.F32
        usual = self.kind.usual
        if usual.block == 1:
            return usual
        return _that_fits(self._wanted(name, shape[-1]), shape[-1])

    def _wanted(self, name: str, columns: int) -> Format:
        usual = self.kind.usual
        if name == "output.weight" or (name == "token_embd.weight" and self.tied):
            return Format.Q8_0 if usual is Format.Q8_0 or columns % usual.block else Format.Q6_K
        match = _LAYER.fullmatch(name)
        if match is None:
            return usual
        layer, part = int(match[1]), match[2].removesuffix("_exps").removesuffix("_shexp")
        if part == "attn_output":
            return _OF_ATTENTION.get(self.kind.name, usual)
        if part == "attn_qkv":
            return _OF_FUSED.get(self.kind.name, usual)
        return {"attn_v": self._of_values, "ffn_down": self._of_down}.get(part, lambda _: usual)(layer)

    def _of_values(self, layer: int) -> Format:
        wanted = self._of_usual_values(layer)
        if self.layers == _WIDE and wanted in (Format.Q3_K, Format.Q4_K):
            return Format.Q5_K
        return wanted

    def _of_usual_values(self, layer: int) -> Format:
        kind, usual = self.kind.name, self.kind.usual
        if kind == "Q2_K":
            return Format.Q4_K if self.sharing >= 4 else Format.Q3_K
        if kind == "Q3_K_M":
            return Format.Q5_K if layer < 2 else Format.Q4_K
        if kind == "Q3_K_L" or (kind in ("IQ4_NL", "IQ4_XS") and self.sharing >= 4):
            return Format.Q5_K
        if kind in ("Q4_K_M", "Q5_K_M") and self._gets_more(layer):
            return Format.Q6_K
        return Format.Q5_K if kind == "Q4_K_S" and layer < 4 else usual

    def _of_down(self, layer: int) -> Format:
        kind, usual = self.kind.name, self.kind.usual
        if kind in ("Q4_K_M", "Q5_K_M"):
            return Format.Q6_K if self._gets_more(layer) else usual
        if kind == "Q3_K_M":
            return Format.Q5_K if layer < self.layers // 16 else Format.Q4_K
        if kind in _OF_DOWN:
            return _OF_DOWN[kind]
        if layer >= self.layers // 8:
            return usual
        if kind == "Q4_K_S" or (kind in ("IQ4_NL", "IQ4_XS") and not self.weighed):
            return Format.Q5_K
        return {Format.Q4_0: Format.Q4_1, Format.Q5_0: Format.Q5_1}.get(usual, usual) if self.weighed else usual

    def _gets_more(self, layer: int) -> bool:
        """Whether the layer gets more bits: those in the first and last eighth, and every third one between."""
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2


def _that_fits(format: Format, columns: int) -> Format:
    if columns % format.block == 0:
        return format
    fallback = _FALLBACKS.get(format, format)
    return Format.F16 if columns % fallback.block else fallback
