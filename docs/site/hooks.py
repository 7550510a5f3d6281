"""MkDocs' hooks: generated parts of pages, files of the root as pages, and links to files of the repository."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from reference import GENERATORS  # noqa: E402  (a folder beside this file)

LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
WHOLE_FILE = re.compile(r"\A<!-- whole file: (\w+\.md) -->")
"""How a page begins that shows a file of the root, such as CHANGELOG.md. On GitHub the page is a link to the file."""
GENERATED = re.compile(r"^<!-- generated: ([\w-]+)(?: ([^>]*?))? -->$", re.MULTILINE)
"""Where a page has a part that is made from the package: a name of `GENERATORS`, and words for it."""
REPOSITORY_ALONE = re.compile(r"^<!-- in the repository alone -->\n(?:>.*\n)+\n", re.MULTILINE)
"""A quotation for readers of the files, which the site leaves out."""
SHORT_CODE = re.compile(r"<td><code>([^<]{1,26})</code>")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Raises ValueError for a link to a file that is not there; MkDocs checks links within the documents."""
    here = posixpath.dirname(page.file.src_uri)
    home = posixpath.join("docs", here)
    if whole := WHOLE_FILE.match(markdown):
        markdown, home = (ROOT / whole[1]).read_text(encoding="utf-8"), ""
    markdown = REPOSITORY_ALONE.sub("", markdown)
    markdown = GENERATED.sub(lambda found: GENERATORS[found[1]](*(found[2] or "").split()), markdown)

    def rewritten(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(home, match[2]))
        if path.startswith("docs/"):
            return f"{match[1]}{posixpath.relpath(path, posixpath.join('docs', here))}{match[3]}"
        if not (ROOT / path).exists():
            raise ValueError(f"{page.file.src_uri} links to {match[2]}, which is not there")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{match[1]}{config.repo_url.rstrip('/')}/{kind}/main/{path}{match[3]}"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep short code in tables on one line."""
    return SHORT_CODE.sub(r'<td><code class="whole">\1</code>', html)
