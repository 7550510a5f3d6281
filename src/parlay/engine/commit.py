"""Where tokens join sequences: stops, lengths and logprobs inside an accepted path are handled here, once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from torch import Tensor

from parlay import trees
from parlay.engine.scheduler import Turn
from parlay.engine.sequence import Sequence
from parlay.sampling.logprobs import prompt_token_logprobs, step_logprobs
from parlay.types import NOTHING_COMMITTED, CommittedTokens, FinishReason, ParlayError, TokenLogprobs, Verdict

TARGET = "target"
"""Source of a token that no drafter proposed."""


class Commit(NamedTuple):
    """What joined one sequence in one step, how much of the verdict's path that was, and whether it ended."""

    committed: CommittedTokens = NOTHING_COMMITTED
    accepted: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None


def commit(turn: Turn, verdict: Verdict, logits_RV: Tensor, max_context: int) -> Commit:
    """Append the verdict's tokens until a stop: the token that completes a stop counts, later ones do not exist."""
    sequence, draft, path = turn.sequence, turn.draft, verdict.path
    room = sequence.room(max_context)
    logprobs = _logprobs(sequence, verdict, logits_RV, turn.root)
    end = _read(sequence, verdict.sampled[:room])
    tokens = verdict.sampled[: end.kept]
    sequence.tokens.extend(tokens)
    sources = (*trees.along(draft.sources, path), TARGET)
    joined = CommittedTokens(tokens, sources[: end.kept], logprobs[: end.kept])
    accepted = min(end.kept, len(path))
    if end.error is not None:
        return Commit(joined, accepted, "error", error=end.error)
    if end.stopped:
        reason = tokens[-1] if tokens[-1] in sequence.request.params.stop_token_ids else None
        return Commit(joined, accepted, "stop", reason)
    return Commit(joined, accepted, "length" if end.kept == room else None)


class _End(NamedTuple):
    """How many tokens of a step count, whether the last of them stops the text, and what is wrong after it."""

    kept: int
    stopped: bool = False
    error: str | None = None


def _read(sequence: Sequence, tokens: Seq[int]) -> _End:
    """Tell the request's readers of the tokens, one by one, until one says that the text is complete."""
    request, before = sequence.request, sequence.output_length
    constraint, checker, stop_ids = request.constraint, request.stop_checker, request.stop_ids
    if constraint is None and checker is None and stop_ids.isdisjoint(tokens):
        return _End(len(tokens))
    for count, token in enumerate(tokens, start=1):
        try:
            complete = constraint is not None and constraint.commit(token)
        except ParlayError as error:  # a rule that chose what the sampler can't
            return _End(count - 1, error=str(error))
        stopped = checker is not None and checker.push(token)
        if complete or token in stop_ids or (stopped and before + count >= request.params.min_tokens):
            return _End(count, stopped=True)
    return _End(len(tokens))


def _logprobs(sequence: Sequence, verdict: Verdict, logits_RV: Tensor, root: int) -> tuple[TokenLogprobs, ...]:
    params = sequence.request.params
    if params.logprobs is None:
        return ()
    rows = [root, *(root + 1 + node for node in verdict.path)]
    return tuple(step_logprobs(logits_RV[rows], sequence, verdict.sampled, params.logprobs))


def collect_prompt_logprobs(turn: Turn, logits_RV: Tensor, start: int) -> None:
    """Row ``start + i``, if the request wants such, predicts the token after token i of a prefill chunk."""
    sequence = turn.sequence
    top = sequence.request.params.prompt_logprobs
    have = len(sequence.prompt_logprobs)
    if top is None or have >= sequence.prompt_length:
        return
    # Rows before `have - 1` were collected before a preemption.
    first = start + have - 1 - sequence.cached
    count = min(sequence.cached + len(turn.pending) + 1, sequence.prompt_length) - have
    tokens = sequence.tokens[have : have + count]
    sequence.prompt_logprobs += prompt_token_logprobs(logits_RV[first : first + count], tokens, top)
