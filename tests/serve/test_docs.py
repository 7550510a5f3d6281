"""The examples of the documents and of the README run as they stand, against a live server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
import yaml
from fastapi import FastAPI

ROOT = Path(__file__).parents[2]
RUN = re.compile(r"^( *)<!-- run -->\n\1```(\w+)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")}
EXAMPLES = [
    (page, language, textwrap.dedent(code)) for page, text in PAGES.items() for _, language, code in RUN.findall(text)
]
SHELL = [code for _, language, code in EXAMPLES if language == "sh"]
CLIENT = next(code for page, _, code in EXAMPLES if page == "docs/tutorials/serve.md" and "client = OpenAI(" in code)
PYTHON = [code for _, language, code in EXAMPLES if language == "python" and code != CLIENT]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_CALL = README.partition("<!-- snippet: server -->")[2].partition("```")[2].partition("```")[0].partition("curl ")
MEANINGS = yaml.safe_load((ROOT / "docs" / "site" / "reference" / "meanings.yml").read_text(encoding="utf-8"))
BODIES = {"ChatBody": "chat", "CompletionBody": "completions", "ResponsesBody": "responses", "MessagesBody": "messages"}
Serve = Callable[[FastAPI], AbstractContextManager[str]]
PORT = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(make_app: Callable[..., FastAPI], serve: Serve) -> Iterator[str]:
    """The URL of a server with the built-in model."""
    with serve(make_app()) as url:
        yield url


def name(code: str) -> str:
    """Name that tells an example from the others."""
    return re.sub(r"\W+", "-", code.strip().split("\n")[0])[-40:].strip("-")


def test_every_example_is_run() -> None:
    assert sum(text.count("<!-- run -->") for text in PAGES.values()) == len(EXAMPLES)
    assert {language for _, language, _ in EXAMPLES} == {"sh", "python"}
    assert all(PORT in code for code in [*SHELL, CLIENT])


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
    exec(compile(CLIENT.replace(PORT, server), "tutorials/serve.md", "exec"), names)
    assert capsys.readouterr().out.strip()
    exec(compile(code.replace(PORT, server), "an example", "exec"), names)
    assert capsys.readouterr().out.strip()


def test_the_reference_has_a_meaning_for_every_address_and_field(server: str) -> None:
    """The site takes them from the application, and their meanings from docs/site/reference/meanings.yml."""
    api = json.loads(httpx.get(f"{server}/openapi.json").raise_for_status().text)
    addresses = {f"{method.upper()} {path}" for path, methods in api["paths"].items() for method in methods}
    assert not addresses - set(MEANINGS["endpoints"])
    fields = {
        (group, field)
        for body, group in BODIES.items()
        for field in api["components"]["schemas"][body]["properties"]
        if field not in MEANINGS["common"]
    }
    assert not {each for each in fields if each[1] not in MEANINGS[each[0]]}
