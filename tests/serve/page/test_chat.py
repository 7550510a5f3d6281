"""The chat: conversations that stay, what is sent for them, and what can be done with a message."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.serve.page.actions import answers, begin, press, said, send, set_field, until_over
from tests.serve.page.fake_server import TEXT, THOUGHT, Fake


def test_enter_sends_and_shift_enter_begins_a_line(page: Page, fake: Fake) -> None:
    message = page.get_by_label("Message", exact=True)
    message.press_sequentially("one")
    message.press("Shift+Enter")
    message.press_sequentially("two")
    assert not fake.bodies
    message.press("Enter")
    expect(answers(page).locator(".body")).to_have_text(TEXT)  # markup in a text stays text
    expect(message).to_have_value("")
    assert fake.bodies[0][1]["messages"] == [{"role": "user", "content": "one\ntwo"}]


def test_a_conversation_goes_on_with_all_that_was_said(page: Page, fake: Fake) -> None:
    send(page, "first")
    send(page, "second")
    assert [message["content"] for message in fake.bodies[1][1]["messages"]] == ["first", TEXT, "second"]


def test_history_survives_a_reload(page: Page, fake: Fake) -> None:
    send(page, "Where is the cat?")
    press(page, "New chat")
    expect(answers(page)).to_have_count(0)
    send(page, "And the dog?")
    page.reload()
    expect(answers(page).locator(".body")).to_have_text(TEXT)
    assert said(page) == ["And the dog?", TEXT]
    page.get_by_role("link", name="Where is the cat?").click()
    expect(page.locator(".said")).to_have_text("Where is the cat?")
    send(page, "Still there?")
    assert fake.bodies[-1][1]["messages"][0]["content"] == "Where is the cat?"


def test_conversations_are_renamed_and_deleted(page: Page) -> None:
    send(page, "Where is the cat?")
    press(page, "Rename Where is the cat?")
    page.get_by_label("Title").fill("Cats")
    page.get_by_label("Title").press("Enter")
    expect(page.get_by_role("link", name="Cats")).to_be_visible()
    page.reload()
    page.once("dialog", lambda dialog: dialog.dismiss())
    press(page, "Delete Cats")
    expect(answers(page)).to_have_count(1)
    page.once("dialog", lambda dialog: dialog.accept())
    press(page, "Delete Cats")
    expect(page.locator("#list li")).to_have_count(0)
    expect(answers(page)).to_have_count(0)
    page.reload()
    expect(page.locator("#list li")).to_have_count(0)


def test_what_is_said_before_the_page_is_ready_is_answered_where_it_is_seen(fake: Fake, page: Page) -> None:
    """The browser's store opens late; an Enter before that waits, and one more says nothing twice."""
    page.add_init_script(
        """const early = indexedDB.open.bind(indexedDB);
        indexedDB.open = (...named) => {
          const request = early(...named), late = {};
          request.onupgradeneeded = () => late.onupgradeneeded?.();
          request.onsuccess = () => setTimeout(() => late.onsuccess(), 400);
          return Object.defineProperty(late, "result", { get: () => request.result });
        };"""
    )
    page.reload()
    message = page.get_by_label("Message", exact=True)
    message.fill("Where?")
    message.press("Enter")
    message.press("Enter")
    page.wait_for_timeout(900)  # what is shown first may be replaced when the store opens
    expect(answers(page)).to_have_count(1)
    until_over(page)
    expect(page.locator("#list li")).to_have_count(1)
    assert len(fake.bodies) == 1


def test_the_system_prompt_is_sent_and_stays(page: Page, fake: Fake) -> None:
    set_field(page, "System prompt, of this chat and of new ones", "Be brief.")
    send(page, "first")
    page.reload()
    expect(answers(page)).to_have_count(1)
    send(page, "second")
    for _, body in fake.bodies:
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_each_conversation_has_its_own_system_prompt(page: Page, fake: Fake) -> None:
    set_field(page, "System prompt, of this chat and of new ones", "Be brief.")
    send(page, "first")
    press(page, "New chat")
    set_field(page, "System prompt, of this chat and of new ones", "Be long.")
    page.get_by_role("link", name="first").click()
    expect(page.locator(".said")).to_have_text("first")
    set_field(page, "Temperature", "0.1")
    send(page, "second")
    assert fake.bodies[-1][1]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_settings_are_sent_and_stay(page: Page, fake: Fake) -> None:
    press(page, "Settings")
    page.get_by_label("Strategy", exact=True).select_option("mumbler")
    for label, value in (("Temperature", "0.3"), ("Max tokens", "64"), ("Seed", "11"), ("Top k", "20")):
        page.get_by_label(label, exact=True).and_(page.locator("#settings input")).fill(value)
    press(page, "Done")
    page.reload()
    send(page, "Where?")
    expect(answers(page).locator(".note")).to_have_text(
        "3 tokens · 150.0 tokens/s · 1.50 tokens per step · mumbler · lossy · seed 11"
    )
    path, body = fake.bodies[0]
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "parlay-mini",
        "messages": [{"role": "user", "content": "Where?"}],
        "strategy": "mumbler",
        "temperature": 0.3,
        "top_p": 0.9,  # as the model's makers recommend
        "top_k": 20,
        "max_tokens": 64,
        "seed": 11,
        "stream": True,
        "stream_options": {"include_usage": True},
        "explain": True,
    }


