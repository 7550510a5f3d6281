"""How likely a model finds given texts: perplexity, and which of several endings it would choose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parlay.llm.llm import LLM
from parlay.text.prompts import TokensPrompt
from parlay.types import SamplingParams

WINDOW = 512
"""Tokens that are read together; each is told by at least half of them, but for those of the first window."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """``tokens`` were predicted, at ``nats`` of surprise each in the mean."""

    tokens: int
    nats: float

    @property
    def value(self) -> float:
        """The number of tokens that are as likely as the true one."""
        return math.exp(self.nats)


@dataclass(frozen=True, slots=True)
class Question:
    """A text, and endings of which number ``answer`` is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The endings that are likeliest as a whole, and per byte: what lm_eval calls acc and acc_norm."""

    likeliest: int
    likeliest_per_byte: int


def perplexity(llm: LLM, text: str, window: int = WINDOW) -> Perplexity:
    """Read a text in windows that overlap by half. Raises ValueError for a text of fewer than two tokens.

    Every window begins with what a text begins with, which models take for granted.
    """
    tokenizer = llm.get_tokenizer()
    ids, begin_ids = tuple(tokenizer.encode(text)), tuple(tokenizer.encode(""))
    begin_ids = begin_ids if ids[: len(begin_ids)] == begin_ids else ()
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens, and at least 2 are needed")
    found = in_windows(llm, ids, window, begin_ids)
    return Perplexity(len(found), -sum(found) / len(found))


def in_windows(llm: LLM, ids: tuple[int, ...], window: int = WINDOW, begin_ids: tuple[int, ...] = ()) -> list[float]:
    """Log-probability of each token but the first, read as `perplexity` does; ``begin_ids`` begin the later windows."""
    windows = list(_windows(len(ids), min(window, llm.engine.longest - 1 - len(begin_ids))))
    heads = [begin_ids if begin else () for begin, _, _ in windows]
    texts = [
        (head + ids[begin:end], len(head) + first - begin)
        for head, (begin, first, end) in zip(heads, windows, strict=True)
    ]
    return [value for values in token_log_likelihoods(llm, texts) for value in values]


def _windows(tokens: int, window: int) -> Iterator[tuple[int, int, int]]:
    """Where each begins, where what is counted of it begins, and where it ends; every token but one counts once."""
    first, end = 1, min(window, tokens)
    yield 0, first, end
    while end < tokens:
        first, end = end, min(end + window // 2, tokens)
        yield max(0, end - window), first, end


def choose(llm: LLM, question: Question) -> Choice:
    """Which ending the model finds likeliest."""
    tokenizer = llm.get_tokenizer()
    kept = question.prompt.rstrip()  # spaces belong to the tokens of the ending
    before = len(tokenizer.encode(kept))
    texts = [question.prompt + choice for choice in question.choices]
    found = log_likelihoods(llm, [(tuple(tokenizer.encode(text)), before) for text in texts])
    per_byte = [value / max(1, len(choice.encode())) for value, choice in zip(found, question.choices, strict=True)]
    return Choice(found.index(max(found)), per_byte.index(max(per_byte)))


def log_likelihoods(llm: LLM, texts: Sequence[tuple[tuple[int, ...], int]]) -> list[float]:
    """Sum the log-probabilities of each text's tokens from a place on; that of its first token is never included."""
    return [sum(values) for values in token_log_likelihoods(llm, texts)]


def token_log_likelihoods(llm: LLM, texts: Sequence[tuple[tuple[int, ...], int]]) -> list[list[float]]:
    """The log-probability of each text's tokens from a place on; that of its first token is never included."""
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
