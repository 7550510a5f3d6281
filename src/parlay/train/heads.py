"""`parlay train METHOD` of draft heads, from nothing to a folder that a strategy opens.

The target writes texts, its features are kept, a head is trained on them, measured and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch

from parlay import models
from parlay.drafters.heads import options as methods
from parlay.drafters.self_speculation.options import EARLY_EXIT
from parlay.llm import LLM
from parlay.train.data.features import Featured, FeatureStore
from parlay.train.data.given import save_given
from parlay.train.data.prompts import read_conversations, read_prompts
from parlay.train.data.writing import Writer, WritingPlan
from parlay.train.loop import Loop
from parlay.train.options import (
    BlockTrainOptions,
    BlockwiseTrainOptions,
    DynamoTrainOptions,
    Eagle3TrainOptions,
    EagleTrainOptions,
    EarlyExitTrainOptions,
    HeadTrainOptions,
    HydraTrainOptions,
    KangarooTrainOptions,
    MedusaTrainOptions,
    MlpSpeculatorTrainOptions,
    MtpTrainOptions,
    ProbeTrainOptions,
    ReDrafterTrainOptions,
)
from parlay.train.recipes import (
    block,
    blockwise,
    dynamo,
    eagle,
    eagle3,
    early_exit,
    hydra,
    kangaroo,
    medusa,
    mlp_speculator,
    mtp,
    probes,
    redrafter,
)
from parlay.train.recipes.early_exit import EarlyExitRecipe
from parlay.train.recipes.recipe import HeadRecipe
from parlay.train.recipes.target import Target
from parlay.train.saving import origin_of, save_head, written_card
from parlay.types import ParlayError, Runner

HELD_OUT = 10
"""One text in so many is kept for measuring; it is never trained on."""
MEASURED = 64
"""As many of these are measured in each interval."""


@dataclass(frozen=True, slots=True)
class Method:
    """One kind of drafter. ``start`` is called with options of its own class, the target, and the texts to train on."""

    summary: str
    options: type[HeadTrainOptions]
    start: Callable[[Any, Target, Sequence[Featured]], HeadRecipe | EarlyExitRecipe]


METHODS = {
    methods.BLOCK_DRAFTER: Method(
        "train a head that drafts a block in one forward for a target model", BlockTrainOptions, block.start
    ),
    methods.BLOCKWISE: Method(
        "train the heads of blockwise parallel decoding for a target model", BlockwiseTrainOptions, blockwise.start
    ),
    methods.DYNAMO: Method("train DynaMo's heads for a target model", DynamoTrainOptions, dynamo.start),
    EARLY_EXIT: Method(
        "train a target model so that it can draft with its first layers", EarlyExitTrainOptions, early_exit.start
    ),
    methods.EAGLE: Method(
        "train EAGLE's draft head for a target model; eagle2 drafts with it too", EagleTrainOptions, eagle.start
    ),
    methods.EAGLE3: Method("train an EAGLE-3 draft head for a target model", Eagle3TrainOptions, eagle3.start),
    methods.HYDRA: Method("train Hydra's draft heads for a target model", HydraTrainOptions, hydra.start),
    methods.KANGAROO: Method("train Kangaroo's adapter for a target model", KangarooTrainOptions, kangaroo.start),
    methods.MEDUSA: Method("train Medusa's draft heads for a target model", MedusaTrainOptions, medusa.start),
    methods.MLP_SPECULATOR: Method(
        "train IBM's MLP speculator for a target model", MlpSpeculatorTrainOptions, mlp_speculator.start
    ),
    methods.MTP: Method("train a module of multi-token prediction for a target model", MtpTrainOptions, mtp.start),
    methods.PASS: Method("train PaSS's look-ahead embeddings for a target model", ProbeTrainOptions, probes.start_pass),
    methods.PPD: Method("train PPD's probes for a target model", ProbeTrainOptions, probes.start_ppd),
    methods.REDRAFTER: Method("train a recurrent drafter for a target model", ReDrafterTrainOptions, redrafter.start),
}
"""By the name of the strategy that drafts with them."""


def train(method: str, options: HeadTrainOptions) -> str:
    """Runs all stages, skipping what is there already; returns what was reached, in one line."""
    target = Target.named(options.model)
    texts = prepare(options, LLM(options.model, max_num_seqs=64))
    return fit(method, options, target, texts)


def prepare(options: HeadTrainOptions, llm: LLM) -> list[Featured]:
    """Texts and features, written where they are lacking; all methods read the same."""
    given = read_prompts(options.prompts, skip_broken=options.skip_broken) if options.prompts else []
    plan = WritingPlan(given, 0.5 if given else 1.0, answer_tokens=options.answer_tokens, seed=options.seed)
    with llm:
        Writer(llm, plan).write(options.work, options.shards, lambda number: print(f"texts: shard {number} written"))
        if options.texts:
            read = read_conversations(options.texts, skip_broken=options.skip_broken)
            assert llm.tokenizer is not None, "the writer has its chat template"
            save_given(options.work, read, llm.tokenizer, plan.prompt_tokens, options.answer_tokens)
    runner: Runner = models.load(options.model)
    store = FeatureStore(options.work, Target.named(options.model).stored_layers())
    store.compute(runner, lambda path: print(f"features: {path.name} written"))
    return store.load()


def fit(method: str, options: HeadTrainOptions, target: Target, texts: Sequence[Featured]) -> str:
    """Trains a head on the texts but for one in ten, and saves it with its card."""
    heldout, trained = texts[::HELD_OUT], [text for place, text in enumerate(texts) if place % HELD_OUT]
    if not trained:
        raise ParlayError("there are too few texts to train on: raise --shards")
    torch.manual_seed(options.seed)
    recipe = METHODS[method].start(options, target, trained)
    state = options.work / f"{method}.safetensors"
    learned = whole(trained) if options.whole else trained
    reached = Loop(recipe, options, state).run(learned, heldout[:MEASURED], lambda each: print(each, flush=True))
    card = written_card(method, options, reached, trained, origin_of(options))
    if isinstance(recipe, EarlyExitRecipe):
        recipe.save(options.out, card)
    else:
        save_head(method, options, target, recipe, heldout=heldout, expected=reached.acceptance[0], card=card)
    return f"{options.out}: {reached}"


def whole(texts: Sequence[Featured]) -> list[Featured]:
    """The texts as if the target had written all but what stands at the head of each, as a system prompt does."""
    first, last = texts[0].ids_T.tolist(), texts[-1].ids_T.tolist()
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return [replace(text, answer=max(1, min(text.answer, shared))) for text in texts]
