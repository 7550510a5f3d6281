"""Native runner: logits of transformers, taps of the right layers, trees on both attentions, errors that say why."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from parlay.cache import BLOCK, Rows
from parlay.cache.pages import Page, PageTable
from parlay.models.config import DecoderConfig, LayerForm
from parlay.models.families.reading import read_config
from parlay.models.forward import LayerPages
from parlay.models.native import NativeRunner
from parlay.models.torch_ops.attention import ExactAttention
from parlay.models.torch_ops.attention_form import AttentionKind, Form, Heads, LayerRopes
from parlay.models.torch_ops.attention_masked import MaskedAttention
from parlay.models.torch_ops.kernels import choose_dtype
from parlay.models.torch_ops.step_rows import step_rows
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.types import NO_TREE, Exactness, OutOfRoom, Segment, Tree

CPU = torch.device("cpu")
TREE = Tree((1,) * 6, (-1, 0, -1, 2, 2, 1))
CHAIN = Tree((1, 1), (-1, 0))
CANVAS = Tree((1,) * 7, (-1, 0, -1, 1, 3, 4, 5))
GROUPS = Tree((0,) * 8, (-1, 0, 0, -1, 3, 4, 1, 6))
TEXT = tuple(torch.randint(VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(0)).tolist())


def native(config: DecoderConfig, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> NativeRunner:
    return NativeRunner(config, dict(model.state_dict()), dtype=dtype, device=CPU, max_tokens_cached=512)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[NativeRunner, Tensor]:
    """A runner, and the hidden states and logits of transformers for TEXT, ``[layers + 1, 40, ...]``."""
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    model = save_random(request.param, directory)
    with torch.no_grad():
        expected = model(torch.tensor([TEXT]), output_hidden_states=True)
    return native(read_config(directory), model), expected


@pytest.fixture
def runner(pair: tuple[NativeRunner, Tensor]) -> NativeRunner:
    for sequence in range(3):
        pair[0].release(sequence)
    pair[0].open(0, TEXT, salt="fresh")
    assert pair[0].reserve(0, 200)
    pair[0].truncate(0, 0)
    assert pair[0].reserve(0, 200)
    return pair[0]


def test_logits_and_taps_are_those_of_transformers(runner: NativeRunner, pair) -> None:
    out = runner.forward([Segment(0, TEXT)], taps=(0, 2, 3))
    torch.testing.assert_close(out.logits_RV, pair[1].logits[0], atol=1e-4, rtol=1e-4)
    assert out.logits_RV.dtype == torch.float32
    for layer in (0, 2, 3):  # the last of transformers' hidden states is the one its LM head reads
        torch.testing.assert_close(out.taps[layer], pair[1].hidden_states[layer][0], atol=1e-4, rtol=1e-4)


def test_logits_are_computed_for_the_wanted_rows_alone(runner: NativeRunner) -> None:
    runner.open(1, TEXT[:5], salt="other")
    runner.reserve(1, 5)
    out = runner.forward([Segment(0, TEXT, logits_from=38), Segment(1, TEXT[:5], logits_from=5)], taps=(3,))
    whole = runner.forward([Segment(0, TEXT), Segment(1, TEXT[:5])], taps=(3,))
    assert out.starts == (0, 2, 2)
    assert whole.starts == (0, 40, 45)
    assert torch.equal(out.logits_RV, whole.logits_RV[38:40])
    assert out.taps[3].shape == whole.taps[3].shape == (45, 32)
    nothing = runner.forward([Segment(0, TEXT, logits_from=40)])
    assert nothing.logits_RV.shape == (0, VOCAB_SIZE)


def test_a_forward_commits_nothing(runner: NativeRunner) -> None:
    first = runner.forward([Segment(0, TEXT[:9])]).logits_RV
    assert torch.equal(runner.forward([Segment(0, TEXT[:9])]).logits_RV, first)
    assert runner.truncate(0, 100) == 0


def test_logits_can_be_changed_by_their_reader(runner: NativeRunner) -> None:
    logits = runner.forward([Segment(0, TEXT[:3])]).logits_RV
    logits[0, 0] = -math.inf
    logits.div_(2.0)


def test_wrong_input_is_named_in_one_line(runner: NativeRunner) -> None:
    with pytest.raises(ValueError, match="token 64 is not in the vocabulary of 64"):
        runner.forward([Segment(0, (1, 64))])
    with pytest.raises(ValueError, match="token -1"):
        runner.forward([Segment(0, (1,), Tree((-1,), (-1,)))])
    with pytest.raises(ValueError, match="from 0 to 3"):
        runner.forward([Segment(0, (1,))], taps=(4,))
    with pytest.raises(ValueError, match="at least one row"):
        runner.forward([])
    runner.open(1, TEXT[:1])
    with pytest.raises(ValueError, match="reserve them first"):
        runner.forward([Segment(1, TEXT[:1])])
    with pytest.raises(OutOfRoom):
        runner.reserve(0, runner.capacity() + 1)
    runner.check()


def test_nan_logits_pass_through(tmp_path: Path) -> None:
    model = save_random("llama", tmp_path)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = math.nan
    broken = native(read_config(tmp_path), model)
    broken.open(0, (7,))
    broken.open(1, (8,))
    assert broken.reserve(0, 1)
    assert broken.reserve(1, 1)
    logits = broken.forward([Segment(0, (7,)), Segment(1, (8,))]).logits_RV
    assert logits[0].isnan().all()
    assert not logits[1].isnan().any()


def test_float64_claims_no_more_than_it_holds(tmp_path: Path) -> None:
    model = save_random("llama", tmp_path, dtype=torch.float64)
    runner = native(read_config(tmp_path), model, torch.float64)
    runner.open(0, TEXT)
    runner.reserve(0, len(TEXT))
    with torch.no_grad():
        expected = model(torch.tensor([TEXT])).logits[0].float()
    torch.testing.assert_close(runner.forward([Segment(0, TEXT)]).logits_RV, expected, atol=1e-5, rtol=1e-5)
    assert runner.spec.exactness in (Exactness.BITS, Exactness.SEED)


PLACES = [
    (0, 5, NO_TREE, 0, 0),
    (70, 1, TREE, 0, 0),
    (31, 3, TREE, 0, 0),
    (31, 2, CHAIN, 0, 0),
    (0, 5, NO_TREE, 2, 0),
    (70, 1, TREE, 1, 0),
    (31, 3, TREE, 2, 0),
    (31, 3, TREE, 6, 0),
    (31, 3, TREE, 8, 0),
    (31, 2, CHAIN, 3, 0),
    (31, 2, CHAIN, 0, 2),
    (31, 2, CANVAS, 0, 4),
    (70, 3, CANVAS, 4, 4),
    (31, 2, GROUPS, 0, 5),
    (70, 3, GROUPS, 4, 5),
]
"""Where rows lie: tokens cached, tokens pending, tree, base, and rows that see each other."""


@pytest.mark.parametrize(
    "form",
    [LayerForm(), LayerForm(window=9), LayerForm(score_cap=2.0, scale=0.3), LayerForm(rope=None)],
    ids=["plain", "window", "cap", "no positions"],
)
def test_masked_and_exact_attention_agree_on_chains_trees_and_canvases(form: LayerForm) -> None:
    heads = Heads(6, 2, 16)
    config = DecoderConfig(
        architecture="test", vocab_size=8, hidden_size=96, intermediate_size=8, num_layers=1, num_heads=6,
        num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, max_context=256, layers=(form,),
    )  # fmt: skip
    kind, ropes = AttentionKind(heads), LayerRopes(config, torch.float32, CPU)
    attentions = (
        ExactAttention(kind, [form], ropes, Form(4, 192), dtype=torch.float32, sinks=[None]),
        MaskedAttention(kind, [form], ropes, [None]),
    )
    for start, pending, nodes, base, together in PLACES:
        table = PageTable()
        for _ in range(8):
            table.append(Page(torch.zeros(1, 2, 2, 1, BLOCK, 16)))
        for slot in range(start + base):
            table.row(slot)[0][:] = torch.randn(1, 2, 2, 16)
        place = Rows(table, start, pending, nodes, base, together)
        qkv = torch.view_as_complex(torch.randn(place.end - base, heads.qkv_heads, 8, 2))
        outs, pages = [], []
        for attention in attentions:
            out = torch.zeros(place.end - base, 96)
            attention.plan(step_rows(place, CPU, LayerPages.alike(1)), place, 0, out)(0, qkv)
            outs.append(out)
            pages.append(torch.cat([page.rows.clone() for page in table], 3))
        torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(*pages, atol=1e-5, rtol=1e-5)


def test_the_chosen_dtype_comes_with_its_timings(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    config = replace(read_config(tmp_path), vocab_size=512)
    dtype, reason = choose_dtype(config, CPU)
    assert dtype in (torch.float32, torch.bfloat16)
    assert "float32" in reason
    assert choose_dtype(config, CPU) == (dtype, reason)
