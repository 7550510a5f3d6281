"""Measures how likely a model finds given texts: perplexity, and which of several endings it prefers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parlay.llm.llm import LLM
from parlay.text.prompts import TokensPrompt
from parlay.types import SamplingParams

WINDOW = 512
"""Tokens per window. Each token has at least half a window of context, except in the first window."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """``tokens`` tokens were predicted, with a mean negative log-probability of ``nats``."""

    tokens: int
    nats: float

    @property
    def value(self) -> float:
        """The perplexity: exp(nats)."""
        return math.exp(self.nats)


@dataclass(frozen=True, slots=True)
class Question:
    """A text with several endings, of which number ``answer`` is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The endings with the highest log-probability, in total and per byte: lm_eval's acc and acc_norm."""

    likeliest: int
    likeliest_per_byte: int


def perplexity(llm: LLM, text: str, window: int = WINDOW) -> Perplexity:
    """The perplexity of a text, read in windows that overlap by half.

    Every window begins with the tokens that every text begins with, which models expect. Raises ValueError for a text
    of fewer than two tokens.
    """
    tokenizer = llm.vocabulary.required_tokenizer
    ids, begin_ids = tuple(tokenizer.encode(text)), tuple(tokenizer.encode(""))
    begin_ids = begin_ids if ids[: len(begin_ids)] == begin_ids else ()
    if len(ids) < 2:
        raise ValueError(f"the text must have at least 2 tokens, and has {len(ids)}: take a longer one")
    found = in_windows(llm, ids, window, begin_ids)
    return Perplexity(len(found), -sum(found) / len(found))


def in_windows(llm: LLM, ids: tuple[int, ...], window: int = WINDOW, begin_ids: tuple[int, ...] = ()) -> list[float]:
    """Log-probability of each token but the first, read as by `perplexity`.

    ``begin_ids`` begin every window but the first.
    """
    windows = list(_windows(len(ids), min(window, llm.engine.longest - 1 - len(begin_ids))))
    heads = [begin_ids if begin else () for begin, _, _ in windows]
    texts = [
        (head + ids[begin:end], len(head) + first - begin)
        for head, (begin, first, end) in zip(heads, windows, strict=True)
    ]
    return [value for values in token_log_likelihoods(llm, texts) for value in values]


def _windows(tokens: int, window: int) -> Iterator[tuple[int, int, int]]:
    """For each window: its first token, the first that counts, and its end. Every token but the first counts once."""
    first, end = 1, min(window, tokens)
    yield 0, first, end
    while end < tokens:
        first, end = end, min(end + window // 2, tokens)
        yield max(0, end - window), first, end


def choose(llm: LLM, question: Question) -> Choice:
    """Find the ending that the model finds likeliest."""
    tokenizer = llm.vocabulary.required_tokenizer
    kept = question.prompt.rstrip()  # a trailing space belongs to the ending's first token
    before = len(tokenizer.encode(kept))
    texts = [question.prompt + choice for choice in question.choices]
    found = log_likelihoods(llm, [(tuple(tokenizer.encode(text)), before) for text in texts])
    per_byte = [value / max(1, len(choice.encode())) for value, choice in zip(found, question.choices, strict=True)]
    return Choice(found.index(max(found)), per_byte.index(max(per_byte)))


def log_likelihoods(llm: LLM, texts: Sequence[tuple[tuple[int, ...], int]]) -> list[float]:
    """Sum the log-probabilities of each text's tokens from a given place on; its first token never counts."""
    return [sum(values) for values in token_log_likelihoods(llm, texts)]


def token_log_likelihoods(llm: LLM, texts: Sequence[tuple[tuple[int, ...], int]]) -> list[list[float]]:
    """The log-probabilities of each text's tokens from a given place on; its first token never counts."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in texts]
    outputs = llm.generate(prompts, params, False, strategy="none", store=False)
    found = []
    for (ids, first), output in zip(texts, outputs, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None, "they were asked for"
        places = range(max(first, 1), len(ids))
        found.append([entry[ids[place]].logprob for place in places if (entry := entries[place]) is not None])
    return found
