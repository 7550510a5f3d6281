"""The roofline counts what a model computes: FLOPs as torch counts them, bytes as the cache keeps them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from parlay.bench.plan.machine import open_random
from parlay.bench.plan.shapes import config_of, shape_of
from parlay.cache import Budget
from parlay.cost.devices import DEVICES, machine
from parlay.cost.roofline import ForwardShape, Machine, ModelShape, flops, moved_bytes, operators
from parlay.models import load
from parlay.models.families.reading import read_config
from parlay.models.random_decoder import save_decoder
from parlay.models.transformers_adapter.call import cache_argument
from parlay.options import LoadOptions
from parlay.testing.checkpoints import random_model

MACHINE = Machine(
    bandwidth=2e10,
    rate=1e11,
    attention_bandwidth=1e10,
    attention_rate=3e10,
    vector_bandwidth=5e9,
    layer_seconds=5e-5,
    attend_seconds=3e-5,
    forward_seconds=1e-4,
)
SHAPE = ModelShape(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    kv_bytes=4,
)
WORKS = {
    "prefill": ForwardShape(batch=2, rows=9, logits=1),
    "prefill, second chunk": ForwardShape(rows=6, context=9, logits=1),
    "decode": ForwardShape(batch=3, context=7),
    "verify": ForwardShape(batch=2, rows=5, context=7),
    "tree": ForwardShape(rows=6, context=7, leaves=3),
}


def shape(model: PreTrainedModel, folder: Path) -> ModelShape:
    model.save_pretrained(folder)
    return shape_of(read_config(folder), weight_bytes=4, kv_bytes=4)


def counted(model: PreTrainedModel, work: ForwardShape) -> int:
    """FLOPs of the forward as torch counts them; a tree is a mask and positions like any other."""
    with torch.no_grad():
        ids = torch.ones(work.batch, work.context, dtype=torch.long)
        argument = cache_argument("", inspect.signature(model.forward).parameters)
        cache = model(ids, use_cache=True)[argument] if work.context else None
        seen = torch.zeros(work.batch, 1, work.rows, work.context + work.rows)
        if work.leaves > 1:  # the first two nodes are siblings
            seen[:, :, 2, work.context + 1] = -torch.inf
        with FlopCounterMode(display=False) as counter:
            model(
                torch.ones(work.batch, work.rows, dtype=torch.long),
                attention_mask=seen,
                logits_to_keep=work.logits or 0,
                **{argument: cache},
            )
    return int(counter.get_total_flops())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama-tied"])
def test_flops_are_exactly_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    model = random_model(family)
    model.set_attn_implementation("eager")
    read = shape(model, tmp_path)
    assert {name: flops(read, work) for name, work in WORKS.items()} == {
        name: counted(model, work) for name, work in WORKS.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_keys_and_values_are_those_of_the_cache(dtype: str, tmp_path: Path) -> None:
    """In whatever type the kernels here keep them: what a sequence of so many tokens takes of the memory."""
    tokens = 1920  # whole pages, however keys are padded
    options = LoadOptions(dtype=dtype, device="cpu")
    _, kept = open_random(SHAPE, options, max_context=2048, cache_tokens=tokens)
    save_decoder(config_of(SHAPE, 2048), tmp_path)
    budget = Budget(None)
    runner = load(str(tmp_path), options, cache_tokens=tokens, budget=budget)
    runner.open(0, (0,))
    runner.reserve(0, tokens)
    assert budget.total - budget.free == tokens * kept.token_bytes
    moved = {operator.name: operator.bytes for operator in operators(kept, ForwardShape(context=180, rows=2))}
    assert moved["attention"] == (180 + 2 + 2) * kept.token_bytes


def test_weights_are_read_once_however_many_rows_there_are() -> None:
    """The bytes of two rows are those of one and a few more; a batch twice as large is no second reading."""
    one, two = (moved_bytes(SHAPE, ForwardShape(rows=rows)) for rows in (1, 2))
    assert one > SHAPE.num_layers * SHAPE.hidden_size * SHAPE.intermediate_size * 3 * SHAPE.weight_bytes
    assert two < 1.05 * one


def test_parameters_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = random_model("llama")
    assert shape(model, tmp_path).parameters == sum(each.numel() for each in model.parameters() if each.dim() > 1)


@pytest.mark.parametrize("field", ["batch", "rows", "context"])
def test_time_flops_and_bytes_rise_with_everything(field: str) -> None:
    base = ForwardShape(batch=2, rows=3, context=100)
    values = (1, 2, 3, 5, 8, 16, 33, 64, 200, 1000)
    works = [replace(base, **{field: value}) for value in values]
    for measure in (lambda work: MACHINE.forward(SHAPE, work), lambda work: flops(SHAPE, work)):
        assert all(less < more for less, more in pairwise(map(measure, works)))


def test_a_forward_is_bound_by_memory_first_and_by_arithmetic_later() -> None:
    """Rows are next to free up to the machine's balance, and proportional beyond: why drafts stop paying in batches."""
    big = replace(SHAPE, hidden_size=2048, intermediate_size=8192, num_heads=16)
    quiet = replace(machine("h200", "bfloat16"), layer_seconds=0.0, attend_seconds=0.0, forward_seconds=0.0)
    one, eight, many, more = (quiet.forward(big, ForwardShape(batch=rows, context=1)) for rows in (1, 8, 4000, 8000))
    assert eight < 1.1 * one
    assert more > 1.9 * many


def test_a_model_that_fits_into_the_cache_is_read_from_there() -> None:
    cached = replace(MACHINE, cached_bandwidth=1e11, cached_rate=MACHINE.rate, cache_bytes=SHAPE.read_bytes)
    assert cached.forward(SHAPE, ForwardShape()) < MACHINE.forward(SHAPE, ForwardShape())
    larger = replace(SHAPE, num_layers=5)
    assert cached.forward(larger, ForwardShape()) == MACHINE.forward(larger, ForwardShape())


def test_prefill_is_the_sum_of_its_chunks() -> None:
    chunks = [ForwardShape(rows=512, logits=0), ForwardShape(rows=88, context=512, logits=1)]
    assert MACHINE.prefill(SHAPE, 600) == pytest.approx(sum(MACHINE.forward(SHAPE, work) for work in chunks))
    assert MACHINE.prefill(SHAPE, 600, batch=3) == pytest.approx(3 * MACHINE.prefill(SHAPE, 600))


def test_every_known_device_predicts_something_sane() -> None:
    """Bandwidth-bound at one row: faster memory, faster decoding; and half the bytes are faster than single ones."""
    big = replace(SHAPE, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8)
    seconds = {name: machine(name, "bfloat16").forward(big, ForwardShape(context=1024)) for name in DEVICES}
    assert seconds["h200"] < seconds["h100-sxm"] < seconds["a100-80gb"] < seconds["l4"]
    assert all(machine(name, "float32").rate < machine(name, "bfloat16").rate for name in DEVICES)


def test_an_unknown_device_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'h300' is not known: name one of b200, .* mi300x"):
        machine("h300", "bfloat16")


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"rows": 0}, {"context": -1}, {"rows": 2, "leaves": 3}])
def test_work_that_can_not_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="work needs"):
        ForwardShape(**wrong)
