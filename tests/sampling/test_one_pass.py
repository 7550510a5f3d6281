"""A pass of the compiled library over a row draws what the sampler draws step by step, or leaves it to the steps."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from parlay.compiled.build import NAMES
from parlay.compiled.library import SWITCH
from parlay.sampling import noise, truncation
from parlay.sampling.sampler import draw_in_one_pass, leading_in_one_pass, likeliest_in_one_pass
from parlay.types import SamplingParams

PARAMS = {
    "temperature": SamplingParams(temperature=0.8),
    "hot": SamplingParams(temperature=1.7),
    "no temperature": SamplingParams(),
    "near zero": SamplingParams(temperature=0.02, top_p=0.9),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "large top-p": SamplingParams(temperature=1.2, top_p=0.999),
    "small top-p": SamplingParams(top_p=0.05),
    "top-k": SamplingParams(temperature=0.8, top_k=40),
    "one": SamplingParams(top_k=1),
    "more than there are": SamplingParams(top_k=100_000, top_p=0.7),
    "min-p": SamplingParams(temperature=1.3, min_p=0.05),
    "all": SamplingParams(temperature=1.3, top_k=60, top_p=0.8, min_p=0.02),
}


@cache
def rows(size: int) -> Tensor:
    """Peaked and flat ones, some with masked tokens, some with many equal logits. Nobody writes into them."""
    count = 60 if size < 49_152 else 20
    logits_RV = torch.randn(count, size, generator=torch.Generator().manual_seed(size))
    logits_RV *= torch.linspace(0.3, 6, count)[:, None]
    logits_RV[1::4, ::3] = -torch.inf
    logits_RV[2::4] = (2 * logits_RV[2::4]).round() / 2
    return logits_RV


def by_steps(logits_V: Tensor, params: SamplingParams, state: int) -> int:
    """Divided, truncated by the whole row put in order, then drawn from."""
    scores_V = logits_V / torch.tensor([params.temperature])
    return noise.draw_among(scores_V, truncation.eligible(scores_V, params), state)


@cache
def all_by_steps(params: str, size: int) -> list[int]:
    """The same for every instruction set."""
    return [by_steps(row_V, PARAMS[params], state) for state, row_V in enumerate(rows(size))]


WIDTHS = [name for name in NAMES if "_" not in name]
"""Of the instruction sets of one width one: draws have no code of their own for integer products or bfloat16."""


@pytest.mark.parametrize("switch", WIDTHS)
@pytest.mark.parametrize("size", [40, 1000, 49_152])
@pytest.mark.parametrize("params", PARAMS)
def test_it_draws_what_the_steps_draw(params: str, size: int, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On instruction sets of every width; and mostly without their help, unless a row is flat."""
    monkeypatch.setenv(SWITCH, switch)
    found = [draw_in_one_pass(row_V, PARAMS[params], state) for state, row_V in enumerate(rows(size))]
    monkeypatch.setenv(SWITCH, "0")
    noise.compiled.cache_clear()
    assert [token for token in found if token is not None] == [
        right for token, right in zip(found, all_by_steps(params, size), strict=True) if token is not None
    ]
    peaked = found[len(found) // 2 :]
    assert peaked.count(None) <= 0.1 * len(peaked)


def test_where_rounding_decides_the_steps_decide() -> None:
    """Two equal halves, and top-p of exactly one half: whether the second token stays is a matter of rounding."""
    params = SamplingParams(top_p=0.5)
    row_V = torch.full((64,), -torch.inf)
    row_V[[3, 9]] = 1.0
    found = {draw_in_one_pass(row_V, params, state) for state in range(50)}
    assert found == {3, None}


def test_a_row_that_it_does_not_read_is_left_to_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    row_V, params = torch.zeros(1000), SamplingParams(top_p=0.9)
    assert draw_in_one_pass(row_V, params, 1) is not None
    assert draw_in_one_pass(row_V.bfloat16(), params, 1) is None
    assert draw_in_one_pass(torch.zeros(2000)[::2], params, 1) is None
    for wrong in (torch.nan, torch.inf):
        assert draw_in_one_pass(row_V.index_fill(0, torch.tensor([7]), wrong), params, 1) is None
    assert draw_in_one_pass(torch.full((1000,), -torch.inf), params, 1) is None
    assert draw_in_one_pass(torch.full((1000,), 1e30), SamplingParams(temperature=1e-30), 1) is None, "they overflow"
    assert draw_in_one_pass(row_V, SamplingParams(typical_p=0.9), 1) is None
    monkeypatch.setenv(SWITCH, "0")
    noise.compiled.cache_clear()
    assert draw_in_one_pass(row_V, params, 1) is None


@pytest.mark.parametrize("switch", WIDTHS)
@pytest.mark.parametrize("size", [3, 40, 1000])
def test_the_likeliest_tokens_of_rows_come_with_their_chances(
    size: int, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal ones the lowest id first, without masked ones, as a stable order of the whole row has them."""
    monkeypatch.setenv(SWITCH, switch)
    logits_RV = rows(size)
    probs_RV = logits_RV.softmax(-1)
    order_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 3, 20):
        found = leading_in_one_pass(logits_RV, count)
        assert found is not None
        for row, guesses in enumerate(found):
            there = min(count, int((logits_RV[row] > -torch.inf).sum()))
            wanted = order_RV[row, :there]
            assert [token for token, _ in guesses] == wanted.tolist()
            assert [chance for _, chance in guesses] == pytest.approx(probs_RV[row, wanted].tolist(), rel=1e-4)
    assert likeliest_in_one_pass(logits_RV) == logits_RV.argmax(-1).tolist()


def test_barred_tokens_are_left_out_of_the_wanted_rows_alone() -> None:
    logits_RV = torch.tensor([[5.0, 4, 3, 1], [5, 4, 3, 1], [1, 3, 4, 5]])
    found = leading_in_one_pass(logits_RV, 2, wanted=[1, 2], barred=(0, 3))
    assert found is not None
    assert [[token for token, _ in guesses] for guesses in found] == [[1, 2], [2, 1]]
    assert found[0][0][1] + found[0][1][1] == pytest.approx(1)
    assert logits_RV[0].tolist() == [5, 4, 3, 1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 17, 36])
def test_nothing_is_guessed_from_a_row_that_is_no_distribution(bad: float, place: int) -> None:
    """The sampler then says what is wrong with it. Places in whole vectors of numbers, and behind them."""
    logits_RV = torch.zeros(3, 37)
    logits_RV[1, place], logits_RV[2] = bad, -torch.inf
    found = leading_in_one_pass(logits_RV, 2)
    assert found is not None
    assert [len(guesses) for guesses in found] == [2, 0, 0]
    assert likeliest_in_one_pass(logits_RV) is None
