"""The models that come with the package: they load without a network, each as what it is."""

from __future__ import annotations

import pytest

from parlay import LLM, SamplingParams, models
from parlay.models.kept import kept
from parlay.models.resolving import BUILT_IN, resolve
from parlay.strategies.cache import BUILT_IN_DRAFTS


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_is_found_and_listed_with_its_size(name: str) -> None:
    assert resolve(name).exists()
    (listed,) = [model for model in kept() if model.name == name]
    assert listed.source == "built-in"
    assert listed.size > 1_000_000


def test_the_draft_model_of_smollm2_has_its_vocabulary_and_writes_text() -> None:
    draft = BUILT_IN_DRAFTS["smollm2-135m"]
    assert models.load(draft).spec.vocab_size == 49_152
    with LLM(draft) as llm:
        (answer,) = llm.generate(["The river"], SamplingParams(temperature=0, max_tokens=8), strategy="none")
    assert len(answer.outputs[0].token_ids) == 8
    assert answer.outputs[0].text.strip()
