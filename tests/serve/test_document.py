"""The OpenAPI document says what the server does: schemathesis tests every operation, with all its checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import schemathesis
from fastapi import FastAPI
from pydantic import BaseModel
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from parlay.aio import AsyncLLM
from parlay.serve.app import create_app
from parlay.serve.errors import ErrorBody, MessageErrorBody, OllamaErrorBody
from parlay.serve.settings import Settings

KEY = "sesame"
ALWAYS_REFUSABLE = {
    "/completion",
    "/apply-template",
    "/infill",
    "/slots/{slot}",
    "/props",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/metrics",
    "/strategies",
    "/choices",
    "/load",
}

GENERATING = ("/v1/completions", "/v1/chat/completions")
MOST_TOKENS = 16
PATIENCE = 120.0
"""Seconds for one request: among them is the largest there may be, of as many prompts as may wait."""
STRATEGIES = ("none", "prompt-lookup", "suffix-decoding", "lookahead")


def ask(
    app: FastAPI,
    examples: int,
    phases: tuple[str, ...],
    *,
    deep: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Counter[tuple[str, int]]:
    """Put right and wrong requests to every operation; how many of each were answered with which status.

    Of all the names that a model might have, next to none are a model's: requests for text end at the lookup. When
    ``deep`` these requests alone are made, about a model that is there. Then what fits the schema may be refused: no
    schema says which fields go together, what a grammar is, or how many tokens a prompt has. ``tell`` hears how far
    it is.

    Raises AssertionError at a wrong answer.
    """
    config = SchemathesisConfig.from_dict(
        {
            "generation": {"max-examples": examples, "deterministic": True},
            "checks": {"positive_data_acceptance": {"enabled": not deep}},
            "request-timeout": PATIENCE,
            "output": {"sanitization": {"enabled": False}},
            "headers": {"Authorization": f"Bearer {KEY}"},
            "phases": {
                phase: {"enabled": phase in phases} for phase in ("examples", "coverage", "fuzzing", "stateful")
            },
        }
    )
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)
    if deep:
        schema = schema.include(path=list(GENERATING))
    answers: Counter[tuple[str, int]] = Counter()
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if isinstance(event, events.ScenarioFinished):
            _check(event)
            tell(
                f"{event.phase.value} {event.label or 'several in a row'}: {len(event.recorder.interactions)} requests"
            )
            for case, interaction in event.recorder.interactions.items():
                assert interaction.response is not None, case
                answers[event.label or "several", interaction.response.status_code] += 1
    return answers


def _go_deep(context: object, case: schemathesis.Case, kwargs: object) -> None:
    """Ask about the model that is there, for few tokens, and mend the commonest conflicts.

    What is of a wrong type stays so.
    """
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "parlay-mini"
    if isinstance(body.get("strategy"), str):
        body["strategy"] = STRATEGIES[len(body["strategy"]) % len(STRATEGIES)]
    if body.get("prompt") == "":
        body["prompt"] = "Once"
    if isinstance(body.get("top_logprobs"), int) and body.get("logprobs") in (None, False):
        body["logprobs"] = True
    if isinstance(body.get("best_of"), int) and body["best_of"] >= 1:
        del body["best_of"]
    for field in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if isinstance(body.get(field), int) and MOST_TOKENS < body[field] < 2**31:
            body[field] = MOST_TOKENS


def _check(event: events.ScenarioFinished) -> None:
    for case, checks in event.recorder.checks.items():
        for check in checks:
            if check.failure_info is not None:
                sent = event.recorder.cases[case].value
                interaction = event.recorder.interactions.get(case)
                answer = interaction.response.content if interaction is not None and interaction.response else b""
                failure = check.failure_info.failure
                told = f"{event.label}: {failure.title}: {failure.message}"
                raise AssertionError(f"{told}\n{sent.as_curl_command()}\n{answer}")


@pytest.fixture
def app(engine: AsyncLLM) -> FastAPI:
    """An app of two models, so that a request that names none ends at the lookup too."""
    return create_app({"parlay-mini": engine, "other": engine}, Settings(keys=(KEY,)))


def test_answers_are_as_documented(app: FastAPI) -> None:
    """Boundary values of every field come in the long form, as phase "coverage"."""
    answers = ask(app, 4, ("fuzzing",))
    assert len({operation for operation, _ in answers}) == sum(map(len, app.openapi()["paths"].values()))


@pytest.mark.slow
def test_answers_are_as_documented_at_length(app: FastAPI, tell: Callable[[str], None]) -> None:
    """An operation without anything to choose has few different requests; what clients do in a row comes on top."""
    answers = ask(app, 100, ("examples", "coverage", "fuzzing", "stateful"), tell=tell)
    asked = Counter({operation: 0 for operation, _ in answers})
    for (operation, _), count in answers.items():
        asked[operation] += count
    assert all(asked[f"POST {path}"] >= 100 for path, methods in app.openapi()["paths"].items() if "post" in methods)


@pytest.mark.slow
def test_generated_answers_are_as_documented_at_length(
    make_app: Callable[..., FastAPI], tell: Callable[[str], None]
) -> None:
    app = make_app(keys=(KEY,), max_tokens=MOST_TOKENS)
    schemathesis.hook("before_call")(_go_deep)
    try:
        answers = ask(app, 300, ("coverage", "fuzzing"), deep=True, tell=tell)
    finally:
        schemathesis.hooks.unregister(_go_deep)
    assert all(answers[f"POST {path}", 200] >= 50 for path in GENERATING), answers


def test_every_operation_says_how_it_fails(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    document = make_app(keys=(KEY,), lora_folder=tmp_path).openapi()
    assert {"ErrorDetail", "MessageErrorDetail"} <= document["components"]["schemas"].keys()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            answers = operation["responses"]
            assert "422" not in answers
            failures = {status for status in answers if status >= "400"}
            assert "500" in failures
            assert ("401" in failures) == (path in ALWAYS_REFUSABLE or path.startswith(("/v1/", "/api/")))
            for status in failures:
                schema = answers[status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": f"#/components/schemas/{error_body(path).__name__}"}


def error_body(path: str) -> type[BaseModel]:
    if path.startswith("/v1/messages"):
        return MessageErrorBody
    return OllamaErrorBody if path.startswith("/api/") else ErrorBody


def test_operations_have_short_names(app: FastAPI) -> None:
    names = [operation["operationId"] for path in app.openapi()["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    assert {"list_models", "tokenize", "detokenize", "health"} <= set(names)
