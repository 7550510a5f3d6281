"""A constraint on token ids that needs no text: the allowed ids are a known function of the whole output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from parlay.testing.toys import text_hash
from parlay.types import ParlayError


@dataclass(frozen=True, slots=True)
class ToyGrammar:
    """A toy grammar. It allows one id at a third of the places, and about half of all ids at the others. The text ends
    after ``length`` ids.

    ``mask``: the mask's id, which is never allowed; None if the model has no mask.
    """

    vocab_size: int
    length: int
    seed: int = 0
    mask: int | None = None

    def following(self, output: Sequence[int]) -> list[int]:
        return _following(self, text_hash(output, self.seed)) if len(output) < self.length else []


@lru_cache(maxsize=4096)
def _following(grammar: ToyGrammar, state: int) -> list[int]:
    ids = [token for token in range(grammar.vocab_size) if token != grammar.mask]
    some = [token for token in ids if text_hash((token, state), grammar.seed) % 2]
    return [ids[state // 3 % len(ids)]] if state % 3 == 0 or not some else some


class ToyConstraint:
    """Implements `Constraint`. Each call computes its answer from the whole output."""

    def __init__(self, grammar: ToyGrammar) -> None:
        self._grammar = grammar
        self._output: list[int] = []

    @property
    def committed(self) -> int:
        return len(self._output)

    def allowed(self, start: int, path: Sequence[int]) -> Tensor | None:
        if self._legal(self._output[:start], path) < len(path):
            return None
        mask_V = torch.zeros(self._grammar.vocab_size, dtype=torch.bool)
        mask_V[self._grammar.following([*self._output[:start], *path])] = True
        return mask_V

    def legal(self, tokens: Sequence[int]) -> int:
        return self._legal(self._output, tokens)

    def forced(self, limit: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while len(tokens) < limit:
            following = self._grammar.following([*self._output, *tokens])
            if len(following) != 1:
                break
            tokens += following
        return tuple(tokens)

    def commit(self, token: int) -> bool:
        if token not in self._grammar.following(self._output):
            raise ParlayError(f"token {token} may not follow {self._output}")
        self._output.append(token)
        return len(self._output) >= self._grammar.length

    def _legal(self, before: Sequence[int], tokens: Sequence[int]) -> int:
        for place, token in enumerate(tokens):
            if token not in self._grammar.following([*before, *tokens[:place]]):
                return place
        return len(tokens)
