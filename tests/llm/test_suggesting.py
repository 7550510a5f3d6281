"""Superposed drafts: by a slow reference, beside other texts, with stops, and what can't be asked of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parlay import LLM, SamplingParams
from parlay.drafters.draft_models.superposed import Candidate
from parlay.llm.suggesting import Suggestion, SuggestParams, grow
from parlay.models.native import NativeRunner
from parlay.ngrams import NgramModel, NgramOptions, Vocabulary, build_from_ids
from parlay.options import UsageError
from parlay.testing.conformance.stages import ngram_model
from parlay.types import Features, ParlayError, Segment, Tree

PROMPT = "Once upon a time there was a little"
MODEL_ONLY = SuggestParams(alpha=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", strategy="none", router_memory="off") as llm:
        yield llm


@pytest.fixture(scope="module")
def ngrams(llm: LLM) -> NgramModel:
    """Of a text that the model itself writes."""
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=1, seed=1, max_tokens=200, ignore_eos=True))
    return ngram_model([output.outputs[0].token_ids], llm.runner.spec.vocab_size)


def reference(llm: LLM, ngrams: NgramModel | None, n: int, steps: int) -> list[tuple[int, ...]]:
    """The paper's algorithm, where each step reads the whole text and all earlier means again, without any cache."""
    runner, prompt = llm.runner, llm.token_ids(PROMPT)
    assert isinstance(runner, NativeRunner)
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    means: list[torch.Tensor] = []
    for step in range(steps):
        tree = Tree((0,) * step, tuple(range(-1, step - 1)))
        runner.open(91, (), salt=f"{step}")
        assert runner.reserve(91, len(prompt) + step)
        features = Features(torch.stack(means)) if means else None
        logits = runner.forward([Segment(91, prompt, tree, len(prompt) + step - 1, 0, features)]).logits_RV[-1]
        runner.release(91)
        likeliest = sorted(range(len(logits)), key=lambda id: -float(logits[id]))[:9]
        weights = [math.exp((float(logits[id]) - float(logits[likeliest[0]])) / 0.06) for id in likeliest]
        grown = []
        for score, path in paths:
            for id, weight in zip(likeliest, weights, strict=True):
                own = math.log(weight / sum(weights))
                if ngrams is not None:
                    state = ngrams.state([*prompt, *path][-ngrams.order :])
                    own = 0.46 * own + 0.54 * math.log(10) * ngrams.log10(state, id)
                grown.append((score + own, (*path, id)))
        paths = sorted(grown, reverse=True)[:n]
        total = sum(math.exp(score - paths[0][0]) for score, _ in paths)
        shares = [math.exp(score - paths[0][0]) / total for score, _ in paths]
        rows = runner.embed([path[-1] for _, path in paths])
        means.append(sum(share * row for share, row in zip(shares, rows.double(), strict=True)).to(rows.dtype))  # type: ignore[union-attr]
    return [path for _, path in paths]


@pytest.mark.parametrize("with_ngrams", [False, True])
def test_drafts_are_those_of_the_slow_reference(llm: LLM, ngrams: NgramModel, with_ngrams: bool) -> None:
    model = ngrams if with_ngrams else None
    (output,) = llm.suggest(PROMPT, SamplingParams(n=3, max_tokens=6, ignore_eos=True), ngrams=model)
    assert [each.token_ids for each in output.outputs] == reference(llm, model, 3, 6)
    assert output.outputs[0].exactness == "lossy"
    assert output.metrics.steps == 6


def test_embeddings_are_what_enters_the_first_layer(llm: LLM) -> None:
    runner, ids = llm.runner, (5, 9, 7)
    assert isinstance(runner, NativeRunner)
    runner.open(92, ())
    assert runner.reserve(92, 3)
    entering = runner.forward([Segment(92, ids)], (0,)).taps[0]
    runner.release(92)
    assert torch.equal(runner.embed(ids).to(entering.dtype), entering)


def test_one_draft_without_ngrams_is_greedy_and_leaves_the_text_cached(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=12)
    (greedy,) = llm.generate(PROMPT, plain)
    (one,) = llm.suggest(PROMPT, SamplingParams(n=1, max_tokens=12), MODEL_ONLY)
    assert one.outputs[0].text == greedy.outputs[0].text
    assert one.outputs[0].finish_reason == greedy.outputs[0].finish_reason
    assert llm.suggest(PROMPT, SamplingParams(max_tokens=2))[0].num_cached_tokens > 0
    assert llm.generate(PROMPT, plain)[0].outputs[0].token_ids == greedy.outputs[0].token_ids
    llm.runner.check()


