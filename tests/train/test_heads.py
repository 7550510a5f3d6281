"""`parlay train` of each kind of head on a tiny target: it learns, goes on after a kill, and is refused elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from parlay import models
from parlay.cli.train import RECIPES
from parlay.drafters.options import EARLY_EXIT
from parlay.heads import artefact
from parlay.heads.artefact import BadHead
from parlay.heads.opening import heads_of
from parlay.llm import LLM
from parlay.options import LoadOptions, UsageError
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.text.prompts import TokensPrompt
from parlay.train.data.features import Featured, FeatureStore
from parlay.train.data.prompts import read_prompts
from parlay.train.data.user_texts import TrainingText, save_shard, shard_path
from parlay.train.heads import DISTILL, METHODS, fit, parted, train
from parlay.train.loop import acceptance
from parlay.train.options import DrafterTrainOptions, Eagle3TrainOptions, MedusaTrainOptions
from parlay.train.recipes.early_exit import EarlyExitRecipe
from parlay.train.recipes.target import Target
from parlay.types import ParlayError, SamplingParams


@pytest.fixture(scope="module")
def work(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that the target wrote, half of them greedily, each from another token on, and its features of them."""
    folder = tmp_path_factory.mktemp("work")
    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
        prompts = [TokensPrompt(prompt_token_ids=[start % VOCAB_SIZE, start]) for start in range(40)]
        params = [SamplingParams(temperature=start % 2, max_tokens=22, seed=start) for start in range(40)]
        outputs = llm.generate(prompts, params, strategy="none")
    texts = [TrainingText((*out.prompt_token_ids, *out.outputs[0].token_ids), 2) for out in outputs]
    save_shard(shard_path(folder, 0), texts)
    runner = models.load(str(model), LoadOptions(dtype="float32", device="cpu"))
    FeatureStore(folder, Target.named(str(model)).stored_layers()).compute(runner)
    return folder


def options(method: str, model: Path, work: Path, out: Path, updates: int, **more: Any) -> DrafterTrainOptions:
    """No test depends on how fast a machine is: updates are counted, and one interval holds all of them."""
    common = {"model": str(model), "work": work, "out": out, "updates": updates}
    made: DrafterTrainOptions = RECIPES[method].options_class()(**common, batch_tokens=256, interval=3600.0, **more)
    return made


FORMS = [
    *[pytest.param(method, {}, id=method) for method in METHODS if method not in (EARLY_EXIT, DISTILL)],
    pytest.param("hydra", {"plus": True}, id="hydra-plus"),
    pytest.param("mtp", {"form": "parallel", "steps": 2}, id="mtp-parallel"),
]


RESUMED = ("eagle3", "block-drafter", "medusa")
"""A head of each kind: one that reads states level by level, one that fills a block, and one of single heads. What is
kept of a training is no matter of the head."""


@pytest.mark.parametrize(("method", "form"), FORMS)
def test_a_head_learns_and_resumes(method: str, form: dict[str, Any], model: Path, work: Path, tmp_path: Path) -> None:
    target = Target.named(str(model))
    texts = FeatureStore(work, target.stored_layers()).load()
    (tmp_path / "work").mkdir()
    for updates in (10, 30) if method in RESUMED else (30,):  # the second run goes on where the first one stopped
        asked = options(method, model, tmp_path / "work", tmp_path / "head", updates, draft_vocab=48, **form)
        again = fit(method, asked, target, texts)
        assert f": step {updates} " in again
    assert float(again.split("by depth: ")[1].split()[0]) > 100 / 48, "better than chance"

    spec = models.load(str(model), LoadOptions(dtype="float32", device="cpu")).spec
    opened = heads_of(str(model), spec, None)(method, str(tmp_path / "head"))
    assert opened is not None
    assert opened.artefact.settings["draft_vocab_size"] == 48
    reached = float(again.split("by depth: ")[1].split()[0]) / 100
    assert opened.artefact.settings["expected"] == pytest.approx(reached, abs=1e-3)


