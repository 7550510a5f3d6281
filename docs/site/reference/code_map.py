"""The map of the code: the first line of each module's docstring, by folder."""

from __future__ import annotations

import ast
from pathlib import Path

from reference.markdown import table

PACKAGE = Path(__file__).parents[3] / "src" / "parlay"


def code_map() -> str:
    """A section for each folder of the package, a row for each module."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        folders.setdefault(path.parent, []).append(path)
    return "\n".join(_folder(folder, modules) for folder, modules in folders.items())


def _folder(folder: Path, modules: list[Path]) -> str:
    name = folder.relative_to(PACKAGE.parent).as_posix()
    about = next((first_line(path) for path in modules if path.name == "__init__.py"), "")
    rows = [(f"`{path.name}`", first_line(path)) for path in modules if path.name != "__init__.py"]
    depth = min(4, 2 + max(0, len(folder.relative_to(PACKAGE).parts) - 1))
    text = f"{'#' * depth} {name}\n\n{about}\n\n"
    return text + (table(["module", "job"], rows) if rows else "")


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without double quotes of code."""
    found = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return found.partition("\n")[0].replace("``", "`").replace("<", "&lt;")
