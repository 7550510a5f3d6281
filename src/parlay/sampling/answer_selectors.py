"""Selectors for models that write an answer in one pass: CTC frames, and paths through DA-Transformer's graph.

All of them decide in one step. Suffixes: P places, C places of a batch's canvases, J distances, V the vocabulary, B
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parlay.types import Canvas, Exactness, Fill, Guesses, SequenceView
from parlay.types.model_forms import link_size


def jumps(scores_BCJ: Tensor, vertices_B: Tensor) -> Tensor:
    """Log-probability ``[B, C, C]`` of going from a vertex (row) to another, from scores of distances 0 to J - 1.

    Of an answer's ``vertices_B`` vertices, each but the last goes to a later one. Other entries are -inf.
    """
    count, distances = scores_BCJ.shape[1:]
    place = torch.arange(count, device=scores_BCJ.device)
    steps_CC = place[None, :] - place[:, None]
    known_BCC = (steps_CC > 0) & (steps_CC < distances) & (place[None, None, :] < vertices_B[:, None, None])
    index_BCC = steps_CC.clamp(0, distances - 1).expand(len(scores_BCJ), -1, -1)
    found_BCC = scores_BCJ.gather(2, index_BCC).masked_fill(~known_BCC, -torch.inf)
    some_BC1 = known_BCC.any(-1, keepdim=True)
    normal_BCC = found_BCC.masked_fill(~some_BC1, 0.0).log_softmax(-1)
    return normal_BCC.masked_fill(~known_BCC, -torch.inf)


def ways_on(numbers_BCJ: Tensor, vertices_B: Tensor, heads: int) -> Tensor:
    """Log-probability ``[B, C, C]`` of going from a vertex (row) to another: `links` with heads, else `jumps`."""
    return links(numbers_BCJ, vertices_B, heads) if heads else jumps(numbers_BCJ, vertices_B)


_TURN = 100.0
"""Wavelength, in vertices, that the slowest rotation of positions approaches."""


def links(numbers_BCJ: Tensor, vertices_B: Tensor, heads: int) -> Tensor:
    """Log-probability ``[B, C, C]`` of going from a vertex (row) to another, by attention to all later vertices.

    The numbers of a vertex are a weight, a query and a key for each head. The probability is the sum over heads of the
    softmax of weights times the softmax of products of query and key (Huang et al. 2022, arXiv:2205.07459). Queries and
    keys are rotated by their places; the paper adds position embeddings instead. Other entries are -inf as in `jumps`.
    """
    size = link_size(numbers_BCJ.shape[2], heads)
    sizes = [heads, heads * size, heads * size]
    weights_BCD, queries, keys = torch.split_with_sizes(numbers_BCJ[..., : sum(sizes)], sizes, -1)
    place_C = torch.arange(numbers_BCJ.shape[1], device=numbers_BCJ.device)
    queries_BDCS, keys_BDCS = (
        _rotated(each.reshape(*each.shape[:2], heads, size), place_C) for each in (queries, keys)
    )
    known_BCC = (place_C[None, :] > place_C[:, None])[None] & (place_C < vertices_B[:, None])[:, None, :]
    products_BDCC = (queries_BDCS @ keys_BDCS.transpose(-1, -2) / size**0.5).masked_fill(
        ~known_BCC[:, None], -torch.inf
    )
    some_BC1 = known_BCC.any(-1, keepdim=True)
    normal_BDCC = products_BDCC.masked_fill(~some_BC1[:, None], 0.0).log_softmax(-1)
    weighed_BDC = weights_BCD.log_softmax(-1).transpose(1, 2)
    mixed_BCC = (normal_BDCC.masked_fill(~known_BCC[:, None], _NEVER) + weighed_BDC[..., None]).logsumexp(1)
    found: Tensor = mixed_BCC.masked_fill(~known_BCC, -torch.inf)
    return found


_NEVER = -1e30
"""A log-probability that stands for -inf. If all entries are equal to it, the gradient is 0, not NaN."""


def _rotated(states_BCDS: Tensor, place_C: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with the place, ``[B, D, C, S]``."""
    half = states_BCDS.shape[-1] // 2
    rates_S = _TURN ** -(torch.arange(half, dtype=states_BCDS.dtype, device=states_BCDS.device) / half)
    angles_CS = place_C[:, None].to(states_BCDS.dtype) * rates_S
    one_BDCS, other_BDCS = states_BCDS.transpose(1, 2).chunk(2, -1)
    cos_CS, sin_CS = angles_CS.cos(), angles_CS.sin()
    return torch.cat((one_BDCS * cos_CS - other_BDCS * sin_CS, other_BDCS * cos_CS + one_BDCS * sin_CS), -1)


