"""What routers learn outlives them in a file: by machine, model and owner, and never at the price of a request."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from parlay import LLM, SamplingParams
from parlay.cost.measured import ROWS, MeasuredCost
from parlay.llm.request_options import RequestOptions
from parlay.llm.router_file import FORMAT, RouterFileEntry, RouterMemory, entries, forget, is_here, memory_of, place
from parlay.models.fetch.resolving import resolve
from parlay.router.arms import Arm
from parlay.router.router import Router
from parlay.router.saved_state import KeptArm, NoMemory
from parlay.types import Exactness, KeptCost, RunnerSpec
from tests.router.simulated_arms import Machine, SimulatedArm, TableCost

SPEC = RunnerSpec("parlay-mini", 1000, 1024, "tree", Exactness.BITS, 64, 2, "cpu", "float32", "")
HEAD = SimulatedArm(rate=lambda length: 0.6, step_seconds=0.2, node_seconds=0.05, opening_seconds=1.0, most=8)


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


POOR = replace(HEAD, rate=lambda length: 0.1)


def learned(*arms: SimulatedArm) -> dict[str, KeptArm]:
    machine = Machine(arms or (HEAD,), seed=9)
    for number in range(2):
        machine.decode(200, first=number, kind="prose")
    return machine.router.kept()


def remember(owner: str = "", model: str = "parlay-mini", spec: RunnerSpec = SPEC) -> RouterMemory:
    memory = RouterMemory(model, spec, "")
    memory.keep(owner, learned())
    memory.write()
    return memory


def test_what_was_learned_is_there_again() -> None:
    memory = remember()
    known = RouterMemory("parlay-mini", SPEC, "").recall("")
    assert known == learned()
    router = Router(TableCost(), [Arm("0", 8)], known)
    assert router.kept() == learned(), "numbers are the same to the last bit"
    assert memory.recall("another") == {}


def test_what_a_drafter_costs_is_known_beside_a_step_of_this_process() -> None:
    """One that ran while the machine was busy kept seconds that are too long for one that starts while it is idle."""
    known = learned()
    slow = {name: replace(arm, row=arm.row * 3) for name, arm in known.items()}
    (kept,) = Router(TableCost(), [Arm("0", 8)], slow).kept().values()
    (was,) = known.values()
    assert kept.row == was.row
    assert kept.reading == pytest.approx([each / 3 for each in was.reading])
    count, nodes, squares, *seconds = kept.seconds
    assert (count, nodes, squares) == was.seconds[:3]
    assert seconds == pytest.approx([each / 3 for each in was.seconds[3:]])


def learned_cost(seconds: float = 0.001) -> KeptCost:
    cost = MeasuredCost()
    for _ in range(100):
        cost.record(1, 100, seconds)
    return cost.kept()


def test_what_steps_cost_is_there_again_with_drafters_or_without() -> None:
    memory = remember()
    memory.keep_cost(learned_cost)
    memory.write()
    again = RouterMemory("parlay-mini", SPEC, "")
    assert again.cost() == learned_cost()
    assert again.recall("") == learned()
    another = RouterMemory("parlay-mini-draft", SPEC, "")
    assert another.cost() == {}
    another.keep_cost(lambda: learned_cost(0.002))
    another.write()
    assert RouterMemory("parlay-mini-draft", SPEC, "").cost() == learned_cost(0.002)
    assert RouterMemory("parlay-mini", SPEC, "").cost() == learned_cost()


def test_what_owners_taught_apart_leaves_the_cost_of_steps_as_it_is() -> None:
    memory = RouterMemory("parlay-mini", SPEC, "", apart=True)
    memory.keep_cost(learned_cost)
    memory.keep("somebody", learned())
    memory.write()
    later = RouterMemory("parlay-mini", SPEC, "", apart=True)
    later.keep("somebody", learned(POOR))
    later.write()
    assert RouterMemory("parlay-mini", SPEC, "").cost() == learned_cost()
    assert RouterMemory("parlay-mini", SPEC, "").recall("") == {}


def test_a_router_that_remembers_need_not_try_what_does_not_pay() -> None:
    known = learned(POOR, HEAD)
    fresh = told = 0.0
    for seed in range(6):
        fresh += Machine((POOR, HEAD), seed=seed).decode(60, kind="prose").seconds
        machine = Machine((POOR, HEAD), seed=seed)
        machine.router = Router(machine.cost, [Arm(str(number), HEAD.most) for number in range(2)], known)
        told += machine.decode(60, kind="prose").seconds
    assert told < 0.97 * fresh


def test_another_model_or_machine_has_a_memory_of_its_own() -> None:
    remember()
    assert RouterMemory("parlay-mini-draft", SPEC, "").recall("") == {}
    assert RouterMemory("parlay-mini", replace(SPEC, dtype="bfloat16"), "").recall("") == {}
    assert RouterMemory("parlay-mini", SPEC, "int8").recall("") == {}
    told = json.loads(place().read_text())["entries"][0]
    assert told["machine"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": 2}',
        b'{"format": 1, "sha256": "", "entries": []}',
        b'{"format": 2, "sha256": "x", "entries": []}',
        b"[" * 100_000,
        b" " * (5 << 20),
    ],
)
def test_a_file_that_can_not_be_used_is_left_out_with_one_line_and_written_anew(
    content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    place().parent.mkdir()
    place().write_bytes(content)
    check_left_out_and_written_anew(caplog)


def test_a_sound_file_of_an_earlier_format_is_left_out_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    remember()
    said = json.loads(place().read_text())
    assert said["entries"], "its checksum is right too"
    place().write_text(json.dumps(said | {"format": FORMAT - 1}))
    check_left_out_and_written_anew(caplog)
    assert f"format {FORMAT - 1}, and this version reads {FORMAT}" in caplog.records[0].getMessage()


def check_left_out_and_written_anew(caplog: pytest.LogCaptureFixture) -> None:
    memory = RouterMemory("parlay-mini", SPEC, "")
    with caplog.at_level(logging.WARNING):
        assert memory.recall("") == {}
        assert memory.recall("another") == {}
        memory.keep("", learned())
        memory.write()
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert RouterMemory("parlay-mini", SPEC, "").recall("") == learned()


def test_a_pipe_in_place_of_the_file_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    place().parent.mkdir()
    os.mkfifo(place())
    check_left_out_and_written_anew(caplog)


def test_a_folder_in_place_of_the_file_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It can't be replaced either: a line says so."""
    place().mkdir(parents=True)
    memory = RouterMemory("parlay-mini", SPEC, "")
    for _ in range(2):
        assert memory.recall("") in ({}, learned())
        memory.keep("", learned())
        memory.write()
    assert ["can't read" in each.getMessage() for each in caplog.records] == [True, False]
    assert "can't write" in caplog.records[1].getMessage()


