"""Actions of a visitor of the page, and what the visitor looks at."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def send(page: Page, text: str) -> None:
    """Send a message, and wait until its answer is over."""
    begin(page, text)
    until_over(page)


def until_over(page: Page) -> None:
    """While an answer is written, `Stop` stands in the place of `Send`."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def begin(page: Page, text: str) -> None:
    expect(page.locator("#send")).to_be_enabled()
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def set_field(page: Page, label: str, value: str) -> None:
    press(page, "Settings")
    page.get_by_label(label, exact=True).fill(value)
    press(page, "Done")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def said(page: Page) -> list[str]:
    """Texts of a conversation that are shown, in turn."""
    return [text.strip() for text in page.locator(".said, .assistant .body").all_inner_texts()]
