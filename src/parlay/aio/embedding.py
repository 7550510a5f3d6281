"""Embeddings beside requests that decode: the engine takes its steps between the forwards of the texts."""

from __future__ import annotations

from collections.abc import Sequence

from parlay.aio.service import AsyncLLM
from parlay.llm.embedding import EmbeddingOutput, EmbeddingRequestOutput, Pooled, check_embeds, groups
from parlay.types import Adapter


async def embed(
    llm: AsyncLLM,
    texts: Sequence[tuple[int, ...]],
    pooling: str,
    adapter: Adapter | None = None,
    *,
    normalize: bool = True,
) -> list[EmbeddingRequestOutput]:
    """`LLM.embed` of token ids. Raises what that raises, and Closed."""
    check_embeds(llm.llm.runner.spec, pooling)
    found: list[list[float]] = []
    for group in groups(texts):
        pooled = Pooled(llm.llm.runner, [texts[place] for place in group], pooling, adapter)
        await _run(llm, pooled)
        found += pooled.embeddings(normalize=normalize)
    return [EmbeddingRequestOutput(ids, EmbeddingOutput(each)) for ids, each in zip(texts, found, strict=True)]


async def _run(llm: AsyncLLM, pooled: Pooled) -> None:
    try:
        await llm.between_steps(lambda _: pooled.open())
        while not pooled.over:
            await llm.between_steps(lambda _: pooled.step())
    finally:
        await llm.between_steps(lambda _: pooled.release())