def test_any_changed_byte_is_noticed() -> None:
    remember()
    whole = place().read_bytes()
    for at in range(0, len(whole), 97):
        place().write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert RouterMemory("parlay-mini", SPEC, "").recall("") in ({}, learned())


def test_numbers_that_no_router_learned_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """As from a file that somebody has written by hand."""
    (kept,) = learned().values()
    for wrong in (
        replace(kept, record=(1.0, 2.0, 0.0, 0.0, 0.0)),
        replace(kept, calibration=(1.0,)),
        replace(kept, seconds=(float("nan"),) * 5),
        replace(kept, gain=-1.0),
        replace(kept, kinds={"prose": ()}),
    ):
        caplog.clear()
        router = Router(TableCost(), [Arm("0", 8)], {"0": wrong})
        assert router.kept() == {}
        assert len(caplog.records) == 1


def test_it_stays_small_and_holds_no_text_and_no_key() -> None:
    memory, arms = RouterMemory("parlay-mini", SPEC, ""), learned()
    for number in range(70):
        memory.keep(f"key-{number}", arms)
        memory.write()
    assert len(entries()) == 64
    assert place().stat().st_size < 400_000
    assert "key-" not in place().read_text()
    assert place().stat().st_mode & 0o077 == 0, "nobody else may read it"


@pytest.mark.parametrize("owner", ["../../evil", "/evil", "..", "a" * 5000, "\0"])
def test_an_owner_whatever_it_is_called_is_no_path(owner: str, tmp_path: Path) -> None:
    remember(owner)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [Path("parlay"), Path("parlay/router.json")]
    assert owner not in place().read_text()
    assert RouterMemory("parlay-mini", SPEC, "").recall(owner) == learned()
    assert RouterMemory("parlay-mini", SPEC, "").recall("") == {}