def test_a_message_waits_until_the_page_knows_what_the_makers_recommend(page: Page, fake: Fake) -> None:
    fake.ready.clear()
    page.reload()
    begin(page, "Where?")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    assert not fake.bodies
    fake.ready.set()
    until_over(page)
    assert fake.bodies[0][1]["top_p"] == 0.9


def test_without_settings_the_model_and_the_server_decide(page: Page, fake: Fake) -> None:
    send(page, "Where?")
    body = fake.bodies[0][1]
    assert (body["temperature"], body["top_p"]) == (0.6, 0.9)
    assert not body.keys() & {"max_tokens", "seed", "strategy"}
    assert page.locator("#max_tokens").get_attribute("placeholder") == "all that fit (512)"


def test_each_model_offers_its_own_strategies(page: Page, fake: Fake) -> None:
    strategy = page.locator("#strategy")
    assert strategy.locator("option").all_text_contents() == ["the server’s default", "none", "copycat", "mumbler"]
    page.get_by_label("Model").select_option("another/model")
    expect(strategy.locator("option")).to_have_text(["the server’s default", "none"])
    send(page, "Where?")
    assert fake.bodies[0][1]["model"] == "another/model"
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("another/model")


def test_stop_keeps_the_text_and_ends_the_request(page: Page, fake: Fake) -> None:
    begin(page, "for ever")
    expect(answers(page).locator(".body")).to_contain_text("on and on and")
    press(page, "Stop")
    expect(answers(page).locator(".note")).to_contain_text("stopped")
    assert fake.aborted.wait(20)
    written = said(page)
    page.reload()
    expect(answers(page)).to_have_count(1)
    assert said(page) == written


def test_escape_stops(page: Page, fake: Fake) -> None:
    begin(page, "for ever")
    expect(answers(page).locator(".body")).to_contain_text("on and on and")
    page.keyboard.press("Escape")
    expect(answers(page).locator(".note")).to_contain_text("stopped")
    assert fake.aborted.wait(20)


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Page) -> None:
    begin(page, "for ever")
    expect(answers(page).locator(".body")).to_contain_text("on and on and")
    press(page, "New chat")
    expect(answers(page)).to_have_count(0)
    page.get_by_role("link", name="for ever").click()
    expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    before = len(said(page)[1])
    expect(answers(page).locator(".body")).to_have_text(re.compile(f".{{{before + 50},}}"))
    press(page, "Stop")


def test_regenerating_keeps_the_answer_before(page: Page, fake: Fake) -> None:
    send(page, "Where?")
    press(page, "Regenerate")
    until_over(page)
    expect(answers(page).locator(".count")).to_have_text("2/2")
    assert fake.bodies[0][1]["messages"] == fake.bodies[1][1]["messages"]
    press(page, "Earlier version")
    expect(answers(page).locator(".count")).to_have_text("1/2")


def test_an_edited_message_begins_another_branch(page: Page, fake: Fake) -> None:
    send(page, "first")
    send(page, "second")
    page.get_by_role("article", name="You").first.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edited message")
    expect(field).to_be_focused()
    field.fill("another")
    field.press("Enter")
    until_over(page)
    expect(page.locator(".said")).to_have_text(["another"])
    expect(answers(page).locator(".body")).to_have_text([TEXT])
    assert [message["content"] for message in fake.bodies[-1][1]["messages"]] == ["another"]
    press(page, "Earlier version")
    expect(page.locator(".said")).to_have_text(["first", "second"])
    page.reload()
    expect(page.locator(".said")).to_have_text(["first", "second"])


def test_reasoning_is_folded(page: Page) -> None:
    send(page, "think")
    thought = page.get_by_text(THOUGHT)
    expect(thought).to_be_hidden()
    page.get_by_text("Reasoning").click()
    expect(thought).to_be_visible()
    expect(answers(page).locator(".body")).to_have_text(TEXT)


def test_a_model_without_a_template_goes_on_with_the_text(page: Page, fake: Fake) -> None:
    fake.chat = False
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("has no chat template")
    send(page, "The")
    path, body = fake.bodies[0]
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", "The", 512)
    expect(answers(page).locator(".body")).to_have_text(TEXT)


def test_a_refused_request_shows_the_servers_reason(page: Page) -> None:
    press(page, "Settings")
    page.get_by_label("Strategy", exact=True).select_option("copycat")
    expect(page.get_by_text("Copies what came before. Exactness: bits.")).to_be_visible()
    page.get_by_label("Its parameters").fill("k = abc")
    press(page, "Done")
    send(page, "Where?")
    expect(answers(page).get_by_role("alert")).to_have_text("k of copycat must be an int, got 'abc'")
    set_field(page, "Its parameters", "")
    press(page, "Regenerate")
    expect(answers(page).locator(".body")).to_have_text(TEXT)


