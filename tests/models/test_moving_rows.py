"""The library moves a row within its pages to the bits that torch's operators would write, and touches no other."""

from __future__ import annotations

import pytest
import torch

from parlay.cache.pages import BLOCK, CacheShape, PageTable, Pool
from parlay.compiled.library import NotLoaded, load
from parlay.models.compiled.memory import row_mover

try:
    CORE = load()
except NotLoaded as reason:
    pytest.skip(f"no compiled decoder: {reason}", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(("source", "to"), [(3, 1), (BLOCK + 2, 5), (2 * BLOCK - 1, BLOCK), (4, 2 * BLOCK + 9)])
def test_a_row_moves_as_torch_moves_it(dtype: torch.dtype, source: int, to: int) -> None:
    shape = CacheShape(
        num_layers=3, num_kv_heads=2, head_dim=64, dtype=dtype, device=torch.device("cpu"), lanes=CORE.panel // 2
    )
    pool, table = Pool(shape), PageTable()
    torch.manual_seed(1)
    for number in range(3):
        table.append(pool.take(number))
        table[number].rows.copy_(torch.randint(0, 100, table[number].rows.shape).to(dtype))
    before = [page.rows.clone() for page in table]
    table.move(source, to)
    expected = [page.rows.clone() for page in table]
    for page, rows in zip(table, before, strict=True):
        page.rows.copy_(rows)
    row_mover(CORE, dtype)(table, source, to)
    assert not all(torch.equal(page.rows, rows) for page, rows in zip(table, before, strict=True))
    assert all(torch.equal(page.rows, rows) for page, rows in zip(table, expected, strict=True))
