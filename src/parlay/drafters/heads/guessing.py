"""The best guesses of heads over a draft vocabulary, as the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parlay.drafters.draft_models.guesses import Guess
from parlay.sampling import noise
from parlay.types import SequenceView


class Guessing:
    """``ids_D`` is the token of the target for each draft id.

    Where a request samples, its own noise decides what the target will write, so the noise is known and only the
    target's logits are guessed. A token's chance is the softmax of the head's logits with the noise added, times the
    temperature: as far as these are from the target's they are at any temperature, and without noise this is the
    head's own probability. Penalties and truncation are left to the target.
    """

    def __init__(self, ids_D: Tensor) -> None:
        self._ids_D = ids_D

    def best(
        self, logits_RD: Tensor, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], width: int
    ) -> list[list[Guess]]:
        """Per row the ``width`` likeliest tokens and their chances."""
        noisy_RD = self._with_noise(logits_RD, views, paths)
        best_RW = noisy_RD.softmax(-1).topk(min(width, logits_RD.shape[-1]))
        ids_RW = self._ids_D[best_RW.indices].tolist()
        return [list(zip(*row, strict=True)) for row in zip(ids_RW, best_RW.values.tolist(), strict=True)]

    def _with_noise(self, logits_RD: Tensor, views: Sequence[SequenceView], paths: Sequence[Sequence[int]]) -> Tensor:
        temperatures = [view.request.params.temperature for view in views]
        if not any(temperatures):
            return logits_RD
        streams = [
            noise.stream(view.request.key, len(view.tokens) + len(path))
            for view, path in zip(views, paths, strict=True)
        ]
        noise_RD = noise.gumbel(noise.bits(streams, self._ids_D))
        return logits_RD + noise_RD.mul_(noise_RD.new_tensor(temperatures)[:, None]).to(logits_RD.dtype)
