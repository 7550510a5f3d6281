"""Attention over pages: torch's results on random trees, and rows that depend on nothing beside them."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay.cache import BLOCK, Rows
from parlay.cache.pages import Page, PageTable, pages_for
from parlay.compiled import triton_here
from parlay.models.config import DecoderConfig, LayerForm
from parlay.models.families.reading import read_config
from parlay.models.forward import LayerPages
from parlay.models.loading import load_weights
from parlay.models.native import NativeRunner
from parlay.models.torch_ops.attention_form import AttentionKind, Heads, LayerRopes
from parlay.models.torch_ops.attention_masked import MaskedAttention
from parlay.models.torch_ops.eager import EagerForward
from parlay.models.torch_ops.step_rows import step_rows
from parlay.models.triton_ops import choosing
from parlay.models.triton_ops.row_table import PlacedRows
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.types import NO_TREE, Segment, Tree, trees
from tests.models.graphs.host_kernels import Watched
from tests.models.graphs.stand_in import StandIn

pytest.importorskip("triton")

from parlay.models.triton_ops import attention as paged
from parlay.models.triton_ops import kernels
from parlay.models.triton_ops.attention import PagedAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = 1e-4 if DEVICE.type == "cuda" else 1e-5
HEADS = Heads(6, 2, 24)
KIND = AttentionKind(HEADS)
TREE = Tree((1,) * 6, (-1, 0, -1, 2, 2, 1))
CANVAS = Tree((1,) * 6, (-1, 0, -1, 1, 3, 4))
TEXT = tuple(torch.randint(VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(0)).tolist())


def config_of(form: LayerForm) -> DecoderConfig:
    return DecoderConfig(
        architecture="test", vocab_size=8, hidden_size=144, intermediate_size=8, num_layers=1, num_heads=6,
        num_kv_heads=2, head_dim=24, rms_norm_eps=1e-6, max_context=2048, layers=(form,),
    )  # fmt: skip


def pages_of(place: Rows, chance: random.Random) -> Rows:
    """The same rows with random keys and values before them, in two slabs, in pages out of order."""
    count = pages_for(place.start + place.end)
    slabs = [torch.randn(1, 2, 2, count, BLOCK, 24, device=DEVICE) for _ in range(2)]
    numbers = chance.sample(range(count), count)
    table = PageTable()
    for number in numbers:
        table.append(Page(slabs[chance.randrange(2)], number))
    return place._replace(table=table)


def random_place(chance: random.Random) -> Rows:
    """A text of up to 90 tokens, pending ones, and a random tree, of which the first rows may have run."""
    nodes = chance.randrange(7)
    tree = Tree((1,) * nodes, tuple(chance.randrange(-1, node) for node in range(nodes)))
    start, pending = chance.randrange(90), chance.randrange(1, 4)
    base = chance.randrange(pending + nodes)
    hidden = (16, 32) if start > 40 and chance.random() < 0.5 else (0, 0)
    return pages_of(Rows(PageTable(), start, pending, tree, base, hidden=hidden), chance)


def by_triton(form: LayerForm, places: Sequence[Rows], qkv: Tensor, sinks: Tensor | None = None) -> Tensor:
    """What all rows of these places attend to, in one launch."""
    ropes, pages = LayerRopes(config_of(form), torch.float32, DEVICE), LayerPages.alike(1)
    own = PagedAttention(
        [KIND], [form], ropes, [sinks], pages=pages, kernels=kernels, dtype=torch.float32, device=DEVICE
    )
    begins = [sum(place.end - place.base for place in places[:number]) for number in range(len(places))]
    out = torch.zeros(len(qkv), 144, device=DEVICE)
    placed = [PlacedRows(begin, place) for begin, place in zip(begins, places, strict=True)]
    own.plan(placed, {HEADS: out})(0, qkv)
    return out


def by_torch(form: LayerForm, places: Sequence[Rows], qkv: Tensor, sinks: Tensor | None = None) -> Tensor:
    ropes = LayerRopes(config_of(form), torch.float32, DEVICE)
    masked, out, begin = MaskedAttention(KIND, [form], ropes, [sinks]), torch.zeros(len(qkv), 144, device=DEVICE), 0
    for place in places:
        end = begin + place.end - place.base
        masked.plan(step_rows(place, DEVICE, LayerPages.alike(1)), place, begin, out[begin:end])(0, qkv)
        begin = end
    return out


def random_rows(places: Sequence[Rows]) -> Tensor:
    count = sum(place.end - place.base for place in places)
    return torch.view_as_complex(torch.randn(count, HEADS.qkv_heads, 12, 2, device=DEVICE))


@pytest.mark.parametrize(
    "form",
    [LayerForm(window=9), LayerForm(score_cap=2.0, scale=0.3, sinks=True)],
    ids=["window", "cap and sinks"],
)
def test_torchs_results_come_out_on_random_trees_and_pages(form: LayerForm) -> None:
    torch.manual_seed(1)
    chance = random.Random(form.window)
    places = [
        *(random_place(chance) for _ in range(3)),
        pages_of(Rows(PageTable(), 31, 2, CANVAS, together=4), chance),
        pages_of(Rows(PageTable(), 5, 6, NO_TREE, block=4), chance),
    ]
    sinks = torch.randn(6, device=DEVICE) if form.sinks else None
    qkv = random_rows(places)
    before = [[page.rows.clone() for page in place.table] for place in places]
    expected = by_torch(form, places, qkv, sinks)
    written = [[page.rows.clone() for page in place.table] for place in places]
    for place, rows in zip(places, before, strict=True):
        for page, own in zip(place.table, rows, strict=True):
            page.rows.copy_(own)
    torch.testing.assert_close(by_triton(form, places, qkv, sinks), expected, atol=NEAR, rtol=NEAR)
    for place, rows in zip(places, written, strict=True):
        for page, own in zip(place.table, rows, strict=True):
            assert torch.equal(page.rows, own)


def test_a_row_is_the_same_alone_in_a_tree_and_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, over spans of a text, whatever slots the nodes of its path have."""
    torch.manual_seed(2)
    monkeypatch.setitem(paged._KEYS, 4, 16)
    monkeypatch.setattr(paged, "SPAN", 32)
    chance, start, form = random.Random(0), 2 * 32 - 3, LayerForm(window=40)
    whole = pages_of(Rows(PageTable(), start, 1, TREE), chance)
    other = pages_of(Rows(PageTable(), 3, 2), chance)
    qkv = random_rows([whole, other])
    together = by_triton(form, [whole, other], qkv)
    for node in (1, 4):
        path = trees.path_to(TREE, node)
        alone = by_triton(form, [whole._replace(tree=trees.chain_tree(path))], qkv[[0, *(1 + each for each in path)]])
        assert torch.equal(alone[-1], together[1 + node])
    for row in (7, 8):  # the same rows as committed text, one by one
        place = other._replace(start=row - 4, pending=1)
        assert torch.equal(by_triton(form, [place], qkv[row][None])[0], together[row])


