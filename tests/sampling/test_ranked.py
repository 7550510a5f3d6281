"""`ranked` gives the tokens that `sample` would draw one after the other, if each that was drawn were masked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parlay.sampling.sampler import ranked, sample
from parlay.types import SamplingParams, SequenceView

MakeView = Callable[..., SequenceView]


def shift(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    return logits_V - logits_V.amax()  # looks at all tokens


def one_after_the_other(logits_V: torch.Tensor, view: SequenceView, count: int) -> tuple[int, ...]:
    left_V, drawn = logits_V.clone(), []
    for _ in range(count):
        (token,) = sample(left_V[None], [view], [()])
        if not isinstance(token, int):
            break
        drawn.append(token)
        left_V[token] = -torch.inf
    return tuple(drawn)


@pytest.mark.parametrize("size", [20, 9000, 50_000])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5, min_p=0.01),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.7, presence_penalty=1.0, logit_bias={3: 2.0}),
        SamplingParams(allowed_token_ids=(1, 4, 6)),
        SamplingParams(logits_processors=(shift,)),
    ],
    ids=["plain", "hot", "top-k", "top-p", "greedy", "penalised", "few", "processor"],
)
def test_rows_are_in_the_order_of_draws(size: int, params: SamplingParams, view: MakeView) -> None:
    generator = torch.Generator().manual_seed(size)
    logits_RV = 2 * torch.randn(6, size, generator=generator)
    logits_RV[1, 5:] = -torch.inf  # fewer than are asked for
    logits_RV[2] = torch.nan
    logits_RV[3, :] = 1.0  # only the noise decides
    logits_RV[4, 7] = 60.0  # and here it does not
    views = [view(params, prompt=(1, 2), output=(3, 4), seed=row) for row in range(6)]
    expected = [one_after_the_other(row, one, 8) for row, one in zip(logits_RV, views, strict=True)]
    assert ranked(logits_RV, views, [()] * 6, 8) == expected
