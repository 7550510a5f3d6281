"""`parlay simulate`, and `parlay plan --devices`, which stands on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parlay.cli.plan_devices_page import command
from parlay.simulate.splits import Split
from tests.cli.conftest import Cli

ON_L4 = ("--model", "llama-3.2-1b", "--device", "l4")
CHATS = ("--mixture", "chat=2,code=1", "--rate", "2", "--duration", "60")


def test_the_page_has_a_line_for_each_fleet(cli: Cli) -> None:
    found = cli(
        "simulate",
        *ON_L4,
        *CHATS,
        "--replicas",
        "1,2",
        "--strategy",
        "none",
        "--strategy",
        "prompt-lookup",
        "--price",
        "0.8",
    )
    assert found.code == 0, found.err
    for words in ("113 requests in 59 s", "tokens/dollar", "whole p50", "joules/token", "The requests are random"):
        assert words in found.out
    lines = [line.split() for line in found.out.splitlines()]
    assert sum(line[:2] in (["1", "none"], ["2", "none"], ["1", "prompt-lookup"]) for line in lines) >= 6
    assert "Chance that a token drafted by prompt-lookup is right: " in found.out


def test_what_chooses_is_as_right_as_what_is_better_on_the_same_texts(cli: Cli) -> None:
    """Copies of references were measured on easy texts alone, on which copies of the prompt are right more often."""
    words = ("simulate", *ON_L4, "--mixture", "documents", "--rate", "2", "--duration", "5", "--strategy")
    lookup = cli(*words, "prompt-lookup").out.partition("prompt-lookup is right: ")[2].splitlines()[0]
    for both in ("auto:of=prompt-lookup+reference-copy", "auto:of=reference-copy+prompt-lookup"):
        assert f"is right: {lookup}\n" in cli(*words, both).out


def test_the_json_says_all_and_a_seed_repeats_it(cli: Cli) -> None:
    words = ("simulate", *ON_L4, *CHATS, "--seed", "3", "--json")
    one, again = cli(*words), cli(*words)
    assert one.out == again.out
    document = json.loads(one.out)
    (fleet,) = document["fleets"]
    assert document["modelled"] is True
    assert fleet["requests"] == document["traffic"]["requests"] > 50
    assert fleet["unfinished"] == 0
    assert 0 < fleet["first_token"]["p50"] <= fleet["first_token"]["p99"]


def test_a_log_says_how_many_replicas_it_needs(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "\n".join(f"{place * 0.1:.1f},800,100" for place in range(300))
    trace.write_text(f"time,prompt_tokens,output_tokens\n{rows}\n")
    words = ("simulate", "--trace", str(trace), *ON_L4, "--ttft-goal", "1", "--tpot-goal", "0.05")
    found = cli(*words, "--replicas", "1,2,4,8")
    assert "the fewest replicas with 99% of the requests in time" in found.out
    assert "take more replicas" in cli(*words[:-4], "--ttft-goal", "0.0001").out


def test_a_trace_without_kinds_has_one_acceptance_for_all(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time,prompt_tokens,output_tokens\n0,80,10\n")
    words = ("simulate", "--trace", str(trace), *ON_L4, "--strategy", "prompt-lookup", "--acceptance")
    assert cli(*words, "0.6").code == 0
    told = "--acceptance code: the traffic has no kinds of work: leave out code"
    assert cli(*words, "code=0.6").err == f"parlay: error: {told}\n"


def test_a_failure_after_the_end_is_told(cli: Cli) -> None:
    found = cli("simulate", *ON_L4, *CHATS, "--kill", "1e9")
    assert "1: no replica died before the last answer ended." in found.out
    assert "deaths" not in found.out
    assert "no replica died" not in cli("simulate", *ON_L4, *CHATS, "--kill", "30").out


def test_recorded_traffic_has_lengths_by_the_tokenizer_and_times_by_the_rate(cli: Cli, tmp_path: Path) -> None:
    record = tmp_path / "traffic.jsonl"
    record.write_text('{"prompt": "one two three", "answer": "four five six", "framed": true}\n' * 5)
    words = ("simulate", "--trace", str(record), "--model", "parlay-mini", "--device", "l4")
    assert "add --rate, the number of requests per second" in cli(*words).err
    found = cli(*words, "--rate", "1")
    assert "5 requests in" in found.out
    assert "Times are random: 1 requests/s" in found.out


def test_an_autoscaled_fleet_that_loses_servers(cli: Cli) -> None:
    words = (
        "simulate",
        *ON_L4,
        *CHATS,
        "--autoscale",
        "1:4",
        "--mtbf",
        "50",
        "--kill",
        "20",
        "--on-failure",
        "continue",
    )
    found = cli(*words)
    assert found.code == 0, found.err
    assert "1-4 (mean" in found.out
    assert "requests failed over" in found.out


def test_a_load_that_does_not_drain_is_said_and_ends(cli: Cli) -> None:
    found = cli(
        "simulate",
        "--model",
        "llama-3.1-70b",
        "--quantize",
        "q4_k_m",
        "--device",
        "a100",
        *CHATS[:2],
        "--rate",
        "200",
        "--duration",
        "60",
    )
    assert "THE LOAD DOES NOT DRAIN" in found.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no requests are given: add --trace FILE, or --mixture"),
        (("--trace", "x.csv", "--mixture", "chat"), "no requests are given"),
        (("--mixture", "chat"), "--mixture needs --rate"),
        (("--mixture", "poems", "--rate", "1"), "there is no kind 'poems'"),
        ((*CHATS, "--replicas", "0"), "--replicas must be whole numbers between 1 and 100000, joined by commas, got 0"),
        ((*CHATS, "--routing", "lest-loaded"), "did you mean least-loaded"),
        ((*CHATS, "--autoscale", "4"), "as in 1:8"),
        ((*CHATS, "--rate", "-1"), "--rate must be above 0 and below 1e+09, got -1"),
        ((*CHATS, "--rate", "1e6", "--duration", "1e6"), "make 1e+12 requests: at most 10,000,000 are simulated"),
        ((*CHATS, "--learned-costs"), "has learned no step costs of llama-3.2-1b"),
        ((*CHATS, "--price", "nan"), "--price must be above 0 and below 1e+09, got nan"),
        ((*CHATS, "--down-time", "-1"), "--down-time must be at least 0, got -1"),
        (
            (*CHATS, "--strategy", "prompt-lookup", "--acceptance", "2"),
            "--acceptance must be a probability, as in 0.6, or KIND=0.6, got 2",
        ),
        ((*CHATS, "--strategy", "prompt-lookup", "--acceptance", "cod=0.5"), "did you mean code"),
        ((*CHATS, "--strategy", "prompt-lookup", "--acceptance", "code=0.5"), "has no rate for the kind 'open chat'"),
        (("--trace", "/nowhere/trace.csv"), "can't read /nowhere/trace.csv"),
        ((*CHATS, "--memory", "1B"), "leave no memory for a cache"),
        ((*CHATS, "--max-model-len", "100"), "but the context is 100: give --too-long drop or cut"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(cli: Cli, words: tuple[str, ...], message: str) -> None:
    found = cli("simulate", *ON_L4, *words)
    assert found.code == 2
    assert message in found.err
    assert found.err.count("\n") == 1 or "joules are not known" in found.err


def test_a_trace_that_is_not_there_is_told_before_a_model_is_fetched_or_measured(cli: Cli) -> None:
    result = cli("simulate", "--trace", "/nowhere/trace.csv")
    assert (result.code, result.err) == (2, "parlay: error: can't read /nowhere/trace.csv: No such file or directory\n")


def test_a_plan_for_several_devices_says_which_split_and_why(cli: Cli) -> None:
    words = ("plan", "--model", "llama-3.1-70b", "--device", "h100", "--devices", "4", *CHATS)
    found = cli(*words, "--link", "300:5")
    assert found.code == 0, found.err
    assert "4 x one device: weights of 141." in found.out
    assert "--tensor-parallel 2 --pipeline-parallel 2" in found.out
    assert "GB/s and 5 us, as --link says" in found.out
    document = json.loads(cli(*words, "--json").out)
    assert sum(each["best"] for each in document["splits"]) == 1
    slow = cli(*words, "--link", "0.001:100000").out
    assert "best: 2 x pipeline 2" in slow
    assert "DOES NOT DRAIN" in slow


def test_a_small_model_is_best_replicated_under_load(cli: Cli) -> None:
    words = ("plan", *ON_L4, "--devices", "4", "--mixture", "chat", "--rate", "40", "--duration", "30")
    found = cli(*words, "--link", "5:50", "--strategy", "prompt-lookup", "--acceptance", "0.3")
    assert "best: 4 x one device" in found.out
    assert "run: parlay serve llama-3.2-1b --strategy prompt-lookup, on each of 4 groups of 1 device" in found.out


def test_a_drafter_apart_runs_beside_its_server(cli: Cli) -> None:
    words = ("plan", *ON_L4, "--devices", "2", "--mixture", "chat", "--rate", "0.2", "--duration", "60")
    draft = ("--strategy", "draft-model", "--draft-model", "smollm2-360m", "--acceptance", "0.8")
    assert "1 x drafter apart" in cli(*words, *draft).out
    split = Split(drafter=True)
    assert command("large", split, "draft-model", "small").endswith(
        "beside parlay serve --drafter-only small --port 8001"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--devices", "0", *CHATS), "--devices must be a whole number between 1 and 1024, or auto, got 0"),
        (("--devices", "2"), "no requests are given"),
        (
            ("--devices", "2", *CHATS, "--link", "fast"),
            "--link must be gigabytes per second and microseconds, as in 64:10, got fast",
        ),
        (CHATS, "work only with --devices"),
        (
            ("--devices", "2", *CHATS, "--strategy", "none", "--strategy", "auto"),
            "--devices needs exactly one strategy",
        ),
    ],
)
def test_mistakes_about_devices_are_one_line(cli: Cli, words: tuple[str, ...], message: str) -> None:
    found = cli("plan", *ON_L4, *words)
    assert found.code == 2
    assert message in found.err
    assert found.err.count("\n") == 1
