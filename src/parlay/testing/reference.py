"""The slow reference decoder, with which every strategy must agree. It has no cache, no drafts and no batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parlay.sampling import noise
from parlay.sampling.distributions import token_logprobs
from parlay.sampling.processors import process
from parlay.types import FinishReason, Request, TokenLogprobs

LogitsOf = Callable[[Sequence[int]], Tensor]
"""The logits ``[V]`` of the token after a text of ids."""


@dataclass(slots=True)
class ReferenceText:
    """The text of a request so far: a `SequenceView` without an engine."""

    request: Request
    tokens: list[int]
    prompt_length: int
    sequence: int = 0
    layers: None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]


def decode(logits_of: LogitsOf, request: Request, max_context: int = 1 << 30) -> ReferenceText:
    """Decode a request, and recompute the logits of the whole text for each token. The request's stop checker and
    constraint can't be used again.

    Raises ParlayError if the target can't go on: logits are NaN, every token is masked, or a processor raises.
    """
    text = ReferenceText(request, list(request.prompt), len(request.prompt))
    if request.params.max_tokens == 0:
        text.finish_reason = "length"
    while text.finish_reason is None:
        logits_V = logits_of(text.tokens)
        processed_V = process(logits_V, text, ())
        token = draw(processed_V, text)
        if request.params.logprobs is not None:
            shown_V = processed_V if request.params.logprobs_mode == "processed" else logits_V
            text.logprobs.append(token_logprobs(shown_V, token, request.params.logprobs))
        text.tokens.append(token)
        text.finish_reason = _finish(text, token, max_context)
    return text


def draw(processed_V: Tensor, text: ReferenceText) -> int:
    """Return the id with the highest logit, after adding Gumbel noise to each logit unless the request is greedy. Of
    equal logits, the lowest id counts."""
    if not text.request.params.greedy:
        state = noise.stream(text.request.key, len(text.tokens))
        every_bit = noise.bits([state], torch.arange(len(processed_V), device=processed_V.device))
        processed_V = processed_V.double() + noise.gumbel(every_bit)[0]
    return int((processed_V == processed_V.max()).nonzero()[0])


def _finish(text: ReferenceText, token: int, max_context: int) -> FinishReason | None:
    request, length = text.request, len(text.output)
    complete = request.constraint is not None and request.constraint.commit(token)
    stopped = request.stop_checker is not None and request.stop_checker.push(token)
    if complete or token in request.stop_ids or (stopped and length >= request.params.min_tokens):
        return "stop"
    return "length" if length == request.params.max_tokens or len(text.tokens) >= max_context else None
