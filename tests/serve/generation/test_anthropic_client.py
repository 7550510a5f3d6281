"""`/v1/messages` as Anthropic's own client sees it, and by the shapes on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM

if TYPE_CHECKING:
    from anthropic import Anthropic

PROMPT = "Repeat this line: the ferry leaves at ten past seven."
TOOL: dict[str, Any] = {
    "name": "set_lamp",
    "description": "Switch a lamp.",
    "input_schema": {
        "type": "object",
        "properties": {"lamp": {"enum": ["desk", "door"]}, "on": {"type": "boolean"}},
        "required": ["lamp", "on"],
        "additionalProperties": False,
    },
}
SAID: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def claude(
    make_app: Callable[..., FastAPI], serve: Callable[[FastAPI], AbstractContextManager[str]]
) -> Iterator[Anthropic]:
    with serve(make_app(keys=("sesame",))) as url:
        from anthropic import Anthropic  # here, for it loads much

        yield Anthropic(base_url=url, api_key="sesame", max_retries=0)


def ask(claude: Anthropic, temperature: float = 0, **more: Any) -> Any:
    """The newest client has no argument for the temperature."""
    return claude.messages.create(
        **{"model": "parlay-mini", "max_tokens": 24, "messages": SAID, **more}, extra_body={"temperature": temperature}
    )


GREEDY: dict[str, Any] = {"model": "parlay-mini", "extra_body": {"temperature": 0}}


def events(client: TestClient, **more: Any) -> list[dict[str, Any]]:
    body = {"model": "parlay-mini", "max_tokens": 24, "temperature": 0, "messages": SAID, "stream": True, **more}
    told = client.post("/v1/messages", json=body)
    assert told.status_code == 200, told.text
    found = []
    for frame in told.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_an_answer_is_a_message(claude: Anthropic) -> None:
    reply = ask(claude)
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "parlay-mini")
    (block,) = reply.content
    assert block.type == "text"
    assert reply.usage.output_tokens > 0
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == count(claude)
    assert reply.stop_reason in ("end_turn", "max_tokens")


def count(claude: Anthropic, **more: Any) -> int:
    return claude.messages.count_tokens(**{"model": "parlay-mini", "messages": SAID, **more}).input_tokens


def test_the_text_is_that_of_a_chat_completion(client: TestClient) -> None:
    body = {"messages": SAID, "max_tokens": 24, "temperature": 0}
    ours = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    for strategy in ("none", "prompt-lookup"):
        reply = client.post("/v1/messages", json={**body, "strategy": strategy}).json()
        assert "".join(block["text"] for block in reply["content"]) == ours
        assert reply["parlay"]["strategy"] == strategy


def test_a_stream_has_the_text_of_the_whole_answer(claude: Anthropic) -> None:
    whole = ask(claude)
    with claude.messages.stream(**GREEDY, max_tokens=24, messages=SAID) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_events_come_in_anthropics_order(client: TestClient) -> None:
    kinds = [event["type"] for event in events(client)]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}


def test_system_is_text_or_blocks_and_counts(claude: Anthropic) -> None:
    bare = count(claude)
    told = count(claude, system="Speak like a pirate.")
    assert told > bare
    assert count(claude, system=[{"type": "text", "text": "Speak like a pirate."}]) == told
    assert ask(claude, system="Speak like a pirate.").content


def test_a_document_that_is_text_stands_in_the_prompt(claude: Anthropic) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "The ferry leaves."}
    blocks = {"type": "content", "content": [{"type": "text", "text": "The ferry leaves."}]}
    ask_of: dict[str, Any] = {"type": "text", "text": "When?"}
    spelled = count(claude, messages=[{"role": "user", "content": "Times\n\nThe ferry leaves.\n\nWhen?"}])
    for source in (plain, blocks):
        document: dict[str, Any] = {"type": "document", "source": source, "title": "Times"}
        assert count(claude, messages=[{"role": "user", "content": [document, ask_of]}]) == spelled


def test_a_prompt_is_only_read_where_no_token_is_wanted(claude: Anthropic) -> None:
    reply = ask(claude, max_tokens=0)
    assert (reply.content, reply.stop_reason, reply.usage.output_tokens) == ([], "max_tokens", 0)


def test_a_stop_sequence_ends_the_answer_and_is_named(claude: Anthropic) -> None:
    whole = ask(claude).content[0].text
    stop = whole[4:7]
    reply = ask(claude, stop_sequences=[stop, "never"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == whole[: whole.index(stop)]
    assert ask(claude, max_tokens=1).stop_reason == "max_tokens"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_lamp"}])
def test_a_tool_that_must_be_called_is_called_with_valid_input(claude: Anthropic, choice: dict[str, str]) -> None:
    said = [{"role": "user", "content": "Switch the lamp at the door on."}]
    reply = ask(claude, messages=said, tools=[TOOL], tool_choice=choice, max_tokens=256)
    (call,) = reply.content
    assert (call.type, call.name, reply.stop_reason) == ("tool_use", "set_lamp", "tool_use")
    assert call.input["lamp"] in ("desk", "door")
    assert isinstance(call.input["on"], bool)
    with claude.messages.stream(**GREEDY, messages=said, tools=[TOOL], tool_choice=choice, max_tokens=256) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].input == call.input


def test_a_call_and_its_result_go_back_to_the_model(claude: Anthropic) -> None:
    said = [
        {"role": "user", "content": "Switch the lamp at the door on."},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I will."},
                {"type": "tool_use", "id": "toolu_1", "name": "set_lamp", "input": {"lamp": "door", "on": True}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "done"}]},
                {"type": "text", "text": "Thanks. Is it on?"},
            ],
        },
    ]
    assert ask(claude, messages=said, tools=[TOOL]).content
    assert count(claude, messages=said, tools=[TOOL]) > count(claude, messages=said[:1], tools=[TOOL])


def test_the_assistants_last_words_are_gone_on_with(claude: Anthropic) -> None:
    """A prefilled answer: the model goes on with it, so its prompt ends there and begins no new answer."""
    begun = [*SAID, {"role": "assistant", "content": "the ferry leaves"}]
    whole = [*begun, {"role": "user", "content": "go on"}]
    assert count(claude) < count(claude, messages=begun) < count(claude, messages=whole)
    assert ask(claude, messages=begun).content


def test_instructions_stand_among_the_messages_too(claude: Anthropic) -> None:
    first: Any = {"role": "system", "content": "Be brief."}
    more: Any = {"role": "system", "content": [{"type": "text", "text": "In English."}]}
    reply = ask(claude, system="Be brief.")
    assert ask(claude, messages=[first, *SAID]).content[0].text == reply.content[0].text
    assert count(claude, messages=[more, *SAID], system="Be brief.") == count(claude, messages=[first, more, *SAID])
    assert count(claude, messages=[first, *SAID, more]) > count(claude, messages=[first, *SAID])


def test_a_thread_is_refused_by_the_code_that_makes_the_client_send_all_of_it(client: TestClient) -> None:
    """Its tool runner begins a thread unasked, and would send what is new alone after that."""
    body = {"max_tokens": 8, "messages": SAID}
    assert client.post("/v1/messages", json={**body, "thread": None}).status_code == 200
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        reply = client.post("/v1/messages", json={**body, "thread": thread})
        assert reply.status_code == 400
        assert reply.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert "details" not in client.post("/v1/messages", json={**body, "top_k": "x"}).json()["error"]


def test_an_answer_keeps_to_a_schema(claude: Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"north": {"type": "boolean"}},
        "required": ["north"],
        "additionalProperties": False,
    }
    reply = ask(claude, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=64)
    assert isinstance(json.loads(reply.content[0].text)["north"], bool)


def test_the_models_have_what_the_client_reads_of_them(claude: Anthropic, engine: AsyncLLM) -> None:
    page = claude.models.list()
    (model,) = page.data
    assert (model.id, model.display_name, model.type) == ("parlay-mini", "parlay-mini", "model")
    assert model.created_at.timestamp() > 0
    assert model.max_input_tokens == engine.llm.engine.max_context
    assert (page.has_more, page.first_id, page.last_id) == (False, "parlay-mini", "parlay-mini")
    assert claude.models.retrieve("parlay-mini") == model


def test_errors_are_anthropics(claude: Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(claude, model="gpt-9")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as wrong:
        ask(claude, temperature=7)
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    assert "temperature" in wrong.value.body["error"]["message"]
    with pytest.raises(anthropic.AuthenticationError):
        ask(anthropic.Anthropic(base_url=str(claude.base_url), api_key="wrong", max_retries=0))


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
REFUSED = {
    "a document in PDF": ({"messages": [{"role": "user", "content": [PDF]}]}, "messages[0].content[0].source"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    "an image as instructions": ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0]"),
    "a tool of Anthropic's": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    "no tools to choose from": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "no such tool": ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "x"),
    "a server of tools": ({"mcp_servers": [{"url": "http://x", "name": "x", "type": "url"}]}, "mcp_servers"),
    "a vote, which chats take": ({"vote": {}}, "vote is for /v1/chat/completions or /v1/completions: send it there"),
    "no messages": ({"messages": []}, "messages"),
    "no length": ({"max_tokens": None}, "max_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_path(client: TestClient, case: str) -> None:
    more, named = REFUSED[case]
    reply = client.post("/v1/messages", json={"max_tokens": 8, "messages": SAID, **more})
    assert reply.status_code == 400
    assert reply.json()["type"] == "error"
    assert named in reply.json()["error"]["message"]


def test_what_cannot_matter_is_taken_and_named(client: TestClient) -> None:
    text = {"type": "text", "text": PROMPT, "cache_control": {"type": "ephemeral"}}
    more = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": [text]}], **more}
    reply = client.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x"})
    assert reply.status_code == 200
    named = reply.headers["parlay-ignored"]
    for path in ("messages[0].content[0].cache_control", "metadata", "service_tier", "thinking.budget_tokens"):
        assert path in named