def test_a_training_that_is_over_says_so(
    model: Path, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target.named(str(model))
    texts = FeatureStore(work, target.stored_layers()).load()
    (tmp_path / "work").mkdir()
    told = []
    for updates in (3, 2):
        fit("medusa", options("medusa", model, tmp_path / "work", tmp_path / "head", updates), target, texts)
        told.append("trained already, to step 3: more --updates go on from there" in capsys.readouterr().out)
    assert told == [False, True]


def test_a_head_is_trained_further(model: Path, work: Path, tmp_path: Path) -> None:
    """With another head's weights it begins where that one ended, and keeps its draft vocabulary."""
    target = Target.named(str(model))
    texts = FeatureStore(work, target.stored_layers()).load()
    reached = []
    for name, updates, more in (("first", 60, {}), ("second", 1, {"head": str(tmp_path / "first"), "draft_vocab": 8})):
        (tmp_path / name).mkdir()
        asked = options("eagle3", model, tmp_path / name, tmp_path / name, updates, **{"draft_vocab": 48, **more})
        reached.append(float(fit("eagle3", asked, target, texts).split("by depth: ")[1].split()[0]))
    assert reached[1] > 0.9 * reached[0] > 100 / 48
    assert artefact.load(tmp_path / "second").settings["draft_vocab_size"] == 48
    with pytest.raises(UsageError, match="no drafter for eagle3"):
        fit("eagle3", options("eagle3", model, tmp_path, tmp_path / "third", 1, head="nothing-like-it"), target, texts)


def test_a_target_learns_to_speak_early_and_is_a_model_then(model: Path, work: Path, tmp_path: Path) -> None:
    texts = FeatureStore(work, Target.named(str(model)).stored_layers()).load()
    out = tmp_path / "model"
    asked = options(EARLY_EXIT, model, tmp_path, out, 150, slow_rate=3e-3, exit=1, exit_scale=1.0)
    before = EarlyExitRecipe(asked, Target.named(str(model)))
    shares = acceptance(before, texts, asked)
    fit(EARLY_EXIT, asked, Target.named(str(model)), texts)
    after = EarlyExitRecipe(asked, Target.named(str(out)))
    assert acceptance(after, texts, asked)[0] > shares[0] + 0.1

    prompt = TokensPrompt(prompt_token_ids=[3, 4])
    with LLM(str(out), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
        plain, early = (
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16), strategy=strategy)[0].outputs[0]
            for strategy in ("none", "early-exit:exit=1")
        )
    assert early.token_ids == plain.token_ids


def test_a_head_opens_for_its_target_alone(model: Path, work: Path, tmp_path: Path) -> None:
    target = Target.named(str(model))
    out = tmp_path / "head"
    texts = FeatureStore(work, target.stored_layers()).load()
    fit("eagle3", options("eagle3", model, tmp_path, out, 2, draft_vocab=48), target, texts)
    spec = models.load(str(model), LoadOptions(dtype="float32", device="cpu")).spec

    other = tmp_path / "other"
    save_random("llama", other, seed=1)
    with pytest.raises(BadHead, match="another model"):
        heads_of(str(other), spec, None)("eagle3", str(out))

    held = artefact.load(out)
    poisoned = {**held.tensors, "fc.weight": torch.full_like(held.tensors["fc.weight"], torch.nan)}
    bad = artefact.HeadArtefact(held.method, held.layer, held.settings, poisoned, held.witness_WH)
    artefact.save(tmp_path / "bad", bad, "")
    with pytest.raises(BadHead, match="not finite"):
        artefact.load(tmp_path / "bad")


