"""Each processor does what transformers' (or vLLM's formula) does, on the row's own path, in the documented order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as hf

from parlay.sampling.processors import process, validate
from parlay.testing.reference import ReferenceText
from parlay.testing.toy_constraint import ToyConstraint, ToyGrammar
from parlay.types import ParlayError, SamplingParams

MakeView = Callable[..., ReferenceText]


def random_rows(count: int = 20, size: int = 40, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(count, size, generator=torch.Generator().manual_seed(size))


def kept(logits_V: torch.Tensor) -> list[int]:
    return logits_V.isfinite().nonzero()[:, 0].tolist()


WARPERS: list[tuple[SamplingParams, Any]] = [
    (SamplingParams(temperature=0.7), hf.TemperatureLogitsWarper(0.7)),
    (SamplingParams(temperature=2.5), hf.TemperatureLogitsWarper(2.5)),
    *((SamplingParams(top_k=k), hf.TopKLogitsWarper(k)) for k in (1, 5, 39, 40)),
    *((SamplingParams(top_p=p), hf.TopPLogitsWarper(p)) for p in (0.01, 0.5, 0.9, 0.999)),
    *((SamplingParams(min_p=p), hf.MinPLogitsWarper(p)) for p in (0.001, 0.1, 1.0)),
    *((SamplingParams(typical_p=p), hf.TypicalLogitsWarper(p)) for p in (0.1, 0.5, 0.95)),
]


@pytest.mark.parametrize(("params", "warper"), WARPERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("size", [40, 9000])
def test_warpers_agree_with_transformers(params: SamplingParams, warper: Any, size: int, view: MakeView) -> None:
    for logits_V in random_rows(8, size):
        expected = warper(torch.tensor([[1]]), logits_V[None])[0]
        torch.testing.assert_close(process(logits_V, view(params), ()), expected, rtol=1e-6, atol=1e-6)


def test_repetition_penalty_agrees_with_transformers_and_counts_prompt_output_and_path(view: MakeView) -> None:
    text = view(SamplingParams(repetition_penalty=1.7), prompt=[3, 3, 9], output=[5])
    for logits_V in random_rows():
        expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 3, 9, 5, 20]]), logits_V[None].clone())[0]
        assert torch.equal(process(logits_V, text, [20]), expected)


def test_presence_and_frequency_penalties_count_output_and_path_only(view: MakeView) -> None:
    """OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    text = view(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt=[3, 3, 9], output=[5, 6])
    processed = process(torch.zeros(12), text, [5, 5, 9])
    expected = torch.zeros(12)
    expected[5], expected[6], expected[9] = -(0.5 + 0.75), -0.75, -0.75
    assert torch.equal(processed, expected)


def test_bias_and_allowed_ids(view: MakeView) -> None:
    params = SamplingParams(logit_bias={2: 5.0, 7: -3.0}, allowed_token_ids=[7, 1, 2])
    processed = process(torch.zeros(10), view(params), ())
    assert kept(processed) == [1, 2, 7]
    assert processed[[1, 2, 7]].tolist() == [0.0, 5.0, -3.0]


def test_stop_ids_are_masked_until_min_tokens_are_out_on_the_path(view: MakeView) -> None:
    text = view(SamplingParams(min_tokens=3), output=[4], stop_ids=[0, 2])
    assert kept(process(torch.zeros(4), text, [])) == [1, 3]
    assert kept(process(torch.zeros(4), text, [1])) == [1, 3]
    assert kept(process(torch.zeros(4), text, [1, 1])) == [0, 1, 2, 3]


def test_custom_processors_run_in_order_after_masks_and_before_temperature(view: MakeView) -> None:
    seen: list[list[int]] = []

    def double(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        return logits_V * 2

    def add(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        return logits_V + len(ids)

    params = SamplingParams(logits_processors=[double, add], logit_bias={1: 1.0}, temperature=0.5)
    processed = process(torch.zeros(3), view(params, prompt=[8, 9], output=[7]), [6])
    assert seen == [[8, 9, 7, 6]]
    assert processed.tolist() == [8.0, 12.0, 8.0]


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie(view: MakeView) -> None:
    logits_V = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0])
    assert kept(process(logits_V, view(SamplingParams(top_k=3)), ())) == [0, 1, 2]


