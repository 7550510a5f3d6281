"""Steps as graphs: the same bits as operator by operator, the same tokens under every strategy, and when they can't be
had, a line."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parlay.cache import Budget
from parlay.models.families.reading import read_config
from parlay.models.loading import load_weights
from parlay.models.native import NativeRunner
from parlay.models.torch_ops import step_graphs
from parlay.models.torch_ops.eager import EagerForward
from parlay.models.torch_ops.fixed_step import FixedStep
from parlay.models.torch_ops.step_graphs import CudaRecorder, Recording, StepGraphs
from parlay.models.triton_ops.row_table import PlacedRows, RowNumbers
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.testing.checkpoints import VOCAB_SIZE, random_model, save_random
from parlay.testing.conformance import KitLength, Stage, check_runner, check_strategy, runner_stage
from parlay.testing.conformance.stages import recomputed, tiny_llama
from parlay.types import Features, Join, Prefix, Segment, Tree, trees
from tests.models.graphs.conftest import open_runner, tiny_runner
from tests.models.graphs.stand_in import StandIn

TEXT = tuple(torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(0)).tolist())
TREE = Tree((3, 4, 5), (-1, 0, 0))
KIT = ("draft-model", "none", "prompt-lookup", "layer-skip", DEFAULT_STRATEGY)
CHECKS = ("greedy", "sampled", "mixed", "forks", "chunks", "preemption")


@pytest.fixture(autouse=True)
def lines_anew() -> None:
    step_graphs._warn_once.cache_clear()


def graphs_of(runner: NativeRunner) -> StepGraphs:
    forward = runner._forward
    assert isinstance(forward, EagerForward)
    assert forward._graphs is not None
    return forward._graphs


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.name == step_graphs.__name__]


def decode(runner: NativeRunner, taps: tuple[int, ...] = (), *, steps: int = 3) -> list[torch.Tensor]:
    """All that forwards give over a prompt and trees below it; each kept path is the tree's longest."""
    runner.open(0, TEXT)
    assert runner.reserve(0, 64)
    found = []
    out = runner.forward([Segment(0, TEXT[:7], logits_from=6)], taps)
    found += [out.logits_RV, *(out.taps[layer] for layer in taps)]
    runner.keep(0, ())
    for step in range(steps):
        out = runner.forward([Segment(0, TEXT[7 + step : 8 + step], TREE)], taps)
        found += [out.logits_RV, *(out.taps[layer] for layer in taps)]
        runner.keep(0, ())
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# ------------------------------------------------------------------------------------------------------ what comes out


def test_no_bit_differs_whatever_happens_to_the_cache() -> None:
    """Trees, chunks, forks, sequences cut back and left-out layers, each row against a step of its own without."""
    made: list[StandIn] = []

    def graphed(tokens: int) -> NativeRunner:
        made.append(StandIn())
        return tiny_runner(made[-1], tokens=tokens)

    report = check_runner(graphed, recomputed(tiny_runner(tokens=8192)), steps=15)
    assert report.passed, str(report)
    assert sum(each.replayed for each in made) > 9


