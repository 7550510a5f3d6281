"""What the sampling tests share: a view of a text that nobody is decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from parlay.testing.reference import Text
from parlay.types import NoiseKey, Request, SamplingParams

MakeView = Callable[..., Text]


@pytest.fixture
def view() -> MakeView:
    """``view(params, prompt, output, seed, stop_ids)``."""

    def make(
        params: SamplingParams,
        prompt: Sequence[int] = (1,),
        output: Sequence[int] = (),
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> Text:
        request = Request(
            id="test", prompt=tuple(prompt), params=params, key=NoiseKey(seed), stop_ids=frozenset(stop_ids)
        )
        return Text(request, [*prompt, *output], len(prompt))

    return make
