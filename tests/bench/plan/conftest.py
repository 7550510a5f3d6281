"""A model's folder without weights, and forwards that a calibration measures within a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from parlay.cost.roofline import ForwardShape, ModelShape
from parlay.testing.checkpoints import save_random

TINY = ModelShape(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    weight_bytes=4,
    kv_bytes=4,
    tie_embeddings=True,
)
WORKS = tuple(
    ForwardShape(batch=batch, rows=rows, context=context) for context in (16, 32) for batch in (1, 2) for rows in (1, 4)
)


@pytest.fixture
def without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the timing of exchanges between processes, which starts a process. Another test covers it."""
    monkeypatch.setattr("parlay.bench.plan.machine.measure_links", dict)


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """config.json of a tiny Llama, and nothing else."""
    folder = tmp_path / "model"
    save_random("llama", folder)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    return folder
