"""A cache that forgets what no layer sees any more computes the very numbers of one that keeps all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from parlay.bench.plan.shapes import shape_of
from parlay.cache import BLOCK, Budget, RecentShape
from parlay.compiled.library import SWITCH
from parlay.models import forward
from parlay.models.config import DecoderConfig, LayerForm, RopeConfig
from parlay.models.forward import LayerPages, cache_room
from parlay.models.native import NativeRunner
from parlay.models.torch_ops import eager
from parlay.models.torch_ops.kernels import judge
from parlay.models.weights.shapes import weight_shapes
from parlay.types import NO_TREE, OutOfRoom, Segment, Tree

VOCAB = 97
ALL = (LayerForm(window=20), LayerForm(window=4))
SOME = (LayerForm(window=20), LayerForm(rope=None), LayerForm(window=70, sinks=True, rope=RopeConfig(theta=500.0)))
UNEVEN = (
    LayerForm(window=20, value_norm=True),
    LayerForm(kv_heads=1, head_dim=64, keys_as_values=True, rope=RopeConfig(theta=500.0)),
    LayerForm(window=20, keys_of=0, mlp_size=96),
    LayerForm(kv_heads=1, head_dim=64, keys_of=1),
)
TREE = Tree((3, 9, 27, 17, 51, 25), (-1, 0, 1, 0, 3, -1))


def decoder(forms: tuple[LayerForm, ...]) -> DecoderConfig:
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=80,
        num_layers=len(forms),
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        max_context=4096,
        layers=forms,
        per_layer_size=8 if forms is UNEVEN else 0,
    )


def made(
    forms: tuple[LayerForm, ...],
    dtype: torch.dtype = torch.float32,
    cached: str = "auto",
    memory: int | None = None,
) -> NativeRunner:
    """A random decoder of such layers, with a cache for one long text and a little more, or of so many bytes."""
    config = decoder(forms)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        for name, shape in weight_shapes(config).items()
    }
    return NativeRunner(
        config,
        weights,
        dtype=dtype,
        device=torch.device("cpu"),
        max_tokens_cached=5000,
        budget=Budget(memory),
        kv_cache_dtype=cached,
    )


class Session:
    """Texts of one runner, and the logits of their last rows."""

    def __init__(self, runner: NativeRunner) -> None:
        self.runner, self.logits = runner, list[Tensor]()
        self.texts: dict[int, list[int]] = {}

    def open(self, name: int, text: Sequence[int], chunk: int) -> None:
        cached = self.runner.open(name, text)
        self.texts[name] = list(text[:cached])
        while cached < len(text):
            self.step(name, text[cached : cached + chunk])
            cached = len(self.texts[name])

    def step(self, name: int, tokens: Sequence[int], tree: Tree = NO_TREE, path: tuple[int, ...] = ()) -> None:
        text = self.texts[name]
        segment = Segment(name, tuple(tokens), tree, logits_from=len(tokens) - 1)
        assert self.runner.reserve(name, len(text) + segment.end)
        self.logits.append(self.runner.forward([segment]).logits_RV[-1 - len(tree) :])
        text += [*tokens, *(tree.tokens[node] for node in path)]
        assert self.runner.keep(name, path) == len(text)
        self.runner.check()

    def cut(self, name: int, length: int) -> None:
        """Cut a text, and run what the cache lost besides."""
        text = self.texts[name]
        kept = self.runner.truncate(name, length)
        self.texts[name] = text[:kept]
        if kept < length:
            self.step(name, text[kept:length])


def lived(runner: NativeRunner) -> list[Tensor]:
    """Chunks, drafts deeper than a window, a fork, cuts near and far, and a prefix that another text left."""
    chance, session = random.Random(0), Session(runner)
    text = chance.choices(range(VOCAB), k=400)
    session.open(0, text, 90)
    for _ in range(6):
        session.step(0, chance.choices(range(VOCAB), k=2), TREE, chance.choice([(), (0, 1, 2), (0, 3, 4), (5,)]))
    deep = Tree(tuple(range(30)), tuple(range(-1, 29)))
    session.step(0, (1,), deep, tuple(range(25)))
    runner.fork(0, 1)
    session.texts[1] = session.texts[0][: runner.store.length(1)]
    session.step(1, (5, 6), TREE, (5,))
    session.cut(0, len(session.texts[0]) - 40)
    session.step(0, (7,), TREE, (0, 1))
    runner.release(1)
    session.open(2, [*text[:300], 1, 2, 3], 512)
    session.cut(0, 150)
    session.step(0, (8,), TREE, (0,))
    session.open(3, chance.choices(range(VOCAB), k=2000), 700)
    assert runner.spec.max_context == 4096
    return session.logits


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")


def masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr(eager, "judge", lambda *asked, **how: replace(judge(*asked, **how), form=None))


KINDS = pytest.mark.parametrize(
    ("kernels", "dtype", "cached"),
    [
        (None, torch.float32, "auto"),
        (None, torch.bfloat16, "auto"),
        (None, torch.bfloat16, "q8_0"),
        (without_library, torch.float32, "auto"),
        (masked, torch.float32, "auto"),
    ],
    ids=["float32", "bfloat16", "q8_0", "torch", "masked"],
)


def forgets(
    forms: tuple[LayerForm, ...], dtype: torch.dtype, cached: str, keep_all: Callable[[], None]
) -> NativeRunner:
    """A runner that has decoded texts; its logits are those of one that ``keep_all`` has keep all, in less memory."""
    runner = made(forms, dtype, cached)
    found, held = lived(runner), runner.store.nbytes - runner.store.spare
    keep_all()
    keeps = made(forms, dtype, cached)
    expected = lived(keeps)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert held < 0.6 * (keeps.store.nbytes - keeps.store.spare)
    return runner


@KINDS
def test_layers_that_differ_forget_what_no_row_sees(
    kernels: Callable[[pytest.MonkeyPatch], None] | None,
    dtype: torch.dtype,
    cached: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With heads of their own in pages of their own, and layers that see an earlier one's keys in its pages."""
    if kernels is not None:
        kernels(monkeypatch)
    widened = partial(RecentShape, margin=4096)
    runner = forgets(UNEVEN, dtype, cached, lambda: monkeypatch.setattr(forward, "RecentShape", widened))
    number = {torch.float32: 4, torch.bfloat16: 2}[dtype] if cached == "auto" else 34 / 32
    assert runner.store.shape.page_bytes == 2 * 64 * BLOCK * number
    assert cache_room(decoder(UNEVEN), number).bytes_for(2000) == runner.store._room.bytes_for(2000)


