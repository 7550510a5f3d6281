"""`parlay train eagle3`: the target writes texts, its features are kept, a head is trained on them, measured, saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from parlay import models
from parlay.drafters.heads.options import EAGLE3
from parlay.heads import artefact
from parlay.heads.eagle3 import Eagle3Head
from parlay.llm import LLM
from parlay.options import option
from parlay.train.data.features import Featured, FeatureStore
from parlay.train.data.prompts import read_prompts
from parlay.train.data.writing import Writer, WritingPlan
from parlay.train.loop import Loop, LoopOptions, Progress
from parlay.train.recipes.eagle3 import Eagle3Recipe
from parlay.train.recipes.eagle3_start import feature_scale, start_head
from parlay.train.recipes.target import Target, common_tokens
from parlay.types import ParlayError, Runner

HELD_OUT = 10
"""One text in so many is kept for measuring; it is never trained on."""
MEASURED = 64
"""As many of these are measured in each interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3TrainOptions(LoopOptions):
    """Which target, on what it is trained, and how large the head is."""

    model: str = option("smollm2-135m", "the target, by name, folder or GGUF file")
    out: Path = option(Path(EAGLE3), "folder of the finished head")
    work: Path = option(Path("eagle3-work"), "folder of texts, features and checkpoints; a killed run goes on from it")
    prompts: Path | None = option(
        None, 'file of JSON lines {"prompt": TEXT}; the target writes half of its own besides'
    )
    skip_broken: bool = option(False, "leave broken lines of that file out")
    shards: int = option(16, "shards of 128 conversations that the target writes", low=1)
    answer_tokens: int = option(192, "most tokens of an answer", low=2)
    draft_vocab: int = option(4096, "tokens that can be drafted: those that the target writes most", low=2)
    steps: int = option(3, "steps of the training-time test", low=1, high=8)
    own_vocabulary: bool = option(False, "train the LM head too, which begins as the target's")


def train(options: Eagle3TrainOptions) -> str:
    """Runs all stages, skipping what is there already; returns what was reached, in one line."""
    target = Target.named(options.model)
    texts = prepare(options, LLM(options.model, max_num_seqs=64))
    return fit(options, target, texts)


def prepare(options: Eagle3TrainOptions, llm: LLM) -> list[Featured]:
    """Texts and features, written where they are lacking."""
    given = read_prompts(options.prompts, skip_broken=options.skip_broken) if options.prompts else []
    plan = WritingPlan(given, 0.5 if given else 1.0, answer_tokens=options.answer_tokens, seed=options.seed)
    with llm:
        Writer(llm, plan).write(options.work, options.shards, lambda number: print(f"texts: shard {number} written"))
    runner: Runner = models.load(options.model)
    store = FeatureStore(options.work, Target.named(options.model).stored_layers())
    store.compute(runner, lambda path: print(f"features: {path.name} written"))
    return store.load()


def fit(options: Eagle3TrainOptions, target: Target, texts: Sequence[Featured]) -> str:
    """Trains a head on the texts but for one in ten, and saves it with its card."""
    heldout, trained = texts[::HELD_OUT], [text for place, text in enumerate(texts) if place % HELD_OUT]
    if not trained:
        raise ParlayError("there are too few texts to train on: raise --shards")
    torch.manual_seed(options.seed)
    draft_ids_D = common_tokens(trained, options.draft_vocab, target.config.vocab_size)
    head = start_head(target, draft_ids_D, target.usual_taps(), trained)
    scale_F = feature_scale(trained, head.fc.in_features)
    recipe = Eagle3Recipe(head, target, scale_F, options.steps, own_vocabulary=options.own_vocabulary)
    reached = Loop(recipe, options, options.work / "state.safetensors").run(trained, heldout[:MEASURED], print)
    tokens = sum(len(text.ids_T) for text in trained)
    save(options.out, recipe.finished(), target, _card(options, reached, tokens))
    return f"{options.out}: {reached}"


def save(folder: Path, head: Eagle3Head, target: Target, card: str) -> None:
    """The head as a strategy opens it."""
    config = head.config
    settings = {"taps": list(config.taps), "draft_vocab_size": config.draft_vocab_size}
    witness_WH = target.embedding_VH[artefact.witness_ids(config.layer.vocab_size)]
    made = artefact.HeadArtefact(EAGLE3, config.layer, settings, dict(head.state_dict()), witness_WH)
    artefact.save(folder, made, card)


def _card(options: Eagle3TrainOptions, reached: Progress, tokens: int) -> str:
    source = f"{options.prompts.name} and prompts of its own" if options.prompts else "prompts of its own"
    shares = ", ".join(f"{100 * share:.1f} %" for share in reached.acceptance)
    return (
        f"# EAGLE-3 head for {options.model}\n\n"
        f"- Target: {options.model}. Its licence holds for the head too.\n"
        f"- Data: {tokens:,} tokens, the target's answers to {source} (seed {options.seed}).\n"
        f"- Training: {reached.tokens:,} tokens in {reached.step} steps, {reached.seconds:.0f} s; "
        f"loss {reached.loss:.3f}.\n"
        f"- Held-out drafts that are right up to each depth, best guess alone: {shares}.\n"
    )