def test_long_prefills_run_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    place = pages_of(Rows(PageTable(), 0, 5), random.Random(0))
    qkv = random_rows([place])
    whole = by_triton(LayerForm(), [place], qkv)
    monkeypatch.setattr(paged, "_PARTS_BYTES", 2 * 2 * 16 * 24 * 4)
    assert torch.equal(by_triton(LayerForm(), [place], qkv), whole)


def runner_of(
    folder: Path, family: str, dtype: torch.dtype, *, paged: bool = True, recorder: StandIn | None = None
) -> NativeRunner:
    save_random(family, folder, dtype=dtype)
    config = read_config(folder)

    def eager(config, weights, dtype, device, *, packed, cached):
        record = None if recorder is None else lambda: recorder
        made = EagerForward(config, weights, dtype, device, paged=paged, recorder=record)
        return made, made.kernels.reason

    runner = NativeRunner(
        config,
        load_weights(folder, config),
        dtype=dtype,
        device=DEVICE,
        max_tokens_cached=256,
        make_forward=eager,
    )
    runner.open(0, TEXT)
    assert runner.reserve(0, 64)
    return runner


@pytest.mark.parametrize("family", ["gpt-oss", "gemma4-e"])
def test_models_compute_what_torch_computes(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: prefill, a tree, and its path kept; windows, sinks, experts, layers that see other layers' keys."""
    monkeypatch.setattr(choosing, "_try", lambda *args, **kwargs: None)  # other tests try
    runners = [runner_of(tmp_path, family, torch.float64, paged=paged) for paged in (True, False)]
    assert ["Triton" in runner.spec.kernels for runner in runners] == [True, False]
    logits = []
    for runner in runners:
        found = [runner.forward([Segment(0, TEXT[:7])]).logits_RV[-1:]]
        runner.keep(0, ())
        found.append(runner.forward([Segment(0, TEXT[7:8], Tree((3, 4, 5), (-1, 0, 0)))]).logits_RV)
        runner.keep(0, (0, 2))
        found.append(runner.forward([Segment(0, TEXT[8:9])]).logits_RV)
        logits.append(torch.cat(found))
    torch.testing.assert_close(*logits, atol=1e-6, rtol=1e-6)


def test_without_triton_torch_attends_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_here, "find_spec", lambda name: None)
    choosing._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for folder in ("a", "b"):
            assert "Triton" not in runner_of(tmp_path / folder, "llama", torch.float32).spec.kernels
    assert [line.getMessage() for line in caplog.records if line.name == choosing.__name__] == [
        "no attention over pages by Triton: Triton is not installed; torch's attention runs instead, which takes longer"
    ]


@pytest.mark.parametrize("wrong", ["raises", "differs"])
def test_kernels_that_fail_when_tried_are_not_used(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def attend(self, layer, table, queries, out) -> None:
        if wrong == "raises":
            raise RuntimeError("out of resource:\n  shared memory")

    monkeypatch.setattr(PagedAttention, "_attend", attend)
    choosing._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        runner = runner_of(tmp_path, "llama", torch.float32)
    assert "Triton" not in runner.spec.kernels
    (line,) = [line.getMessage() for line in caplog.records if line.name == choosing.__name__]
    assert ("RuntimeError: out of resource: shared memory" if wrong == "raises" else "from torch's") in line
    assert "\n" not in line
    assert runner.forward([Segment(0, TEXT[:5])]).logits_RV.isfinite().all()


def test_a_step_of_a_fixed_shape_launches_the_same_kernels_whenever_it_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own kernels under the stand-in for CUDA graphs: the same bits as without."""
    monkeypatch.setattr(choosing, "_try", lambda *args, **kwargs: None)
    for name in ("store", "attend", "combine"):
        monkeypatch.setattr(kernels, name, Watched(getattr(kernels, name), name))
    logits = []
    for recorder in (StandIn(), None):
        runner = runner_of(tmp_path, "llama-biased", torch.float32, recorder=recorder)
        found = [runner.forward([Segment(0, TEXT[:2], TREE)]).logits_RV]
        for step in range(2):
            runner.keep(0, ())
            found.append(runner.forward([Segment(0, TEXT[2 + step : 4 + step], TREE)]).logits_RV)
        logits.append(torch.cat(found))
        if recorder is not None:
            assert (recorder.recorded, recorder.replayed) == (1, 2)
    assert torch.equal(*logits)