def test_one_that_can_not_be_written_costs_one_line_in_the_log_and_is_written_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that is full, or read-only."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    memory = remember()
    memory.write()
    memory.keep("another", learned(POOR))
    memory.write()
    assert [record.getMessage() for record in caplog.records if "can't write" in record.getMessage()] != []
    assert len(caplog.records) == 1
    file.unlink()
    memory.write()
    assert len(entries()) == 2


def test_it_is_written_while_the_model_is_in_use_but_not_for_each_request() -> None:
    memory = RouterMemory("parlay-mini", SPEC, "", every=0.01)
    memory.keep("", learned())
    deadline = time.monotonic() + 600
    while not place().exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert RouterMemory("parlay-mini", SPEC, "").recall("") == learned()
    memory = RouterMemory("parlay-mini", SPEC, "")
    before = place().read_bytes()
    memory.keep("", learned(POOR))
    assert place().read_bytes() == before
    assert memory.recall("") == learned(POOR), "what is not written yet is known all the same"
    memory.write()


def test_two_models_that_close_together_lose_nothing() -> None:
    memories = [RouterMemory("parlay-mini", replace(SPEC, dtype=f"type{number}"), "") for number in range(8)]
    for memory in memories:
        memory.keep("", learned())
    threads = [threading.Thread(target=memory.write) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entries()) == 8


def test_it_can_be_forgotten_by_model() -> None:
    remember()
    remember(model="parlay-mini-draft", spec=replace(SPEC, name="parlay-mini-draft"))
    assert forget("parlay-mini") == 1
    assert [each.model for each in entries()] == ["parlay-mini-draft"]
    assert forget() == 1
    assert forget() == 0
    assert not place().exists()


def test_nothing_is_kept_where_that_is_wanted_or_there_is_no_name() -> None:
    assert memory_of("parlay-mini", SPEC, "", "off") == NoMemory()
    assert memory_of(object(), SPEC, "", "per-key") == NoMemory(apart=True)
    with pytest.raises(ValueError, match="router_memory='always': choose one of shared, per-key, off"):
        memory_of("parlay-mini", SPEC, "", "always")  # type: ignore[arg-type]


def test_an_llm_knows_what_steps_cost_from_the_last_one_whatever_its_strategy() -> None:
    """Kept costs say that many rows take a thousand times as long as they do, which no machine measures anew."""
    with LLM("parlay-mini", strategy="none") as llm:
        decode(llm, "")
        spec = llm.runner.spec
    (entry,) = entries()
    assert not entry.arms
    (context, (level, *numbers)), *_ = entry.cost.items()
    slow = [1000 * each if rows >= 32 else each for rows, each in zip(ROWS, numbers, strict=False)]
    often = [100.0] * len(ROWS)  # each was measured, so none is a guess that moves along with its neighbours
    memory = RouterMemory("parlay-mini", spec, "")
    memory.keep_cost(lambda: {context: (level, *slow, *often, *often, 0.0)})
    memory.write()
    with LLM("parlay-mini", strategy="none") as llm:
        assert llm.engine.cost.forward(64, 100) > 100 * llm.engine.cost.forward(1, 100)
    with LLM("parlay-mini", strategy="none", router_memory="off") as llm:
        assert llm.engine.cost.forward(64, 100) <= 64.001 * llm.engine.cost.forward(1, 100), "rows are in proportion"


def decode(llm: LLM, owner: str) -> None:
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    job = llm.job("one two three one two three one two three one two", params, RequestOptions(owner=owner))
    llm.add(job)
    while not llm.engine.idle:
        llm.engine.step()


def kept_of(owner: str) -> list[RouterFileEntry]:
    found = RouterMemory(str(resolve("parlay-mini")), SPEC, "")._of(owner).owner
    return [each for each in entries() if each.owner == found]


