"""The OpenAPI document says what the server does: schemathesis tests every operation, with all its checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from parlay.serve.errors import ErrorBody

KEY = "sesame"
ALWAYS_REFUSABLE = {"/v1/models", "/v1/models/{model}", "/tokenize", "/detokenize", "/metrics", "/strategies"}


def ask(app: FastAPI, examples: int, phases: tuple[str, ...]) -> Counter[str]:
    """Put right and wrong requests to every operation; how many each got. Raises AssertionError at a wrong answer."""
    config = SchemathesisConfig.from_dict(
        {
            "generation": {"max-examples": examples, "deterministic": True},
            "headers": {"Authorization": f"Bearer {KEY}"},
            "phases": {
                phase: {"enabled": phase in phases} for phase in ("examples", "coverage", "fuzzing", "stateful")
            },
        }
    )
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=config)
    asked: Counter[str] = Counter()
    for event in from_schema(schema).execute():
        assert not isinstance(event, events.NonFatalError | events.FatalError), event
        if isinstance(event, events.ScenarioFinished):
            asked[event.label or "several"] += len(event.recorder.cases)
            _check(event)
    return asked


def _check(event: events.ScenarioFinished) -> None:
    for case, checks in event.recorder.checks.items():
        for check in checks:
            if check.failure_info is not None:
                sent = event.recorder.cases[case].value
                raise AssertionError(f"{event.label}: {check.failure_info.failure.message}\n{sent.as_curl_command()}")


@pytest.fixture
def app(make_app: Callable[..., FastAPI]) -> FastAPI:
    return make_app(keys=(KEY,))


def test_answers_are_as_documented(app: FastAPI) -> None:
    asked = ask(app, 5, ("coverage", "fuzzing"))
    assert len(asked) == sum(map(len, app.openapi()["paths"].values()))


@pytest.mark.slow
def test_answers_are_as_documented_at_length(app: FastAPI) -> None:
    """An operation without anything to choose has few different requests; what clients do in a row comes on top."""
    asked = ask(app, 100, ("examples", "coverage", "fuzzing", "stateful"))
    assert all(asked[f"POST {path}"] >= 100 for path, methods in app.openapi()["paths"].items() if "post" in methods)


def test_every_operation_says_how_it_fails(app: FastAPI) -> None:
    for path, methods in app.openapi()["paths"].items():
        for operation in methods.values():
            answers = operation["responses"]
            assert "422" not in answers
            failures = {status for status in answers if status >= "400"}
            assert "500" in failures
            assert ("401" in failures) == (path in ALWAYS_REFUSABLE or path.startswith("/v1/"))
            for status in failures:
                schema = answers[status]["content"]["application/json"]["schema"]
                assert schema == {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}


def test_operations_have_short_names(app: FastAPI) -> None:
    names = [operation["operationId"] for path in app.openapi()["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    assert {"list_models", "tokenize", "detokenize", "health"} <= set(names)
