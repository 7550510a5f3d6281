"""The page for everybody: by keyboard, by ear, on a phone, in the dark, and within its bounds."""

from __future__ import annotations

import gzip
import re
from importlib.resources import files

import pytest
from playwright.sync_api import Page, expect

from tests.serve.page.actions import answers, begin, press, send
from tests.serve.page.conftest import Open
from tests.serve.page.fake_server import Fake

PAGE = files("parlay.serve") / "page"
MOST_BYTES = 60_000
LONG = (
    "say # Title\n\n" + "word " * 40 + "\n\n```python\n" + "x = 1; " * 60 + "\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
)


def test_everything_can_be_done_with_the_keyboard(page: Page) -> None:
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("Where?")
    page.keyboard.press("Enter")
    expect(answers(page).get_by_role("button", name="Regenerate")).to_be_visible()
    reached = []
    for _ in range(30):
        page.keyboard.press("Shift+Tab")
        focused = page.locator(":focus")
        if not focused.count():
            break
        reached.append(focused.get_attribute("aria-label") or focused.get_attribute("id") or focused.inner_text())
        assert focused.evaluate("node => getComputedStyle(node).outlineStyle") == "solid", reached
    wanted = {
        "Sources",
        "Regenerate",
        "Copy the answer",
        "Edit",
        "Messages",
        "open-settings",
        "model",
        "to-race",
        "new",
    }
    assert wanted <= set(reached)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    expect(answers(page)).to_have_count(1)


def test_what_is_heard_is_paragraphs_and_not_tokens(page: Page) -> None:
    heard = page.locator("#heard")
    expect(heard).to_have_attribute("aria-live", "polite")
    begin(page, "for ever")
    expect(answers(page).locator(".body")).to_contain_text("on and on and")
    expect(heard).to_be_empty()
    page.keyboard.press("Escape")
    expect(heard).to_contain_text("on and on and")
    send(page, "say One.\n\nTwo.")
    expect(heard.locator("p")).to_have_count(3)
    assert not page.locator("#messages[aria-live], #messages [aria-live]").count()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(fake: Fake, open_page: Open, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(fake.url, color_scheme=theme)
    send(page, LONG)
    send(page, "think")
    answers(page).first.get_by_role("button", name="Sources").click()
    found = {"chat": axe.Axe().run(page)}
    press(page, "Settings")
    found["settings"] = axe.Axe().run(page)
    press(page, "Done")
    page.get_by_role("link", name="Race").click()
    press(page, "Start the race")
    expect(page.locator("#verdict")).to_contain_text("Same text.")
    found["race"] = axe.Axe().run(page)
    page.get_by_role("link", name="Live").click()
    expect(page.locator(".chart")).to_have_count(4)
    found["live"] = axe.Axe().run(page)
    serious = [
        (view, fault["id"], fault["nodes"][0]["html"])
        for view, result in found.items()
        for fault in result.response["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
    assert not serious


def test_a_phone_needs_no_sideways_scrolling(fake: Fake, open_page: Open) -> None:
    page = open_page(fake.url, viewport={"width": 360, "height": 640})
    send(page, LONG)
    for view in ("Chat", "Race", "Live"):
        page.get_by_role("link", name=view).click()
        if view == "Race":
            press(page, "Start the race")
            expect(page.locator("#verdict")).to_contain_text("Same text.")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
        expect(page.locator("#side")).to_be_hidden()
        press(page, "Chats")
        expect(page.get_by_role("button", name="New chat")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#side")).to_be_hidden()
        expect(page.get_by_role("button", name="Chats", exact=True)).to_be_focused()


def test_enter_begins_a_line_where_there_is_no_shift_to_hold(fake: Fake, open_page: Open) -> None:
    page = open_page(fake.url, viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    message = page.get_by_label("Message", exact=True)
    message.press_sequentially("one")
    message.press("Enter")
    expect(message).to_have_value("one\n")
    press(page, "Send")
    expect(answers(page)).to_have_count(1)


def test_the_theme_follows_the_system_until_one_is_chosen(fake: Fake, open_page: Open) -> None:
    page = open_page(fake.url, color_scheme="dark")
    assert brightness(page) < 150
    press(page, "Dark")
    assert brightness(page) > 600
    page.reload()
    assert brightness(page) > 600


def brightness(page: Page) -> int:
    """Red, green and blue of the background together."""
    colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)))


def test_the_page_is_small_and_all_there_is() -> None:
    """Nothing comes from elsewhere, no text becomes markup, and every file is short."""
    contents = {entry.name: entry.read_bytes() for entry in PAGE.iterdir()}
    assert sum(len(gzip.compress(content)) for content in contents.values()) <= MOST_BYTES
    named = set(re.findall(rb"page/([a-z]+\.js)", contents["index.html"]))
    assert named == {name.encode() for name in contents if name.endswith(".js")}  # each is fetched at once
    for name, content in contents.items():
        text = content.decode()
        assert len(text.splitlines()) <= 400, name
        outside = re.findall(r"https?://(?!www\.w3\.org/)[\w-]+\.", text)
        assert not outside, name
        assert not re.search(r"innerHTML|insertAdjacentHTML|eval\(|\bstyle=", text), name
