"""A model that writes with a datastore: its distribution is mixed with the tokens that followed similar hidden
states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parlay.models.wrapped_runner import WrappedRunner
from parlay.options import Nest, UsageError
from parlay.types import NO_SKIP, Origin, Output, Runner, RunnerSpec, Segment, Skip


class Neighbours(NamedTuple):
    """The states of a datastore nearest to a query, nearest first: their places, the tokens that follow them, and
    squared distances."""

    places_K: NDArray[np.int64]
    tokens_K: NDArray[np.int64]
    distances_K: NDArray[np.float64]


class StateStore(Protocol):
    """Texts with the hidden states that enter ``layer`` at each token."""

    @property
    def layer(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    def nearest(self, state_H: NDArray[Any], count: int) -> Neighbours:
        """The ``count`` nearest states, or all if there are fewer; the result depends on ``state_H`` alone."""
        ...

    def locate(self, place: int) -> tuple[str, int]:
        """The name of the document that has this place, and the token's index in it, from 0."""
        ...


@dataclass(frozen=True, slots=True)
class RetrievalLaw:
    """The datastore's distribution in one row: ``logprobs_T`` of ``tokens_T``, and the log-odds of the model's weight
    against the datastore's."""

    tokens_T: NDArray[np.int64]
    logprobs_T: NDArray[np.float64]
    model_odds: float


def retrieval_law(found: Neighbours, hidden_size: int, nest: Nest) -> RetrievalLaw:
    """The distribution p(x) ~ sum of exp(-d / sqrt(H)) over the neighbours that x follows, and the model's odds.

    The model's weight is sigmoid((d_min / d_max - alpha) / tau): the closer the nearest neighbour is compared with the
    farthest, the more the datastore decides (relative retrieval confidence, Li et al. 2024, arXiv:2405.19325).
    """
    distances = found.distances_K
    weights = np.exp((distances[0] - distances) / math.sqrt(hidden_size))
    tokens_T, number_K = np.unique(found.tokens_K, return_inverse=True)
    shares_T = np.bincount(number_K, weights=weights) / weights.sum()
    ratio = float(distances[0] / distances[-1]) if distances[-1] else 0.0
    with np.errstate(divide="ignore"):  # a weight may round to 0
        return RetrievalLaw(tokens_T, np.log(shares_T), (ratio - nest.alpha) / nest.tau)


def mix(row_V: Tensor, law: RetrievalLaw) -> NDArray[np.float64]:
    """Set a row to log(w p + (1 - w) q) + c in place; returns the datastore's share in the probability of each of its
    tokens.

    c is chosen such that only the logits of the datastore's tokens change: with the model's log-odds o they become
    logaddexp(logit, logsumexp(row) - o + log q).
    """
    ids_T = torch.from_numpy(law.tokens_T).to(row_V.device)
    from_store_T = float(row_V.double().logsumexp(0)) - law.model_odds + law.logprobs_T
    mixed_T = np.logaddexp(row_V[ids_T].double().cpu().numpy(), from_store_T)
    row_V[ids_T] = torch.from_numpy(mixed_T).to(row_V)
    with np.errstate(invalid="ignore"):  # a token with probability 0 in both
        shares_T: NDArray[np.float64] = np.nan_to_num(np.exp(from_store_T - mixed_T))
    return shares_T


class _Row(NamedTuple):
    """The neighbours that a row of logits was mixed with, their distinct tokens, and the datastore's share in each."""

    found: Neighbours
    tokens_T: NDArray[np.int64]
    shares_T: NDArray[np.float64]


class RetrievedOrigins:
    """Finds the datastore origins of tokens drawn from rows of logits."""

    def __init__(self, store: StateStore, rows: Sequence[_Row]) -> None:
        self._store, self._rows = store, rows

    def of(self, row: int, token: int, after: Origin | None = None) -> Origin | None:
        """See `parlay.types.Origins`."""
        found, tokens_T, shares_T = self._rows[row]
        places = found.places_K[found.tokens_K == token]
        if not len(places):
            return None
        share = float(shares_T[tokens_T == token][0])
        located = (Origin(*self._store.locate(int(place)), share) for place in places)
        first = next(located)
        if after is None or _follows(first, after):
            return first
        return next((each for each in located if _follows(each, after)), first)


def _follows(origin: Origin, before: Origin) -> bool:
    return (origin.document, origin.position) == (before.document, before.position + 1)


class NestRunner(WrappedRunner):
    """Mixes the logits of ``inner`` with the distribution of a datastore of its states; see `parlay.types.Runner`.

    Each row is mixed by itself, so a text does not depend on drafts or other requests. Layer-skipping drafts are not
    mixed.
    """

    def __init__(self, inner: Runner, store: StateStore, nest: Nest) -> None:
        """Raises UsageError if the model or the datastore can't take part."""
        super().__init__(inner)
        spec = inner.spec
        if spec.fills_only or spec.encoder is not None:
            kind = "an encoder-decoder" if spec.encoder is not None else "a diffusion model"
            raise UsageError(f"{spec.name} is {kind}: a datastore goes with models that write token by token")
        self.store, self._nest = store, nest
        kernels = f"{nest.describe(spec.name)}; {spec.kernels}"
        self._spec = replace(spec, kernels=kernels, canvas=None, hides=False, likeliest=False, in_flight=1)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        layer = self.store.layer
        if skip or not any(segment.end > segment.logits_from for segment in segments):
            return self._inner.forward(segments, taps, skip)
        out = self._inner.forward(segments, sorted({*taps, layer}))
        states_NH = out.taps[layer].float().cpu().numpy()
        logits_RV = out.logits_RV.clone()
        rows = [self._mix(logits_RV[place], states_NH[at]) for place, at in enumerate(_wanted(segments))]
        own, seconds = {tap: out.taps[tap] for tap in taps}, out.tap_seconds if taps else 0.0
        origins = RetrievedOrigins(self.store, rows)
        return replace(out, logits_RV=logits_RV, taps=own, tap_seconds=seconds, origins=origins)

    def _mix(self, row_V: Tensor, state_H: NDArray[Any]) -> _Row:
        """Mix a row in place; a row whose state has no neighbours (it is NaN) stays as it is."""
        found = self.store.nearest(state_H, self._nest.neighbours)
        if not len(found.tokens_K):
            return _Row(found, found.tokens_K, found.distances_K)
        law = retrieval_law(found, self.store.hidden_size, self._nest)
        return _Row(found, law.tokens_T, mix(row_V, law))


def _wanted(segments: Sequence[Segment]) -> Iterator[int]:
    """The indices of the rows with logits among all rows that ran."""
    before = 0
    for segment in segments:
        yield from range(before + segment.logits_from - segment.base, before + segment.rows)
        before += segment.rows
