"""Appends accepted tokens to sequences.

Only this module handles stops, lengths and logprobs inside an accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import Commit, SequenceStep
from parlay.sampling.distributions import prompt_token_logprobs, row_logprobs
from parlay.types import TARGET, CommittedTokens, Exactness, Origin, ParlayError, TokenLogprobs, trees


def commit(step: SequenceStep, max_context: int) -> Commit:
    """Append the verdict's tokens, up to and including the one that ends the text; later ones are dropped.

    A canvas's verdict may have no tokens. Then nothing happens, unless the text has reached its length.
    """
    sequence, (path, sampled) = step.sequence, step.verdict
    room = sequence.room(max_context)
    logprobs = step.logprobs if sequence.canvas is not None else _logprobs(step)
    end = _read(sequence, sampled[:room])
    tokens = sampled[: end.kept]
    sequence.tokens.extend(tokens)
    sources = trees.along(step.draft.sources, path) + (TARGET,) * (len(sampled) - len(path))
    writers = _writers(step, sources)[: end.kept]
    joined = CommittedTokens(tokens, sources[: end.kept], logprobs[: end.kept], writers, _origins(step, tokens))
    accepted = min(end.kept, len(path))
    if end.error is not None:
        return Commit(joined, accepted, "error", error=end.error)
    answered = sequence.ends is not None and len(tokens) == len(sampled) > 0
    if end.stopped or answered:
        reason = tokens[-1] if tokens[-1] in (sequence.request.params.stop_token_ids or ()) else None
        return Commit(joined, accepted, "stop", reason)
    return Commit(joined, accepted, "length" if end.kept == room else None)


def _writers(step: SequenceStep, sources: tuple[str, ...]) -> tuple[str, ...]:
    """Who chose each token, if not the target alone: a lossy rule may keep what a drafter chose."""
    sequence, path, by_row = step.sequence, step.verdict.path, step.out.writers
    if sequence.canvas is not None:
        return ()
    rule = sequence.rule
    lossy = bool(path) and rule.exactness is Exactness.LOSSY and not rule.matches(sequence)
    if not by_row:
        return sources if lossy else ()
    own = tuple([by_row[row] for row in step.walk])
    return (*sources[: len(path)], *own[len(path) :]) if lossy else own


def _origins(step: SequenceStep, tokens: Seq[int]) -> tuple[Origin | None, ...]:
    """Where in a datastore each token may come from. Empty if the target mixes in no datastore."""
    if (origins := step.out.origins) is None or step.sequence.canvas is not None:
        return ()
    found: list[Origin | None] = []
    for node, token in zip((-1, *step.verdict.path), tokens, strict=False):
        before = found[-1] if found else step.sequence.origin
        found.append(origins.of(step.root + 1 + node, token, before))
    step.sequence.origin = found[-1] if found else None
    return tuple(found)


class _End(NamedTuple):
    """How many of a step's tokens are kept, whether the last of them ends the text, and what is wrong with the next."""

    kept: int
    stopped: bool = False
    error: str | None = None


def _read(sequence: Sequence, tokens: Seq[int]) -> _End:
    """Give the tokens one by one to constraint and stop checker, until the text is complete."""
    request, before = sequence.request, sequence.output_length
    constraint, checker, stop_ids = request.constraint, request.stop_checker, request.stop_ids
    if constraint is None and checker is None and stop_ids.isdisjoint(tokens):
        return _End(len(tokens))
    for count, token in enumerate(tokens, start=1):
        try:
            complete = constraint is not None and constraint.commit(token)
        except ParlayError as error:  # a lossy rule chose a token that the constraint forbids
            return _End(count - 1, error=str(error))
        stopped = checker is not None and checker.push(token)
        if complete or token in stop_ids or (stopped and before + count >= request.params.min_tokens):
            return _End(count, stopped=True)
    return _End(len(tokens))


def _logprobs(step: SequenceStep) -> tuple[TokenLogprobs, ...]:
    count = step.sequence.request.params.logprobs
    if count is None:
        return ()
    sampled = step.verdict.sampled
    paths = [sampled[:depth] for depth in range(len(step.verdict.path) + 1)]
    return tuple(row_logprobs(step.out.logits_RV[step.walk], step.sequence, paths, sampled, count))


def collect_prompt_logprobs(step: SequenceStep) -> None:
    """Add the logprobs of a prefill chunk's tokens, if the request wants them.

    The logits at each row predict the token after it.
    """
    sequence = step.sequence
    top = sequence.request.params.prompt_logprobs
    have = len(sequence.prompt_logprobs)
    if top is None or have >= sequence.prompt_length:
        return
    # Rows before `have - 1` were collected before a preemption.
    first = step.first_logits + have - 1 - sequence.cached
    count = min(sequence.cached + len(step.pending) + 1, sequence.prompt_length) - have
    tokens = sequence.tokens[have : have + count]
    sequence.prompt_logprobs += prompt_token_logprobs(step.out.logits_RV[first : first + count], tokens, top)
