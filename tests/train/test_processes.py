"""Training in several processes: one set of weights, each process its share of the batches, one that writes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parlay.train.loop import LoopOptions
from parlay.train.optimizers import mixed
from parlay.train.processes import Alone, processes
from parlay.types import ParlayError

ROOT = Path(__file__).parents[2]
SCRIPT = """
import contextlib
import io
import runpy
import sys
from pathlib import Path
from safetensors.torch import save_file
from parlay.train.loop import Loop, LoopOptions
from parlay.train.processes import processes
from parlay.train.watching import Watch
from tests.train.test_loop import TEXTS, Toy

where, toy, folder = processes(), Toy(), Path(sys.argv[1])
options = LoopOptions(updates=12, interval=3600.0, batch_tokens=16, slow_rate=0.01)
with contextlib.redirect_stdout(io.StringIO()), Watch("Training", wanted=False) as watch:
    reached = Loop(toy, options, folder / "state.safetensors", where).run(TEXTS, TEXTS, watch)
save_file({"weight": toy.module.weight.detach()}, folder / f"{where.rank}.safetensors")
(folder / f"{where.rank}.txt").write_text(f"{reached.step} {reached.tokens}")
del sys.argv[1]
runpy.run_module("parlay", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Trained:
    """What two processes left in a folder, and what they said of the command."""

    folder: Path
    said: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One pair of processes trains a toy and then runs the command: to start a pair takes longest."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("trained")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.md").write_text("The harbour was quiet before the storm. " * 100)
    (folder / "own.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    argv = [
        *(str(folder / "own.py"), str(folder), "train", "medusa", "--model", "parlay-mini"),
        *("--texts", str(folder / "texts"), "--shards", "0", "--work", str(folder / "work")),
        *("--out", str(folder / "head"), "--longest", "64", "--updates", "3"),
    ]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}  # for a script that imports tests
    done = subprocess.run([*command, *argv], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return Trained(folder, done.stdout)


def test_all_processes_end_with_the_same_weights(trained: Trained) -> None:
    one, other = (load_file(trained.folder / f"{rank}.safetensors")["weight"] for rank in (0, 1))
    assert torch.equal(one, other)
    told = {(trained.folder / f"{rank}.txt").read_text() for rank in (0, 1)}
    assert told == {f"12 {12 * 2 * 16}"}, "updates of both, and the tokens of both"
    assert torch.equal(load_file(trained.folder / "state.safetensors")["module.weight"], one)


def test_the_command_trains_a_head_in_two_processes(trained: Trained) -> None:
    head = trained.folder / "head"
    assert f"{head}: step 3 " in trained.said
    assert trained.said.count("held-out") == 2, "one process tells how far it is, and what it reached"
    assert (head / "model.safetensors").exists()


def test_one_process_needs_no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(processes(), Alone)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ParlayError, match=r"needs accelerate: pip install 'parlay\[accelerate\]'"):
        processes()


@pytest.mark.parametrize(("precision", "kind"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_precision_is_what_was_asked_for(precision: str, kind: torch.dtype) -> None:
    with mixed(LoopOptions(precision=precision).precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is kind
