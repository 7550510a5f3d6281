"""Traffic: files of requests, mixtures by rule, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from parlay.bench.plan.kinds import kinds
from parlay.simulate.mixtures import KINDS, mixture, read_mixture, timed
from parlay.simulate.traces import read_trace
from parlay.simulate.traffic import Arrival, Traffic, within

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
LOG = """\
{"time": "2026-11-27T01:00:09.000+00:00", "level": "info", "logger": "parlay", "message": "listening"}
{"time": "2026-11-27T01:00:20.000+00:00", "level": "info", "logger": "parlay", "message": "x", "request": \
{"prompt_tokens": 30, "cached_tokens": 16, "completion_tokens": 7, "seconds": 4.0}}
{"time": "2026-11-27T01:00:21.000+00:00", "level": "info", "logger": "parlay", "message": "x", "request": \
{"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": 9, "seconds": 9.5}}
{"time": "2026-11-27T01:00:22.000+00:00", "level": "info", "logger": "parlay", "message": "x", "request": \
{"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": 0, "seconds": 1.0}}
"""


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azures_table_is_read_as_it_is_published(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, AZURE)).arrivals
    assert first == Arrival(0.0, 374, 44)
    assert second.seconds == pytest.approx(4.314579)
    assert second[1:3] == (396, 109)


def test_a_table_may_name_kinds_and_sessions_whose_last_text_is_found_again(tmp_path: Path) -> None:
    text = "time,prompt_tokens,output_tokens,kind,session\n0,10,5,chat,a\n1,9,5,chat,b\n2.5,40,5,chat,a\n3,2,1,chat,a\n"
    arrivals = read_trace(written(tmp_path, text)).arrivals
    assert [each.history for each in arrivals] == [0, 0, 15, 0]
    assert {each.kind for each in arrivals} == {"chat"}


def test_the_log_of_a_server_has_requests_when_they_end(tmp_path: Path) -> None:
    traffic = read_trace(written(tmp_path, LOG, "log.jsonl"))
    assert list(traffic.arrivals) == [Arrival(0.0, 20, 9), Arrival(4.5, 30, 7, common=16)]
    assert "1 requests without tokens" in traffic.notes[0]


def test_json_lines_are_a_table_too(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 5, "output_length": 2}\n'
    text = line % 3 + "\n" + line % 4
    assert [each.seconds for each in read_trace(written(tmp_path, text, "trace.jsonl")).arrivals] == [0.0, 1.0]


_LOGGED = (
    '{"time": 9, "level": "", "logger": "", "message": "", "request": '
    '{"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "seconds": %s}}\n'
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("time,prompt_tokens\n1,2\n", r"no column for the output \(GeneratedTokens or"),
        ("time,prompt_tokens,output_tokens\n", "has no requests"),
        ("time,prompt_tokens,output_tokens\n5,1,1\n4,1,1\n", "line 3: the time goes back by 1 s: sort"),
        ("time,prompt_tokens,output_tokens\n-5,1,1\n", "line 2: the time '-5' must be"),
        ("time,prompt_tokens,output_tokens\nnan,1,1\n", "line 2: the time 'nan' must be"),
        ("time,prompt_tokens,output_tokens\nnoon,1,1\n", "line 2: 'noon' is not a time"),
        ("time,prompt_tokens,output_tokens\n1,0,1\n", "line 2: prompt_tokens '0' must be a whole number from 1 on"),
        ("time,prompt_tokens,output_tokens\n1,3,many\n", "line 2: output_tokens 'many' must be"),
        ("time,prompt_tokens,output_tokens\n1,3\n", "line 2: GeneratedTokens is missing"),
        ('{"time": 1}\n', "no column for the prompt"),
        ('{"time": 1, "prompt_tokens": 2, "output_tokens": 2}\n[]\n', "line 2: not an object"),
        ('{"time": 1, "prompt_tokens": 2, "output_tokens": 2}\n{\n', "line 2: not JSON"),
        ('{"time": 1, "prompt_tokens": Infinity, "output_tokens": 2}\n', "can't be read"),
        ('{"time": 1%s, "prompt_tokens": 2, "output_tokens": 2}\n' % ("0" * 400), "can't be read"),
        ("time,prompt_tokens,output_tokens\n1,3,%s\n" % ("1" * 200_000), "can't be read"),
        ('{"time": "x", "level": "", "logger": "", "message": ""}\n', "has no finished request"),
        ('{"time": 1, "prompt_tokens": 2.5, "output_tokens": 2}\n', "prompt_tokens 2.5 must be a whole number"),
        ('{"time": 1, "prompt_tokens": 2, "output_tokens": true}\n', "output_tokens True must be a whole number"),
        *((_LOGGED % number, "not a request of the log of parlay serve") for number in ("NaN", "Infinity", "-1")),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        read_trace(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't read"):
        read_trace(tmp_path / "none.csv")


def test_what_is_longer_than_the_context_is_refused_dropped_or_cut() -> None:
    traffic = Traffic("t", [Arrival(0.0, 10, 5), Arrival(1.0, 100, 50)])
    with pytest.raises(ValueError, match="request 2 has 100 tokens and an answer of 50, but the context is 60"):
        within(traffic, 60, 1 << 20, "refuse")
    assert list(within(traffic, 60, 1 << 20, "drop").arrivals) == [Arrival(0.0, 10, 5)]
    assert within(traffic, 60, 1 << 20, "cut").arrivals[1] == Arrival(1.0, 10, 50)
    assert "cache of a replica" in within(traffic, 1 << 20, 60, "drop").notes[0]
    with pytest.raises(ValueError, match="no request that fits"):
        within(traffic, 8, 1 << 20, "drop")
    with pytest.raises(ValueError, match="no request that fits"):  # none has room for a prompt and an answer
        within(traffic, 1, 1 << 20, "cut")


def test_a_mixture_is_the_same_for_a_seed_and_has_its_rate_and_shares() -> None:
    shares = {"chat": 3.0, "code": 1.0}
    traffic = mixture(shares, rate=5.0, seconds=2000, seed=3)
    assert traffic.arrivals == mixture(shares, rate=5.0, seconds=2000, seed=3).arrivals
    assert traffic.arrivals != mixture(shares, rate=5.0, seconds=2000, seed=4).arrivals
    assert len(traffic.arrivals) == pytest.approx(10_000, rel=0.15)
    assert sum(each.kind == "code" for each in traffic.arrivals) / len(traffic.arrivals) == pytest.approx(
        0.25, abs=0.06
    )
    times = [each.seconds for each in traffic.arrivals]
    assert times == sorted(times)
    assert any(each.history for each in traffic.arrivals)
    assert all(each.history < each.prompt for each in traffic.arrivals)


def test_the_rate_swings_over_a_day() -> None:
    traffic = mixture({"code": 1.0}, rate=0.1, seconds=86_400, seed=1, daily=0.8)
    noon = sum(abs(each.seconds - 43_200) < 10_800 for each in traffic.arrivals)
    night = sum(abs(each.seconds - 43_200) > 32_400 for each in traffic.arrivals)
    assert noon > 3 * night


def test_lengths_without_times_get_random_ones() -> None:
    lengths = Traffic("t", [Arrival(0.0, 10, 5)] * 500)
    assert timed(lengths, 2.0, 1).span == pytest.approx(250, rel=0.2)


@pytest.mark.parametrize("text", ["chat=0", "poems", "chat=", "chat=x", ""])
def test_a_mixture_of_nothing_known_is_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="--mixture"):
        read_mixture(text)


def test_kinds_of_mixtures_are_those_that_acceptance_was_measured_on() -> None:
    assert {kind.name for kind in KINDS.values()} <= set(kinds())
