"""Embeddings of texts by a decoder: the hidden states that its LM head would read, pooled over each text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from parlay.types import Adapter, MachineBusy, Runner, RunnerSpec, Segment

Pooling = Literal["last", "mean"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
ROWS = 512
"""Of one forward: other requests decode between two."""
_names = itertools.count(1 << 61)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One text's embedding, as many numbers as the model has hidden states."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """One text's tokens, and what was made of them. The names are vLLM's."""

    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How alike two texts are, from -1 to 1."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The tokens of a query and a document, and their score."""

    prompt_token_ids: tuple[int, ...]
    outputs: ScoringOutput


def check_embeds(spec: RunnerSpec, pooling: str) -> None:
    """Raises ValueError for a model that embeds no texts, and for a pooling that is not known."""
    if spec.encoder is not None or spec.canvas is not None:
        raise ValueError(f"{spec.name} does not write token by token from left to right: it embeds no texts")
    if pooling not in POOLINGS:
        raise ValueError(f"pooling {pooling!r:.40} is unknown: use one of {', '.join(POOLINGS)}")


def groups(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Places of texts that run together: of ``ROWS`` tokens in all, or one longer text."""
    group: list[int] = []
    for place, ids in enumerate(texts):
        if group and sum(len(texts[each]) for each in group) + len(ids) > ROWS:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


class Pooled:
    """Texts on their way through the model: `open`, then `step` until they are `over`, and in any case `release`."""

    def __init__(
        self, runner: Runner, texts: Sequence[Sequence[int]], pooling: str, adapter: Adapter | None = None
    ) -> None:
        self._runner, self._texts, self._pooling, self._adapter = runner, texts, pooling, adapter
        self._names: list[int] = []
        self._done = 0
        self._sums_NH = torch.zeros(len(texts), runner.spec.hidden_size, dtype=torch.float64)

    def open(self) -> None:
        """Reserve memory. Raises ParlayError where the cache has no room for the texts now."""
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

    def step(self) -> None:
        """Run the next tokens of all texts in one forward."""
        layer, begin = self._runner.spec.num_layers, self._done
        running = [place for place, ids in enumerate(self._texts) if len(ids) > begin]
        chunks = [tuple(self._texts[place][begin : begin + ROWS]) for place in running]
        segments = [
            Segment(self._names[place], chunk, logits_from=len(chunk), adapter=self._adapter)
            for place, chunk in zip(running, chunks, strict=True)
        ]
        states_NH = self._runner.forward(segments, (layer,)).taps[layer].double().cpu()
        for place, rows in zip(running, torch.split(states_NH, [len(chunk) for chunk in chunks]), strict=True):
            self._runner.keep(self._names[place], ())
            self._sums_NH[place] = rows[-1] if self._pooling == "last" else self._sums_NH[place] + rows.sum(0)
        self._done += ROWS

    def embeddings(self, *, normalize: bool) -> list[list[float]]:
        """One for each text; of length 1 if ``normalize``."""
        counts = torch.tensor([1 if self._pooling == "last" else len(ids) for ids in self._texts])
        pooled_NH = self._sums_NH / counts[:, None]
        if normalize:
            pooled_NH = torch.nn.functional.normalize(pooled_NH, dim=1)
        found: list[list[float]] = pooled_NH.float().tolist()
        return found

    def release(self) -> None:
        """Forget the texts; nothing of them stays cached."""
        for name in self._names:
            self._runner.truncate(name, 0)
            self._runner.release(name)
        self._names.clear()


def embed(
    runner: Runner,
    texts: Sequence[tuple[int, ...]],
    pooling: str,
    adapter: Adapter | None = None,
    *,
    normalize: bool = True,
) -> list[EmbeddingRequestOutput]:
    """Embed all texts, together or one after the other; see `Pooled`. Raises ValueError for what can't be used."""
    check_embeds(runner.spec, pooling)
    found: list[list[float]] = []
    for group in groups(texts):
        pooled = Pooled(runner, [texts[place] for place in group], pooling, adapter)
        try:
            pooled.open()
            while not pooled.over:
                pooled.step()
            found += pooled.embeddings(normalize=normalize)
        finally:
            pooled.release()
    return [EmbeddingRequestOutput(ids, EmbeddingOutput(each)) for ids, each in zip(texts, found, strict=True)]


def paired(queries: int, documents: int) -> list[tuple[int, int]]:
    """Pairs of a query and a document: each with its own, or one with each. Raises ValueError for other numbers."""
    if not queries or not documents or (queries not in (1, documents)):
        raise ValueError(f"{queries} queries and {documents} documents: give one query, or as many as documents")
    return [(place if queries > 1 else 0, place) for place in range(documents)]


def scored(outputs: Sequence[EmbeddingRequestOutput], pairs: Sequence[tuple[int, int]]) -> list[ScoringRequestOutput]:
    """The scores of pairs of these texts, whose embeddings have length 1: their cosines."""
    vectors_NH = torch.tensor([output.outputs.embedding for output in outputs], dtype=torch.float64)
    return [
        ScoringRequestOutput(
            (*outputs[one].prompt_token_ids, *outputs[other].prompt_token_ids),
            ScoringOutput(float((vectors_NH[one] * vectors_NH[other]).sum())),
        )
        for one, other in pairs
    ]
