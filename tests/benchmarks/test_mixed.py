"""Mixed traffic: the same talks at the same times for every strategy, read from streams, and a page that adds up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks.serving import mixed
from benchmarks.serving.mixed_client import Answer, play
from benchmarks.serving.mixed_page import ALONE, CAPACITY, GOODPUT, RATE, page, percentile
from benchmarks.serving.mixed_trace import KINDS, arrivals, trace
from parlay.bench.provenance import provenance
from parlay.bench.records import PLAIN, Cell, Results, Row

SHARED = {"model": "m"}


def test_a_trace_has_each_kind_in_equal_parts_and_is_the_same_each_time() -> None:
    talks = trace(None, 8)
    assert sorted(talk.kind for talk in talks) == sorted([*KINDS, *KINDS])
    assert talks == trace(None, 8)
    assert len({talk.messages[0] for talk in talks if talk.kind == "chat"}) == 1, "chats share their beginning"
    assert all(talk.follow_ups for talk in talks if talk.kind == "chat")
    assert all((talk.schema is not None) == (talk.kind == "calls") for talk in talks)


def test_arrivals_come_at_the_rate_and_differ_by_round() -> None:
    assert arrivals(2000, 4.0, seed=0)[-1] == pytest.approx(500, rel=0.1)
    assert arrivals(9, 4.0, seed=0) == arrivals(9, 4.0, seed=0) != arrivals(9, 4.0, seed=1)


def chunk(text: str, tokens: int) -> dict[str, object]:
    pieces = [["x", "target"]] * tokens
    return {"choices": [{"index": 0, "delta": {"content": text}, "parlay": {"pieces": pieces}}]}


def answered(*texts: str, status: int = 200, cut: bool = False) -> httpx.MockTransport:
    """A server whose answers come in these chunks, of a token each."""

    def reply(request: httpx.Request) -> httpx.Response:
        told = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}, *(chunk(text, 1) for text in texts)]
        usage = [] if cut else [{"choices": [], "usage": {"completion_tokens": len(texts)}}]
        lines = [f"data: {json.dumps(each)}" for each in (*told, *usage)]
        return httpx.Response(status, text="\n\n".join([*lines, "data: [DONE]", ""]))

    return httpx.MockTransport(reply)


def played(transport: httpx.MockTransport, count: int = 4) -> list[Answer]:
    async def run() -> list[Answer]:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await play(client, trace(None, count), SHARED, at_once=2)

    return asyncio.run(run())


def test_every_turn_of_every_talk_is_asked_and_read() -> None:
    answers = played(answered("One", " two", " three"))
    assert [(answer.text, answer.tokens) for answer in answers] == [("One two three", 3)] * 5
    assert sorted(answer.turn for answer in answers if answer.kind == "chat") == [0, 1]
    assert all(0 < answer.first <= answer.ended for answer in answers)


@pytest.mark.parametrize(
    ("transport", "told"), [(answered(status=400), "is refused"), (answered("One", cut=True), "has no whole answer")]
)
def test_an_answer_that_is_refused_or_cut_short_is_an_error(transport: httpx.MockTransport, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        played(transport)


def row(load: str, strategy: str, first: Sequence[float], part: str = "", **values: float) -> Row:
    cell = Cell(part=part, model="m", strategy=strategy, workload=load)
    itl = tuple(each / 10 for each in first)
    return Row(
        cell=cell,
        requests=len(first),
        tokens=100,
        seconds=10.0,
        ttft=tuple(first),
        itl=itl,
        same=2,
        of=2,
        values=values,
    )


def test_the_page_tells_what_was_measured_of_each_load_and_strategy() -> None:
    rows = [
        row("closed loop", PLAIN, (), CAPACITY, **{RATE: 2.5, ALONE: 0.02}),
        row("0.3", PLAIN, (0.1, 0.3), **{GOODPUT: 0.5}),
        row("0.3", "auto", (0.1, 0.2), **{GOODPUT: 0.75}),
        row("0.3", PLAIN, (0.1,), "edits"),
        row("0.3", "auto", (0.05,), "edits"),
        Row(cell=Cell(model="m", strategy="eagle3", workload="0.3"), error="no head"),
    ]
    text = page(provenance("command"), rows)
    assert "serves 2.50 talks a second; alone it takes 20.0 ms" in text
    assert "| 0.3 | `auto` | 1 | 100.0 / 200.0 | 10.0 / 20.0 | 10.0 | 0.75 | 2/2 |" in text
    assert "| 0.3 | `auto` | - | - | 5.0 | - |" in text
    assert "no head" in text


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(each) for each in range(100, 0, -1)]
    assert (percentile(values, 50), percentile(values, 95), percentile([7.0], 95)) == (50.0, 95.0, 7.0)


def test_a_run_goes_on_with_the_rounds_that_a_file_lacks(tmp_path: Path) -> None:
    options = mixed.parse(["--model", "m", "--strategies", "none", "auto", "--loads", "0.5", "--rounds", "2"])
    results = Results(tmp_path / "mixed.jsonl", {})
    assert len(mixed.lacking(options, results)) == 4
    results.add([row("0.5", PLAIN, (0.1,))])
    assert [(each.number, each.cell.strategy) for each in mixed.lacking(options, results)] == [
        (0, "auto"),
        (1, "none"),
        (1, "auto"),
    ]
