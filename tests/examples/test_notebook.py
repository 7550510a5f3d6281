"""The notebook's cells run one after the other, on the built-in model in place of SmolLM2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def test_every_cell_runs(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        code = "".join(cell["source"]).replace("smollm2-135m", "parlay-mini")
        exec(compile(code, f"cell {number}", "exec"), names)
        assert capsys.readouterr().out.strip() or number == 0
    names["llm"].close()  # type: ignore[attr-defined]
