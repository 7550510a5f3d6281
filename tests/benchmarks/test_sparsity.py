"""Benchmarks of sparsity: products of all layouts are right, and pieces and pages are made as said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.sparsity import accuracy, products
from parlay.models.gguf.importance import ReadText


@pytest.mark.skipif(not products.runs_here(), reason="the products need AVX-512 with bf16 and VBMI2")
def test_each_layout_gives_the_product_of_its_weights(tmp_path: Path) -> None:
    found = products.layouts(products.compiled(tmp_path), 8, 128, (0.5,))
    products.checked(found)
    assert [(each.name, each.kept) for each in found[:3]] == [("all weights", 1.0), ("bitmap", 0.5), ("2:4", 0.5)]
    assert np.abs(found[0].expected).min() > 0
    rows = products.page(found, products.speeds(found, rounds=1)).splitlines()
    assert rows[2].startswith("| all weights | 1.000 | 1.00 | 1.00 |")


def test_pieces_begin_as_the_text_does() -> None:
    ids = range(accuracy.CHUNK + 10)
    first, last = accuracy.pieces(ReadText([99, *ids], [99]))
    assert (first[:2], len(first)) == ([99, 0], accuracy.CHUNK + 1)
    assert (last[:2], len(last)) == ([99, accuracy.CHUNK], 11)


def test_variants_have_names() -> None:
    names = [variant.name for variant in (*accuracy.ZEROS, *accuracy.SMALLER)]
    assert names[:2] == ["zeros 0.25"] * 2
    assert names[-2:] == ["width 0.75", "layers 0.84"]
