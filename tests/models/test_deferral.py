"""Two models write one text, and a head says at each token which of them: as when it is combined by hand."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parlay import LLM, Ensemble, ParlayError, SamplingParams
from parlay.heads.artefact import Origin
from parlay.heads.deferral import save_deferral, witnesses
from parlay.llm.outputs import CompletionOutput
from parlay.models.ensembles.combining import Deferral
from parlay.models.loading import load_weights, read_config
from parlay.models.native import NativeRunner
from parlay.testing.checkpoints import VOCAB_SIZE
from parlay.testing.conformance.stages import recomputed
from parlay.testing.reference import LogitsOf, decode
from parlay.types import NoiseKey, Request, Segment

STRATEGIES = ("none", "prompt-lookup", "draft-model", "jacobi", "token-recycling", "union")
PROMPTS = [
    [1 + (7 * place + step * step) % (VOCAB_SIZE - 4) for step in range(5 + place % 4)] * 2 for place in range(20)
]


def runner_of(folder: str) -> NativeRunner:
    config = read_config(Path(folder))
    weights = load_weights(Path(folder), config)
    return NativeRunner(config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=1024)


def states_of(folder: str) -> Callable[[Sequence[int]], Tensor]:
    """The state that the LM head reads after a text, each from an empty cache."""
    runner, names = runner_of(folder), itertools.count()

    def states(ids: Sequence[int]) -> Tensor:
        name = next(names)
        runner.open(name, (), salt=str(name))
        runner.reserve(name, len(ids))
        layer = runner.spec.num_layers
        out = runner.forward([Segment(name, tuple(ids), logits_from=len(ids) - 1)], [layer])
        runner.release(name)
        return out.taps[layer][-1].double()

    return states


@pytest.fixture(scope="module")
def head(folders: list[str]) -> Deferral:
    """One that defers about half of the time."""
    torch.manual_seed(5)
    state_of = states_of(folders[0])
    weight_H = torch.randn(read_config(Path(folders[0])).hidden_size).bfloat16().double()
    scores = sorted(float(torch.sigmoid(weight_H @ state_of(prompt))) for prompt in PROMPTS)
    return Deferral(weight_H, 0.0, scores[len(scores) // 2])


def save(folder: Path, head: Deferral, pair: Sequence[str]) -> str:
    base, assistant = (witnesses(each, VOCAB_SIZE) for each in pair)
    config = read_config(Path(pair[0]))
    save_deferral(folder, head, (config, Origin("base"), base), ("assistant", assistant), "# A head\n")
    return str(folder)


@pytest.fixture(scope="module")
def saved(folders: list[str], head: Deferral, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("deferral"), head, folders[:2])


def by_hand(folders: Sequence[str], head: Deferral) -> LogitsOf:
    """Co-LLM's rule, as plainly as can be."""
    base, assistant = (recomputed(runner_of(each)) for each in folders[:2])
    state_of = states_of(folders[0])

    def logits(ids: Sequence[int]) -> Tensor:
        deferring = 1 / (1 + torch.exp(-(head.weight_H @ state_of(ids) + head.bias)))
        return assistant(ids) if deferring > head.threshold else base(ids)

    return logits


def written(llm: LLM, params: Sequence[SamplingParams], strategy: str) -> list[CompletionOutput]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(params)]]
    return [output.outputs[0] for output in llm.generate(prompts, params, strategy=strategy)]