def test_an_error_in_mid_stream_keeps_what_there_is(page: Page) -> None:
    send(page, "fail")
    expect(answers(page).get_by_role("alert")).to_have_text("The engine lost this request.")
    expect(answers(page).locator(".body")).to_have_text(TEXT)


def test_the_key_is_asked_for_where_there_is_one_and_lives_as_long_as_the_tab(page: Page, fake: Fake) -> None:
    fake.key = "secret"
    page.reload()
    page.locator("#key").fill("secret")
    press(page, "Use this key")
    expect(page.get_by_label("Model")).to_have_value("parlay-mini")
    page.reload()
    send(page, "Where?")
    expect(answers(page).locator(".body")).to_have_text(TEXT)
    kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, JSON.stringify(sessionStorage)]")
    assert ["secret" in text for text in kept] == [False, False, True]


def test_sources_colour_what_was_accepted(page: Page) -> None:
    send(page, "Where?")
    press(page, "Sources")
    runs = page.locator(".run")
    assert runs.all_inner_texts() == ["cat <b>sat</b> ", "the "]
    assert runs.first.get_attribute("title") == "copycat: 2 accepted"
    assert runs.evaluate_all("runs => new Set(runs.map((run) => getComputedStyle(run).backgroundColor)).size") == 2
    expect(page.locator(".tokens")).to_have_text(TEXT)
    expect(page.locator(".legend li")).to_have_count(3)
    expect(page.locator(".steps")).to_contain_text("3 steps: 2.00 tokens in each on average, 3 at most")
    press(page, "Sources")
    expect(page.locator(".tokens")).to_be_hidden()
    page.reload()
    press(page, "Sources")
    expect(runs.first).to_be_visible()


def test_sources_colour_who_wrote_what_where_several_models_do(page: Page) -> None:
    send(page, "together")
    press(page, "Sources")
    runs = page.locator(".run")
    assert runs.all_inner_texts() == ["The cat ", "sits."]
    assert [run.get_attribute("title") for run in runs.all()] == ["large: 2 written", "small: 1 written"]
    expect(page.locator(".legend")).to_contain_text("written by small")


def test_what_a_datastore_gave_is_underlined_and_its_documents_are_listed(page: Page) -> None:
    """Tokens whose probability is mostly the model's own are not."""
    send(page, "quote")
    expect(page.locator(".documents li")).to_have_text(["a.txt: 2 of 3 tokens"])
    press(page, "Sources")
    expect(page.locator(".quoted")).to_have_text(["The ", "cat "])
    assert page.locator(".quoted").first.get_attribute("title") == "a.txt, token 7: 90 % from there"


def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(page: Page, fake: Fake) -> None:
    begin(page, "for ever")
    expect(answers(page).locator(".body")).to_contain_text("on and on and")
    page.once("dialog", lambda dialog: dialog.accept())
    press(page, "Delete for ever")
    assert fake.aborted.wait(20)
    expect(answers(page)).to_have_count(0)
    page.reload()
    expect(page.get_by_label("Model")).to_have_value("parlay-mini")
    expect(page.locator("#list li")).to_have_count(0)


def test_a_title_can_be_written_while_an_answer_is(page: Page) -> None:
    begin(page, "for ever")
    expect(answers(page).locator(".body")).to_contain_text("on and on and")
    press(page, "Rename for ever")
    page.get_by_label("Title").fill("A long")
    page.wait_for_timeout(1800)  # meanwhile the conversation is saved
    page.get_by_label("Title").press_sequentially(" story")
    page.get_by_label("Title").press("Enter")
    expect(page.get_by_role("link", name="A long story")).to_be_visible()
    press(page, "Stop")
    expect(answers(page).locator(".note")).to_contain_text("stopped")
    page.reload()
    expect(page.get_by_role("link", name="A long story")).to_be_visible()
    expect(page).to_have_title("A long story – Parlay")


def test_what_was_chosen_for_an_answer_is_told_and_stays(page: Page) -> None:
    send(page, "first")
    expect(page.locator(".choices")).to_have_count(0)
    send(page, "choose")
    for _ in range(2):
        panel = page.locator(".choices")
        expect(panel).to_have_count(1)
        panel.get_by_text("Choices", exact=True).click()
        expect(panel.locator("tbody tr").last).to_be_visible()
        rows = [[cell.strip() for cell in row.split("\t")] for row in panel.locator("tbody tr").all_inner_texts()]
        assert rows == [
            ["copycat", "3", "1", "2 (1.5)", "2.0 (1.0)"],
            ["magpie", "2", "1 (1 tried)", "1 (0.5)", "0.4 (0.0)"],
        ]
        expect(panel).to_contain_text("taken for: prose · 1 worth most · 1 trial · 1 not worth its cost")
        expect(panel.locator("figcaption")).to_contain_text("3 steps: each bar is a step")
        assert panel.locator("rect:not(.expected)").count() == 3
        page.reload()
