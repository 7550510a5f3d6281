"""The official client against a running server: chat, streams, log-probabilities, and its classes of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import openai
import pytest
from fastapi import FastAPI

from parlay import RequestOutput, SamplingParams

TEXT = "the quick fox saw the brown dog."
MESSAGES = [{"role": "user", "content": f"Repeat this text exactly.\n\n[text]\n{TEXT}\n[/text]"}]
Serve = Callable[[FastAPI], AbstractContextManager[str]]


@pytest.fixture
def client(make_app: Callable[..., FastAPI], serve: Serve) -> Iterator[openai.OpenAI]:
    with (
        serve(make_app(keys=("secret",))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


def test_an_answer_is_the_one_of_the_python_api(client: openai.OpenAI, generate: Callable[..., RequestOutput]) -> None:
    answer = client.chat.completions.create(
        model="parlay-mini",
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0.8,
        seed=6,
        n=2,
        logprobs=True,
        top_logprobs=2,
        extra_body={"strategy": "prompt-lookup", "top_k": 50},
    )
    plain = generate(MESSAGES, SamplingParams(max_tokens=12, temperature=0.8, seed=6, n=2, logprobs=2, top_k=50))
    assert [choice.message.content for choice in answer.choices] == [sample.text for sample in plain.outputs]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(sample.token_ids) for sample in plain.outputs)
    for choice, sample in zip(answer.choices, plain.outputs, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [entry.logprob for entry in choice.logprobs.content] == [own.logprob for own in sample.logprobs.entries]
    assert answer.model_extra is not None
    assert answer.model_extra["parlay"]["strategy"] == "prompt-lookup"


def test_a_conversation_goes_on_with_the_answer_as_it_came(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="parlay-mini", messages=MESSAGES, max_tokens=4, temperature=0)
    said = first.choices[0].message
    for again in (said, said.model_dump()):
        messages = [*MESSAGES, again, MESSAGES[0]]
        answer = client.chat.completions.create(model="parlay-mini", messages=messages, max_tokens=4)
        assert answer.choices[0].message.role == "assistant"


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    wanted = {"model": "parlay-mini", "messages": MESSAGES, "temperature": 0, "stop": ["brown"]}
    whole = client.chat.completions.create(**wanted)
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with client.chat.completions.stream(**wanted) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == text


def test_completions(client: openai.OpenAI) -> None:
    wanted = {"model": "parlay-mini", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**wanted, echo=True)
    assert whole.choices[0].text.startswith("Once upon a time")
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.token_logprobs is not None
    assert whole.choices[0].logprobs.token_logprobs[0] is None
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**wanted, stream=True))
    assert whole.choices[0].text == "Once upon a time" + streamed


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="other", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        create(model="parlay-mini", messages=MESSAGES, verbosity="high")
    assert refused.value.param == "verbosity"
    with pytest.raises(openai.BadRequestError) as too_long:
        create(model="parlay-mini", messages=[{"role": "user", "content": "word " * 5000}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model="parlay-mini", messages=MESSAGES)


def test_an_error_in_mid_stream_is_raised(make_app: Callable[..., FastAPI], serve: Serve) -> None:
    with serve(make_app(request_timeout=0.3)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        stream = client.completions.create(
            model="parlay-mini",
            prompt="Once",
            max_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True, "strategy": "none"},
        )
        with pytest.raises(openai.APIError, match=r"0\.3 seconds"):
            list(stream)
