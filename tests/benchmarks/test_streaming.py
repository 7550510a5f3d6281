"""Streaming through the server, held against the Python API."""

from __future__ import annotations

import pytest

from benchmarks.serving import streaming
from benchmarks.serving.over_api import API, CLIENT, STREAMED, WHOLE, OverHttp
from benchmarks.serving.served import served
from parlay import LLM
from parlay.bench.provenance import provenance
from parlay.bench.records import Cell, Row
from parlay.bench.wave import Ask


def row(way: str, decoding: float, request: float) -> Row:
    return Row(
        cell=Cell(engine=way, model="m", strategy="none", workload="prose"),
        requests=1,
        tokens=100,
        decode_tokens=99,
        decode_seconds=decoding,
        seconds=request,
        same=1,
        of=1,
        values={CLIENT: 0.002},
    )


def test_decoding_counts_without_the_prompt_and_requests_with_it() -> None:
    rows = [row(API, 0.99, 1.0), row(STREAMED, 1.1, 1.25), row(WHOLE, 0.0, 2.0)]
    text = streaming.page(provenance("command"), rows)
    assert "| none | server, streamed | 90 (90-90) | 0.90 (0.90-0.90) | 0.80 (0.80-0.80) | 1/1 | 20 |" in text
    assert "| none | server, whole |  |  | 0.50 (0.50-0.50) | 1/1 | 20 |" in text


def test_both_ways_of_asking_give_one_text_and_an_error_is_told() -> None:
    with served("parlay-mini") as url, LLM("parlay-mini") as llm:
        address = url.removeprefix("http://").rstrip("/")
        ask = Ask(ids=(5, 6, 7), most=24)
        texts = {OverHttp(llm, address, "parlay-mini", streamed=each).ask("none", ask).text for each in (True, False)}
        assert len(texts) == 1
        with pytest.raises(ValueError, match="there is no model 'no-such' here"):
            OverHttp(llm, address, "no-such", streamed=True).ask("none", ask)