def test_keys_that_are_apart_never_learn_from_each_other() -> None:
    with LLM("parlay-mini", strategy="auto:of=prompt-lookup", router_memory="per-key") as llm:
        decode(llm, "one")
        decode(llm, "one")
        decode(llm, "two")
    (one,), (two,) = kept_of("one"), kept_of("two")
    assert [entry.arms for entry in kept_of("")] == [{}], "of both together only what steps cost"
    assert one.arms != two.arms
    with LLM("parlay-mini", strategy="auto:of=prompt-lookup", router_memory="per-key") as llm:
        assert taught(known_of(llm, "one")) == taught(one.arms)
        assert known_of(llm, "three") == {}, "a key begins with nothing of another's"
        decode(llm, "three")
        assert known_of(llm, "three")
        assert taught(known_of(llm, "one")) == taught(one.arms), "and teaches no other"
        assert taught(known_of(llm, "two")) == taught(two.arms)
        assert known_of(llm, "four") == known_of(llm, "") == {}


def taught(arms: Mapping[str, KeptArm]) -> dict[str, KeptArm]:
    """Without what drafters cost, which follows the speed of the machine."""
    return {name: replace(arm, seconds=(), reading=(), row=0.0) for name, arm in arms.items()}


def known_of(llm: LLM, owner: str) -> dict[str, KeptArm]:
    """What the router of an owner knows now."""
    policy = llm._strategies.get(llm._strategies.build_default(llm.strategy), owner).policy
    assert isinstance(policy, Router)
    return policy.kept()


def test_an_llm_begins_with_what_the_last_one_learned() -> None:
    for _ in range(2):
        with LLM("parlay-mini", strategy="auto:of=prompt-lookup") as llm:
            decode(llm, "")
    (entry,) = entries()
    (arm,) = entry.arms.values()
    assert arm.calibration[-1] >= 2
    with LLM("parlay-mini", strategy="auto:of=prompt-lookup", router_memory="off") as llm:
        decode(llm, "")
    assert entries() == [entry]


LEARNS = """
import os, signal, sys, time
from parlay import LLM, SamplingParams
from parlay.llm.router_file import place

def learn(end, every):
    global llm  # to the end of the process
    os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ["XDG_CACHE_HOME"], end)
    llm = LLM("parlay-mini", strategy="auto:of=prompt-lookup")
    llm._strategies._memory._every = every
    text = "one two three one two three one two three one two"
    llm.generate(text, SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True))
    while end == "killed" and not place().exists():
        time.sleep(0.01)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

codes = []
for case in (("killed", 0.05), ("forgets", 3600.0)):
    child = os.fork()
    if child == 0:
        learn(*case)
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(*codes)
"""


def test_a_program_that_is_killed_or_does_not_close_its_model_keeps_what_it_learned(tmp_path: Path) -> None:
    """Each is a fork of one process that has loaded what both need."""
    done = subprocess.run([sys.executable, "-c", LEARNS], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    assert done.stdout.split() == [str(-signal.SIGKILL), "0"]
    for end in ("killed", "forgets"):
        kept = entries(tmp_path / end / "parlay" / place().name)
        assert [list(entry.arms) for entry in kept] == [["prompt-lookup"]], end


def test_a_model_writes_to_the_file_it_was_loaded_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, first = RouterMemory("parlay-mini", SPEC, ""), place()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    memory.keep("", learned())
    memory.write()
    assert entries() == []
    assert [list(entry.arms) for entry in entries(first)] == [list(learned())]


def test_what_another_machine_learned_is_told_apart() -> None:
    remember()
    (own,) = entries()
    assert is_here(own)
    assert not is_here(replace(own, machine="another processor, 64 processors, 64 threads"))


def test_numbers_that_no_machine_has_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    kept = {name: replace(arm, row=1e-320) for name, arm in learned().items()}
    router = Router(TableCost(), [Arm("0", 8)], kept)
    assert router.kept() == {}
    assert "takes no time" in caplog.text


def test_processes_that_end_together_write_one_after_another(tmp_path: Path) -> None:
    """Each writes what the file had and its own: what another one writes meanwhile would be lost."""
    fcntl = pytest.importorskip("fcntl")
    memory = remember()
    memory.keep("someone", learned(POOR))
    descriptor = os.open(place().parent, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    writer = threading.Thread(target=memory.write)
    writer.start()
    writer.join(0.3)
    assert [each.owner for each in entries()] == [""]
    os.close(descriptor)
    writer.join(10)
    assert len(entries()) == 2
