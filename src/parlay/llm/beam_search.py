"""Beam search under vLLM's names: the likeliest continuations of a prompt, one token at a time.

Drafts can't speed it up, because each step chooses among all beams. So it decodes plainly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from parlay.llm.outputs import Logprob, RequestOutput
from parlay.llm.request_options import RequestOptions
from parlay.system.progress import Progress, bar
from parlay.text.prompts import Prompt, Prompts, TokensPrompt, listed
from parlay.types import Request, SamplingParams, Tokenizer, check_kind

if TYPE_CHECKING:
    from parlay.llm.llm import LLM

Step = Callable[[Sequence[Prompt], SamplingParams], list[RequestOutput]]
"""Decodes one token after each of several lists of token ids, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search. Field names are vLLM's.

    Beams are ranked by log-probability divided by length to the power of ``length_penalty``; as in vLLM, the length is
    that of prompt and output. Raises ValueError for a value out of range. ``temperature`` must be 0, because nothing is
    drawn.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, value in (("beam_width", self.beam_width), ("max_tokens", self.max_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be a finite number, got {self.length_penalty}")
        if self.temperature:
            raise ValueError("beam search draws nothing: leave temperature at 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """One continuation. ``tokens`` and ``text`` include the prompt; ``logprobs`` are for the output only."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] = ()
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The best ``beam_width`` sequences, or all if there are fewer; the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    """The search of one prompt: running beams and ended ones. ``salt``: the prompt's cache salt."""

    salt: str
    running: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


def search_beams(llm: LLM, prompts: Prompts, params: BeamSearchParams, use_tqdm: Progress) -> list[BeamSearchOutput]:
    """Search for the beams of all prompts: the body of `LLM.beam_search`."""
    check_kind("params", params, BeamSearchParams, "a BeamSearchParams")
    tokenizer, options = llm.vocabulary.required_tokenizer, RequestOptions(strategy="none")
    one = SamplingParams(max_tokens=1)
    starts = [llm.job(prompt, one, options).samples[0].request for prompt in listed(prompts)]
    decode, ends = partial(llm.generate, use_tqdm=False, strategy="none"), frozenset(llm.vocabulary.end_ids)
    longest = llm.engine.longest
    with bar(params.max_tokens, "Beam search", "token", use_tqdm) as shown:
        return beam_search(starts, params, decode, tokenizer, ends, longest=longest, after_token=shown.update)


def beam_search(
    prompts: Sequence[Request],
    params: BeamSearchParams,
    step: Step,
    tokenizer: Tokenizer,
    eos_ids: frozenset[int],
    *,
    longest: int,
    after_token: Callable[[], object],
) -> list[BeamSearchOutput]:
    """Search for all ``prompts`` together. ``step`` decodes one more token of each beam.

    ``longest``: the most tokens of a beam, prompt included; there it ends as at ``max_tokens``.
    """
    width = params.beam_width
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
    ends = frozenset() if params.ignore_eos else eos_ids
    searches = [_Search(prompt.salt, [BeamSearchSequence(tokens=prompt.prompt)]) for prompt in prompts]
    due = searches
    for _ in range(params.max_tokens):
        outputs = iter(step([_asked(beam, search.salt) for search in due for beam in search.running], one))
        for search in due:
            grown = [child for beam in search.running for child in _children(beam, next(outputs), ends, params)]
            search.ended += [beam for beam in grown if beam.finish_reason]
            going = [beam for beam in grown if not beam.finish_reason]
            search.running = sorted(going, key=lambda beam: -beam.cum_logprob)[:width]
        after_token()
        due = [search for search in due if search.running and len(search.running[0].tokens) < longest]
        if not due:
            break
    return [
        BeamSearchOutput([replace(beam, text=_text(beam, tokenizer)) for beam in _best(search, params, ends)])
        for search in searches
    ]


def _asked(beam: BeamSearchSequence, salt: str) -> TokensPrompt:
    """The beam as a prompt that shares cached prefixes with the prompt it began from."""
    if salt:
        return TokensPrompt(prompt_token_ids=beam.tokens, cache_salt=salt)
    return TokensPrompt(prompt_token_ids=beam.tokens)


def _text(beam: BeamSearchSequence, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(beam.tokens, skip_special_tokens=True)


def _children(
    beam: BeamSearchSequence, output: RequestOutput, ends: frozenset[int], params: BeamSearchParams
) -> list[BeamSearchSequence]:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    entry = logprobs[0]
    return [
        BeamSearchSequence(
            tokens=beam.tokens if token in ends and not params.include_stop_str_in_output else (*beam.tokens, token),
            logprobs=(*beam.logprobs, entry),
            cum_logprob=beam.cum_logprob + one.logprob,
            finish_reason="stop" if token in ends else None,
            stop_reason=token if token in ends else None,
        )
        for token, one in entry.items()
    ]


def _best(search: _Search, params: BeamSearchParams, ends: frozenset[int]) -> list[BeamSearchSequence]:
    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in ends)
        return beam.cum_logprob / float(length**params.length_penalty)

    cut = [replace(beam, finish_reason="length") for beam in search.running]
    return sorted([*search.ended, *cut], key=score, reverse=True)[: params.beam_width]
