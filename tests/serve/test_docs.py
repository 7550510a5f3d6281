"""The examples of docs/server.md and the README's run as they stand, against a live server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"<!-- run -->\n```(\w+)\n(.*?)```", DOCUMENT, re.DOTALL)
SHELL = [code for language, code in EXAMPLES if language == "sh"]
FIRST_CALL = README.partition("<!-- snippet: server -->")[2].partition("```")[2].partition("```")[0].partition("curl ")
CLIENT, *PYTHON = [code for language, code in EXAMPLES if language == "python"]
Serve = Callable[[FastAPI], AbstractContextManager[str]]
PORT = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(make_app: Callable[..., FastAPI], serve: Serve) -> Iterator[str]:
    """The URL of a server with the built-in model."""
    with serve(make_app()) as url:
        yield url


def name(code: str) -> str:
    """What tells an example from the others."""
    return re.sub(r"\W+", "-", code.strip().split("\n")[0])[-40:].strip("-")


def test_every_example_is_run() -> None:
    assert {language for language, _ in EXAMPLES} == {"sh", "python"}
    assert DOCUMENT.count("<!-- run -->") == len(EXAMPLES) == DOCUMENT.count("\n```python\n") + len(SHELL)
    assert all(PORT in code for code in [*SHELL, CLIENT])


@pytest.mark.parametrize("code", [CLIENT, *PYTHON], ids=name)
def test_python_examples_are_python(code: str) -> None:
    compile(code, "server.md", "exec")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize("code", [*SHELL, "".join(FIRST_CALL[1:]).replace("Qwen/Qwen3-0.6B", "parlay-mini")], ids=name)
def test_commands_run(server: str, code: str, tmp_path: Path) -> None:
    (tmp_path / ".curlrc").write_text("fail-with-body\n")
    script = f"set -e\n{code.replace(PORT, server)}"
    environment = {**os.environ, "CURL_HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    end = done.stdout.strip()[-1000:]
    assert done.returncode == 0, end + done.stderr
    assert end
    assert '"error"' not in end


@pytest.mark.parametrize("code", PYTHON, ids=name)
def test_python_examples_run(server: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(CLIENT.replace(PORT, server), "server.md", "exec"), names)
    assert capsys.readouterr().out.strip()
    exec(compile(code.replace(PORT, server), "server.md", "exec"), names)
    assert capsys.readouterr().out.strip()


def test_every_path_and_field_is_told_of(server: str) -> None:
    """By the document that the server gives of itself."""
    api = json.loads(fetch(f"{server}/openapi.json"))
    missing = [path for path in api["paths"] if f"{path}`" not in DOCUMENT]
    for body in ("ChatBody", "CompletionBody", "ResponsesBody"):
        missing += [field for field in api["components"]["schemas"][body]["properties"] if f"`{field}`" not in DOCUMENT]
    assert not missing


def test_every_metric_is_told_of(server: str) -> None:
    families = set(re.findall(r"^# TYPE (parlay_\w+?)(?:_total|_created)? ", fetch(f"{server}/metrics"), re.MULTILINE))
    assert families == set(re.findall(r"`(parlay_\w+)`", DOCUMENT.partition("\n## Metrics\n")[2]))


def fetch(url: str) -> str:
    return httpx.get(url).raise_for_status().text