def test_two_texts_under_way_do_not_disturb_each_other(llm: LLM, ngrams: NgramModel) -> None:
    """Nor a request that decodes between their steps."""
    params, prompts = SamplingParams(n=3, max_tokens=6), [PROMPT, "The dog said that"]
    alone = [[each.token_ids for each in output.outputs] for output in llm.suggest(prompts, params, ngrams=ngrams)]
    jobs = [llm.job(prompt, params) for prompt in prompts]
    under_way = [Suggestion(llm.runner, job, llm.tokenizer, ngrams=ngrams) for job in jobs]
    for each in under_way:
        each.open()
    while not all(each.over for each in under_way):
        for each in under_way:
            if not each.over:
                each.step()
        llm.generate("A cat", SamplingParams(temperature=0, max_tokens=2))
    for each in under_way:
        each.release()
        each.finish()
    assert [[each.token_ids for each in job.output().outputs] for job in jobs] == alone


def test_drafts_end_before_a_stop_and_differ(llm: LLM, ngrams: NgramModel) -> None:
    (free,) = llm.suggest(PROMPT, SamplingParams(n=3, max_tokens=10), ngrams=ngrams)
    stop = free.outputs[0].text[4:6]
    (output,) = llm.suggest(PROMPT, SamplingParams(n=3, max_tokens=10, stop=[stop]), ngrams=ngrams)
    assert all(stop not in each.text for each in output.outputs)
    assert any(each.finish_reason == "stop" and each.stop_reason == stop for each in output.outputs)
    assert len({each.token_ids for each in output.outputs}) == 3


def test_logits_that_are_no_numbers_are_one_clear_line() -> None:
    with pytest.raises(ParlayError, match="logits are NaN"):
        grow([Candidate()], torch.tensor([0.0, math.nan, 1.0]), [1])


def test_weights_of_the_law_decide_where_there_are_no_ngrams() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    grown = grow([Candidate()], logits, [0], SuggestParams(temperature=1, top_k=2))
    assert [each.tokens for each in grown] == [(1,), (3,)]
    assert sum(math.exp(each.score) for each in grown) == pytest.approx(1)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(n=17), "n is 17"),
        (SamplingParams(max_tokens=1000), "max_tokens is 1000"),
        (SamplingParams(max_tokens=0), "max_tokens is 0"),
        (SamplingParams(presence_penalty=1), "presence_penalty can't be used"),
        (SamplingParams(logprobs=1), "logprobs can't be used"),
        (SamplingParams(logprobs=0), "logprobs can't be used"),
        (SamplingParams(prompt_logprobs=0), "prompt_logprobs can't be used"),
    ],
)
def test_what_drafts_cannot_honour_is_refused(llm: LLM, params: SamplingParams, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        llm.suggest(PROMPT, params)


def test_a_prompt_that_fills_the_context_is_refused(llm: LLM) -> None:
    most = llm.runner.spec.max_context
    with pytest.raises(ValueError, match=f"the prompt has {most} tokens, and the model reads {most}"):
        llm.suggest({"prompt_token_ids": [5] * most})


def test_one_draft_ends_where_greedy_does_whatever_comes_close(llm: LLM) -> None:
    """The token that comes second at each step ends a text in turn: the one draft is still the likeliest's."""
    (free,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2))
    chances = free.outputs[0].logprobs
    assert chances is not None
    for step, token in zip(chances, free.outputs[0].token_ids, strict=True):
        second = [each for each in step if each != token][:1]
        params = SamplingParams(n=1, max_tokens=6, ignore_eos=True, stop_token_ids=second)
        (greedy,) = llm.generate(PROMPT, dataclasses.replace(params, temperature=0))
        (one,) = llm.suggest(PROMPT, params, SuggestParams(alpha=0, temperature=2))
        assert one.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_sixteen_drafts_of_one_token_differ(llm: LLM) -> None:
    (output,) = llm.suggest(PROMPT, SamplingParams(n=16, max_tokens=1, ignore_eos=True))
    assert len({each.token_ids for each in output.outputs}) == 16


def test_an_ngram_model_of_other_tokens_is_refused(llm: LLM, tmp_path: Path) -> None:
    build_from_ids(tmp_path / "m", [[1, 2]], Vocabulary(5, "other", "abc"), NgramOptions(order=2))
    for model in (tmp_path / "m", NgramModel.open(tmp_path / "m")):
        with pytest.raises(UsageError, match=r"superposed drafts: .*another tokenizer"):
            llm.suggest(PROMPT, ngrams=model)
    with pytest.raises(ParlayError, match="nowhere"):
        llm.suggest(PROMPT, ngrams=tmp_path / "nowhere")
    for wrong in ({"alpha": 2}, {"temperature": 0}, {"top_k": 0}, {"temperature": math.nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SuggestParams(**wrong)  # type: ignore[arg-type]
