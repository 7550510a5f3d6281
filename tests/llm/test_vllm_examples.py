"""Programs written for vLLM run here, and keep what they assert, with only their imports changed."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from parlay import LLM

EXAMPLES = sorted((Path(__file__).parent / "vllm_examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_program_for_vllm_runs_with_its_imports_changed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = path.read_text(encoding="utf-8")
    changed, imports = re.subn(r"^from vllm[\w.]* import", "from parlay import", code, flags=re.MULTILINE)
    assert imports
    assert "vllm" not in re.sub(r'generation_config="vllm"|vLLM', "", changed)
    names: dict[str, object] = {"__name__": path.stem}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exec(compile(changed, str(path), "exec"), names)
    for value in names.values():
        if isinstance(value, LLM):
            value.close()
    capsys.readouterr()
