"""Log-probabilities over HTTP: bit for bit those of the Python API, in both shapes, with tokens spelled to the byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from parlay import LLM, RequestOutput, SamplingParams
from parlay.aio import AsyncLLM
from parlay.serve.openai.completions import route
from parlay.serve.openai.completions.reply import CompletionReply, CompletionShape, completion_reply
from parlay.serve.protocol.logprobs import NEVER, Speller, finite

PROMPT = "Repeat this: the quick brown fox.\n\nThe text: the quick"
MESSAGES = [{"role": "user", "content": "Repeat this: the quick brown fox, the quick brown dog."}]
Post = Callable[..., Any]
Generate = Callable[..., RequestOutput]


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup", "draft-model"])
def test_of_completions_equal_those_of_the_python_api(post: Post, generate: Generate, strategy: str) -> None:
    reply = post("completions", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3, strategy=strategy)
    told = reply["choices"][0]["logprobs"]
    plain = generate(PROMPT, SamplingParams(max_tokens=12, temperature=0, logprobs=3)).outputs[0]
    assert plain.logprobs is not None
    assert told["token_logprobs"] == [entry.logprob for entry in plain.logprobs.entries]
    assert [sorted(top.values()) for top in told["top_logprobs"]] == [
        sorted(logprob for _, logprob in entry.top) for entry in plain.logprobs.entries
    ]
    text = reply["choices"][0]["text"]
    assert [text[start:][: len(token)] for start, token in zip(told["text_offset"], told["tokens"], strict=True)] == (
        told["tokens"]
    )


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup", "draft-model"])
def test_of_chat_equal_those_of_the_python_api(post: Post, generate: Generate, strategy: str) -> None:
    reply = post(
        "chat/completions",
        messages=MESSAGES,
        max_tokens=10,
        temperature=0.7,
        seed=4,
        logprobs=True,
        top_logprobs=2,
        strategy=strategy,
    )
    plain = generate(MESSAGES, SamplingParams(max_tokens=10, temperature=0.7, seed=4, logprobs=2)).outputs[0]
    assert plain.logprobs is not None
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [entry.logprob for entry in plain.logprobs.entries]
    for entry, own in zip(content, plain.logprobs.entries, strict=True):
        assert [top["logprob"] for top in entry["top_logprobs"]] == [logprob for _, logprob in own.top]
        assert entry["token"].encode() == bytes(entry["bytes"])


@pytest.mark.parametrize(("asked", "given"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 5}, 5)])
def test_as_many_alternatives_come_as_were_asked_for(post: Post, asked: dict[str, int], given: int) -> None:
    reply = post("chat/completions", messages=MESSAGES, max_tokens=2, logprobs=True, **asked)
    assert [len(entry["top_logprobs"]) for entry in reply["choices"][0]["logprobs"]["content"]] == [given, given]


def test_echo_tells_how_likely_the_prompt_was_as_harnesses_ask_it(
    post: Post, client: TestClient, generate: Generate
) -> None:
    """How likelihoods of given continuations are measured: ids in, one token out, echo, one alternative."""
    ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    plain = generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    assert plain.prompt_logprobs is not None
    for most in (0, 1):
        reply = post("completions", prompt=[ids], max_tokens=most, temperature=0, logprobs=1, echo=True)
        (choice,) = reply["choices"]
        told = choice["logprobs"]
        assert choice["text"].startswith(PROMPT)
        assert told["token_logprobs"][: len(ids)] == [
            entry and entry.logprob for entry in plain.prompt_logprobs.entries
        ]
        assert told["top_logprobs"][0] is None
        assert {len(column) for column in told.values()} == {len(ids) + most}
        greedy = [
            max(top.values()) == own
            for top, own in zip(told["top_logprobs"][1:], told["token_logprobs"][1:], strict=True)
        ]
        assert greedy[: len(ids) - 1] == [
            entry.rank == 1 for entry in plain.prompt_logprobs.entries if entry is not None
        ]


def test_parts_of_a_character_are_spelled_in_bytes_and_begin_where_it_does(post: Post) -> None:
    text = "Größe: 日本!"
    told = post("completions", prompt=text, max_tokens=0, logprobs=0, echo=True)["choices"][0]["logprobs"]
    spelled = b""
    for token in told["tokens"]:
        if token.startswith("bytes:"):
            spelled += bytes(int(byte, 16) for byte in token.removeprefix("bytes:").split("\\x")[1:])
        else:
            spelled += token.encode()
    assert spelled.decode() == f"<|endoftext|>{text}"  # every text of this model begins with that token
    assert any(token.startswith("bytes:") for token in told["tokens"])
    whole = [(start, token) for start, token in zip(told["text_offset"], told["tokens"], strict=True) if token in text]
    assert all(text[start:].startswith(token) for start, token in whole)


def test_streamed_log_probabilities_add_up_to_the_whole_ones(post: Post, stream: Post) -> None:
    wanted = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2, "n": 2, "seed": 1}
    whole = post("completions", **wanted)["choices"]
    columns: list[dict[str, list[Any]]] = [{}, {}]
    for chunk in stream("completions", **wanted):
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                columns[choice["index"]].setdefault(name, []).extend(values)
    assert columns == [choice["logprobs"] for choice in whole]


def test_the_logarithm_of_zero_can_be_written_as_json() -> None:
    assert json.dumps(finite(float("-inf")), allow_nan=False) == str(NEVER)


def test_vocabularies_with_byte_tokens_are_spelled_to_the_byte() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<0xE6>": 0, "▁a": 1, "b": 2}, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<s>")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    speller = Speller(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert [speller.bytes_of(token) for token in range(4)] == [b"\xe6", b" a", b"b", b"<s>"]
    assert [speller.text_of(token) for token in range(2)] == ["bytes:\\xe6", " a"]
    assert speller.bytes_of(1000) == b""


def test_every_token_of_the_built_in_model_has_bytes_of_its_own(engine: AsyncLLM) -> None:
    llm: LLM = engine.llm
    speller = Speller(llm.tokenizer)
    size = llm.runner.spec.vocab_size
    assert len({speller.bytes_of(token) for token in range(size)}) == size


def test_the_log_probabilities_of_a_long_prompt_hold_up_nobody(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written in a thread, while the event loop serves others."""
    wrote: list[bool] = []

    def reply(outputs: Sequence[RequestOutput], shape: CompletionShape) -> CompletionReply:
        try:
            wrote.append(asyncio.get_running_loop() is not None)
        except RuntimeError:
            wrote.append(False)
        return completion_reply(outputs, shape)

    monkeypatch.setattr(route, "completion_reply", reply)
    client = TestClient(make_app())
    for words in (1, 300):
        body = {"prompt": "one two three " * words, "max_tokens": 1, "echo": True, "logprobs": 20}
        answer = client.post("/v1/completions", json=body)
        assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) > words
    assert wrote == [True, False]
