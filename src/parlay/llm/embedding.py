"""Embeds texts with a decoder: pools the hidden states that enter its LM head over each text."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from parlay.types import Adapter, MachineBusy, Runner, RunnerSpec, Segment

Pooling = Literal["last", "mean"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
ROWS = 512
"""The most rows of a forward. Other requests decode between forwards."""
_names = itertools.count(1 << 61)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One text's embedding: ``hidden_size`` numbers."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """One text's tokens and its embedding. Names are vLLM's."""

    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A score: the similarity of two texts, from -1 to 1, or the probability that a document answers a query."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The tokens of a query and a document, and their score."""

    prompt_token_ids: tuple[int, ...]
    outputs: ScoringOutput


def check_embeds(spec: RunnerSpec, pooling: str) -> None:
    """Raises ValueError for a model that can't embed texts, and for an unknown pooling."""
    if spec.encoder is not None or spec.canvas is not None:
        raise ValueError(f"{spec.name} does not write token by token from left to right: it embeds no texts")
    if pooling not in POOLINGS:
        raise ValueError(f"pooling {pooling!r:.40} is unknown: use one of {', '.join(POOLINGS)}")


def groups(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of texts that run together: up to ``ROWS`` tokens in all, or one longer text."""
    group: list[int] = []
    for place, ids in enumerate(texts):
        if group and sum(len(texts[each]) for each in group) + len(ids) > ROWS:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


class Reading(ABC):
    """Runs texts through the model. Call `open`, then `step` until `over`, and always `release`."""

    def __init__(self, runner: Runner, texts: Sequence[Sequence[int]], adapter: Adapter | None = None) -> None:
        self._runner, self._texts, self._adapter = runner, texts, adapter
        self._names: list[int] = []
        self._done = 0

    def open(self) -> None:
        """Reserve memory. Raises MachineBusy if the cache has no room for the texts now."""
        for ids in self._texts:
            name = next(_names)
            self._runner.open(name, (), salt=f"embedding {name}")
            self._names.append(name)
            if not self._runner.reserve(name, len(ids)):
                raise MachineBusy("the cache has no room for the texts now: try again later, or send fewer")

    @property
    def over(self) -> bool:
        """Whether all tokens have run."""
        return self._done >= max(len(ids) for ids in self._texts)

    def step(self, rows: int = ROWS) -> None:
        """Run the next tokens of all texts in one forward: ``rows`` in all, but at least one of each text."""
        left = {place: len(ids) - self._done for place, ids in enumerate(self._texts) if len(ids) > self._done}
        each = max(left.values()) if sum(left.values()) <= rows else max(1, rows // len(left))
        chunks = {place: tuple(self._texts[place][self._done : self._done + each]) for place in left}
        self._read(chunks, [tokens <= each for tokens in left.values()])
        for place in left:
            self._runner.keep(self._names[place], ())
        self._done += each

    @abstractmethod
    def _read(self, chunks: Mapping[int, tuple[int, ...]], last: Sequence[bool]) -> None:
        """Run one chunk of each text, by index. ``last``: for each chunk, whether it ends its text."""

    def _segment(self, place: int, chunk: tuple[int, ...], logits_from: int) -> Segment:
        return Segment(self._names[place], chunk, logits_from=logits_from, adapter=self._adapter)

    def release(self) -> None:
        """Free the texts' cache, so that nothing of them stays cached."""
        for name in self._names:
            self._runner.truncate(name, 0)
            self._runner.release(name)
        self._names.clear()

    def run(self) -> None:
        """Open, run all steps and release, while nothing else runs."""
        try:
            self.open()
            while not self.over:
                self.step()
        finally:
            self.release()


class Pooled(Reading):
    """Reads texts and pools the hidden states of each."""

    def __init__(
        self, runner: Runner, texts: Sequence[Sequence[int]], pooling: str, adapter: Adapter | None = None
    ) -> None:
        super().__init__(runner, texts, adapter)
        self._pooling = pooling
        self._sums_NH = torch.zeros(len(texts), runner.spec.hidden_size, dtype=torch.float64)

    def _read(self, chunks: Mapping[int, tuple[int, ...]], last: Sequence[bool]) -> None:
        layer = self._runner.spec.num_layers
        segments = [self._segment(place, chunk, len(chunk)) for place, chunk in chunks.items()]
        states_NH = self._runner.forward(segments, (layer,)).taps[layer].double().cpu()
        for place, rows in zip(chunks, torch.split(states_NH, [*map(len, chunks.values())]), strict=True):
            self._sums_NH[place] = rows[-1] if self._pooling == "last" else self._sums_NH[place] + rows.sum(0)

    def embeddings(self, *, normalize: bool) -> list[list[float]]:
        """One embedding per text; of length 1 if ``normalize``."""
        counts = torch.tensor([1 if self._pooling == "last" else len(ids) for ids in self._texts])
        pooled_NH = self._sums_NH / counts[:, None]
        if normalize:
            pooled_NH = torch.nn.functional.normalize(pooled_NH, dim=1)
        found: list[list[float]] = pooled_NH.float().tolist()
        return found


def embed(
    runner: Runner,
    texts: Sequence[tuple[int, ...]],
    pooling: str,
    adapter: Adapter | None = None,
    *,
    normalize: bool = True,
) -> list[EmbeddingRequestOutput]:
    """Embed all texts, in groups; see `Pooled`. Raises ValueError if the model or the pooling can't be used."""
    check_embeds(runner.spec, pooling)
    found: list[list[float]] = []
    for group in groups(texts):
        pooled = Pooled(runner, [texts[place] for place in group], pooling, adapter)
        pooled.run()
        found += pooled.embeddings(normalize=normalize)
    return [EmbeddingRequestOutput(ids, EmbeddingOutput(each)) for ids, each in zip(texts, found, strict=True)]


def paired(queries: int, documents: int) -> list[tuple[int, int]]:
    """Pairs of a query and a document: query i with document i, or one query with all. Raises ValueError otherwise."""
    if not queries or not documents or (queries not in (1, documents)):
        raise ValueError(f"{queries} queries and {documents} documents: give one query, or as many as documents")
    return [(place if queries > 1 else 0, place) for place in range(documents)]


def scored(outputs: Sequence[EmbeddingRequestOutput], pairs: Sequence[tuple[int, int]]) -> list[ScoringRequestOutput]:
    """The cosines of pairs of these texts, whose embeddings have length 1."""
    vectors_NH = torch.tensor([output.outputs.embedding for output in outputs], dtype=torch.float64)
    return [
        ScoringRequestOutput(
            (*outputs[one].prompt_token_ids, *outputs[other].prompt_token_ids),
            ScoringOutput(float((vectors_NH[one] * vectors_NH[other]).sum().clamp(-1, 1))),  # rounding may exceed 1
        )
        for one, other in pairs
    ]