@pytest.mark.parametrize("family", ["gemma4-e", "granite"])
def test_windows_shared_keys_and_numbers_of_layers(family: str, tmp_path: Path) -> None:
    """Taps, too, of every layer: torch's attention gives the same up to rounding, and without graphs the same bits."""
    save_random(family, tmp_path, dtype=torch.float32)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    recorder, taps = StandIn(), tuple(range(config.num_layers + 1))
    graphed, plain, by_torch = (
        decode(open_runner(config, weights, record, paged=paged), taps)
        for record, paged in ((recorder, True), (None, True), (None, False))
    )
    assert equal(graphed, plain)
    for one, other in zip(graphed, by_torch, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert (recorder.recorded, recorder.replayed) == (1, 2)


def graphed_stage(made: list[StandIn]) -> Stage:
    """What is expected comes from a runner without graphs; target and draft model have some."""
    weights = random_model("llama").state_dict()
    disturbed = {name: each + 0.1 * each.std() * torch.randn_like(each) for name, each in weights.items()}

    def graphed(of: dict[str, torch.Tensor], tokens: int) -> NativeRunner:
        made.append(StandIn())
        return open_runner(tiny_llama(4096), of, made[-1], dtype=torch.float64, tokens=tokens)

    stage = runner_stage(
        "graphs",
        lambda tokens: tiny_runner(dtype=torch.float64, tokens=tokens, paged=False),
        lambda: graphed(disturbed, 8192),
    )
    return replace(stage, open_runner=lambda tokens: graphed(weights, tokens))


@pytest.mark.parametrize("spec", [KIT[0], *(pytest.param(spec, marks=pytest.mark.slow) for spec in KIT[1:])])
def test_strategies_write_the_same_tokens(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    made: list[StandIn] = []
    with caplog.at_level(logging.WARNING):
        report = check_strategy(
            spec, effort=KitLength(tokens=6, draws=100), stages=[graphed_stage(made)], checks=CHECKS
        )
    assert report.passed, str(report)
    assert sum(each.replayed for each in made) > 9
    assert lines(caplog) == []


# ----------------------------------------------------------------------------------------------------------- the rows


def test_rows_that_fill_a_shape_up_write_to_no_page_of_a_text() -> None:
    runner = tiny_runner(StandIn())
    decode(runner)
    pages = [page.rows.clone() for page in runner.store._live[0].table]
    place = runner.store.stage(Segment(0, TEXT[10:11]))
    rows = RowNumbers.of([PlacedRows(0, place)])
    step = graphs_of(runner)._step
    assert step is not None
    filled = rows.filled(4, step._spare)
    assert filled.numbers == [0, 1, 2, 3]
    spare = step._spare.table[0].address
    assert [filled.lists[fields[6]] for fields in filled.fields[1:]] == [spare] * 3
    assert filled.fields[:1] == rows.fields
    assert filled.positions == [*rows.positions, 0, 0, 0]
    assert all(torch.equal(page.rows, own) for page, own in zip(runner.store._live[0].table, pages, strict=True))


def test_shapes_are_powers_of_two_and_long_steps_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    run = FixedStep.run

    def seen(step: FixedStep, shape: step_graphs.StepShape) -> None:
        shapes.append((shape.rows, shape.bound))
        run(step, shape)

    monkeypatch.setattr(FixedStep, "run", seen)
    monkeypatch.setattr(step_graphs, "SPAN", 16)
    monkeypatch.setattr(step_graphs, "MOST_ROWS", 20)
    runner = tiny_runner(StandIn())
    runner.open(0, TEXT)
    assert runner.reserve(0, 64)
    for count in (1, 3, 9, 20, 21):
        runner.forward([Segment(0, TEXT[:count])])
        runner.keep(0, ())
    assert shapes == [(2, 16), (4, 16), (16, 16), (32, 64)]


def test_rows_may_enter_as_features() -> None:
    """As those of draft heads do."""
    chance = torch.Generator().manual_seed(1)
    given = [Features(torch.randn(2, 32, generator=chance), added=bool(step % 2)) for step in range(6)]
    found = []
    for recorder in (StandIn(), None):
        runner = tiny_runner(recorder)
        runner.open(0, TEXT)
        assert runner.reserve(0, 64)
        outs = [runner.forward([Segment(0, TEXT[:3], features=each)]).logits_RV for each in given]
        found.append(outs)
    assert equal(*found)
    assert not torch.equal(found[0][0], found[0][2])


@pytest.mark.parametrize(
    "features",
    [
        Features(torch.ones(1, 32), prefix=Prefix(torch.ones(3, 2, 2, 4, 8))),
        Features(torch.ones(1, 32), join=Join(1, torch.ones(2, 32), torch.ones(2, 32))),
    ],
    ids=["prefix", "join"],
)
def test_rows_that_see_a_prefix_or_join_later_run_without(features: Features) -> None:
    recorder, found = StandIn(), []
    for record in (recorder, None):
        runner = tiny_runner(record)
        runner.open(0, TEXT)
        assert runner.reserve(0, 64)
        segment = Segment(0, TEXT[:3], trees.chain_tree((1,)), features=features)
        found.append([runner.forward([segment]).logits_RV for _ in range(3)])
    assert equal(*found)
    assert recorder.recorded == 0


# ------------------------------------------------------------------------------------------------------- what can fail


class Wrong(StandIn):
    """Its replays give other numbers."""

    def record(self, call):
        made = super().record(call)
        call.func.__self__._hidden.add_(1)
        return made


class Breaking(StandIn):
    """The recording works, and its replays end in an error of the driver."""

    def record(self, call):
        super().record(call)
        return Recording(self._fail, 0)

    def _fail(self) -> None:
        raise RuntimeError("CUDA error: an illegal instruction was encountered\nSearch for details")


@pytest.mark.parametrize(
    ("recorder", "words"),
    [
        (
            StandIn(fails=RuntimeError("CUDA out of memory.\nTried to allocate")),
            "RuntimeError: CUDA out of memory. Tried",
        ),
        (StandIn(fails=MemoryError()), "MemoryError"),
        (Wrong(), "ArithmeticError: a replay gives other numbers"),
        (Breaking(), "RuntimeError: CUDA error: an illegal instruction"),
    ],
    ids=["out of memory", "no words", "wrong numbers", "replay"],
)
def test_what_fails_leaves_the_same_bits_and_one_line(
    recorder: StandIn, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner, expected = tiny_runner(recorder), decode(tiny_runner(), steps=5)
    with caplog.at_level(logging.WARNING):
        assert equal(decode(runner, steps=5), expected)
    (line,) = lines(caplog)
    assert line.startswith(f"no CUDA graphs: {words}")
    assert line.endswith("; operators are launched one by one instead, which takes longer")
    assert "\n" not in line
    assert graphs_of(runner).nbytes == 0


def test_memory_that_is_not_there_when_a_step_begins(caplog: pytest.LogCaptureFixture) -> None:
    runner = tiny_runner(StandIn())

    def nothing() -> FixedStep:
        raise torch.OutOfMemoryError("no memory")

    graphs_of(runner)._make_step = nothing
    assert equal(decode(runner), decode(tiny_runner()))
    assert lines(caplog)[0].startswith("no CUDA graphs: OutOfMemoryError: no memory")


def test_the_runner_says_why_there_are_none(tmp_path: Path) -> None:
    assert tiny_runner(StandIn()).spec.kernels.endswith("; CUDA graphs of up to 512 rows")
    assert tiny_runner(StandIn(), paged=False).spec.kernels.endswith("; no CUDA graphs: they need attention by Triton")
    assert "CUDA graphs" not in tiny_runner().spec.kernels
    save_random("mixtral", tmp_path, dtype=torch.float32)
    config = read_config(tmp_path)
    runner = open_runner(config, load_weights(tmp_path, config), StandIn())
    assert runner.spec.kernels.endswith("; no CUDA graphs: the host reads which experts rows choose")


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_counts_and_texts_of_the_target_take_it() -> None:
    page = tiny_runner().store.shape.page_bytes
    step = graphed_bytes()
    budget = Budget(step + 12 * page)
    runner = tiny_runner(StandIn(bytes=2 * page), budget=budget)
    expected = decode(tiny_runner(), steps=6)
    assert equal(decode(runner, steps=2), expected[:3])
    assert graphs_of(runner).nbytes == step + 2 * page
    assert budget.nbytes == step + 2 * page + runner.store.nbytes
    tokens = (budget.total - runner.store.nbytes) // page * 16
    runner.open(1, ())
    assert runner.reserve(1, tokens)
    assert graphs_of(runner).nbytes == 0
    assert budget.free >= 0


def graphed_bytes() -> int:
    runner = tiny_runner(StandIn())
    decode(runner, steps=0)
    return graphs_of(runner).nbytes


def test_without_room_there_are_none_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "_PATIENCE", 2)
    recorder = StandIn(bytes=1 << 20)
    runner = tiny_runner(recorder, budget=Budget(graphed_bytes() + (1 << 19)))
    assert equal(decode(runner, steps=10), decode(tiny_runner(), steps=10))
    assert recorder.recorded == 2  # after the first two steps are without, after the second four
    assert graphs_of(runner).nbytes == 0


def test_the_oldest_of_many_graphs_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "_MOST_GRAPHS", 1)
    recorder = StandIn()
    runner = tiny_runner(recorder)
    runner.open(0, TEXT)
    assert runner.reserve(0, 64)
    for count in (1, 1, 1, 4, 4, 4, 1, 1):
        runner.forward([Segment(0, TEXT[:1], trees.chain_tree(TEXT[1:count]))])
    assert (recorder.recorded, recorder.replayed) == (3, 3 + 2 + 1)


# ---------------------------------------------------------------------------------------------------------------- CUDA


class FakeGraph:
    """What `torch.cuda.CUDAGraph` is to who uses it."""

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None

    def replay(self) -> None:
        assert self.call is not None, "nothing was recorded"
        self.call()


def fake_cuda(monkeypatch: pytest.MonkeyPatch, done: list[str], free: list[int]) -> None:
    """Put what writes down its calls in the place of torch's functions; ``free`` bytes are told one after another."""
    real = inspect.signature(torch.cuda.graph.__init__)

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def wait_stream(self, other: object) -> None:
            done.append("wait")

    @contextmanager
    def graph(*given, **named):
        real.bind(None, *given, **named)  # torch's own takes these
        done.append("begin")
        yield
        done.append("end")

    for name, fake in (
        ("Stream", Stream),
        ("CUDAGraph", FakeGraph),
        ("graph", graph),
        ("stream", lambda stream: nullcontext()),
        ("current_stream", Stream),
        ("graph_pool_handle", lambda: (0, 1)),
        ("synchronize", lambda device: done.append("synchronize")),
        ("empty_cache", lambda: done.append("empty")),
        ("mem_get_info", lambda device: (free.pop(0), 1 << 30)),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)


def test_cuda_graphs_are_recorded_after_a_run_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fake_cuda(monkeypatch, done, [1600, 1000, 900])
    monkeypatch.setattr(FakeGraph, "replay", lambda graph: done.append("replay"))
    recorder = CudaRecorder(torch.device("cuda"))
    assert recorder.share == 100
    replay, size = recorder.record(lambda: done.append("run"))
    assert (size, done) == (
        100,
        ["wait", "run", "wait", "synchronize", "empty", "begin", "run", "end", "replay", "synchronize"],
    )
    replay()
    recorder.forget()
    assert done[-3:] == ["replay", "synchronize", "empty"]
