"""Runs embeddings, judgements and suggestions between the engine's steps, so that decoding requests go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from parlay.aio.service import AsyncLLM
from parlay.llm.embedding import (
    ROWS,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Pooled,
    Reading,
    ScoringRequestOutput,
    check_embeds,
    groups,
)
from parlay.llm.jobs import Job
from parlay.llm.judging import Judged, score_outputs, words_of
from parlay.llm.outputs import RequestOutput
from parlay.llm.suggesting import Suggestion, SuggestParams
from parlay.ngrams.model import NgramModel
from parlay.types import Adapter

Turn = Callable[[], AbstractAsyncContextManager[object]]
"""Makes a context manager that each forward runs in; entering it may wait, so that other requests get their turn."""


async def embed(
    llm: AsyncLLM,
    texts: Sequence[tuple[int, ...]],
    pooling: str,
    adapter: Adapter | None = None,
    *,
    normalize: bool = True,
    turn: Turn = nullcontext,
) -> list[EmbeddingRequestOutput]:
    """Embed token ids as `LLM.embed` does. Raises what `LLM.embed` raises, and Closed."""
    check_embeds(llm.llm.runner.spec, pooling)
    found: list[list[float]] = []
    for group in groups(texts):
        pooled = Pooled(llm.llm.runner, [texts[place] for place in group], pooling, adapter)
        await _run(llm, pooled, turn)
        found += pooled.embeddings(normalize=normalize)
    return [EmbeddingRequestOutput(ids, EmbeddingOutput(each)) for ids, each in zip(texts, found, strict=True)]


async def judge(
    llm: AsyncLLM, prompts: Sequence[tuple[int, ...]], adapter: Adapter | None = None, *, turn: Turn = nullcontext
) -> list[ScoringRequestOutput]:
    """Score the prompts that `judge_prompts` made. Raises ValueError if the model lacks one of the judge's two words,
    and Closed."""
    words, scores = words_of(llm.llm), list[float]()
    for group in groups(prompts):
        judged = Judged(llm.llm.runner, [prompts[place] for place in group], words, adapter)
        await _run(llm, judged, turn)
        scores += judged.scores
    return score_outputs(prompts, scores)


async def suggest(
    llm: AsyncLLM,
    jobs: Sequence[Job],
    params: SuggestParams,
    model: NgramModel | None,
    *,
    turn: Turn = nullcontext,
) -> list[RequestOutput]:
    """Suggest texts for jobs as `LLM.suggest` does, with an n-gram model that `fitting` returned. Raises what
    `LLM.suggest` raises, and Closed."""
    for job in jobs:
        suggestion = Suggestion(llm.llm.runner, job, llm.llm.tokenizer, params, model)
        await _run(llm, suggestion, turn)
        suggestion.finish()
    return [job.output() for job in jobs]


async def _run(llm: AsyncLLM, reading: Reading | Suggestion, turn: Turn) -> None:
    try:
        await llm.between_steps(lambda _: reading.open())
        while not reading.over:
            async with turn():
                await llm.between_steps(lambda own: reading.step(own.engine.scheduler.rows_between_steps(ROWS)))
    finally:
        await llm.between_steps(lambda _: reading.release())
