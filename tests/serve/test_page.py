"""The page in Chromium: what a visitor sees, and what the page asks of the server. The answers are canned."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

from tests.serve.fake_server import PAGE, Fake, serving

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: `make check-browser` installs it")
TEXT = "The cat <b>sat</b> on the mat."


@pytest.fixture(scope="module")
def server() -> Iterator[Fake]:
    with serving() as fake:
        yield fake


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=20_000)  # a busy machine is no fault of the page
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def fake(server: Fake) -> Fake:
    server.key = ""
    server.bodies.clear()
    server.aborted.clear()
    return server


@pytest.fixture
def page(browser: Browser, fake: Fake) -> Iterator[Page]:
    """The page in a tab of its own. No script may fail in it, and nothing may break its own security policy."""
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(20_000)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.extend(violations(message)))
        page.goto(fake.url)
        expect(page.get_by_label("Model")).to_have_value("parlay-mini")
        yield page
        assert not faults


def violations(message: ConsoleMessage) -> list[str]:
    return [message.text] if "Content Security Policy" in message.text else []


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).click()


def lane(page: Page, number: int = 0) -> Locator:
    return page.locator("article").nth(number)


def figure(lane: Locator, name: str) -> Locator:
    return lane.locator(f"[data-figure={name}]")


def test_it_offers_what_the_server_has(page: Page) -> None:
    assert page.get_by_label("Model").locator("option").all_inner_texts() == ["parlay-mini", "another/model"]
    strategy = page.get_by_label("Strategy", exact=True)
    assert strategy.locator("option").all_inner_texts() == ["the server’s default", "none", "copycat", "mumbler"]
    strategy.select_option("copycat")
    expect(page.get_by_text("Copies what came before.")).to_be_visible()


def test_it_asks_for_what_the_form_says(page: Page, fake: Fake) -> None:
    page.get_by_label("Prompt").fill("Where is the cat?")
    page.get_by_label("Model").select_option("another/model")
    page.get_by_label("Strategy", exact=True).select_option("mumbler")
    page.get_by_label("Max tokens").fill("")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("11")
    press(page, "Generate")
    expect(lane(page).locator(".note")).to_have_text("mumbler · lossy · seed 11 · ended by stop")
    path, body = fake.bodies[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "another/model",
        "messages": [{"role": "user", "content": "Where is the cat?"}],
        "strategy": "mumbler",
        "temperature": 0.7,
        "seed": 11,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_completion_sends_the_prompt_itself_and_leaves_the_strategy_to_the_server(page: Page, fake: Fake) -> None:
    page.get_by_label("Prompt").fill("The")
    page.get_by_label("completion").check()
    press(page, "Generate")
    expect(page.locator(".answer")).to_have_text(TEXT)
    path, body = fake.bodies[0]
    assert (path, body["prompt"]) == ("/v1/completions", "The")
    assert "strategy" not in body
    assert isinstance(body["seed"], int)


def test_each_token_is_tinted_by_where_it_came_from(page: Page) -> None:
    press(page, "Generate")
    expect(page.locator(".answer")).to_have_text(TEXT)  # markup in a text stays text
    tokens = [(token.inner_text(), token.get_attribute("class")) for token in page.locator(".answer span").all()]
    assert [(text.strip(), tint) for text, tint in tokens] == [
        ("The", "plain"),
        ("cat", "tint-0"),
        ("<b>sat</b>", "tint-0"),
        ("on", "correction"),
        ("the", "tint-1"),
        ("mat.", "correction"),
    ]
    legend = page.locator("#legend li")
    assert [re.sub("^abc", "", text) for text in legend.all_inner_texts()] == [
        "the model’s own",
        "drafted by copycat",
        "the model’s own, where a draft ended",
        "drafted by magpie",
    ]


def test_the_figures_are_the_engines_at_the_end(page: Page) -> None:
    press(page, "Generate")
    expect(figure(lane(page), "rate")).to_have_text("200")
    expect(figure(lane(page), "perStep")).to_have_text("2.00")
    expect(figure(lane(page), "tokens")).to_have_text("6")
    expect(figure(lane(page), "first")).to_have_text(re.compile(r"^\d+ ms$"))


def test_a_race_runs_the_same_request_plainly_first(page: Page, fake: Fake) -> None:
    page.get_by_label("Strategy", exact=True).select_option("copycat")
    press(page, "Race")
    expect(page.get_by_role("status")).to_have_text("Same text. 2.00 times the tokens/s of plain decoding.")
    expect(lane(page, 0).locator("h2")).to_have_text("plain decoding")
    expect(figure(lane(page, 0), "perStep")).to_have_text("1.00")
    expect(figure(lane(page, 1), "perStep")).to_have_text("2.00")
    plain, fast = (body for _, body in fake.bodies)
    assert (plain.pop("strategy"), fast.pop("strategy")) == ("none", "copycat")
    assert plain == fast
    assert plain["store"] is False


def test_a_race_says_where_texts_differ(page: Page) -> None:
    page.get_by_label("Strategy", exact=True).select_option("mumbler")
    press(page, "Race")
    expect(page.get_by_role("status")).to_have_text(
        "The texts differ from character 9 on (exactness: lossy). 1.50 times the tokens/s of plain decoding."
    )
    expect(page.locator(".differs")).to_have_text(["<b>sat</b> ", "sits."])


def test_plain_against_plain_is_refused(page: Page, fake: Fake) -> None:
    page.get_by_label("Strategy", exact=True).select_option("none")
    press(page, "Race")
    expect(page.get_by_role("alert")).to_contain_text("choose another strategy")
    assert not fake.bodies


def test_a_refused_request_shows_the_servers_reason(page: Page) -> None:
    page.get_by_label("Strategy", exact=True).select_option("copycat")
    page.get_by_label("Its parameters").fill("k = abc")
    press(page, "Generate")
    expect(page.get_by_role("alert")).to_have_text("k of copycat must be an int, got 'abc'")
    expect(page.locator("article")).to_have_count(0)
    page.get_by_label("Its parameters").fill("")
    press(page, "Generate")
    expect(page.locator(".answer")).to_have_text(TEXT)
    expect(page.get_by_role("alert")).to_be_empty()


def test_an_error_in_mid_stream_keeps_what_there_is(page: Page) -> None:
    page.get_by_label("Prompt").fill("fail")
    press(page, "Generate")
    expect(page.get_by_role("alert")).to_have_text("The engine lost this request.")
    expect(page.locator(".answer")).to_have_text(TEXT)


def test_escape_stops_the_request_in_the_server_too(page: Page, fake: Fake) -> None:
    page.get_by_label("Prompt").fill("for ever")
    press(page, "Generate")
    expect(page.locator(".answer")).to_contain_text("on and on and")
    page.keyboard.press("Escape")
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    assert fake.aborted.wait(20)


def test_a_new_run_ends_the_one_before(page: Page, fake: Fake) -> None:
    page.get_by_label("Prompt").fill("for ever")
    press(page, "Generate")
    expect(page.locator(".answer")).to_contain_text("on and")
    page.get_by_label("Prompt").fill("once")
    press(page, "Generate")
    expect(page.locator(".answer")).to_have_text(TEXT)
    assert fake.aborted.wait(20)


def test_everything_can_be_done_with_the_keyboard(page: Page) -> None:
    page.keyboard.press("Shift+Tab")  # the prompt has the focus first, and what stands above it comes before
    fields = ["prompt", "kind", "model", "strategy", "parameters", "max_tokens", "temperature", "seed"]
    for name in ["API key", *fields, "generate", "race"]:
        focused = page.locator(":focus")
        assert name in (focused.get_attribute("name"), focused.get_attribute("id"), focused.inner_text())
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Tab")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".answer")).to_have_text(TEXT)


def test_what_is_heard_is_what_is_new(page: Page) -> None:
    """Answers are read out once they are whole, and each field has a name."""
    press(page, "Generate")
    answer = page.get_by_role("region", name="the server’s default")
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer).to_have_attribute("aria-live", "polite")
    assert page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].every((field) => field.labels.length)"
    )


def test_the_key_lives_as_long_as_the_tab(page: Page, fake: Fake) -> None:
    fake.key = "secret"
    page.reload()
    expect(page.get_by_role("alert")).to_have_text("An API key is needed.")
    page.locator("#key").fill("secret")
    page.locator("#key").press("Tab")
    expect(page.get_by_role("alert")).to_be_empty()
    page.reload()
    press(page, "Generate")
    expect(page.locator(".answer")).to_have_text(TEXT)
    assert page.evaluate("[localStorage.length, document.cookie, Object.keys(sessionStorage).length]") == [0, "", 1]


def test_a_narrow_screen_needs_no_sideways_scrolling(page: Page) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    press(page, "Race")
    expect(page.get_by_role("status")).to_contain_text("Same text.")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_the_page_is_all_there_is() -> None:
    """Nothing comes from elsewhere, and no text becomes markup."""
    files = {path.name: path.read_text(encoding="utf-8") for path in PAGE.iterdir()}
    assert files.keys() == {"index.html", "style.css", "page.js", "icon.svg"}
    for text in files.values():
        assert not re.search(r"(?<!xmlns=\")https?://|innerHTML|insertAdjacentHTML|eval\(|\bstyle=|\bon\w+=", text)
