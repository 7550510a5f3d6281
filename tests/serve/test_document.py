"""The OpenAPI document says what the server does: schemathesis asks every operation for what it claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings

from parlay.serve.errors import ErrorBody


@pytest.fixture(scope="session")
def app(engine: Any) -> FastAPI:
    from parlay.serve.app import create_app

    return create_app({"parlay-mini": engine})


def ask(app: FastAPI, examples: int) -> int:
    """Put generated requests, right and wrong ones, to each operation and check each answer; how many there were."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    asked = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
            def check(case: schemathesis.Case) -> None:
                nonlocal asked
                asked += 1
                case.call_and_validate()

            check()
    return asked
