"""`parlay train defer`: a head learns which of two models should write, from texts alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parlay import LLM, Ensemble, ParlayError, SamplingParams
from parlay.train.data.user_texts import TrainingText
from parlay.train.defer import (
    DeferTrainOptions,
    Rows,
    deferring,
    fit,
    known_to_both,
    marginal,
    parts_of,
    threshold_of,
    train,
)


def test_the_marginal_likelihood_rewards_whom_a_token_is_likelier_with() -> None:
    """Deferring gains where the assistant's probability is higher and costs where it is lower."""
    score_N = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    probabilities_N2 = torch.tensor([[0.1, 0.8], [0.8, 0.1]], dtype=torch.float64)
    likelihood_N = marginal(score_N, probabilities_N2.log())
    torch.testing.assert_close(likelihood_N, probabilities_N2.mean(1).log())
    likelihood_N.sum().backward()  # type: ignore[no-untyped-call]
    assert score_N.grad is not None
    assert (score_N.grad.sign() == torch.tensor([1.0, -1.0])).all()


def test_a_head_finds_the_tokens_that_the_assistant_knows() -> None:
    """Where the first number of the state says which of the models is right, on rows that it has not seen too."""
    torch.manual_seed(0)
    states_NH = 3 * torch.randn(600, 8) + 1
    knows_N = states_NH[:, 0] > 1
    probabilities_N2 = torch.where(knows_N[:, None], torch.tensor([0.1, 0.9]), torch.tensor([0.7, 0.2])).double()
    rows = Rows(states_NH, probabilities_N2.log(), probabilities_N2 > 0.5)
    seen, other = (Rows(*(each[part] for each in (rows.states_NH, rows.logprobs_N2, rows.right_N2)))
                   for part in (slice(0, 500), slice(500, 600)))  # fmt: skip
    deferring_N = deferring(other, *fit(seen, other))
    threshold = threshold_of(deferring_N, other.logprobs_N2, None)
    assert ((deferring_N > threshold) == knows_N[500:]).double().mean() > 0.97
    for share in (0.0, 0.25, 0.5, 1.0):
        deferred_N = deferring_N > threshold_of(deferring_N, other.logprobs_N2, share)
        assert float(deferred_N.double().mean()) == pytest.approx(share)


def test_equal_chances_of_deferring_are_on_one_side_of_the_threshold() -> None:
    """Those that round to one, too; the likeliest texts are found among the thresholds that can be."""
    deferring_N = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5, 0.0], dtype=torch.float64)
    gains = torch.tensor([3.0, -1.0, 1.0, -2.0, 0.5, 9.0], dtype=torch.float64)
    logprobs_N2 = torch.stack([torch.zeros(6, dtype=torch.float64), gains], 1)
    for share, deferred in ((0.0, 0), (0.2, 2), (0.3, 2), (0.75, 5), (None, 2)):
        assert int((deferring_N > threshold_of(deferring_N, logprobs_N2, share)).sum()) == deferred, share


PAIR = ("parlay-mini", "parlay-mini-draft")


def test_a_trained_head_opens_for_its_pair_and_writes_with_it(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    options = DeferTrainOptions(
        model=PAIR[0], assistant=PAIR[1], texts=data, out=out, share=0.5, most=12, longest=24, device="cpu"
    )
    reached = train(options)
    assert "the assistant writes" in reached
    assert "half of them deferred" in reached
    said = json.loads((out / "config.json").read_text())
    assert said["settings"]["assistant"] == PAIR[1]
    with LLM(PAIR[0], ensemble=Ensemble(PAIR[1], "defer", head=str(out))) as llm:
        (output,) = llm.generate(["The harbour"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 6


def test_a_document_is_in_one_part_alone() -> None:
    """Of few documents each part is a run of texts."""
    many = [TrainingText((1, 2), 1, place // 3) for place in range(60)]
    parts = parts_of(many)
    assert {len({part for text, part in zip(many, parts, strict=True) if text.document == d}) for d in range(20)} == {1}
    assert set(parts) == set(range(10))
    few = parts_of([TrainingText((1, 2), 1, place // 30) for place in range(60)])
    assert few == sorted(few)
    assert set(few) == set(range(10))
    least = parts_of([TrainingText((1, 2), 1) for _ in range(6)])
    assert {0, 5} < set(least), "some choose, some measure, and some are learned from"


def test_texts_with_tokens_that_one_model_lacks_are_left_out() -> None:
    texts = [TrainingText((1, 2, number), 2) for number in range(10)]
    assert [text.ids[-1] for text in known_to_both(texts, 7)] == list(range(7))
    with pytest.raises(ParlayError, match="5 of 10 texts have tokens that one of the models lacks"):
        known_to_both(texts, 5)


def test_too_few_texts_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("The harbour was quiet before the storm. " * 4)
    with pytest.raises(ParlayError, match=r"1 texts in .* are too few: give 6 or more"):
        train(DeferTrainOptions(model=PAIR[0], assistant=PAIR[1], texts=tmp_path / "one.txt", out=tmp_path / "head"))
