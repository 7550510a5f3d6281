"""Answers as Markdown: drawn piece by piece, and inert whatever a model writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.serve.page.actions import press, send
from tests.serve.page.conftest import opening
from tests.serve.page.fake_server import Fake

DOCUMENT = """\
# Cats & dogs

A *small* list, with **bold**, `code`, ~~gone~~ and [a page](https://example.org/a_(b)).
Its second line.

- one
  - inner
- two **three**

  more of two

3. third
4. fourth

> quoted
> on

| name | count |
|:-----|------:|
| a\\|b | `x|y` |
| c | 2 |

```python
def cat():
    return "<b>"
```

---
Snake_case_words and 2 * 3 * 4 stay.
"""
OUTLINE = (
    "h3,p,em,strong,code,del,a,ul,li,p,ul,li,li,p,strong,p,ol,li,li,blockquote,p,div,table,thead,tr,th,th,tbody,tr,td,td,"
    "code,tr,td,td,figure,figcaption,button,pre,code,hr,p"
)
DRAW = """
async ([text, steps]) => {
  const { Markdown } = await import("/page/markdown.js");
  const host = document.createElement("div");
  const markdown = new Markdown(host);
  const firsts = [];
  for (let at = 1; at < text.length && steps; at += 1) {
    markdown.update(text.slice(0, at), true);
    firsts.push(host.firstElementChild);
  }
  const began = performance.now();
  markdown.update(text);
  return {
    html: host.innerHTML,
    text: host.textContent,
    names: [...host.querySelectorAll("*")].map((node) => node.localName).join(),
    attributes: [...host.querySelectorAll("*")].flatMap((node) => node.getAttributeNames()),
    links: [...host.querySelectorAll("a")].map((link) => link.href),
    kept: new Set(firsts.slice(20)).size,
    milliseconds: performance.now() - began,
  };
}
"""
ELEMENTS = {*OUTLINE.split(","), "h4"}
ATTRIBUTES = {"class", "data-language", "href", "target", "rel", "tabindex", "type", "aria-label", "start"}
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "![a picture](https://elsewhere.example/a.png)",
    "[a](javascript:window.hacked=1) [b](JaVaScRiPt:alert(1)) [c](java\nscript:alert(1)) [d](vbscript:x)",
    "[e](data:text/html;base64,PHNjcmlwdD4=) <javascript:alert(1)> [f](//elsewhere.example) [g](/metrics)",
    '[h](&#106;avascript:alert(1)) [i](\x01javascript:alert(1)) [j]( https://safe.example/"onclick=alert(1) )',
    "```html\n<script>window.hacked = 1</script>\n```",
    '```" onclick=alert(1)\nx\n```',
    "| <b>a</b> | <i>b</i> |\n|---|---|\n| <svg onload=alert(1)> | &lt;script&gt; |",
    "# <iframe src='https://elsewhere.example'>",
    "- <style>*{display:none}</style>\n> <form action=x>",
    "[x](https://safe.example) <https://safe.example> https://safe.example/?a=<b>",
]
WIDE = [
    "*a " * 8000,
    "**a " * 6000,
    "[" * 20000,
    "[a](" * 5000,
    "`a``b```" * 3000,
    "# " + " " * 20000 + "x",
    "a|b\n" + " " * 20000 + "-x",
    "- " * 5000,
    "> " * 5000,
    "_" * 20000,
    "|" * 20000 + "\n" + "|-" * 900,
    "h" * 20000 + "https://" * 2000,
    "```" + " " * 20000 + "`",
]


@pytest.fixture(scope="module")
def blank(browser: Browser, server: Fake) -> Iterator[Page]:
    """A page in which nothing was said. What `draw` draws stands nowhere in it, and stays until nobody looks."""
    server.reset()
    with opening(browser) as open:
        yield open(server.url)


def draw(page: Page, text: str, *, steps: bool = False) -> dict[str, Any]:
    drawn: dict[str, Any] = page.evaluate(DRAW, [text, steps])
    return drawn


def test_markdown_becomes_what_it_means(blank: Page) -> None:
    drawn = draw(blank, DOCUMENT)
    assert drawn["names"] == OUTLINE
    assert drawn["links"] == ["https://example.org/a_(b)"]
    assert 'return "<b>"' in drawn["text"]
    for shown in ("a|b", "x|y", "Snake_case_words and 2 * 3 * 4 stay.", "Cats & dogs"):
        assert shown in drawn["text"]
    assert '<ol start="3">' in drawn["html"]
    assert '<td class="right">' in drawn["html"]


def test_what_comes_piece_by_piece_ends_as_the_whole_and_touches_no_complete_block(blank: Page) -> None:
    """A block that is replaced would flicker, and take a selection with it."""
    drawn = draw(blank, DOCUMENT, steps=True)
    assert drawn["html"] == draw(blank, DOCUMENT)["html"]
    assert drawn["kept"] == 1


def test_a_mark_that_is_not_closed_yet_is_not_shown(blank: Page) -> None:
    shown = blank.evaluate("""async () => {
      const { Markdown } = await import("/page/markdown.js");
      const host = document.createElement("div");
      const markdown = new Markdown(host);
      return ["The **bo", "The **bold** `co", "The **bold** `code`\\n\\n``"].map((text) => {
        markdown.update(text, true);
        return host.textContent;
      });
    }""")
    assert shown == ["The bo", "The bold co", "The bold code"]


def test_hostile_text_is_inert(blank: Page) -> None:
    for text in HOSTILE:
        drawn = draw(blank, text)
        assert set(drawn["names"].split(",")) <= ELEMENTS, text
        assert set(drawn["attributes"]) <= ATTRIBUTES, text
        assert all(link.startswith("https://") for link in drawn["links"]), text
    assert blank.evaluate("window.hacked") is None


def test_no_text_takes_long_to_draw(blank: Page) -> None:
    for text in WIDE:
        assert draw(blank, text)["milliseconds"] < 3000, text[:20]


def test_code_is_copied_as_it_was_written(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    send(page, "say ```python\nx  =  '<b>'\n```")
    press(page, "Copy this code")
    expect(page.get_by_role("button", name="Copy this code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x  =  '<b>'"
    press(page, "Copy the answer")
    expect(page.get_by_role("button", name="Copy the answer")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("```python")
