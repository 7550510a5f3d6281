"""The soak over all endpoints passes in small, and it would notice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from fastapi import FastAPI

from benchmarks.serving.endpoints import ENDPOINTS
from benchmarks.serving.soak_endpoints import Soak, cases, soak

Serve = Callable[[FastAPI], AbstractContextManager[str]]


def test_the_soak_in_small_keeps_every_promise(make_app: Callable[..., FastAPI], serve: Serve) -> None:
    with serve(make_app()) as url:
        result = soak(url.removeprefix("http://"), 12, 0, 4)
    assert result["passed"], result["wrong"]
    assert result["fates"] == {"completed": 10, "cancelled": 1, "refused": 1}
    assert result["samples_equal_to_plain"] == result["samples_exact"] > 5


def test_what_differs_or_is_lost_is_told(make_app: Callable[..., FastAPI], serve: Serve) -> None:
    (case,) = (one for one in cases(9, 0, ENDPOINTS[:1], ["none"]) if one.kind == "failing")
    with serve(make_app()) as url:
        run = Soak(url.removeprefix("http://"), frozenset({None}), {case.key: "something else"})
        run.run([case], 1)
        assert "differs" in run.tally.wrong.pop()
        run.known.clear()
        run.run([case], 1)
    assert run.tally.fates == {"completed": 1, "lost": 1}
