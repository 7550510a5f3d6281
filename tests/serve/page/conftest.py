"""A Chromium for each test file, a browser context for each page, and a server with canned answers.

The whole session can't share one, because no other code in Playwright's thread can start an event loop while it runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.serve.page.fake_server import Fake, serving

CHROMIUM = shutil.which("chromium")
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def server() -> Iterator[Fake]:
    with serving() as fake:
        yield fake


@pytest.fixture
def fake(server: Fake) -> Fake:
    server.reset()
    return server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: `make check-browser` installs it")
    expect.set_options(timeout=20_000)  # the machine may be busy
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@contextmanager
def opening(browser: Browser) -> Iterator[Open]:
    """Yield ``open(url, **context)``, which opens the page in a context of its own.

    No script may fail there, nothing may break the page's security policy, and no request may go to another host.
    """
    contexts, faults = [], []

    def open(url: str, **options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.extend(violations(message)))
        page.on("request", lambda request: faults.extend([] if request.url.startswith(url) else [request.url]))
        page.goto(url)
        expect(page.get_by_label("Model")).to_have_value("parlay-mini")
        return page

    yield open
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    with opening(browser) as open:
        yield open


@pytest.fixture
def page(fake: Fake, open_page: Open) -> Page:
    return open_page(fake.url)


def violations(message: ConsoleMessage) -> list[str]:
    broken = ("Content Security Policy", "TrustedHTML", "TrustedScript")
    return [message.text] if any(word in message.text for word in broken) else []
