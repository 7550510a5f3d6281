"""The simulator's validation: its page, from a small run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulation import __main__ as command
from benchmarks.simulation import cases


def test_a_run_writes_rows_and_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SERVERS", cases.SERVERS[:1])
    monkeypatch.setattr(cases, "LOADS", (1.3,))
    monkeypatch.setattr(command, "DAY", 600.0)
    out = tmp_path / "rows.jsonl"
    command.main(["--quick", "--only", "virtual", "fleet", "--out", str(out), "--threads", "1"])
    page = out.with_suffix(".md").read_text()
    assert "| small model on a processor | 1.3 | " in page
    assert "| autoscaling | " in page
    command.main(["--quick", "--only", "virtual", "--out", str(out), "--threads", "1"])
    assert len(out.read_text().splitlines()) == 1 + 1 + 3