@dataclass(frozen=True, slots=True)
class CtcFrames:
    """Decides each frame by the sampler's token; greedy, this is the likeliest alignment (Graves et al. 2006)."""

    exactness = Exactness.LOSSY
    revokes = False

    def fill(self, views: Sequence[SequenceView], canvases: Sequence[Canvas], guesses: Sequence[Guesses]) -> list[Fill]:
        return [Fill(guess.places, guess.tokens) for guess in guesses]


class _Path:
    """Decides the vertices of one path through each graph, with the sampler's tokens."""

    exactness = Exactness.LOSSY
    revokes = False

    def fill(self, views: Sequence[SequenceView], canvases: Sequence[Canvas], guesses: Sequence[Guesses]) -> list[Fill]:
        ends = [canvas.spec.ends for canvas in canvases]
        return [self._fill(guess, own.heads if own else 0) for guess, own in zip(guesses, ends, strict=True)]

    def _fill(self, guess: Guesses, heads: int) -> Fill:
        assert guess.numbers_PJ is not None, "only models with numbers are read as graphs"
        count = len(guess.places)
        jumps_PP = ways_on(guess.numbers_PJ.double()[None], torch.tensor([count]), heads)[0]
        path = self.path(jumps_PP, guess.probs_PV.amax(-1).log())
        return Fill(tuple([guess.places[at] for at in path]), tuple([guess.tokens[at] for at in path]))

    def path(self, jumps_PP: Tensor, tokens_P: Tensor) -> list[int]:
        """The vertices of a path from the first vertex to the last.

        ``tokens_P``: the log-probability of each vertex's likeliest token.
        """
        raise NotImplementedError


def _followed(next_P: Tensor) -> list[int]:
    """The path from vertex 0 that follows each vertex's next one."""
    path, last = [0], len(next_P) - 1
    while path[-1] < last:
        path.append(int(next_P[path[-1]]))
    return path


@dataclass(frozen=True, slots=True)
class GreedyPath(_Path):
    """Goes from each vertex to the likeliest next one (Huang et al. 2022, arXiv:2205.07459)."""

    def path(self, jumps_PP: Tensor, tokens_P: Tensor) -> list[int]:
        return _followed(jumps_PP.argmax(-1))


@dataclass(frozen=True, slots=True)
class Lookahead(_Path):
    """Goes from each vertex to the next one with the highest joint probability of link and likeliest token.

    Log-probabilities of tokens are multiplied by ``beta`` (Huang et al. 2022, arXiv:2205.07459).
    """

    beta: float = 1.0

    def path(self, jumps_PP: Tensor, tokens_P: Tensor) -> list[int]:
        return _followed((jumps_PP + self.beta * tokens_P).argmax(-1))


@dataclass(frozen=True, slots=True)
class Viterbi(_Path):
    """Finds the path with the highest log-probability of links and likeliest tokens over its length to the ``penalty``.

    Shao et al. 2022, arXiv:2210.05193. With a penalty of 0 short answers win; higher ones favour longer answers.
    """

    penalty: float = 1.0

    def path(self, jumps_PP: Tensor, tokens_P: Tensor) -> list[int]:
        count = len(tokens_P)
        reached_P = torch.full((count,), -torch.inf, dtype=jumps_PP.dtype)
        reached_P[0] = tokens_P[0]
        origins, scores = list[Tensor](), [reached_P[-1]]
        for _ in range(count - 1):
            into = (reached_P[:, None] + jumps_PP).max(0)
            reached_P = into.values + tokens_P
            origins.append(into.indices)
            scores.append(reached_P[-1])
        vertices = torch.arange(1, count + 1, dtype=jumps_PP.dtype)
        length = int((torch.stack(scores) / vertices**self.penalty).argmax())
        path = [count - 1]
        for origin_P in reversed(origins[:length]):
            path.append(int(origin_P[path[-1]]))
        return path[::-1]
