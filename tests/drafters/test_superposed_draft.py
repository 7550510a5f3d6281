"""Superposed drafts as a tree: paths as `LLM.suggest` writes them, one row for each level, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from parlay import LLM, SamplingParams
from parlay.drafters.draft_models.superposed import SuperposedDraft
from parlay.drafters.options import SuperposedDraftOptions as Options
from parlay.drafters.resources import Resources
from parlay.llm.suggesting import SuggestParams
from parlay.models.native import NativeRunner
from parlay.options import UsageError
from parlay.testing.conformance.stages import ngram_model
from parlay.types import Output, Segment, trees
from tests.drafters.sight import GREEDY, SAMPLED, MakeRunner, drafted, token_paths

PROMPT = "Once upon a time there was a little"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", strategy="none", router_memory="off", seed=1) as model:
        yield model


@pytest.fixture(scope="module")
def resources(llm: LLM) -> Resources:
    """The model drafts for itself."""
    return Resources(llm.runner.spec.vocab_size, lambda name: llm.runner, default_draft="toy", tokenizer=llm.tokenizer)


@pytest.mark.parametrize("with_ngrams", [False, True])
def test_the_deepest_paths_are_what_suggest_writes(llm: LLM, resources: Resources, with_ngrams: bool) -> None:
    (text,) = llm.generate(PROMPT, SamplingParams(temperature=1, max_tokens=200, ignore_eos=True))
    ngrams = ngram_model([text.outputs[0].token_ids], llm.runner.spec.vocab_size)
    own = replace(resources, open_ngrams=lambda _: ngrams)
    drafter = SuperposedDraft(own, Options(min_p=0, ngrams="toy" if with_ngrams else ""))
    draft = drafted(drafter, llm.token_ids(PROMPT), 12)
    drafter.release(0)
    deepest = max(trees.depths(draft.tree))
    assert len(draft) == 12
    assert deepest > 2
    params = SuggestParams(alpha=0.54 if with_ngrams else 0)
    for depth in range(1, deepest):
        wanted = SamplingParams(n=3, max_tokens=depth, ignore_eos=True)
        (output,) = llm.suggest(PROMPT, wanted, params, ngrams=ngrams if with_ngrams else None)
        assert {each.token_ids for each in output.outputs} & token_paths(draft)


def test_one_draft_is_the_models_greedy_text_and_each_level_one_row(
    llm: LLM, resources: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    (greedy,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    rows: list[int] = []
    forward = NativeRunner.forward

    def counted(self: NativeRunner, segments: Sequence[Segment]) -> Output:
        rows.append(sum(each.rows for each in segments))
        return forward(self, segments)

    monkeypatch.setattr(NativeRunner, "forward", counted)
    drafter = SuperposedDraft(resources, Options(min_p=0, drafts=1))
    draft = drafted(drafter, llm.token_ids(PROMPT), 6)
    assert draft.tree.tokens == greedy.outputs[0].token_ids
    assert rows[1:] == [1] * 5
    rows.clear()
    many = drafted(SuperposedDraft(resources, Options(min_p=0)), llm.token_ids(PROMPT), 16)
    assert rows[1:] == [1] * (max(trees.depths(many.tree)) - 1)
    assert 0 < len(rows) < len(many)


def test_nodes_come_after_their_parents_and_the_likeliest_first(llm: LLM, resources: Resources) -> None:
    drafter = SuperposedDraft(resources, Options(drafts=4, min_p=0.01, temperature=1))
    for request in (GREEDY, SAMPLED):
        draft = drafted(drafter, llm.token_ids(PROMPT), 20, request)
        assert all(parent < node for node, parent in enumerate(draft.tree.parents))
        whole = [1.0]
        for parent, score in zip(draft.tree.parents, draft.scores, strict=True):
            whole.append(score * whole[parent + 1])
        assert whole[1:] == sorted(whole[1:], reverse=True)
        assert min(whole) >= 0.01
        assert len(token_paths(draft)) == len(draft)
        drafter.release(0)


def test_only_models_that_tell_their_embeddings_can_draft_so(toy_runner: MakeRunner) -> None:
    resources = Resources(12, lambda name: toy_runner(), default_draft="toy")
    with pytest.raises(UsageError, match="can't read several tokens as one"):
        SuperposedDraft(resources, Options())
    with pytest.raises(UsageError, match="no draft model goes with this target"):
        SuperposedDraft(replace(resources, default_draft=None), Options())


def test_the_text_is_that_of_plain_decoding_and_tokens_are_drafted() -> None:
    greedy, sampled = SamplingParams(temperature=0, max_tokens=40), SamplingParams(max_tokens=40, seed=3)
    with LLM("parlay-mini", dtype="float32", draft_model="parlay-mini-draft", router_memory="off") as llm:
        for params in (greedy, sampled):
            plain = llm.generate([PROMPT, "The dog"], params, strategy="none")
            drafted_too = llm.generate([PROMPT, "The dog"], params, strategy="superposed-draft:policy=fixed,k=8")
            assert [one.chosen.token_ids for one in drafted_too] == [one.chosen.token_ids for one in plain]
            assert sum(one.chosen.sources.count("superposed-draft") for one in drafted_too) > 4
