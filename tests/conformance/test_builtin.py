"""The built-in model under every catalogue entry: no token that is promised differs from plain decoding, in fp32 and in
bf16."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from parlay import models
from parlay.drafters.resources import Resources
from parlay.drafters.stores.datastore_file import Datastore
from parlay.models.fetch.resolving import BUILT_IN_DRAFTS, resolve
from parlay.models.loading import load_tokenizer
from parlay.models.native import NativeRunner
from parlay.models.opening import round_weights
from parlay.options import LoadOptions
from parlay.strategies.built import RunnerCache
from parlay.testing.conformance import Stage, catalogue_specs, subject_of
from parlay.testing.conformance.compare import comparable
from parlay.testing.conformance.stage import PLAIN, StageRequest, decode
from parlay.testing.conformance.stages import copying_link, ngram_model, states_in_memory
from parlay.testing.random_heads import random_heads
from parlay.types import Exactness, SamplingParams

SPECS = catalogue_specs()
FIRST = {spec.partition(":")[0]: spec for spec in reversed(SPECS)}.values()
BATCHES = [(spec, "bfloat16" if spec in FIRST else "float32") for spec in SPECS]
"""Every toy of an entry, its first one in bf16 and further ones in fp32: an entry's toys differ in their trees, not in
numbers. In fp32 the kit's brief form has the first one on a native decoder in chunks, forks, preemption or going on."""

MODEL = "parlay-mini"
LENGTH = 24
PROMPTS = (
    "Repeat this text exactly: the quick brown fox jumps over the lazy dog.\n\nThe text: the quick brown",
    "def area(width, height):\n    return",
    "Once upon a time there was a king who",
    '{"name": "Ada", "age": 36}, {"name": "Grace", "age":',
    "The weather was",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "A",
)
CHOICES = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.95))


@cache
def with_canvas(model: str) -> str:
    """The same model as a causal one that says it fills canvases, too: a folder whose config.json has one key more."""
    folder = Path(tempfile.mkdtemp()) / model
    shutil.copytree(resolve(model), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "set_block_size": 4, "mask_token_id": 0}))
    return str(folder)


@cache
def stage(dtype: str) -> Stage:
    """The built-in target with its own draft model, both in ``dtype``, whatever name a toy setting gives to one."""
    options = LoadOptions(dtype=dtype)
    runner = models.load(with_canvas(MODEL), options, cache_tokens=2048)
    assert isinstance(runner, NativeRunner)
    draft = with_canvas(BUILT_IN_DRAFTS[MODEL])
    shelf = RunnerCache(lambda _: models.load(draft, LoadOptions(dtype=dtype), cache_tokens=2048))
    tokenizer = load_tokenizer(resolve(MODEL))
    store = Datastore.build([np.array(ask.prompt) for ask in asks()], runner.spec.vocab_size)
    resources = Resources(
        runner.spec.vocab_size,
        shelf,
        default_draft=BUILT_IN_DRAFTS[MODEL],
        tokenizer=tokenizer,
        open_tokenizer=lambda _: tokenizer,
        target=runner.spec,
        find_head=random_heads(runner.spec),
        open_drafter=lambda _: copying_link(runner.spec.vocab_size),
        round_weights=partial(round_weights, runner, with_canvas(MODEL), options),
        open_ngrams=lambda _: ngram_model([ask.prompt for ask in asks()], runner.spec.vocab_size),
        open_datastore=lambda _: store,
        open_states=cache(lambda _: states_in_memory(store, runner)),
    )
    return Stage(dtype, lambda _: runner, lambda _: pytest.fail("not recomputed"), runner.spec.vocab_size, resources)


@cache
def asks() -> tuple[StageRequest, ...]:
    """Greedy and sampled in turn, of many lengths."""
    tokenizer = load_tokenizer(resolve(MODEL))
    return tuple(
        StageRequest(
            tuple(tokenizer.encode(text)), replace(CHOICES[index % 2], max_tokens=LENGTH - 2 * index), seed=index
        )
        for index, text in enumerate(PROMPTS)
    )


@cache
def plain(dtype: str) -> list[list[int]]:
    """What plain decoding writes, each prompt alone."""
    here = stage(dtype)
    return [decode(here.open_runner(0), [(ask, PLAIN.strategy(here, 0))])[0].tokens for ask in asks()]


def exact_stage(dtype: str) -> Stage:
    if stage(dtype).open_runner(0).spec.exactness is not Exactness.BITS:
        pytest.skip(f"on this machine {MODEL} in {dtype} is exact up to numerical noise only")
    return stage(dtype)


ALONE = ("auto", "prompt-lookup", "suffix-decoding", "draft-model", "eagle3", "kangaroo", "lookahead", "set-block")
"""One entry of each way to draft: none or several drafters, a chain copied, a tree of a store, a model with a cache of
its own, a head that reads states, early layers, further rows of the target's own, a canvas."""


@pytest.mark.parametrize("spec", [spec for spec in FIRST if spec.partition(":")[0] in ALONE])
def test_no_token_differs_alone(spec: str) -> None:
    """In bf16. How many rows share a forward shows in no logit (`tests/models/test_bits.py`), and the kit has every
    entry's texts alone on the toy: here is one entry of each kind, and in the mixed batch below every one.
    """
    here = exact_stage("bfloat16")
    for index in (0, 1):
        strategy = subject_of(spec).strategy(here, 6)
        if comparable(strategy, asks()[index]):
            (sample,) = decode(here.open_runner(0), [(asks()[index], strategy)])
            assert sample.tokens == plain("bfloat16")[index]


@pytest.mark.parametrize(("spec", "dtype"), BATCHES)
def test_no_token_differs_in_a_mixed_batch_of_eight(spec: str, dtype: str) -> None:
    here = exact_stage(dtype)
    shared, other, none = (
        subject_of(spec).strategy(here, 8),
        subject_of(spec).strategy(here, 3),
        PLAIN.strategy(here, 0),
    )
    strategies = (shared, shared, none, other, shared, none, other, shared)
    samples = decode(here.open_runner(0), list(zip(asks(), strategies, strict=True)))
    for index, (strategy, sample) in enumerate(zip(strategies, samples, strict=True)):
        if comparable(strategy, asks()[index]):
            assert sample.tokens == plain(dtype)[index]
