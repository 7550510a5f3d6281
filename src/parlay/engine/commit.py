"""Where tokens join sequences: stops, lengths and logprobs inside an accepted path are handled here, once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from parlay.engine.scheduler import Turn
from parlay.engine.sequence import Sequence
from parlay.sampling.logprobs import prompt_token_logprobs, step_logprobs
from parlay.types import Committed, FinishReason, ParlayError, TokenLogprobs, Verdict

TARGET = "target"
"""Source of a token that no drafter proposed."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What joined one sequence in one step, how much of the verdict's path that was, and whether it ended."""

    committed: tuple[Committed, ...] = ()
    accepted: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


def commit(turn: Turn, verdict: Verdict, logits_RV: Tensor, root: int, max_context: int) -> Commit:
    """Append the verdict's tokens until a stop: the token that completes a stop counts, later ones do not exist."""
    sequence, draft = turn.sequence, turn.draft
    constraint = sequence.request.constraint
    sources = [draft.sources[node] for node in verdict.path] + [TARGET]
    logprobs = _logprobs(sequence, verdict, logits_RV, root)
    joined: list[Committed] = []
    finish: FinishReason | None = None
    stop_reason: int | None = None
    for token, source, logprob in zip(verdict.sampled, sources, logprobs, strict=True):
        if sequence.remaining <= 0:  # only when nothing at all may be generated
            finish = "length"
            break
        try:
            complete = constraint is not None and constraint.commit(token)
        except ParlayError as error:  # a rule that chose what the sampler can't
            return Commit(tuple(joined), len(joined), "error", error=str(error))
        sequence.tokens.append(token)
        joined.append(Committed(token, source, logprob))
        finish = _finish(sequence, token, complete, max_context)
        if finish is not None:
            stop_reason = token if token in sequence.request.params.stop_token_ids else None
            break
    return Commit(tuple(joined), min(len(joined), len(verdict.path)), finish, stop_reason)


def _finish(sequence: Sequence, token: int, complete: bool, max_context: int) -> FinishReason | None:
    request = sequence.request
    stopped = request.stop_checker is not None and request.stop_checker.push(token)
    if complete or token in request.stop_ids or (stopped and sequence.output_length >= request.params.min_tokens):
        return "stop"
    if sequence.remaining <= 0 or len(sequence.tokens) >= max_context:
        return "length"
    return None


def _logprobs(sequence: Sequence, verdict: Verdict, logits_RV: Tensor, root: int) -> Seq[TokenLogprobs | None]:
    params = sequence.request.params
    if params.logprobs is None:
        return [None] * len(verdict.sampled)
    rows = [root, *(root + 1 + node for node in verdict.path)]
    return step_logprobs(logits_RV[rows], sequence, verdict.sampled, params.logprobs)


def collect_prompt_logprobs(turn: Turn, logits_RV: Tensor) -> None:
    """Row i of a prefill chunk predicts the token after the chunk's token i."""
    sequence = turn.sequence
    top = sequence.request.params.prompt_logprobs
    have = len(sequence.prompt_logprobs)
    if top is None or have >= sequence.prompt_length:
        return
    # Rows before `have - 1` were collected before a preemption.
    first = have - 1 - sequence.cached
    count = min(sequence.cached + len(turn.pending) + 1, sequence.prompt_length) - have
    tokens = sequence.tokens[have : have + count]
    sequence.prompt_logprobs += prompt_token_logprobs(logits_RV[first : first + count], tokens, top)
