"""`/v1/completions`: what the Python API gives, in OpenAI's shape; prompts of every form; refusals name the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from parlay import RequestOutput, SamplingParams

PROMPT = (
    "Repeat this text exactly: the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on.\n\nThe text:"
)
ALWAYS = "prompt-lookup:k=4,policy=fixed"
Post = Callable[..., Any]
Generate = Callable[..., RequestOutput]


@pytest.mark.parametrize("strategy", ["none", None, "draft-model"])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_the_text_is_that_of_the_python_api_whatever_the_strategy(
    post: Post, generate: Generate, strategy: str | None, temperature: float
) -> None:
    reply = post("completions", prompt=PROMPT, max_tokens=20, temperature=temperature, seed=3, n=2, strategy=strategy)
    plain = generate(PROMPT, SamplingParams(max_tokens=20, temperature=temperature, seed=3, n=2))
    assert [choice["text"] for choice in reply["choices"]] == [sample.text for sample in plain.outputs]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in reply["choices"]] == [out.finish_reason for out in plain.outputs]
    assert reply["parlay"]["seed"] == 3
    assert reply["parlay"]["exactness"] == plain.outputs[0].exactness


def test_a_reply_has_the_fields_of_openai_and_says_what_drafting_did(post: Post) -> None:
    reply = post("completions", prompt=PROMPT, max_tokens=24, temperature=0, strategy=ALWAYS)
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "parlay-mini"
    assert reply["usage"]["completion_tokens"] == 24
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + 24
    speculation = reply["metrics"]["speculative_decoding"]
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    assert (
        sum(place * count for place, count in enumerate(speculation["acceptance_histogram"]))
        == (speculation["num_accepted_draft_tokens"])
    )
    assert reply["parlay"]["accepted_by_source"] == {"prompt-lookup": speculation["num_accepted_draft_tokens"]}
    assert reply["parlay"]["tokens_per_step"] > 1


def test_prompts_may_be_texts_or_ids_one_or_many(post: Post, client: TestClient) -> None:
    ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    wanted = {"max_tokens": 6, "temperature": 0}
    text = post("completions", prompt=PROMPT, **wanted)["choices"][0]["text"]
    assert post("completions", prompt=ids, **wanted)["choices"][0]["text"] == text
    for prompts in ([PROMPT, "Once upon"], [ids, ids[:3]]):
        reply = post("completions", prompt=prompts, n=2, **wanted)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in reply["choices"][:2]] == [text, text]
        assert reply["usage"]["completion_tokens"] == 24


def test_stop_strings_and_parameters_of_other_engines_are_kept_to(post: Post, generate: Generate) -> None:
    fields: dict[str, Any] = {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.2, "min_tokens": 4, "seed": 8}
    reply = post("completions", prompt=PROMPT, max_tokens=16, stop=["the", "zz"], logit_bias={"300": -100}, **fields)
    params = SamplingParams(max_tokens=16, stop=["the", "zz"], logit_bias={300: -100}, **fields)
    plain = generate(PROMPT, params).outputs[0]
    assert reply["choices"][0]["text"] == plain.text
    assert reply["choices"][0]["finish_reason"] == plain.finish_reason


def test_documents_are_drafted_from_and_no_text_depends_on_them(post: Post) -> None:
    wanted = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}
    text = post("completions", **wanted)["choices"][0]["text"]
    reply = post(
        "completions",
        documents=[f"Once upon{text}"],
        store=False,
        strategy=ALWAYS,
        cache_salt="a",
        priority=1,
        **wanted,
    )
    assert reply["choices"][0]["text"] == text
    assert sum(reply["parlay"]["accepted_by_source"].values()) > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mirostat": 2}, "mirostat"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"seed": 2**65}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"stream": True, "echo": True, "logprobs": 1}, "stream"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [4096]}, "prompt"),
    ({"prompt": "word " * 5000}, "prompt"),
    ({"prompt": ["x"] * 289}, "prompt"),  # 32 run and 256 wait at most
    ({"prompt": ["x"] * 73, "n": 4}, "prompt"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
]


@pytest.mark.parametrize(
    ("fields", "field"), REFUSED, ids=[f"{field}-{place}" for place, (_, field) in enumerate(REFUSED)]
)
def test_what_can_not_be_used_is_refused_and_the_field_named(refusal: Post, fields: dict[str, Any], field: str) -> None:
    error = refusal("completions", **{"prompt": PROMPT, **fields})
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "strategy",
    [
        "no-such-strategy",
        "prompt-lookup:k=zero",
        "draft-model:model=parlay-mini-draft",
        "self-draft:bits=4",
        "suffix-decoding:store=outputs.bin",
        "union:of=lookup-decoding(static=bigrams.bin)",
        "json:JSONDecoder",
        "union:of=json:JSONDecoder",
        "union(of=json:JSONDecoder)",
        " json:JSONDecoder",
    ],
)
def test_a_request_can_not_make_the_server_open_files_or_import_code(refusal: Post, strategy: str) -> None:
    assert refusal("completions", prompt=PROMPT, strategy=strategy)["param"] == "strategy"


@pytest.mark.parametrize("strategy", ["frobnicate", "frobnicate:k=2", "union:of=prompt-lookup+frobnicate"])
def test_an_unknown_strategy_is_told_with_the_address_that_lists_them(
    client: TestClient, refusal: Post, strategy: str
) -> None:
    """A client may have no command line; the address is there."""
    error = refusal("completions", prompt=PROMPT, strategy=strategy)
    assert error["message"] == "unknown strategy 'frobnicate': GET /strategies lists them"
    assert "prompt-lookup" in [entry["name"] for entry in client.get("/strategies").json()]
    near = refusal("completions", prompt=PROMPT, strategy="prompt-lokup")
    assert near["message"] == "unknown strategy 'prompt-lokup': did you mean prompt-lookup?"
    parameter = refusal("completions", prompt=PROMPT, strategy="jacobi:zzz=1")
    assert parameter["message"] == "strategy jacobi has no parameter 'zzz': GET /strategies lists them"


@pytest.mark.parametrize(
    ("strategy", "meant"),
    [
        ("union:of=suffix-decoding+prompt-lookup:k=2", "union:of=suffix-decoding+prompt-lookup(k=2)"),
        ("union(of=suffix-decoding+prompt-lookup(k=2))", "union:of=suffix-decoding+prompt-lookup(k=2)"),
        ("prompt-lookup(k=2)", "prompt-lookup:k=2"),
    ],
)
def test_a_strategy_is_understood_as_on_the_command_line(post: Post, strategy: str, meant: str) -> None:
    """A colon inside a strategy may stand before the parameters of another one."""
    assert post("completions", prompt=PROMPT, max_tokens=2, strategy=strategy)["parlay"]["strategy"] == meant


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ("union:of=eagle3:head=x+prompt-lookup", "strategy eagle3: head is set by the server's owner"),
        ("union:of=remote(url=http://127.0.0.1:9)", "strategy remote: url is set by the server's owner"),
        ("prompt-lookup:k=2:3", "strategy prompt-lookup: k must be a whole number, got 2:3"),
        ("union:of=prompt-lokup:k=2", "unknown strategy 'prompt-lokup': did you mean prompt-lookup?"),
        ("prompt-lookup:min_ngram=9,max_ngram=3", "strategy prompt-lookup: min_ngram 9 is more than max_ngram 3"),
        ("union:of=prompt-lookup", "strategy union: of=prompt-lookup must name two or more different drafters"),
        ("datastore", "strategy datastore needs file=PATH"),
        ("denoise:steps=3", "strategy denoise:steps=3: steps is not an option of selector=threshold"),
    ],
)
def test_a_refusal_names_the_field_and_what_is_at_fault_inside_a_strategy(
    refusal: Post, strategy: str, told: str
) -> None:
    error = refusal("completions", prompt=PROMPT, strategy=strategy)
    assert error["message"].startswith(told)
    assert (error["param"], error["code"]) == ("strategy", "invalid_strategy")


@pytest.mark.parametrize(
    "strategy",
    [
        "suffix-decoding:max_tokens=250001",
        "lookup-decoding:remember=10000000",
        "token-recycling:tenants=4096",
        "union:of=prompt-lookup+trie-lookahead(max_tokens=1000000)",
    ],
)
def test_a_request_can_not_make_the_server_keep_more(refusal: Post, strategy: str) -> None:
    assert "at most" in refusal("completions", prompt=PROMPT, strategy=strategy)["message"]


def test_a_request_may_have_the_server_keep_less(post: Post) -> None:
    strategy = "suffix-decoding:max_tokens=2000"
    assert post("completions", prompt=PROMPT, max_tokens=2, strategy=strategy)["parlay"]["strategy"] == strategy


def test_an_unknown_model_is_not_found(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "../etc", "prompt": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_null_is_as_good_as_absent(post: Post) -> None:
    fields = ["n", "stop", "logprobs", "echo", "suffix", "stream", "strategy", "logit_bias", "user", "prompt_embeds"]
    reply = post("completions", prompt="Once", max_tokens=1, **dict.fromkeys(fields))
    assert reply["usage"]["completion_tokens"] == 1
