"""Log-probabilities, ranks and alternatives, of raw or of processed logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parlay.sampling.distributions import prompt_token_logprobs, row_logprobs, token_logprobs
from parlay.testing.reference import ReferenceText
from parlay.types import SamplingParams

MakeView = Callable[..., ReferenceText]


@pytest.mark.parametrize("size", [30, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprob_rank_and_alternatives_are_those_of_a_sorted_softmax(size: int, dtype: torch.dtype) -> None:
    logits_V = (2 * torch.randn(size, generator=torch.Generator().manual_seed(size))).to(dtype)
    logprobs = logits_V.double().log_softmax(0)
    order = logits_V.sort(descending=True, stable=True).indices.tolist()
    for token in (0, 5, order[0], order[-1]):
        found = token_logprobs(logits_V, token, 4)
        assert found.token == token
        assert found.logprob == pytest.approx(logprobs[token].item(), abs=1e-5)
        assert found.rank == order.index(token) + 1
        assert [other for other, _ in found.top] == order[:4]
        assert [value for _, value in found.top] == pytest.approx(logprobs[order[:4]].tolist(), abs=1e-5)


def test_equal_tokens_rank_by_id() -> None:
    found = token_logprobs(torch.zeros(6), 3, 2)
    assert (found.rank, [token for token, _ in found.top]) == (4, [0, 1])
    assert token_logprobs(torch.zeros(6), 3, 0).top == ()


def test_prompt_logprobs_pair_each_row_with_the_next_token() -> None:
    logits_RV = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    found = prompt_token_logprobs(logits_RV, [4, 0, 9], 1)
    assert found == [token_logprobs(row, token, 1) for row, token in zip(logits_RV, [4, 0, 9], strict=True)]


def test_processed_logprobs_are_of_the_distribution_that_was_sampled_from_on_the_path(view: MakeView) -> None:
    logits_RV = torch.zeros(2, 4)
    params = SamplingParams(frequency_penalty=1.0, top_k=3, logprobs_mode="processed")
    first, second = row_logprobs(logits_RV, view(params), [(), (1,)], [1, 2], 0)
    assert first.logprob == pytest.approx(torch.zeros(3).log_softmax(0)[0].item())
    # After token 1, ids 0, 2 and 3 are the best three.
    assert second.logprob == pytest.approx(torch.zeros(3).log_softmax(0)[0].item())
    raw = row_logprobs(logits_RV, view(SamplingParams(top_k=1)), [(), (1,)], [1, 2], 0)
    assert [one.logprob for one in raw] == pytest.approx([torch.zeros(4).log_softmax(0)[0].item()] * 2)
