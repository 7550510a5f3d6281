"""The site's generated parts can be made from the package as it is, and the pages name modules that exist."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.glob("docs/**/*.md")}
MARK = re.compile(r"^<!-- generated: ([\w-]+)(?: ([^>]*?))? -->$", re.MULTILINE)
MARKS = sorted({found for text in PAGES.values() for found in MARK.findall(text)})
MODULE = re.compile(r"`((?:\w+/)+\w+\.py)`")
DOCUMENTED = re.findall(r"^::: (parlay[\w.]+)$", "\n".join(PAGES.values()), re.MULTILINE)


@pytest.fixture(scope="module")
def generators() -> Mapping[str, Callable[..., str]]:
    """What docs/site/hooks.py calls for each mark of a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "site")
        found: Mapping[str, Callable[..., str]] = importlib.import_module("reference").GENERATORS
        return found


@pytest.mark.parametrize(("name", "words"), MARKS, ids=lambda each: each or "-")
def test_a_generated_part_can_be_made(generators: Mapping[str, Callable[..., str]], name: str, words: str) -> None:
    """A parameter, field or address without a meaning in docs/site/reference/meanings.yml is an error here."""
    assert generators[name](*words.split()).strip()


@pytest.mark.parametrize("path", DOCUMENTED)
def test_what_the_site_documents_is_defined_under_its_name(path: str) -> None:
    """The site's builder reads sources: it finds no method that a class takes over from a function elsewhere."""
    own = pkgutil.resolve_name(path).__qualname__
    module = path.removesuffix(f".{own}")
    assert module != path
    assert isinstance(pkgutil.resolve_name(module), ModuleType)


def test_every_generator_is_used(generators: Mapping[str, Callable[..., str]]) -> None:
    assert set(generators) == {name for name, _ in MARKS}


@pytest.mark.parametrize(("page", "file"), [("contributing", "CONTRIBUTING"), ("changes", "CHANGELOG")])
def test_a_page_may_show_a_file_of_the_root(page: str, file: str) -> None:
    """On GitHub, which knows no such pages, it is a link to that file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs" / "site")
        mark: re.Pattern[str] = importlib.import_module("hooks").WHOLE_FILE
    text = PAGES[f"docs/developers/{page}.md"]
    assert [found[1] for found in [mark.match(text)] if found] == [f"{file}.md"]
    assert f"[{file}.md](../../{file}.md)" in text
    assert (ROOT / f"{file}.md").exists()


def test_modules_of_the_walks_exist() -> None:
    named = MODULE.findall(PAGES["docs/developers/architecture.md"])
    assert named
    assert not [name for name in named if not (ROOT / "src" / "parlay" / name).is_file()]
