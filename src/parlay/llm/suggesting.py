"""Superposed decoding: several drafts of a continuation for the forwards of one (Shen et al. 2024, arXiv:2405.18400).

Each step feeds the model one row: the mean of the embeddings of the drafts' last tokens, weighted by the drafts'
probabilities. All drafts share the next-token distribution that follows, and an n-gram model tells which token
continues which draft. No draft is a sample of the model, and nothing verifies them: a person picks one. So they are
lossy.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parlay.drafters.counting.ngram_lm import check_fits
from parlay.drafters.draft_models.superposed import TOP_K, Candidate, grown, mean_of
from parlay.llm.jobs import Job, Sample
from parlay.llm.outputs import RequestOutputs
from parlay.llm.request_options import RequestOptions
from parlay.models.native import NativeRunner
from parlay.ngrams.model import NgramModel
from parlay.sampling.processors import unusable
from parlay.text.detokenizer import TextStream
from parlay.text.prompts import Prompts, listed
from parlay.types import (
    CommittedTokens,
    Event,
    Exactness,
    Features,
    FieldError,
    FinishReason,
    MachineBusy,
    Metrics,
    ParlayError,
    Runner,
    SamplingParams,
    Segment,
    Tokenizer,
    Tree,
    UsageError,
)

if TYPE_CHECKING:
    from parlay.llm.adapters import Adapted
    from parlay.llm.llm import LLM

SOURCE = "superposed"
MOST_DRAFTS = 16
MOST_TOKENS = 128
ROWS = 512
"""Rows per forward of a prompt. Other requests decode between forwards."""

USED = frozenset(
    [
        "n",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "truncate_prompt_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "seed",
        "logprobs_mode",
    ]
)
"""Fields of `SamplingParams` that are honoured here, or that only affect drawing: nothing is drawn."""
_names = itertools.count(3 << 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestParams:
    """How superposed drafts are scored. The defaults are the paper's.

    Each token adds log(p^(1 - alpha) q^alpha) to a draft's score: p is the model's distribution at ``temperature``,
    over its ``top_k`` likeliest tokens, and q is that of the n-gram model. Without an n-gram model only p counts.
    Raises ValueError for a value out of range.
    """

    alpha: float = 0.54
    temperature: float = 0.06
    top_k: int = TOP_K

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise FieldError("alpha", f"must be between 0 and 1, got {self.alpha:g}")
        if not 0 < self.temperature < math.inf:
            raise FieldError("temperature", f"must be above 0, got {self.temperature:g}: chances weigh the drafts")
        if not 1 <= self.top_k <= 64:
            raise FieldError("top_k", f"must be between 1 and 64, got {self.top_k}")


PAPER = SuggestParams()


def check_suggests(runner: Runner, params: SamplingParams) -> None:
    """Raises ValueError if the model can't read the mean of several tokens, or drafts can't honour the parameters."""
    spec = runner.spec
    if not isinstance(runner, NativeRunner) or not spec.features or spec.canvas is not None or runner.adds_ngrams:
        raise ValueError(
            f"{spec.name} can't read several tokens as one: superposed drafts need a model of Parlay's own decoder "
            "that writes token by token and reads no n-grams"
        )
    if params.n > MOST_DRAFTS:
        raise FieldError("n", f"is {params.n}, and there are {MOST_DRAFTS} superposed drafts at most")
    if params.max_tokens is None or not 1 <= params.max_tokens <= MOST_TOKENS:
        raise FieldError("max_tokens", f"is {params.max_tokens}: superposed drafts have 1 to {MOST_TOKENS} tokens")
    usual = SamplingParams()
    for name in (field.name for field in fields(params) if field.name not in USED):
        if _unset(getattr(params, name)) != _unset(getattr(usual, name)):
            raise FieldError(name, "can't be used with superposed drafts: remove it")


def _unset(value: object) -> object:
    """The value, or None if it asks for nothing: False or empty. A number asks for something, even 0."""
    return None if value is False or value in ((), [], {}, "") else value


class Suggestion:
    """The drafts after one prompt. Call `open`, then `step` until `over`, always `release`, and then `finish`.

    ``job`` has a sample for each draft; its prompt, ``max_tokens`` and stops apply. The rows that stand for all drafts
    are nodes of a chain that is never kept: kept rows could be found by other requests, and these belong to no text.
    """

    def __init__(
        self,
        runner: Runner,
        job: Job,
        tokenizer: Tokenizer | None,
        params: SuggestParams = PAPER,
        ngrams: NgramModel | None = None,
    ) -> None:
        request = job.samples[0].request
        check_suggests(runner, request.params)
        assert isinstance(runner, NativeRunner), "the check says so"
        self._runner, self._job, self._params, self._ngrams = runner, job, params, ngrams
        self._request, self._tokenizer = request, tokenizer
        known, context = len(request.prompt), runner.spec.max_context
        if known >= context:
            raise UsageError(f"the prompt has {known} tokens, and the model reads {context}: shorten it", "prompt")
        self._most = min(request.params.max_tokens or 1, context - known)
        self._name, self._known, self._cached = next(_names), 0, 0
        self._nodes: list[int] = []
        self._alive, self._ended = [Candidate()], list[Candidate]()
        self._seconds = [0.0, 0.0]  # for the prompt with its first token, and for the rest

    def open(self) -> None:
        """Reserve memory. Raises MachineBusy if the cache has no room now."""
        prompt = self._request.prompt
        self._known = self._cached = self._runner.open(self._name, prompt, self._request.salt)
        if not self._runner.reserve(self._name, len(prompt) + self._most):
            raise MachineBusy("the cache has no room for the text now: try again later")

    @property
    def over(self) -> bool:
        """Whether all drafts have ended or reached their longest length."""
        return not self._alive or len(self._alive[0].tokens) >= self._most

    @property
    def candidates(self) -> list[Candidate]:
        """The best drafts so far by score per token, the best first."""
        found = [*self._ended, *self._alive]
        return sorted(found, key=lambda each: -each.score / max(1, len(each.tokens)))[: len(self._job.samples)]

    def step(self, rows: int = ROWS) -> None:
        """Run the next rows of the prompt, at most ``rows``, or the one row that stands for all drafts."""
        began, prompt = time.perf_counter(), self._request.prompt
        if self._cached < len(prompt) - 1:
            chunk = prompt[self._cached : -1][:rows]
            self._runner.forward([self._segment(chunk)._replace(logits_from=len(chunk))])
            self._cached = self._runner.keep(self._name, ())
        else:
            logits_V = self._runner.forward([self._next()]).logits_RV[-1]
            wanted, params = len(self._job.samples), self._params
            if not self._alive[0].tokens:  # the first token: one empty draft becomes as many as are wanted
                params = replace(params, top_k=max(params.top_k, wanted))
            found = grow(self._alive, logits_V, self._request.prompt, params, self._ngrams)
            self._take(found[: 2 * wanted if wanted > 1 else 1])
        self._seconds[bool(self._nodes)] += time.perf_counter() - began

    def _take(self, grown: Sequence[Candidate]) -> None:
        """Keep twice as many drafts as wanted (the paper's number) while some end; of one, only the best."""
        found = [Candidate(each.tokens, each.score, self._ends(each.tokens)) for each in grown]
        self._ended += [each for each in found if each.ended]
        self._alive = [each for each in found if not each.ended][: len(self._job.samples)]

    def _ends(self, tokens: tuple[int, ...]) -> bool:
        """Whether the last token ends the text or completes a stop string."""
        if tokens[-1] in self._request.stop_ids:
            return True
        if self._tokenizer is None or not self._request.params.stops:
            return False
        text = TextStream(self._tokenizer, self._request.params, () if self._job.begins else self._request.prompt)
        return any(text.push(token) for token in tokens)

    def _segment(self, pending: tuple[int, ...]) -> Segment:
        return Segment(self._name, pending, adapter=self._request.adapter)

    def _next(self) -> Segment:
        """Make the row that stands for all drafts. Its token is the best draft's; earlier rows are not run again."""
        root = self._segment(self._request.prompt[-1:])
        if not self._alive[0].tokens:
            return root
        last = [each.tokens[-1] for each in self._alive]
        self._nodes.append(last[0])
        mean_1H = mean_of(self._runner.embed(last), self._alive)
        count = len(self._nodes)
        tree = Tree(tuple(self._nodes), tuple(range(-1, count - 1)))
        return root._replace(tree=tree, base=count, logits_from=count, features=Features(mean_1H))

    def release(self) -> None:
        """Free the drafts' rows. The prompt's rows stay cached for later requests."""
        self._runner.release(self._name)

    def run(self) -> None:
        """Open, run all steps and release, while nothing else runs."""
        try:
            self.open()
            while not self.over:
                self.step()
        finally:
            self.release()
        self.finish()

    def finish(self) -> None:
        """Give each sample of the job a draft, the best to the first."""
        found = self.candidates
        for place, sample in enumerate(self._job.samples):
            self._give(sample, found[min(place, len(found) - 1)])

    def _give(self, sample: Sample, draft: Candidate) -> None:
        if sample.text is not None:
            for token in draft.tokens:
                sample.text.push(token)
        last = draft.tokens[-1]
        metrics = Metrics(
            SOURCE,
            Exactness.LOSSY,
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._known,
            completion_tokens=len(draft.tokens),
            first_step_tokens=1,
            steps=1 + len(self._nodes),
            prefill_seconds=self._seconds[0],
            verify_seconds=self._seconds[1],
        )
        named = last if last in (self._request.params.stop_token_ids or ()) else None
        joined = CommittedTokens(draft.tokens, (SOURCE,) * len(draft.tokens))
        reason: FinishReason = "stop" if draft.ended else "length"
        sample.strategy = SOURCE
        sample.take(Event(sample.request.id, joined, reason, named, metrics=metrics))


def grow(
    candidates: Sequence[Candidate],
    logits_V: Tensor,
    text: Sequence[int],
    params: SuggestParams = PAPER,
    ngrams: NgramModel | None = None,
) -> list[Candidate]:
    """All continuations of the drafts by one token, the best first; ``logits_V`` ``[V]`` are shared by all drafts.

    ``text``: the tokens before the drafts. Raises ParlayError for NaN or infinite logits.
    """
    if (complaint := unusable(float(logits_V.max()))) is not None:
        raise ParlayError(complaint)
    top = torch.topk(logits_V.double() / params.temperature, min(params.top_k, len(logits_V)))
    logs: list[float] = torch.log_softmax(top.values, 0).tolist()
    ids: list[int] = top.indices.tolist()
    return grown(candidates, list(zip(ids, logs, strict=True)), text, params.alpha, ngrams)


def suggest(
    self: LLM,
    prompts: Prompts,
    sampling_params: SamplingParams | None = None,
    params: SuggestParams = PAPER,
    *,
    ngrams: NgramModel | str | Path | None = None,
    lora_request: Adapted = None,
) -> RequestOutputs:
    """Write ``n`` drafts after each prompt for the forwards of one, for people to pick from; lossy.

    ``sampling_params``: how many drafts (3), how long (16 tokens), and where they stop. Nothing is drawn, so the same
    drafts come each time. ``ngrams``: a model of `parlay ngram build`, or its file. Build it with the target's
    tokenizer from texts like those to be written, because it tells which words go together. The first output of each
    prompt is the best. Raises ValueError for a value that can't be used.
    """
    asked = sampling_params or SamplingParams(n=3, max_tokens=16)
    options = RequestOptions(strategy="none", adapter=self.adapters.of(lora_request))
    model = fitting(self, ngrams)
    jobs = [self.job(prompt, asked, options) for prompt in listed(prompts)]
    began = time.perf_counter()
    with self.call_lock.entered():
        for job in jobs:
            Suggestion(self.runner, job, self.tokenizer, params, model).run()
    return RequestOutputs([job.output() for job in jobs], time.perf_counter() - began)


def fitting(llm: LLM, ngrams: NgramModel | str | Path | None) -> NgramModel | None:
    """The n-gram model, if it fits the LLM's tokens.

    Raises UsageError if it does not, ParlayError for an unusable file.
    """
    if ngrams is None:
        return None
    model = ngrams if isinstance(ngrams, NgramModel) else NgramModel.open(ngrams)
    name = "the n-gram model" if isinstance(ngrams, NgramModel) else str(ngrams)
    check_fits("superposed drafts", name, model, llm.runner.spec.vocab_size, llm.vocabulary.fingerprint)
    return model
