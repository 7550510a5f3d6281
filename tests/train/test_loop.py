"""The loop that trains: what a checkpoint survives, and what stops a run without harm."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parlay.options import UsageError
from parlay.train.data.batches import TrainingBatch, in_order
from parlay.train.data.features import Featured
from parlay.train.loop import Loop, LoopOptions, Progress
from parlay.train.watching import Watch
from parlay.types import ParlayError

SIZE = 8
Disturbance = Callable[[int, Tensor], Tensor]


class Toy:
    """Learns to tell a token from its state. ``disturb`` gets the number of each loss, and the loss."""

    def __init__(self, disturb: Disturbance = lambda _, loss: loss, size: int = SIZE) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Linear(SIZE, size, bias=False)
        self.losses = 0
        self._disturb = disturb

    @property
    def matrices(self) -> Sequence[nn.Parameter]:
        return []

    @property
    def slow(self) -> Sequence[nn.Parameter]:
        return list(self.module.parameters())

    def loss(self, batch: TrainingBatch) -> Tensor:
        self.losses += 1
        logits_BRV = self.module(batch.states_BTF)
        loss = nn.functional.cross_entropy(logits_BRV.flatten(0, 1), batch.ids_BT.flatten())
        return self._disturb(self.losses, loss)

    def right(self, batch: TrainingBatch) -> Tensor:
        right = (self.module(batch.states_BTF).argmax(-1) == batch.ids_BT).sum()
        return torch.stack((torch.tensor(batch.ids_BT.numel()), right))


TEXTS = [Featured(torch.arange(SIZE), 1, torch.eye(SIZE) + place / 10) for place in range(6)]


def run(toy: Toy, folder: Path, updates: int) -> Progress:
    """One interval, whatever time it takes."""
    options = LoopOptions(updates=updates, interval=3600.0, batch_tokens=16, slow_rate=0.01)
    with Watch("Training", wanted=False) as watch:
        return Loop(toy, options, folder / "toy.safetensors").run(TEXTS, TEXTS, watch)


def weights(folder: Path) -> Tensor:
    return load_file(folder / "toy.safetensors")["module.weight"]


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file can grow larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_loss_that_is_no_number_stops_and_the_last_good_weights_stay(bad: float, tmp_path: Path) -> None:
    run(Toy(), tmp_path, 3)
    good = weights(tmp_path)
    with pytest.raises(ParlayError, match=r"the loss became (nan|inf) at step 3: .*lower learning rate"):
        run(Toy(lambda number, loss: loss * bad), tmp_path, 6)
    assert torch.equal(weights(tmp_path), good)
    assert run(Toy(), tmp_path, 6).step == 6, "and a run goes on from them"


def test_a_gradient_that_is_no_number_changes_no_weight(tmp_path: Path) -> None:
    def poisoned(number: int, loss: Tensor) -> Tensor:
        return loss + torch.sqrt(loss * 0)  # zero, with an infinite slope

    run(Toy(), tmp_path, 3)
    good = weights(tmp_path)
    with pytest.raises(ParlayError, match="the gradient became nan at step 3"):
        run(Toy(poisoned), tmp_path, 6)
    assert torch.equal(weights(tmp_path), good)


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    large = 20_000  # so that what is printed meanwhile fits where the weights do not
    run(Toy(size=large), tmp_path, 3)
    good = weights(tmp_path)
    with disk_of(200_000), pytest.raises(ParlayError, match=r"can't write .*toy\.safetensors .*is intact"):
        run(Toy(size=large), tmp_path, 6)
    assert torch.equal(weights(tmp_path), good)
    assert [file.name for file in tmp_path.iterdir()] == ["toy.safetensors"], "nothing half written stays"
    assert run(Toy(size=large), tmp_path, 6).step == 6


def test_a_kill_loses_one_interval(tmp_path: Path) -> None:
    def killed(number: int, loss: Tensor) -> Tensor:
        if number == 5:
            raise KeyboardInterrupt
        return loss

    run(Toy(), tmp_path, 3)
    good = weights(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(Toy(killed), tmp_path, 20)
    assert torch.equal(weights(tmp_path), good)
    assert run(Toy(), tmp_path, 20).step == 20


def test_a_checkpoint_that_is_cut_short_or_anothers_is_named(tmp_path: Path) -> None:
    run(Toy(), tmp_path, 3)
    whole = (tmp_path / "toy.safetensors").read_bytes()
    for bad in (whole[: len(whole) // 2], b""):
        (tmp_path / "toy.safetensors").write_bytes(bad)
        with pytest.raises(ParlayError, match=r"toy\.safetensors is damaged, or the checkpoint of a run"):
            run(Toy(), tmp_path, 6)
    (tmp_path / "toy.safetensors").write_bytes(whole)
    with pytest.raises(ParlayError, match="the checkpoint of a run with other options"):
        run(Toy(size=SIZE + 1), tmp_path, 6)


def test_a_run_goes_on_with_the_options_that_decide_what_is_learned_alone(tmp_path: Path) -> None:
    """How long it takes and how fast it learns may change; with others it would be half one run, half another."""
    run(Toy(), tmp_path, 3)
    options = LoopOptions(updates=6, batch_tokens=8, slow_rate=0.001, interval=3600.0)
    with Watch("Training", wanted=False) as watch:
        assert Loop(Toy(), options, tmp_path / "toy.safetensors").run(TEXTS, TEXTS, watch).step == 6
        other = Loop(Toy(), replace(options, seed=7), tmp_path / "toy.safetensors")
        with pytest.raises(UsageError, match=r"toy\.safetensors is from a run with seed=0, not 7: give 0 to resume"):
            other.run(TEXTS, TEXTS, watch)


def test_measuring_takes_a_fifth_of_the_time_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which an update takes a second, and each batch of a measurement ten."""
    toy, now, measured = Toy(lambda _, loss: forward(1, loss)), [0.0], []

    def forward(seconds: float, value: Tensor) -> Tensor:
        now[0] += seconds
        return value

    def right(batch: TrainingBatch) -> Tensor:
        measured.append(now[0])
        return forward(10, Toy.right(toy, batch))

    toy.right = right  # type: ignore[method-assign]
    monkeypatch.setattr("parlay.train.loop.time", SimpleNamespace(monotonic=lambda: now[0]))
    options = LoopOptions(minutes=5, interval=1, batch_tokens=16)
    with Watch("Training", wanted=False) as watch:
        Loop(toy, options, tmp_path / "toy.safetensors").run(TEXTS, TEXTS, watch)
    batches = len(list(in_order(TEXTS, 16, 640)))
    begins = [at for place, at in enumerate(measured) if place % batches == 0]
    assert len(begins) > 2
    assert all(after - before >= 5 * 10 * batches for before, after in pairwise(begins[:-1]))


def test_nothing_to_train_on_or_to_measure_is_an_error(tmp_path: Path) -> None:
    options = LoopOptions(updates=1)
    for texts, heldout in (([], TEXTS), (TEXTS, [])):
        with pytest.raises(ParlayError, match="too few texts"), Watch("Training", wanted=False) as watch:
            Loop(Toy(), options, tmp_path / "toy.safetensors").run(texts, heldout, watch)
