"""A view of a text without an engine, for the sampling tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from parlay.testing.reference import ReferenceText
from parlay.types import NoiseKey, Request, SamplingParams

MakeView = Callable[..., ReferenceText]


@pytest.fixture
def view() -> MakeView:
    """``view(params, prompt, output, seed, stop_ids)`` makes a view."""

    def make(
        params: SamplingParams,
        prompt: Sequence[int] = (1,),
        output: Sequence[int] = (),
        seed: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> ReferenceText:
        request = Request(
            id="test", prompt=tuple(prompt), params=params, key=NoiseKey(seed), stop_ids=frozenset(stop_ids)
        )
        return ReferenceText(request, [*prompt, *output], len(prompt))

    return make
