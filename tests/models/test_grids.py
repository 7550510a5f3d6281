"""Blocks that point into tables: damaged ones are found, and where the tables are not there a line says so."""

from __future__ import annotations

import pytest
import torch

from parlay.models.weights.dequantize import dense
from parlay.models.weights.formats import INDEXED, DamagedWeights, Format
from parlay.models.weights.stored import StoredTensor, is_finite
from parlay.types import ParlayError
from tests.models.test_formats import stored


@pytest.mark.parametrize("format", sorted(INDEXED, key=lambda format: format.name), ids=str)
def test_a_scale_that_is_no_number_is_damage(format: Format) -> None:
    weight = stored(format, (4, 768))
    assert is_finite(weight)
    weight.data[1, : format.block_bytes] = 0xFF
    assert not is_finite(weight)
    with pytest.raises(DamagedWeights), weight.reading():
        pass


def test_without_the_tables_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from parlay.models.weights import grids

    grids._table.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ParlayError, match="IQ3_S blocks are read with tables of the package gguf: pip install"):
        dense(StoredTensor(Format.IQ3_S, (1, 256), torch.zeros(1, 110, dtype=torch.uint8)))
