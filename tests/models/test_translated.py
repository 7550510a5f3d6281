"""Members of an ensemble that have another tokenizer: they read the same letters, and count where both have a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay import LLM, SamplingParams
from parlay.models.ensembles.translated import TranslatedRunner, Translation
from parlay.models.loading import load_tokenizer, load_weights, read_config
from parlay.models.native import NativeRunner
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.conformance import check_runner
from parlay.testing.conformance.stages import recomputed
from parlay.testing.reference import LogitsOf, decode
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import NoiseKey, Request, Runner

PROMPTS = [
    [1 + (7 * place + step * step) % (VOCAB_SIZE - 4) for step in range(5 + place % 4)] * 2 for place in range(8)
]


@pytest.mark.parametrize(("cut", "head"), [(1, ()), (4, (11,))])
def test_every_row_is_that_of_the_text_in_the_other_ids(cut: int, head: tuple[int, ...]) -> None:
    """Whatever is opened, forked, cut back or kept, also where whole tokens do not end at the cache's multiples."""
    own = [(3,), (4, 5), (6,), (7, 8, 9), (10,), (0,), (1, 2), (2,)]
    common = {place: ids[0] for place, ids in enumerate(own) if len(ids) == 1}
    law, words = RandomLogits(12, 3), Translation(own, common, head, 11 / 8)

    def open_runner(capacity: int) -> Runner:
        return TranslatedRunner(ToyRunner(law, 12, capacity=-(-capacity * 11 // 8), cut=cut), words)

    def by_hand(ids: Sequence[int]) -> Tensor:
        row_V = law([*head, *(one for token in ids for one in own[token])])
        found_V = torch.full((8,), float(row_V.min()) - 1000)
        for place, there in common.items():
            found_V[place] = row_V[there]
        return found_V

    report = check_runner(open_runner, by_hand, noise_bound=1e-4, steps=40)
    assert report.passed, str(report)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two random models whose tokenizers write the same letters and cut them otherwise, under other ids."""
    made = []
    for name, seed in (("llama", 1), ("qwen2", 2)):
        made.append(str(tmp_path_factory.mktemp(name)))
        save_random(name, Path(made[-1]), seed=seed)
        toy_tokenizer(VOCAB_SIZE, seed=seed).save_pretrained(made[-1])
    return made


def alone(folder: str) -> LogitsOf:
    config = read_config(Path(folder))
    weights = load_weights(Path(folder), config)
    return recomputed(
        NativeRunner(config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=1024)
    )


def by_hand(folders: Sequence[str]) -> LogitsOf:
    """The mean of both laws, where the second has a share in common tokens only."""
    ours, theirs = (load_tokenizer(Path(folder)).get_vocab() for folder in folders)
    texts = {number: text for text, number in ours.items()}
    members = [alone(folder) for folder in folders]

    def logits(ids: Sequence[int]) -> Tensor:
        words = [[texts[token]] if texts[token] in theirs else list(texts[token]) for token in ids]
        second = members[1]([theirs[part] for word in words for part in word]).double()
        law_V, common = torch.softmax(members[0](ids).double(), 0) / 2, [text for text in ours if text in theirs]
        shares = torch.softmax(second[[theirs[text] for text in common]], 0) / 2
        law_V[[ours[text] for text in common]] += shares
        return law_V.log()

    return logits


def test_a_text_is_that_of_both_models_combined_by_hand(folders: list[str]) -> None:
    """Greedy and sampled, together, under plain decoding and two drafters."""
    logits_of = by_hand(folders)
    with LLM(folders[0], ensemble=folders[1], dtype="float32", draft_model=folders[0]) as llm:
        for temperature in (0.0, 0.9):
            params = [
                SamplingParams(temperature=temperature, seed=place, max_tokens=8, ignore_eos=True)
                for place in range(len(PROMPTS))
            ]
            requests = [
                Request(id="", prompt=tuple(prompt), params=own, key=NoiseKey(own.seed or 0))
                for prompt, own in zip(PROMPTS, params, strict=True)
            ]
            wanted = [tuple(decode(logits_of, request).output) for request in requests]
            for strategy in ("none", "draft-model", "union"):
                prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
                outputs = llm.generate(prompts, params, strategy=strategy)
                assert [output.outputs[0].token_ids for output in outputs] == wanted, strategy
        llm.runner.check()
        assert llm.engine.stats().cache_tokens_used == 0
