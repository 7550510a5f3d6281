"""The pages of a gateway's measurements, and the questions that its streams ask."""

from __future__ import annotations

from benchmarks.serving import kills
from benchmarks.serving.fleet import question
from benchmarks.serving.replicas import page

HEADER = {
    "machine": {"cpu": "a cpu", "cores": 2, "capability": "x", "memory_gib": 8, "system": "s"},
    "threads": 2,
    "environment": {},
    "versions": {"parlay": "0"},
    "commit": "c",
    "date": "d",
    "command": "m",
}


def test_the_pages_show_what_was_lost() -> None:
    soak = {"kills": 3, "streams": 48, "lost": 1, "different": 2, "resumed": 20, "retried": 4, "broken": 5}
    row = {"replicas": 2, "tokens": 9, **soak, "seconds": 9, "commit": "c1"}
    assert "| 3 | 48 | 1 | 2 | 20 | 4 | 5 | 9 |" in kills.page(HEADER, [row])
    cuts = {"part": "cuts", "cuts": 4, "streams": 5, "lost": 0, "different": 0, "resumed": 3}
    assert "| 4 | 5 | 0 | 0 | 3 |" in page(HEADER, [cuts])


def test_the_streams_are_of_every_kind() -> None:
    asked = [question(number, 64) for number in range(16)]
    assert {path for path, _ in asked} == {"/v1/completions", "/v1/chat/completions"}
    bodies = [body for _, body in asked]
    for field in ("n", "logprobs", "temperature", "presence_penalty"):
        assert any(body.get(field) is not None for body in bodies), field
    assert len({body["seed"] for body in bodies}) == 16
