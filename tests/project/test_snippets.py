"""The documents keep their word: Python runs as it stands, and the real parser takes every command line and flag."""

from __future__ import annotations

import argparse
import ast
import asyncio
import re
import shlex
import textwrap
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from parlay import LLM
from parlay.cli import Command
from parlay.cli.commands import COMMANDS
from parlay.cli.parser import Parser
from parlay.models.fetch.resolving import resolve

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_drafter" / "src" / "parlay_follower" / "__init__.py"
RULES = ROOT / "examples" / "rules" / "my_rules.py"
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/**/*.md"))}
TEXTS = {
    **PAGES,
    **{name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")},
    "example": (EXAMPLE.parents[2] / "README.md").read_text(encoding="utf-8"),
}
OF_OTHERS = {
    *(f"docs/how-to/{name}.md" for name in ("from-vllm", "from-llama-cpp", "from-transformers", "vllm")),
    *(f"docs/developers/{name}.md" for name in ("releases", "architecture", "log", "contributing")),
}
"""Pages that name flags of other programs too."""
PROSE_FLAGS = {"--add-host"}
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
"""In a tab, a block of code is indented."""
LIVE = re.compile(r"^( *)<!-- run -->\n\1```\w+\n.*?^\1```", re.DOTALL | re.MULTILINE)
"""What tests/serve/test_docs.py runs against a server."""
LINE = re.compile(r"^(?: {4,}|\$ )?(?:\.venv/bin/)?(parlay (?:[^\\\n]|\\\n)+)$", re.MULTILINE)
INLINE = re.compile(rf"`parlay ({'|'.join(COMMANDS)})( [^`]*)?`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w*-])")
MODELS = ("smollm2-135m", "Qwen/Qwen3-0.6B", "model.gguf")
"""What the documents name where the tests take the built-in model."""


def pythons(page: str) -> list[str]:
    """A page's Python, in order."""
    found = FENCE.findall(LIVE.sub("", TEXTS[page]))
    return [textwrap.dedent(code) for _, language, code in found if language == "python"]


def commands() -> Iterator[tuple[str, str]]:
    """Page and command line of whatever begins with `parlay` on a line of its own."""
    for page, text in TEXTS.items():
        for line in dict.fromkeys(LINE.findall(text)):
            if "..." not in line:
                yield page, line.replace("\\\n", " ")


def parser_of(command: str) -> Parser:
    module: Command = import_module(f"parlay.cli.{command}")
    parser = Parser(f"parlay {command}", "")
    module.add_arguments(parser)
    return parser


def arguments_of(line: str) -> list[str]:
    """A command's words as a shell gives them, without comments, redirections and what stands in for a number."""
    line = re.sub(r"\$\([^)]*\)", "", line).replace(" follower:", " parlay_follower:Follower:")
    words = shlex.split(line, comments=True)[1:]
    end = next((place for place, word in enumerate(words) if word in (">", "|", "&&", "<")), len(words))
    return [re.sub(r"^N$|^X$", "1", word) for word in words[:end]]


@pytest.mark.parametrize(("page", "line"), list(commands()), ids=lambda value: re.sub(r"\W+", "-", value)[-50:])
def test_a_command_line_is_understood(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for example in (EXAMPLE.parent.parent, RULES.parent):
        monkeypatch.syspath_prepend(example)
    name, *words = arguments_of(line)
    parser_of(name).parse(words)


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    if isinstance(parser, Parser):
        parser.fill()
    known = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            known = known.union(*(flags_of(part) for part in action.choices.values()))
    return known


def test_every_flag_that_is_spoken_of_exists() -> None:
    known = set[str]().union(*(flags_of(parser_of(name)) for name in COMMANDS)) | PROSE_FLAGS | {"--version"}
    spoken = {
        (page, flag)
        for page, text in PAGES.items()
        if page not in OF_OTHERS
        for code in re.findall(r"`([^`\n]*)`", FENCE.sub("", text))
        if not code.startswith(("python", "pip", "docker", "make", "git"))
        for flag in FLAG.findall(code)
    }
    assert not {(page, flag) for page, flag in spoken if flag not in known}


def test_flags_stand_behind_their_own_commands() -> None:
    spoken = {
        (page, command, flag)
        for page, text in TEXTS.items()
        for command, words in INLINE.findall(" ".join(text.split()))
        for flag in FLAG.findall(words)
    }
    assert not {each for each in spoken if each[2] not in flags_of(parser_of(each[1]))}


@pytest.mark.parametrize(("page", "example"), [("write-a-drafter", EXAMPLE), ("write-a-rule", RULES)])
def test_guides_show_their_examples_whole(page: str, example: Path) -> None:
    assert pythons(f"docs/how-to/{page}.md") == [example.read_text(encoding="utf-8")]


RUN = [page for page in PAGES if page != "docs/how-to/write-a-drafter.md" and pythons(page)]
"""The drafter has tests of its own."""


@pytest.mark.parametrize("page", RUN)
def test_python_runs_from_the_top_of_a_page_to_its_end(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for code in pythons(page):
            _run(code, page, names)
    for name in names.values():
        if isinstance(name, LLM):
            name.close()
    capsys.readouterr()


def _run(code: str, page: str, names: dict[str, object]) -> None:
    for model in MODELS:
        place = str(resolve("parlay-mini")) if "from_pretrained" in code else "parlay-mini"
        code = code.replace(model, place)
    if page == "docs/explanation/energy.md":
        names.update(llm=LLM("parlay-mini"), prompts=["Once upon a time"])
    if page == "docs/how-to/compile.md":  # compiling takes a minute, and has tests of its own
        code = code.replace("compile=True", "compile=False")
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compiled = compile(code, page, "exec", flags=flags)
    outcome = eval(compiled, names)
    if outcome is not None:
        asyncio.run(outcome)