@pytest.mark.parametrize("forms", [ALL, SOME], ids=["all", "some"])
@KINDS
def test_logits_are_those_of_a_cache_that_keeps_all(
    forms: tuple[LayerForm, ...],
    kernels: Callable[[pytest.MonkeyPatch], None] | None,
    dtype: torch.dtype,
    cached: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernels is not None:
        kernels(monkeypatch)
    alike = staticmethod(lambda config: LayerPages.alike(config.num_layers))
    forgets(forms, dtype, cached, lambda: monkeypatch.setattr(LayerPages, "of", alike))


def test_admission_counts_what_a_text_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for 1,000 tokens in all layers takes texts of any length where all layers have windows."""
    memory = 1000 * 2 * len(ALL) * 2 * 32 * 4
    runner = made(ALL, memory=memory)
    runner.open(0, ())
    assert runner.reserve(0, 4096)
    assert runner.capacity() >= 4096
    runner.open(1, ())
    assert not runner.reserve(1, 4096)
    monkeypatch.setattr(LayerPages, "of", staticmethod(lambda config: LayerPages.alike(config.num_layers)))
    keeps = made(ALL, memory=memory)
    keeps.open(0, ())
    with pytest.raises(OutOfRoom, match="4096 tokens does not fit a cache of 992"):
        keeps.reserve(0, 4096)


def test_a_plan_counts_the_keys_and_weights_of_layers_that_differ() -> None:
    config = decoder(UNEVEN)
    shape, sizes = shape_of(config, weight_bytes=4, kv_bytes=4), weight_shapes(config)
    assert shape.parameters == sum(math.prod(size) for size in sizes.values() if len(size) == 2)
    assert shape.text_bytes(100) == 100 * (2 * 64 + 2 * 2 * 32) * 4
    assert shape.text_bytes(4000) == 4000 * 2 * 64 * 4 + shape.recent_tokens * 2 * 2 * 32 * 4


def test_a_plan_counts_the_keys_that_windows_keep() -> None:
    shape = shape_of(decoder(SOME), weight_bytes=4, kv_bytes=4)
    each = shape.token_bytes // 3
    assert shape.text_bytes(100) == 100 * 3 * each
    assert shape.text_bytes(4000) == (4000 + 2 * shape.recent_tokens) * each
    assert 70 < shape.recent_tokens < 1000