@pytest.mark.parametrize("watched", [False, True])
def test_a_head_learns_from_a_folder_of_texts_alone(
    watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target writes nothing: it reads the documents, and the head is measured on those held out.

    While somebody watches, a bar says how it goes, else a line for each interval.
    """
    monkeypatch.setattr("parlay.system.progress.watched", lambda: watched)
    (tmp_path / "texts").mkdir()
    for part in range(3):
        story = "".join(f"The harbour of town {n} was quiet before storm {n * part}. " for n in range(20))
        (tmp_path / "texts" / f"{part}.md").write_text(story)
    asked = MedusaTrainOptions(
        model="parlay-mini",
        texts=tmp_path / "texts",
        shards=0,
        work=tmp_path / "work",
        out=tmp_path / "head",
        longest=64,
        updates=6,
        keep_features=watched,
    )
    reached = train("medusa", asked)
    assert float(reached.split("by depth: ")[1].split()[0]) > 0
    told = capsys.readouterr()
    assert ("features: shard 1 of 1" in told.out, "step " in told.out) == (not watched, not watched)
    assert (
        bool(
            re.search(
                r"Training medusa .* left, [\d,]+ tokens/s, loss \d+\.\d+, held-out drafts right by depth: \d", told.err
            )
        )
        == watched
    )
    assert bool(list((tmp_path / "work").glob("features-*"))) == watched, "where they were to be kept"
    card = (tmp_path / "head" / "README.md").read_text()
    assert "are 0 of these; it read those of texts." in card
    outputs = LLM("parlay-mini").generate(
        "The harbour", SamplingParams(max_tokens=8), strategy=f"medusa:head={tmp_path / 'head'}"
    )
    assert outputs[0].outputs[0].text


@pytest.mark.parametrize("name", ["work", "out"])
def test_folders_that_can_not_be_written_are_named_before_anything_is_computed(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("taken")
    folders = {"work": tmp_path / "work", "out": tmp_path / "out", name: tmp_path / "file"}
    with pytest.raises(ParlayError, match=rf"can't write to the folder {tmp_path / 'file'}"):
        train("medusa", MedusaTrainOptions(model="no such model", **folders))


def test_a_target_that_writes_nothing_needs_texts(tmp_path: Path) -> None:
    """The message asks only for what is missing."""
    wishes = [
        ({}, "give texts=PATH"),
        ({"texts": tmp_path, "whole": False}, "remove whole=False"),
        ({"whole": False}, "give texts=PATH, and remove whole=False"),
    ]
    for more, wish in wishes:
        with pytest.raises(UsageError, match=f"shards=0: the target writes nothing, so {wish}$"):
            MedusaTrainOptions(shards=0, **more)


def test_texts_of_others_are_whole_and_prompts_are_answered(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="remove texts or whole=False"):
        MedusaTrainOptions(texts=tmp_path, whole=False)
    with pytest.raises(UsageError, match="with shards=0 it does not"):
        MedusaTrainOptions(texts=tmp_path, prompts=tmp_path, shards=0)


def text(ids: tuple[int, ...], answer: int) -> Featured:
    return Featured(torch.tensor(ids), answer, torch.zeros(len(ids), 1))


def test_a_prompt_that_is_measured_is_not_trained_on() -> None:
    """Prompts are dealt out again and again, and a greedy answer is the same each time."""
    written = [text((number % 20, 1, 2, 3), 2) for number in range(100)]
    given = [text((number, 5, 6), 3) for number in range(30)]
    heldout, trained = parted([*written, *given])
    asked = [{tuple(each.ids_T[:2].tolist()) for each in part} for part in (heldout, trained[: 100 - len(heldout)])]
    assert (len(heldout), len(asked[0]), asked[0] & asked[1]) == (10, 2, set())
    assert trained[-30:] == given, "what the target did not write is never measured, so all of it is learned"
    heldout, trained = parted(given)
    assert (len(heldout), len(trained)) == (3, 27), "unless there is nothing else"


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle", EARLY_EXIT])
def test_answers_of_a_token_or_two_train_a_head(method: str, model: Path, tmp_path: Path) -> None:
    """No depth further on has anything to learn from, and no loss is divided by nothing."""
    target = Target.named(str(model))
    save_shard(shard_path(tmp_path, 0), [TrainingText((3, at % 40, at % 7), 2) for at in range(40)])
    store = FeatureStore(tmp_path, target.stored_layers())
    store.compute(models.load(str(model), LoadOptions(dtype="float32", device="cpu")))
    more = {} if method == EARLY_EXIT else {"draft_vocab": 8}
    asked = options(method, model, tmp_path, tmp_path / "head", 2, whole=False, **more)
    assert ": step 2 " in fit(method, asked, target, store.load())


def test_too_few_texts_are_an_error(model: Path, work: Path, tmp_path: Path) -> None:
    with pytest.raises(ParlayError, match="too few texts"):
        fit(
            "eagle3",
            options("eagle3", model, tmp_path, tmp_path / "head", 2, draft_vocab=48),
            Target.named(str(model)),
            [],
        )


def test_wrong_values_are_errors() -> None:
    with pytest.raises(UsageError, match="steps must be at least 1"):
        Eagle3TrainOptions(steps=0)
    with pytest.raises(TypeError, match="setps"):
        Eagle3TrainOptions(setps=3)  # type: ignore[call-arg]


def test_broken_prompts_are_named_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Hello"}\nbroken\n{"text": "x"}\n')
    with pytest.raises(ParlayError, match=r"line 2: not JSON .*\(2 such lines\)"):
        read_prompts(file)
    assert read_prompts(file, skip_broken=True) == ["Hello"]


def test_damaged_features_are_an_error(model: Path, work: Path, tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, (0, 1, 2))
    save_shard(shard_path(tmp_path, 0), [TrainingText((1, 2, 3), 1)])
    (tmp_path / "features-0-1-2-00000.safetensors").write_bytes(b"cut short")
    with pytest.raises(ParlayError, match="is damaged"):
        store.load()