def test_top_p_keeps_the_lowest_ids_of_a_tie(view: MakeView) -> None:
    assert kept(process(torch.zeros(8), view(SamplingParams(top_p=0.5)), ())) == [0, 1, 2, 3]
    assert kept(process(torch.zeros(8), view(SamplingParams(top_p=0.51)), ())) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [500, 30_000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_top_p_is_the_smallest_set_that_reaches_the_mass(size: int, scale: float, view: MakeView) -> None:
    """Against a full sort, from sharp rows to flat ones where thousands of tokens stay."""
    logits_V = scale * torch.randn(size, generator=torch.Generator().manual_seed(1))
    for top_p in (0.3, 0.95):
        tokens = kept(process(logits_V, view(SamplingParams(top_p=top_p)), ()))
        probs, order = logits_V.double().softmax(0).sort(descending=True, stable=True)
        needed = int((probs.cumsum(0) < top_p).sum()) + 1
        assert abs(len(tokens) - needed) <= 1
        assert set(tokens) == set(order[: len(tokens)].tolist())


def test_filters_apply_one_after_another(view: MakeView) -> None:
    """top-p sees the distribution that top-k left: 0.6 of five equal tokens is three."""
    assert kept(process(torch.zeros(20), view(SamplingParams(top_k=5, top_p=0.6)), ())) == [0, 1, 2]
    logits_V = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert kept(process(logits_V, view(SamplingParams(top_k=3, top_p=0.8, min_p=0.61)), ())) == [0]


def constrained(view: ReferenceText, grammar: ToyGrammar, committed: Sequence[int] = ()) -> ReferenceText:
    constraint = ToyConstraint(grammar)
    for token in committed:
        constraint.commit(token)
    return replace(view, request=replace(view.request, constraint=constraint))


def test_a_constraint_masks_each_row_on_its_own_path(view: MakeView) -> None:
    """Also in views that go on after what is committed, and in those that end before."""
    grammar, output = ToyGrammar(9, length=8, seed=1), list[int]()
    for _ in range(5):
        output.append(grammar.following(output)[0])
    logits_V = random_rows(1, 9)[0]
    for committed in (0, 2, 5):
        for shown in (0, 2, 4):
            text = constrained(view(SamplingParams(), output=output[:shown]), grammar, output[:committed])
            assert kept(process(logits_V, text, output[shown:5])) == grammar.following(output)


def test_a_constraint_says_nothing_after_a_path_that_it_forbids(view: MakeView) -> None:
    grammar = ToyGrammar(9, length=8, seed=1)
    forbidden = next(token for token in range(9) if token not in grammar.following([]))
    logits_V = random_rows(1, 9)[0]
    assert torch.equal(process(logits_V, constrained(view(SamplingParams()), grammar), [forbidden]), logits_V)


def test_no_processor_brings_back_what_the_constraint_forbids(view: MakeView) -> None:
    grammar = ToyGrammar(9, length=8, seed=1)
    params = SamplingParams(logits_processors=[lambda ids, logits_V: torch.ones_like(logits_V)])
    assert kept(process(random_rows(1, 9)[0], constrained(view(params), grammar), ())) == grammar.following([])


def test_truncation_sees_the_tempered_distribution(view: MakeView) -> None:
    logits_V = torch.tensor([0.5, 0.3, 0.2]).log()
    assert kept(process(logits_V, view(SamplingParams(top_p=0.6)), ())) == [0, 1]
    assert kept(process(logits_V, view(SamplingParams(top_p=0.6, temperature=0.1)), ())) == [0]


def test_greedy_rows_are_neither_tempered_nor_truncated(view: MakeView) -> None:
    logits_V = random_rows(1)[0]
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, typical_p=0.1)
    assert process(logits_V, view(params), ()) is logits_V


def test_the_given_row_is_never_changed(view: MakeView) -> None:
    logits_V = random_rows(1)[0]
    before = logits_V.clone()
    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.5, repetition_penalty=2.0, presence_penalty=1.0,
        logit_bias={1: 2.0}, allowed_token_ids=range(30), logits_processors=[lambda ids, logits_V: logits_V.add_(1)],
    )  # fmt: skip
    process(logits_V, view(params, output=[2, 3]), ())
    assert torch.equal(logits_V, before)


def test_half_precision_rows_are_processed_in_float32(view: MakeView) -> None:
    logits_V = random_rows(1)[0].bfloat16()
    params = SamplingParams(repetition_penalty=1.3, temperature=0.7, top_k=9)
    processed = process(logits_V, view(params, prompt=[1, 2]), ())
    assert processed.dtype == torch.float32
    assert torch.equal(processed, process(logits_V.float(), view(params, prompt=[1, 2]), ()))


def raises(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such state")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logits_processors=[raises]), "raised KeyError: 'no such state'"),
        (
            SamplingParams(logits_processors=[lambda ids, logits_V: logits_V[:2]]),
            r"must return shape \(5,\), got shape",
        ),
        (SamplingParams(logits_processors=[lambda ids, logits_V: None]), "got NoneType"),  # type: ignore[list-item,return-value]
        (SamplingParams(allowed_token_ids=[]), "every token is masked: allowed_token_ids, bad_words, .* leave none"),
        (SamplingParams(logit_bias={1: math.nan}), "NaN"),
        (SamplingParams(temperature=1e-44), "infinite: .* or temperature is too near 0: give 0"),
    ],
)
def test_rows_that_can_not_be_drawn_from_say_why(params: SamplingParams, message: str, view: MakeView) -> None:
    with pytest.raises(ParlayError, match=message):
        process(torch.ones(5), view(params), ())


def test_ids_outside_the_vocabulary_are_refused() -> None:
    validate(SamplingParams(logit_bias={9: 1.0}, allowed_token_ids=[0, 9]), 10)
    with pytest.raises(ValueError, match="logit_bias names token 10, but this model's ids are 0 to 9"):
        validate(SamplingParams(logit_bias={10: 1.0}), 10)
    with pytest.raises(ValueError, match="allowed_token_ids names token -1"):
        validate(SamplingParams(allowed_token_ids=[-1]), 10)
    with pytest.raises(ValueError, match="stop_token_ids names token 10"):
        validate(SamplingParams(stop_token_ids=[10]), 10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": [1.5]}, r"stop_token_ids must be a list of token ids, got \[1\.5\]"),
        ({"allowed_token_ids": [1, "2"]}, "allowed_token_ids must be a list of token ids"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must map token ids to numbers, got"),
        ({"logit_bias": {5: math.nan}}, "logit_bias of token 5 is nan: give a number"),
        ({"logit_bias": {5: math.inf}}, "logit_bias of token 5 is inf: give a number"),
    ],
)
def test_what_is_no_id_and_no_bias_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(SamplingParams(**fields), 10)
