"""What every file keeps to: lengths, directions of import, where names may stand, and words that have no place here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from parlay.cli.commands import COMMANDS
from parlay.llm.request_options import RequestOptions
from parlay.options import options_of
from parlay.strategies.catalogue import catalogue
from parlay.strategies.entry import DEFAULT_STRATEGY, StrategyEntry

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "parlay"
MODULES = sorted(PACKAGE.rglob("*.py"))

FILE_LINES = 400
BODY_LINES = 40
"""Of a function, without its docstring."""
STEP_STATEMENTS = 15
ALIASES = frozenset({"calibration", "energy", "trees"})

RUN = frozenset({"types", "options", "system", "strategies", "certificates", "text"})
"""What runs a model."""
MAY_IMPORT: dict[str, frozenset[str]] = {
    "types": frozenset(),
    "compiled": frozenset(),
    "system": frozenset({"types"}),
    "options": frozenset({"types"}),
    "cache": frozenset({"types"}),
    "cost": frozenset({"types", "options"}),
    "router": frozenset({"types"}),
    "simulate": frozenset({"types", "options", "cost"}),
    "sampling": frozenset({"types", "system", "compiled"}),
    "engine": frozenset({"types", "sampling", "system", "cost"}),
    "models": frozenset({"types", "options", "system", "compiled", "cache"}),
    "ranks": frozenset({"types", "options", "system", "compiled", "cache", "models"}),
    "text": frozenset({"types", "system", "models"}),
    "structured": frozenset({"types", "system", "text"}),
    "heads": frozenset({"types", "options", "system", "cache", "models"}),
    "ngrams": frozenset({"types", "options", "system", "text"}),
    "drafters": frozenset({"types", "options", "sampling", "models", "heads", "ngrams"}),
    "strategies": frozenset({"types", "options", "text", "router", "drafters"}),
    "certificates": frozenset({"types", "options", "system", "models", "drafters", "strategies"}),
    "llm": RUN
    | {"cache", "cost", "router", "sampling", "engine", "models", "ranks", "structured", "heads", "drafters"}
    | {"ngrams"},
    "transformers": frozenset({"types", "options", "cost", "engine", "models", "drafters", "strategies"}),
    "aio": frozenset({"types", "system", "text", "engine", "ngrams", "strategies", "llm"}),
    "testing": frozenset(
        {"types", "sampling", "router", "engine", "models", "heads", "ngrams", "drafters", "strategies"}
    ),
    "train": RUN | {"llm", "models", "heads", "drafters", "router", "sampling", "bench"},
    "bench": RUN | {"llm", "cache", "cost", "router", "sampling", "engine", "models", "ranks", "drafters"},
    "serve": RUN | {"llm", "cost", "sampling", "models", "structured", "ngrams", "drafters", "aio"},
    "vllm": frozenset({"types", "options", "cost", "models", "drafters", "strategies"}),
    "sglang": frozenset({"types", "options", "drafters", "vllm"}),
    "gateway": frozenset({"types", "options", "serve"}),
    "ray": frozenset({"types", "options", "llm", "aio", "serve"}),
    "__main__": frozenset({"cli"}),
}
"""Part of the package -> the other parts that it may know. The command line may know all of them."""


def part(path: Path) -> str:
    """The first name below the package: a folder's, or a module's."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def identify(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> set[str]:
    """Modules, and the names in them, that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def imported_parts(path: Path) -> set[str]:
    """The parts of this package that a module imports."""
    return {name.split(".")[1] for name in imported_names(path) if name.startswith("parlay.")}


def tracked_text() -> Iterator[tuple[str, str]]:
    """Path and content of every text file that is committed or about to be."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.suffix in {".safetensors", ".gguf", ".zst", ".png"} or path.name in {
            "tokenizer.json",
            Path(__file__).name,
        }:
            continue
        if path.is_file():
            yield name, path.read_text(encoding="utf-8")


def test_every_module_is_used() -> None:
    """One that nothing imports is left over. Commands, rules and recipes are imported by name: ``module:name``."""
    used = set().union(*(imported_names(path) for path in [*MODULES, *(ROOT / "tests").rglob("*.py")]))
    texts = (node.value for path in MODULES for node in ast.walk(parse(path)) if isinstance(node, ast.Constant))
    used_by_name = {name for text in texts if isinstance(text, str) for name in re.findall(r"(\w+):[A-Za-z_]", text)}
    places = {path: ".".join(["parlay", *path.relative_to(PACKAGE).with_suffix("").parts]) for path in MODULES}
    by_users = {
        "parlay.transformers",
        *(f"parlay.{name}" for name in ALIASES),
        *(f"parlay.cli.{each}" for each in COMMANDS),
    }
    assert not [
        place
        for path, place in places.items()
        if place not in used | by_users and path.stem not in used_by_name | {"__init__", "__main__"}
    ]


