"""MkDocs' hooks: files of the repository's root as pages, and links from pages to files beside the documents."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
WHOLE_FILE = re.compile(r'\A--8<-- "(\w+\.md)"\n*\Z')
"""A page that is nothing but a file of the root, such as CHANGELOG.md."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Raises ValueError for a link to a file that is not there; links within the documents are checked by MkDocs."""
    here = posixpath.dirname(page.file.src_uri)
    home = posixpath.join("docs", here)
    if whole := WHOLE_FILE.match(markdown):
        markdown, home = (ROOT / whole[1]).read_text(encoding="utf-8"), ""

    def rewritten(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(home, match[2]))
        if path.startswith("docs/"):
            return f"{match[1]}{posixpath.relpath(path, posixpath.join('docs', here))}{match[3]}"
        if not (ROOT / path).exists():
            raise ValueError(f"{page.file.src_uri} links to {match[2]}, which is not there")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{match[1]}{config.repo_url.rstrip('/')}/{kind}/main/{path}{match[3]}"

    return LINK.sub(rewritten, markdown)
