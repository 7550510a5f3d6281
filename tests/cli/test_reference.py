"""The site's reference of the command line is made from the parsers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from parlay.cli.commands import COMMANDS

SCRIPT = Path(__file__).parents[2] / "docs" / "site" / "cli_reference.py"


def test_the_reference_has_a_section_for_every_command_with_its_flags() -> None:
    spec = importlib.util.spec_from_file_location("cli_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.reference()
    assert all(f"\n## parlay {name}\n" in f"\n{text}" for name in COMMANDS)
    assert "| `--matrix-rate" in text.partition("### parlay train eagle3")[2].partition("###")[0]
    assert "| `--max-loaded N` |" in text.partition("## parlay serve")[2]
