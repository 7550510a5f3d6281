"""Prepares the training data of drafters: writes texts and the target's states where they are missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parlay import models
from parlay.llm.llm import LLM
from parlay.models.fetch.origin import weights_fingerprint
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.options import LoadOptions
from parlay.text.prompts import TokensPrompt
from parlay.train.data.features import Featured, FeatureStore
from parlay.train.data.prompts import read_prompts
from parlay.train.data.teacher_api import SHARD, TeacherApi, ask
from parlay.train.data.user_texts import (
    Cut,
    TrainingText,
    check_filled,
    encode_user_texts,
    given_path,
    load_shard,
    read_user_texts,
    save_shard,
    save_user_texts,
    shards,
)
from parlay.train.data.writing import Writer, WritingPlan, short_prompts
from parlay.train.options import DistillTrainOptions, DrafterTrainOptions
from parlay.train.recipes.target import Target
from parlay.train.watching import counted
from parlay.types import SamplingParams

_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Answering:
    """How the student samples its answers for on-policy training: the most tokens, and the seed."""

    tokens: int
    seed: int


def prepare(options: DrafterTrainOptions) -> list[Featured]:
    """Return the texts that the target wrote and those that the user gave, with features; every method but distill uses
    this.

    Missing texts and states are written to the work folder first.
    """
    prompts = read_prompts(options.prompts, skip_broken=options.skip_broken) if options.prompts else []
    given = read_user_texts(options.texts, skip_broken=options.skip_broken) if options.texts else None
    check_filled(options.work, _filling(options, prompts))
    store = _store(options, options.work)
    with LLM(options.model, max_num_seqs=_AT_ONCE, device=options.device) as llm:
        own = 1.0 if not prompts else 0.5 if llm.vocabulary.required_tokenizer.chat_template else 0.0
        plan = WritingPlan(prompts, own, answer_tokens=options.answer_tokens, seed=options.seed)
        plan = replace(plan, prompts=short_prompts(prompts, llm.vocabulary.required_tokenizer, plan.prompt_tokens))
        if given:
            cut = Cut(plan.prompt_tokens, options.answer_tokens, options.longest, options.document_tokens)
            texts = encode_user_texts(given, llm.vocabulary.required_tokenizer, cut)
            save_user_texts(options.work, texts)
            print(f"{len(texts):,} texts of {sum(len(text.ids) for text in texts):,} tokens from {options.texts}")
        if options.written_shards:
            with counted("texts", options.written_shards) as done:
                Writer(llm, plan, store).write(options.work, options.written_shards, done)
    return _featured(options, store)


def prepare_distill(options: DistillTrainOptions) -> list[Featured]:
    """Return the texts of `prepare`. With ``source=student``, add the student's answers to the same prompts.

    With ``url``, return only a server's answers, which have no states.
    """
    if options.url:
        return _asked(options)
    found = prepare(options)
    if options.source == "target":
        return found
    own = options.work / f"student-{weights_fingerprint(options.student)[:12]}"
    texts = len(shards(options.work))
    llm = LLM(options.student, max_num_seqs=_AT_ONCE, device=options.device)
    with llm as student, counted("the student's texts", texts) as done:
        answer_as(student, options.work, own, Answering(options.answer_tokens, options.seed), done)
    return [*found, *_featured(options, _store(options, own))]


def answer_as(
    student: LLM, texts: Path, folder: Path, how: Answering, done: Callable[[int], None] = lambda _: None
) -> None:
    """Write the student's sampled answers to the prompts in ``texts``, one shard in ``folder`` for each shard there.

    ``done`` is called with the number of each shard that was missing. The answers count as texts that the target did
    not write, so acceptance is not measured on them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, source in enumerate(shards(texts)):
        path = given_path(folder, number)
        if path.exists():
            continue
        prompts = [text.ids[: text.answer] for text in load_shard(source) if 0 < text.answer < len(text.ids)]
        if not prompts:  # these texts were given, and have no prompts that are known as such
            done(number)
            continue
        params = [
            SamplingParams(temperature=1.0, max_tokens=how.tokens, seed=how.seed * 1_000_003 + place)
            for place in range(len(prompts))
        ]
        outputs = student.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, strategy="none")
        written = [(*out.prompt_token_ids, *out.outputs[0].token_ids) for out in outputs]
        save_shard(path, [TrainingText(ids, len(ids)) for ids in written])
        done(number)


def _asked(options: DistillTrainOptions) -> list[Featured]:
    assert options.prompts is not None, "the options have checked it"
    prompts = read_prompts(options.prompts, skip_broken=options.skip_broken)
    check_filled(options.work, {**_filling(options, prompts), "url_model": options.url_model})
    teacher = TeacherApi(options.url, options.url_model, options.answer_tokens)
    with counted("answers", -(-len(prompts) // SHARD)) as done:
        ask(options.work, prompts, teacher, load_tokenizer(resolve(options.model)), done)
    texts = [text for path in shards(options.work) for text in load_shard(path)]
    return [Featured(torch.tensor(text.ids), text.answer, torch.zeros(len(text.ids), 0)) for text in texts]


def _filling(options: DrafterTrainOptions, prompts: Sequence[str]) -> dict[str, str]:
    """Return all options that the texts and states in the work folder depend on; see `check_filled`."""
    found = {"model": weights_fingerprint(options.model)}
    if not options.written_shards:
        return found
    asked = hashlib.sha256(json.dumps(prompts).encode()).hexdigest() if prompts else ""
    return {**found, "prompts": asked, "seed": str(options.seed), "answer_tokens": str(options.answer_tokens)}


def _store(options: DrafterTrainOptions, folder: Path) -> FeatureStore:
    return FeatureStore(folder, Target.named(options.model).stored_layers(), on_disk=options.keep_features)


def _featured(options: DrafterTrainOptions, store: FeatureStore) -> list[Featured]:
    """Return all texts of the store with their states; compute those that are missing."""
    missing = store.missing()
    if missing:
        with counted("features", len(missing)) as done:
            store.compute(models.load(options.model, LoadOptions(device=options.device)), done)
    return store.load()