def test_files_are_short() -> None:
    lengths = {identify(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert not {name: length for name, length in lengths.items() if length > FILE_LINES}


def test_functions_are_short() -> None:
    lengths = {
        f"{identify(path)}:{node.name}": body_lines(node)
        for path in MODULES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {name: length for name, length in lengths.items() if length > BODY_LINES}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_the_step_reads_on_half_a_screen() -> None:
    functions = [
        node for node in ast.walk(parse(PACKAGE / "engine" / "engine.py")) if isinstance(node, ast.FunctionDef)
    ]
    step = next(node for node in functions if node.name == "step")
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(step)) - 1 <= STEP_STATEMENTS


def test_docstrings_begin_with_what_the_thing_does() -> None:
    """A first word that points elsewhere says nothing to who sees this docstring alone, in an editor or in `help`."""
    pointers = {"That", "Those", "These", "They", "This", "Of", "As", "It", "Its", "Their", "What"}
    found = [
        f"{identify(path)}: {text.splitlines()[0]}"
        for path in MODULES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and (re.split(r"\W", text, maxsplit=1)[0] in pointers or text.startswith("The one that"))
    ]
    assert not found


def test_tensor_parameters_have_shapes() -> None:
    """A name ends in its shape (`logits_NV`), or the docstring gives it: "``x`` ``[..., n]``", or "any shape"."""
    lacking = [
        f"{identify(path)}:{node.name}({name})"
        for path in MODULES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in tensor_parameters(node)
        if not re.search(r"_[A-Z][A-Z0-9]*$", name)
        and not re.search(rf"``{name}``.{{0,60}}?(``\[|any shape)", ast.get_docstring(node) or "", re.DOTALL)
    ]
    assert not lacking


def tensor_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Those annotated with `Tensor`, or `Tensor | None`."""
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        if argument.annotation and re.fullmatch(r"(torch\.)?Tensor( \| None)?", ast.unparse(argument.annotation)):
            yield argument.arg


def test_imports_point_downward() -> None:
    """`__init__` and the public aliases import what they name; the command line may import all."""
    for path in MODULES:
        own = part(path)
        if own not in {"cli", "__init__", *ALIASES}:
            assert imported_parts(path) - {own, "__version__"} <= MAY_IMPORT[own], identify(path)


def test_the_top_level_holds_folders() -> None:
    """Modules there are public paths: `parlay.transformers`, and aliases that only hand names on."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert modules == {"transformers", *ALIASES}
    for name in ALIASES:
        statements = parse(PACKAGE / f"{name}.py").body
        assert [type(each) for each in statements] == [ast.Expr, ast.ImportFrom, ast.Assign]


def test_no_two_parts_may_know_each_other() -> None:
    """Nor three in a circle: the rows above have an order."""
    TopologicalSorter(MAY_IMPORT).prepare()  # raises CycleError


def test_the_engine_knows_no_text_and_no_transformers() -> None:
    for path in (PACKAGE / "engine").rglob("*.py"):
        assert not re.search(r"tokenizer|transformers", path.read_text(encoding="utf-8"), re.IGNORECASE), path


def home(entry: StrategyEntry) -> Path:
    """The file that declares the options of an entry's drafter, and its name."""
    return ROOT / "src" / Path(*entry.options.__module__.split(".")).with_suffix(".py")


def test_a_drafter_is_named_only_where_it_is_made() -> None:
    """`none` is no drafter; `LLM` names the default strategies, and an option that takes strategies its default.

    A published layout says which method it is of, often by the same word.
    """
    words = {field.name for field in fields(RequestOptions)} | {entry.family for entry in catalogue().values()}
    drafters = {name: entry for name, entry in catalogue().items() if entry.factory and name not in words}
    combined = {
        home(entry)
        for entry in catalogue().values()
        if any(option.strategies for option in options_of(entry.options).values())
    }
    for path in MODULES:
        for name, entry in drafters.items():
            command = {PACKAGE / "cli" / "commands.py"} if name in COMMANDS else set()  # one word, two things
            if (
                path.parent != PACKAGE / "heads" / "layouts"
                and path not in {home(entry), PACKAGE / "llm" / "llm.py"} | combined | command
            ):
                assert name not in spoken(path), f"{path} names {name}"


def test_pages_call_no_other_strategy_the_default() -> None:
    """Results of the time when another one was say that it was."""
    said = re.compile(r"default(?: strategy)?(?:,| is|:) `([\w-]+)[`:]|`([\w-]+)`,? (?:is )?the default\b(?! then)")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    found = [(page.name, a or b) for page in pages for a, b in said.findall(page.read_text(encoding="utf-8"))]
    wrong = [(page, name) for page, name in found if name in catalogue() and name != DEFAULT_STRATEGY]
    assert found
    assert not wrong


def test_the_catalogue_loads_no_torch() -> None:
    """Usage errors of strategies and their options come at once."""
    code = "import sys; from parlay.strategies.catalogue import listing; listing(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@cache
def spoken(path: Path) -> set[str]:
    """String constants of a module that look like strategies, without their parameters; docstrings say more."""
    constants = (node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant))
    return {text.partition(":")[0] for text in constants if isinstance(text, str)}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git lists the files")
def test_the_repository_speaks_of_itself_alone() -> None:
    """No machine's paths and no hosts of registries: a clone works anywhere."""
    foreign = re.compile(r"/(?:work|root|opt|home)/\w|extra-index-url|index-url|find-links|shared/data")
    for name, text in tracked_text():
        match = foreign.search(text)
        assert match is None, f"{name}: {match and match.group()}"