def test_texts_are_those_of_the_rule_applied_by_hand(folders: list[str], head: Deferral, saved: str) -> None:
    """20 prompts, greedy and sampled, in batches of 8, under plain decoding and five drafters; and who wrote what."""
    logits_of, defer = by_hand(folders, head), Ensemble(folders[1], "defer", head=saved)
    state_of, names = states_of(folders[0]), [Path(folder).name for folder in folders[:2]]
    with LLM(folders[0], ensemble=defer, dtype="float32", draft_model=folders[0], max_num_seqs=8) as llm:
        for temperature in (0.0, 0.9):
            params = [
                SamplingParams(temperature=temperature, top_p=0.95, seed=place, max_tokens=8, ignore_eos=True)
                for place in range(len(PROMPTS))
            ]
            requests = [
                Request(id="", prompt=tuple(prompt), params=own, key=NoiseKey(own.seed or 0))
                for prompt, own in zip(PROMPTS, params, strict=True)
            ]
            wanted = [tuple(decode(logits_of, request).output) for request in requests]
            writers = [
                tuple(
                    names[head.choose([torch.empty(0)] * 2, state_of((*request.prompt, *text[:length])))]
                    for length in range(len(text))
                )
                for request, text in zip(requests, wanted, strict=True)
            ]
            assert {name for row in writers for name in row} == {*names}
            for strategy in STRATEGIES:
                outputs = written(llm, params, strategy)
                assert [output.token_ids for output in outputs] == wanted, strategy
                assert [output.writers for output in outputs] == writers, strategy
        llm.runner.check()


def test_one_model_alone_is_what_extreme_thresholds_and_equal_models_give(
    folders: list[str], head: Deferral, saved: str, tmp_path: Path
) -> None:
    """Bit for bit, log-probabilities included: the base model at 1, the assistant at 0, and either if both are one."""
    params = [SamplingParams(temperature=1, seed=place, max_tokens=8, logprobs=3) for place in range(4)]

    def read(model: str, ensemble: Ensemble | None = None) -> list[Any]:
        with LLM(model, dtype="float32", ensemble=ensemble) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]], params)
            return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    base, assistant, *_ = folders
    assert read(base, Ensemble(assistant, "defer", head=saved, threshold=1)) == read(base)
    assert read(base, Ensemble(base, "defer", head=save(tmp_path, head, (base, base)))) == read(base)
    assert read(base, Ensemble(assistant, "defer", head=saved, threshold=0)) == read(assistant)


def test_a_head_of_another_pair_is_one_clear_line(folders: list[str], saved: str, tmp_path: Path) -> None:
    base, assistant, third = folders
    with pytest.raises(ParlayError, match=r"was trained for 'assistant', not .*: train one for this pair"):
        LLM(base, ensemble=Ensemble(third, "defer", head=saved), dtype="float32")
    with pytest.raises(ParlayError, match="was trained for another model of this shape"):
        LLM(third, ensemble=Ensemble(assistant, "defer", head=saved), dtype="float32")
    with pytest.raises(ParlayError, match=r"ensemble head .*: no folder of a head; train one with parlay train defer"):
        LLM(base, ensemble=Ensemble(assistant, "defer", head=str(tmp_path)))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Ensemble("a", "defer"), "rule defer needs a head: train one with parlay train defer"),
        (lambda: Ensemble(["a", "b"], "defer", head="x"), "defer needs one other model, the assistant"),
        (lambda: Ensemble("a", "defer", (1, 2), head="x"), "the assistant, and no weights"),
        (lambda: Ensemble("a", "defer", head="x", threshold=1.5), "threshold must be between 0 and 1, got 1.5"),
        (lambda: Ensemble("a", "mean", head="x"), "head and threshold work only with rule defer, not mean"),
    ],
)
def test_what_can_not_defer_is_one_clear_line(make: Callable[[], object], line: str) -> None:
    with pytest.raises(ParlayError, match=line):
        make()


def test_a_head_whose_folder_was_changed_is_one_clear_line(folders: Sequence[str], saved: str, tmp_path: Path) -> None:
    """A threshold that is no probability, and weights that the folder does not name."""
    base, assistant, _ = folders
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    for folder in (wide, narrow):
        shutil.copytree(saved, folder)
    said = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(said | {"settings": said["settings"] | {"threshold": 2}}))
    tensors = load_file(narrow / "model.safetensors")
    save_file(tensors | {"weight": tensors["weight"][:7].clone()}, narrow / "model.safetensors")
    for folder, line in ((wide, "threshold 2 is not from 0 to 1"), (narrow, "damaged or replaced")):
        with pytest.raises(ParlayError, match=line):
            LLM(base, ensemble=Ensemble(assistant, "defer", head=str(folder)))
