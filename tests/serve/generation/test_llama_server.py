"""llama-server's own API, as its editors and other clients ask it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from parlay import LLM
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.models.tokenizers.plain import PlainTokenizer
from parlay.serve.app import create_app
from parlay.serve.protocol.fill_in_the_middle import Gap
from parlay.serve.settings import InfillOrder, Settings
from tests.serve.conftest import Shared

PROMPT = "Repeat this line: the ferry leaves at ten past seven."
GREEDY = {"temperature": 0, "n_predict": 12}
MARKS = {"<|system|>": "<|fim_prefix|>", "<|user|>": "<|fim_suffix|>", "<|assistant|>": "<|fim_middle|>"}
GAP = {"input_prefix": "def add(a, b):\n", "prompt": "    return (", "input_suffix": "\nprint(add(1, 2))\n"}
EDITOR = {
    **GAP,
    "input_extra": [{"filename": "notes.txt", "text": "seven ferries", "time": [1, 2]}],
    "n_predict": 12,
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60_000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached", "nothing"],
}


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


@pytest.fixture(scope="module")
def filler() -> Iterator[Shared]:
    """The built-in model with marks of fill-in-the-middle in place of its own."""
    text = load_tokenizer(resolve("parlay-mini")).backend_tokenizer.to_str()
    for own, mark in MARKS.items():
        text = text.replace(own, mark)
    tokenizer = PlainTokenizer(Tokenizer.from_str(text), {"eos_token": "<|endoftext|>"})
    engine = Shared(LLM("parlay-mini", tokenizer=tokenizer))
    yield engine
    asyncio.run(engine.end())


def editor(filler: Shared, order: InfillOrder = "psm") -> TestClient:
    return TestClient(create_app({"mini": filler}, Settings(infill_order=order)))


def ids(filler: Shared, *parts: str) -> list[int]:
    """Prefix, suffix and what is written, with the marks before them."""
    assert filler.llm.tokenizer is not None
    encode = filler.llm.tokenizer.encode
    return [
        token
        for mark, part in zip(MARKS.values(), parts, strict=True)
        for token in (*encode(mark, add_special_tokens=False), *encode(part, add_special_tokens=False))
    ]


def test_the_seed_that_clients_send_for_none_draws_one(client: TestClient) -> None:
    seeds = {
        client.post("/completion", json={"prompt": PROMPT, "n_predict": 1, "seed": each}).json()["generation_settings"][
            "seed"
        ]
        for each in (-1, 2**32 - 1)
    }
    assert not seeds & {-1, 2**32 - 1}


def test_a_completion_has_the_text_of_openais_api(client: TestClient) -> None:
    usual = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12, "temperature": 0}).json()
    reply = client.post("/completion", json={"prompt": PROMPT, **GREEDY, "return_tokens": True}).json()
    assert reply["content"] == usual["choices"][0]["text"]
    assert len(reply["tokens"]) == reply["tokens_predicted"] == reply["timings"]["predicted_n"]
    assert (reply["stop"], reply["stop_type"], reply["stopping_word"]) == (True, "limit", "")
    assert reply["generation_settings"]["n_predict"] == 12
    both = client.post("/completion", json={"prompt": [PROMPT, "Once"], **GREEDY}).json()
    assert [one["stop"] for one in both] == [True, True]
    assert both[0]["content"] == reply["content"]
    assert [one["index"] for one in both] == [0, 1]


def test_a_stream_has_the_same_text_and_ends_with_the_facts(client: TestClient) -> None:
    whole = client.post("/completion", json={"prompt": PROMPT, **GREEDY}).json()
    told = events(client.post("/completion", json={"prompt": PROMPT, **GREEDY, "stream": True}).text)
    assert "".join(one["content"] for one in told) == whole["content"]
    assert [one["stop"] for one in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_a_stop_text_is_named(client: TestClient) -> None:
    whole = client.post("/completion", json={"prompt": PROMPT, **GREEDY}).json()["content"]
    stop = whole[3:6]
    reply = client.post("/completion", json={"prompt": PROMPT, **GREEDY, "stop": [stop]}).json()
    assert reply["content"] == whole[: whole.index(stop)]
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", stop)


def test_samplers_that_are_left_out_have_no_effect(client: TestClient) -> None:
    """And ``infill`` takes the likeliest token, so an editor gets the same text for the same file."""
    greedy = client.post("/completion", json={"prompt": PROMPT, **GREEDY}).json()
    body = {"prompt": PROMPT, "n_predict": 12, "top_k": 40, "samplers": ["top_k", "infill"]}
    assert client.post("/completion", json=body).json()["content"] == greedy["content"]
    settings = client.post("/completion", json={**body, "samplers": ["top_p", "dry"]})
    assert settings.json()["generation_settings"]["top_k"] == 0
    assert settings.headers["parlay-ignored"] == "samplers"
    usual = client.post("/completion", json={"prompt": PROMPT, "n_predict": 1}).json()["generation_settings"]
    assert [usual[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.8, 40, 0.95, 0.05]


def test_no_tokens_are_wanted_where_the_prompt_is_only_read(client: TestClient) -> None:
    text = PROMPT * 8
    reply = client.post("/completion", json={"prompt": text, "n_predict": 0}).json()
    assert (reply["content"], reply["tokens_predicted"]) == ("", 0)
    later = client.post("/completion", json={"prompt": text, **GREEDY}).json()
    assert later["timings"]["cache_n"] > later["timings"]["prompt_n"]


@pytest.mark.parametrize(
    "field",
    [{"n_probs": 3}, {"mirostat": 2}, {"n_cmpl": 2}, {"n": 2}, {"logit_bias": [[1]]}, {"prompt": []}, {"lora": [{}]}],
)
def test_what_would_change_the_answer_is_refused_in_one_line(client: TestClient, field: dict[str, Any]) -> None:
    reply = client.post("/completion", json={"prompt": PROMPT, **GREEDY, **field})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert next(iter(field)) in error["message"]
    assert "\n" not in error["message"]


def test_a_bias_in_pairs_is_that_of_an_object(client: TestClient) -> None:
    first = client.post("/completion", json={"prompt": PROMPT, **GREEDY, "return_tokens": True}).json()["tokens"][0]
    never = {"prompt": PROMPT, **GREEDY, "return_tokens": True, "logit_bias": [[first, False]]}
    assert client.post("/completion", json=never).json()["tokens"][0] != first


def test_an_editors_request_is_answered_with_the_fields_that_it_names(filler: Shared) -> None:
    reply = editor(filler).post("/infill", json=EDITOR)
    assert reply.json().keys() == {"content", "prompt_n", "predicted_n", "truncated", "tokens_cached"}
    assert reply.headers["parlay-ignored"].split(", ") == [
        *("n_indent", "cache_prompt", "t_max_prompt_ms"),
        "input_extra[0].time",
    ]
    told = events(editor(filler).post("/infill", json={**EDITOR, "stream": True, "response_fields": None}).text)
    assert "".join(one["content"] for one in told) == reply.json()["content"]


@pytest.mark.parametrize("order", get_args(InfillOrder))
def test_the_text_before_the_cursor_is_cut_as_the_server_is_told(filler: Shared, order: InfillOrder) -> None:
    """The prompt that the model reads is that of token ids in this order."""
    prefix, written, suffix = GAP["input_prefix"], GAP["prompt"], GAP["input_suffix"]
    parts = {
        "psm": (prefix + written, suffix, ""),
        "line": (prefix, suffix, written),
        "spm": ("", suffix, prefix + written),
    }[order]
    client = editor(filler, order)
    expected = client.post("/completion", json={"prompt": ids(filler, *parts), **GREEDY}).json()
    reply = client.post("/infill", json={**GAP, **GREEDY}).json()
    assert (reply["content"], reply["tokens_evaluated"]) == (expected["content"], expected["tokens_evaluated"])
    usual = {"prompt": prefix + written, "suffix": suffix, "max_tokens": 12, "temperature": 0}
    assert client.post("/v1/completions", json=usual).json()["choices"][0]["text"] == expected["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_word_behind_the_suffix_is_gone_on_with(filler: Shared, stream: bool) -> None:
    """The prompt ends before it, and the answer is held to begin with it: half a word has other tokens than a whole."""
    prefix, suffix = GAP["input_prefix"], GAP["input_suffix"]
    held = {"prompt": ids(filler, prefix, suffix, "   "), **GREEDY, "structured_outputs": {"regex": " ret(?s:.*)"}}
    expected = editor(filler).post("/completion", json=held).json()["content"]
    reply = editor(filler, "line").post("/infill", json={**GAP, **GREEDY, "prompt": "    ret", "stream": stream})
    text = "".join(one["content"] for one in events(reply.text)) if stream else reply.json()["content"]
    assert f" ret{text}".startswith(expected), "the tokens of the word come on top of the limit"


def test_a_keystroke_reads_neither_prefix_nor_suffix_anew(filler: Shared) -> None:
    client, gap = editor(filler, "line"), {**GAP, "input_suffix": GAP["input_suffix"] * 8}
    client.post("/infill", json={**gap, **GREEDY})
    later = client.post("/infill", json={**gap, **GREEDY, "prompt": f"{gap['prompt']} a"}).json()
    assert later["timings"]["prompt_n"] < 8 < later["timings"]["cache_n"]


def test_a_cut_keeps_the_text_before_the_cursor() -> None:
    gap = Gap("one\ntwo", "after", " three")
    cuts = {order: gap.cut(order) for order in get_args(InfillOrder)}
    assert {order: (cut.prefix, cut.written) for order, cut in cuts.items()} == {
        "psm": ("one\ntwo three", ""),
        "line": ("one\n", "two three"),
        "spm": ("", "one\ntwo three"),
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("order", ["line", "spm"])
def test_limits_and_stops_apply_to_what_is_new(filler: Shared, order: InfillOrder, stream: bool) -> None:
    """The answer begins with the word before the cursor, which the client has: it takes nothing of the limit, no stop
    is found in it, and neither its text nor its tokens are told."""
    client, word = editor(filler, order), "a_name_of_many_tokens_xyz"
    body = {**GAP, **GREEDY, "n_predict": 6, "prompt": f"    {word}", "return_tokens": True, "stream": stream}

    def ask(**fields: Any) -> tuple[str, list[int], dict[str, Any]]:
        reply = client.post("/infill", json={**body, **fields})
        told = events(reply.text) if stream else [reply.json()]
        return "".join(one["content"] for one in told), [id for one in told for id in one["tokens"]], told[-1]

    content, tokens, last = ask()
    assert len(content) > 4
    assert 0 < len(tokens) == last["tokens_predicted"] <= 7
    assert filler.llm.tokenizer is not None
    assert filler.llm.tokenizer.decode(tokens, skip_special_tokens=True).endswith(content)
    assert ask(stop=["name_of"])[:2] == (content, tokens)
    stopped, _, last = ask(stop=[content[2:4]])
    assert stopped == content[: content.index(content[2:4])]
    assert last["stopping_word"] == content[2:4]


def test_time_is_up_when_a_line_has_ended(filler: Shared) -> None:
    """Not before: half a line is of no use. Texts are the beginning of what there would be."""
    client = editor(filler)
    body = {"prompt": PROMPT, "temperature": 0, "n_predict": 200, "ignore_eos": True}
    whole = client.post("/completion", json=body).json()["content"]
    cut = client.post("/completion", json={**body, "t_max_predict_ms": 0.001}).json()
    assert whole.startswith(cut["content"])
    assert ("\n" in cut["content"]) == ("\n" in whole)
    assert cut["stop_type"] == "limit"


def test_a_model_without_the_marks_says_so_in_one_line(client: TestClient) -> None:
    reply = client.post("/infill", json={**GAP, **GREEDY})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "input_suffix"
    assert "no fill-in-the-middle tokens" in reply.json()["error"]["message"]


def test_infill_asks_for_the_text_around_the_cursor(filler: Shared) -> None:
    reply = editor(filler).post("/infill", json={})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "input_prefix"


def test_a_bound_on_reuse_that_nobody_allowed_is_named(filler: Shared) -> None:
    reply = editor(filler).post("/infill", json={**EDITOR, "n_cache_reuse": 64})
    assert "n_cache_reuse" in reply.headers["parlay-ignored"].split(", ")
    usual = editor(filler).post("/infill", json={**EDITOR, "n_cache_reuse": 0})
    assert "n_cache_reuse" not in usual.headers.get("parlay-ignored", "")


def test_prefixes_are_written_to_the_servers_own_file(client: TestClient, tmp_path: Path) -> None:
    """Whatever the slot is, of those that there are: prefixes are everybody's. One line says how to get a file."""
    reply = client.post("/slots/0?action=save", json={"filename": "mine"})
    assert (reply.status_code, "--prefix-cache" in reply.json()["error"]["message"]) == (400, True)
    engine = Shared(LLM("parlay-mini", prefix_cache=tmp_path / "prefixes.kv"))
    try:
        own = TestClient(create_app({"mini": engine}, Settings()))
        own.post("/completion", json={"prompt": PROMPT, **GREEDY})
        saved = own.post("/slots/3?action=save").json()
        assert (saved["id_slot"], saved["filename"]) == (3, "prefixes.kv")
        assert saved["n_saved"] > 0
        assert saved["n_written"] == (tmp_path / "prefixes.kv").stat().st_size
        for wrong in (
            own.post("/slots/0?action=save", json={"filename": "../other"}),
            own.post("/slots/0?action=restore"),
            own.post("/slots/x?action=save"),
            *(own.post(f"/slots/{slot}?action=save") for slot in (-1, 100_000)),
        ):
            assert wrong.status_code == 400
        assert "Invalid slot ID 100000: this server has slots 0 to" in wrong.json()["error"]["message"]
    finally:
        asyncio.run(engine.end())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]},
    ],
)
def test_a_conversation_can_be_seen_as_the_model_reads_it(client: TestClient, more: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Name a colour."}], **more}
    prompt = client.post("/apply-template", json=body).json()["prompt"]
    assert "Name a colour." in prompt
    assert ('"now"' in prompt) is ("tools" in more)
    answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 8, "temperature": 0}).json()
    again = client.post("/completion", json={"prompt": prompt, "n_predict": 8, "temperature": 0}).json()
    assert again["tokens_evaluated"] == answer["usage"]["prompt_tokens"]
    if "tools" not in more:  # with tools, an answer that begins with { is held to a call
        assert again["content"] == answer["choices"][0]["message"]["content"]


def test_a_conversation_that_no_template_takes_is_refused(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "hello there"}], "truncate_prompt_tokens": 3}
    assert "truncate_prompt_tokens" in client.post("/apply-template", json=body).headers["parlay-ignored"]
    wrong = client.post("/apply-template", json={"messages": [{"role": "user", "content": 5}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[0].content")


def test_clients_find_what_they_look_for_at_the_start(client: TestClient) -> None:
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] > 0
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert (props["model_path"], props["is_sleeping"]) == ("parlay-mini", False)
    assert client.get("/v1/health").json() == client.get("/health").json() == {"status": "ok"}
    content = client.post("/tokenize", json={"content": "caf\xe9 \U0001f600"}).json()["tokens"]
    pieces = client.post("/tokenize", json={"content": "caf\xe9 \U0001f600", "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == content
    assert client.post("/detokenize", json={"tokens": content}).json()["content"] == "caf\xe9 \U0001f600"
