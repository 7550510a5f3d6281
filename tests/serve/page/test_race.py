"""A race of two strategies, and the charts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from fastapi import FastAPI
from playwright.sync_api import Locator, Page, expect

from tests.serve.page.actions import answers, press, send
from tests.serve.page.conftest import Open
from tests.serve.page.fake_server import TEXT, Fake


def race(page: Page, second: str) -> None:
    page.get_by_role("link", name="Race").click()
    page.get_by_label("Second strategy").select_option(second)
    press(page, "Start the race")


def figures(page: Page) -> list[list[str]]:
    return [lane.locator("dd").all_inner_texts() for lane in page.locator(".lane").all()]


def verdict(page: Page) -> Locator:
    return page.locator("#verdict")


def test_a_race_asks_the_same_twice(page: Page, fake: Fake) -> None:
    race(page, "copycat")
    expect(verdict(page)).to_have_text("Same text. copycat: 2.00 times the tokens/s of none.")
    tokens, steps, per_step, rate = list(zip(*figures(page), strict=True))[:4]
    assert (tokens, steps, per_step, rate) == (("6", "6"), ("6", "3"), ("1.00", "2.00"), ("100.0", "200.0"))
    prime, plain, fast = (body for _, body in fake.bodies)
    assert prime["max_tokens"] == 1
    assert (plain.pop("strategy"), fast.pop("strategy")) == ("none", "copycat")
    assert plain == fast
    assert plain["store"] is False


def test_a_race_says_where_texts_differ(page: Page) -> None:
    race(page, "mumbler")
    expect(verdict(page)).to_have_text(
        "The texts differ from letter 9 on (exactness: bits and lossy). mumbler: 1.50 times the tokens/s of none."
    )
    expect(page.locator(".differs")).to_have_text(["<b>sat</b> ", "sits."])


def test_a_race_of_one_strategy_is_refused(page: Page, fake: Fake) -> None:
    race(page, "none")
    expect(verdict(page)).to_have_text("Choose two different strategies.")
    assert not fake.bodies


def test_a_race_is_replayed_to_its_end(page: Page) -> None:
    race(page, "copycat")
    expect(verdict(page)).to_contain_text("Same text.")
    press(page, "Replay side by side")
    expect(page.locator(".lane-text")).to_have_text([TEXT, TEXT])


def test_a_race_can_be_stopped(page: Page, fake: Fake) -> None:
    page.get_by_role("link", name="Race").click()
    page.get_by_label("Prompt", exact=True).fill("for ever")
    press(page, "Start the race")
    expect(page.get_by_role("button", name="Stop the race")).to_be_enabled()
    press(page, "Stop the race")
    expect(verdict(page)).to_have_text("Stopped.")
    assert fake.aborted.wait(20)


def test_charts_follow_the_metrics(page: Page, fake: Fake) -> None:
    page.get_by_role("link", name="Live").click()
    shown = page.get_by_role("img", name="Tokens per step in the last three minutes; now tokens per step: 2.50")
    expect(shown).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Queue .* now running: 3, waiting: 5"))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Memory .* now tokens: 250"))).to_be_visible()
    expect(page.get_by_text("room for 1,000")).to_be_visible()
    expect(page.locator("#totals tr")).to_have_text(re.compile(r"copycat\d+\d+2\.5075"))
    page.get_by_role("link", name="Chat").click()
    looks = fake.looks
    page.wait_for_timeout(2500)
    assert fake.looks == looks  # nobody looks, so nothing is asked


@pytest.fixture
def real(
    make_app: Callable[..., FastAPI], serve: Callable[[FastAPI], AbstractContextManager[str]], open_page: Open
) -> Iterator[Page]:
    """The page of a server with the built-in model."""
    with serve(make_app()) as url:
        yield open_page(f"{url}/")


def test_the_built_in_model_chats_and_races(real: Page) -> None:
    press(real, "Settings")
    real.locator("#max_tokens").fill("24")
    real.locator("#seed").fill("7")
    press(real, "Done")
    send(real, "Repeat this line: the ferry leaves at ten past seven.")
    expect(answers(real).locator(".note")).to_contain_text("seed 7")
    expect(answers(real).locator(".body")).not_to_be_empty()
    expect(real.locator("#strategy option[value=draft-model]")).to_have_count(1)
    strategies = real.locator("#strategy option").evaluate_all("options => options.map((option) => option.value)")
    assert {"none", "draft-model"} <= set(strategies)
    assert not {"eagle3", "medusa", "datastore"} & set(strategies)
    real.locator("#race-tokens").evaluate("field => (field.value = 32)")
    race(real, "draft-model")
    expect(verdict(real)).to_contain_text("Same text.")
    plain, fast = figures(real)
    assert plain[0] == fast[0]
    assert plain[2] == "1.00"
    for tokens, steps, per_step, *_ in (plain, fast):  # whether the second drafts depends on the machine's speed
        assert float(per_step) == pytest.approx(int(tokens) / int(steps), abs=0.01)
