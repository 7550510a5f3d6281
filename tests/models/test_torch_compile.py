"""Models of transformers under torch.compile: the same logits whatever compiles them, and a line where nothing can."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from parlay import LLM, models
from parlay.cache import Budget
from parlay.llm.vocabulary import open_draft
from parlay.models.choosing import CompileRefused
from parlay.models.native import NativeRunner
from parlay.models.slots import IDLE, LEAST_SLOTS, SlotPool
from parlay.models.transformers_adapter import graph
from parlay.models.transformers_adapter.compiled_runner import CompiledRunner, NotCompiled
from parlay.models.transformers_adapter.encoder_decoder import EncoderDecoderRunner
from parlay.models.transformers_adapter.packed_linears import PackedLayer
from parlay.models.transformers_adapter.regions import LayerRegions
from parlay.models.transformers_adapter.runner import AdapterRunner
from parlay.models.transformers_adapter.slots import TransformersPool
from parlay.options import LoadOptions, RankOptions
from parlay.ranks.starting import open_target
from parlay.system import machine
from parlay.system.user_cache import user_cache
from parlay.testing.checkpoints import random_model
from parlay.testing.conformance import check_runner, runner_stage
from parlay.types import NO_TREE, Segment, Tree

COMPILE = LoadOptions(compile=True)
NOISE = 1e-10  # of float64


class Slowing:
    """A clock whose seconds grow longer, so that whatever is timed later seems quicker: the compiled form."""

    def __init__(self) -> None:
        self.calls, self.now = 0, 0.0

    def __call__(self) -> float:
        self.calls += 1
        self.now += 1 / self.calls
        return self.now


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the log tells users."""
    with caplog.at_level(logging.WARNING):
        yield lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def tiny(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    return random_model(name, dtype=torch.float64, seed=seed)


def broken(name: str = "llama") -> PreTrainedModel:
    """A model whose forward no graph can hold."""
    model = tiny(name)

    class Breaking(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **rest: Any) -> Any:
            torch._dynamo.graph_break()
            return super().forward(input_ids=input_ids, **rest)

        forward.__signature__ = __import__("inspect").signature(type(model).forward)  # type: ignore[attr-defined]

    model.__class__ = Breaking
    return model


def plain(model: PreTrainedModel, tokens: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits_NV: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits_NV


# ------------------------------------------------------------------------------------------------------------- slots


def test_slots_are_shared_by_forks_and_free_when_nobody_holds_them() -> None:
    pool = SlotPool()
    first = pool.take(3)
    assert IDLE not in first
    pool.share(first[:2])
    pool.drop(first)
    pool.check([first[:2]])
    pool.drop(first[:2])
    pool.check([])
    assert pool.take(2) == first[:2], "the lowest free ones come first"


def test_a_full_pool_doubles_and_keeps_what_it_holds() -> None:
    pool = TransformersPool(1)
    layer = pool.cache.layers[0]
    slots = pool.take(2)
    pool.write_to(torch.tensor(slots))
    written = torch.arange(8.0).reshape(1, 2, 2, 2)
    layer.update(written, -written)
    more = pool.take(LEAST_SLOTS)
    assert pool.capacity == 2 * LEAST_SLOTS
    assert layer.keys[:, :, list(slots)].equal(written)
    assert layer.values[:, :, list(slots)].equal(-written)
    pool.check([slots, more])


# ------------------------------------------------------------------------------------------------------------- graphs


def test_one_graph_serves_any_number_of_rows_and_slots_and_every_runner_of_the_model() -> None:
    """The kit drives trees, chunks, forks and truncation; the pool grows under the graph, which is made once."""
    model, graphs = tiny(), []

    def backend(traced: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(traced)
        return traced.forward

    def compiled(capacity: int | None) -> CompiledRunner:
        return CompiledRunner(model, max_tokens_cached=capacity, backend=backend, clock=Slowing())

    stage = runner_stage("llama", compiled, lambda: AdapterRunner(tiny(seed=1)), NOISE)
    report = check_runner(stage.open_runner, stage.logits_of, noise_bound=NOISE, steps=12)
    assert report.passed, str(report)
    without_taps = compiled(None)
    without_taps.open(0, ())
    long = tuple(token % 50 for token in range(600))
    for count in (560, 1, 8, 31):
        part = long[:count]
        without_taps.forward([Segment(0, part, NO_TREE, len(part) - 1)])
        without_taps.keep(0, ())
    assert without_taps.truncate(0, 560) == 560
    out = without_taps.forward([Segment(0, (3,), Tree((4, 5), (-1, -1)))])
    for node, token in enumerate((4, 5)):
        expected = plain(model, (*long[:560], 3, token))[-1]
        assert float((out.logits_RV[1 + node] - expected).abs().max()) < NOISE
    assert len(graphs) <= 2, "one graph, and one with hidden states"
    whole = max(graphs, key=_calls)
    assert _calls(whole) == stage.open_runner(64).spec.num_layers
    assert len(list(whole.children())) == 1, "layers that are alike are traced once"


def _calls(traced: torch.fx.GraphModule) -> int:
    """How many layers it calls as regions."""
    return [node.target for node in traced.graph.nodes].count(torch.ops.higher_order.invoke_subgraph)


def test_layers_that_differ_are_traced_apart_and_layers_of_others_left_alone() -> None:
    """What differs here is no weight but a number that a layer computes with."""
    model, graphs = tiny(), []

    def backend(traced: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(traced)
        return traced.forward

    layers = cast(list[Any], model.get_decoder().layers)
    layers[-1].self_attn.scaling *= 2
    runner = CompiledRunner(model, backend=backend, clock=Slowing())
    runner.open(0, ())
    out = runner.forward([Segment(0, (5, 6, 7))])
    assert float((out.logits_RV - plain(model, (5, 6, 7))).abs().max()) < NOISE
    assert len(list(graphs[0].children())) == 2
    assert "forward" not in vars(layers[0])
    layers[0].forward = layers[0].forward  # as libraries do that move weights
    assert LayerRegions.of(model) is None


def test_the_weights_of_a_model_of_our_own_are_packed_and_its_own_ones_go() -> None:
    """Layers are traced once all the same, and a model that somebody else holds stays as it is."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(traced: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(traced)
        return traced.forward

    model = random_model("llama", dtype=torch.float32)
    mlp = cast(Any, model).get_decoder().layers[0].mlp
    weight = ref(mlp.up_proj.weight)
    expected_NV = plain(model, (5, 6, 7))
    CompiledRunner(model, backend=backend)
    assert type(mlp.up_proj) is torch.nn.Linear
    runner = CompiledRunner(model, backend="eager", clock=Slowing(), owned=True)
    assert isinstance(mlp.up_proj, PackedLayer)
    gc.collect()
    assert weight() is None
    runner.open(0, ())
    out = runner.forward([Segment(0, (5, 6, 7))])
    assert float((out.logits_RV - expected_NV).abs().max()) < 1e-4
    (row,) = runner.forward([Segment(0, (5,))]).logits_RV
    assert float((row - expected_NV[0]).abs().max()) < 1e-4
    assert len(list(graphs[0].children())) == 1


def reads_weights(mlp: Any, *_: object) -> None:
    assert mlp.up_proj.weight.shape


@pytest.mark.parametrize("why", ["memory", "reads weights"])
def test_weights_stay_where_packing_them_fails(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama", dtype=torch.float32)
    if why == "memory":
        monkeypatch.setattr(machine, "available_bytes", lambda: 0)
    else:
        cast(Any, model).get_decoder().layers[0].mlp.register_forward_hook(reads_weights)
    runner = CompiledRunner(model, backend="eager", clock=Slowing(), owned=True)
    assert type(cast(Any, model).get_decoder().layers[0].mlp.up_proj) is torch.nn.Linear
    runner.open(0, ())
    assert float((runner.forward([Segment(0, (5, 6))]).logits_RV - plain(model, (5, 6))).abs().max()) < 1e-4


def test_a_graph_without_regions_is_made_where_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_in_regions(forward: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def run(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
            if "forward" in vars(cast(list[Any], model.get_decoder().layers)[0]):
                raise RuntimeError("no regions")
            return forward(model, inputs)

        return run

    monkeypatch.setattr(torch, "compile", fails_in_regions)
    model = tiny()
    runner = CompiledRunner(model, backend="no regions", clock=Slowing())
    runner.open(0, ())
    out = runner.forward([Segment(0, (5, 6, 7))])
    assert float((out.logits_RV - plain(model, (5, 6, 7))).abs().max()) < NOISE
    found = graph._graphs[model][False, "no regions"]
    assert found.pays
    assert found.regions is None


def test_a_graph_that_computes_something_else_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(forward: Callable[..., Any], **_: object) -> Callable[..., Any]:
        return lambda *inputs: (1.001 * forward(*inputs)[0], ())

    monkeypatch.setattr(torch, "compile", wrong)
    with pytest.raises(NotCompiled, match="runs uncompiled: its compiled logits differ from its own by"):
        CompiledRunner(tiny(), backend="wrong", clock=Slowing())


def test_a_graph_with_hidden_states_may_fail_alone(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_logits(forward: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def run(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
            if inputs["output_hidden_states"]:
                raise RuntimeError("\nno states in graphs\nand more of that")
            return forward(model, inputs)

        return run

    monkeypatch.setattr(torch, "compile", only_logits)
    model = tiny()
    runner = CompiledRunner(model, backend="only logits", clock=Slowing())
    runner.open(0, ())
    for _ in range(2):
        out = runner.forward([Segment(0, (5, 6, 7))], taps=(0, 1))
        assert float((out.logits_RV - plain(model, (5, 6, 7))).abs().max()) < NOISE
        assert out.taps[1].shape == (3, runner.spec.hidden_size)
    (line,) = lines()
    assert "states: torch.compile fails (no states in graphs)" in line


def test_a_model_that_breaks_the_graph_runs_as_it_is_and_says_so_once(lines: Callable[[], list[str]]) -> None:
    runner = models.load(broken(), COMPILE)
    assert isinstance(runner, AdapterRunner)
    (line,) = [line for line in lines() if "runs uncompiled" in line]
    assert "runs uncompiled: torch.compile fails (" in line


def test_the_slower_form_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nothing is quicker than anything else, so nothing speaks for the graph."""
    model = tiny()
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    runner = CompiledRunner(model, backend="nothing", clock=lambda: 0.0)
    runner.open(0, ())
    runner.forward([Segment(0, (5, 6, 7))])
    assert graph._graphs[model][False, "nothing"].pays == {8: False, 4: False}


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("bloom", AdapterRunner, "position_ids"),
        ("lfm2", AdapterRunner, "its cache can't drop single rows"),
        ("t5", EncoderDecoderRunner, "it is an encoder-decoder"),
    ],
)
def test_models_without_tree_masks_run_as_they_are_with_a_line(
    name: str, kind: type, why: str, lines: Callable[[], list[str]]
) -> None:
    runner = models.load(random_model(name), COMPILE)
    assert isinstance(runner, kind)
    (line,) = [line for line in lines() if "runs uncompiled: " in line]
    assert why in line


def test_parlays_own_decoder_refuses_it_but_for_drafts(folders: list[str]) -> None:
    target = AdapterRunner(random_model("gpt2")).spec
    with pytest.raises(CompileRefused, match=r"runs on Parlay's own decoder.*remove compile"):
        LLM(folders[0], compile=True)
    with pytest.raises(CompileRefused):
        open_target(folders[0], COMPILE, RankOptions(tensor_parallel=2), None, lambda *_: None)
    assert isinstance(open_draft(target, None, COMPILE, Budget(), folders[0]), NativeRunner)


@pytest.mark.parametrize("said", ["", "torch's own", "the user's"])
def test_graphs_are_kept_in_the_cache_unless_the_user_says_where(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing parts of torch says the second."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # here, for it loads much

    value = {"": "", "torch's own": os.path.abspath(default_cache_dir()), "the user's": "/somewhere"}[said]
    monkeypatch.setenv(graph.FOLDER, value)
    if not said:
        monkeypatch.delenv(graph.FOLDER)
    graph._keep_on_disk()
    own = str(user_cache() / "graphs")
    assert os.environ[graph.FOLDER] == ("/somewhere" if said == "the user's" else own)


# ------------------------------------------------------------------------------------------------------- real compiler

_START = """
from torch._dynamo.utils import counters
from parlay import models
from parlay.options import LoadOptions
from parlay.testing.checkpoints import random_model
from parlay.types import Segment
runner = models.load(random_model("gpt2"), LoadOptions(compile=True))
runner.open(0, ())
out = runner.forward([Segment(0, (5, 6, 7))])
print(int(out.logits_RV[-1].argmax()), counters["inductor"]["fxgraph_cache_hit"], type(runner).__name__)
"""


def start(cache: Path, **environment: str) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", _START],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout.split(), done.stderr


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_one_compiled(tmp_path: Path) -> None:
    first, second = (start(tmp_path)[0] for _ in range(2))
    assert first[2] == second[2] == "CompiledRunner"
    assert first[0] == second[0]
    assert (first[1], int(second[1]) > 0) == ("0", True)
    assert (tmp_path / "parlay" / "graphs").is_dir()


@pytest.mark.slow
def test_without_a_compiler_the_model_runs_as_it_is(tmp_path: Path) -> None:
    (token, _, kind), said = start(tmp_path, CXX="no-such-compiler")
    assert kind == "AdapterRunner"
    assert said.count("runs uncompiled: torch.compile fails") == 1
    assert token == start(tmp_path)[0][0]
