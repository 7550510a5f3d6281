"""Appends accepted tokens to sequences.

Only this module handles stops, lengths and logprobs inside an accepted path.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import Commit, SequenceStep
from parlay.sampling.distributions import prompt_token_logprobs, row_logprobs
from parlay.types import TARGET, CommittedTokens, Exactness, Origin, Origins, ParlayError, TokenLogprobs, trees


def commit(step: SequenceStep, max_context: int) -> Commit:
    """Append the verdict's tokens, up to and including the one that ends the text; later ones are dropped.

    A canvas's verdict may have no tokens. Then nothing happens, unless the text has reached its length.
    """
    sequence, (path, sampled) = step.sequence, step.verdict
    canvas, count = sequence.canvas, sequence.request.params.logprobs
    room = sequence.room(max_context)
    logprobs = step.logprobs if canvas is not None or count is None else _logprobs(step, count)
    kept, stopped, error = _read(sequence, sampled[:room])
    tokens = sampled[:kept]
    sequence.tokens.extend(tokens)
    sources = trees.along(step.draft.sources, path) + (TARGET,) * (len(sampled) - len(path))
    writers = _writers(step, sources)[:kept] if canvas is None else ()
    origins = _origins(step, step.out.origins, tokens) if canvas is None and step.out.origins is not None else ()
    joined = CommittedTokens(tokens, sources[:kept], logprobs[:kept], writers, origins)
    accepted = min(kept, len(path))
    if error is not None:
        return Commit(joined, accepted, "error", error=error)
    answered = canvas is not None and sequence.ends is not None and len(tokens) == len(sampled) > 0
    if stopped or answered:
        reason = tokens[-1] if tokens[-1] in (sequence.request.params.stop_token_ids or ()) else None
        return Commit(joined, accepted, "stop", reason)
    return Commit(joined, accepted, "length" if kept == room else None)


def _writers(step: SequenceStep, sources: tuple[str, ...]) -> tuple[str, ...]:
    """Who chose each token, if not the target alone: a lossy rule may keep what a drafter chose."""
    sequence, path, by_row = step.sequence, step.verdict.path, step.out.writers
    rule = sequence.rule
    lossy = bool(path) and rule.exactness is Exactness.LOSSY and not rule.matches(sequence)
    if not by_row:
        return sources if lossy else ()
    own = tuple([by_row[row] for row in step.walk])
    return (*sources[: len(path)], *own[len(path) :]) if lossy else own


def _origins(step: SequenceStep, origins: Origins, tokens: Seq[int]) -> tuple[Origin | None, ...]:
    """Where in a datastore each token may come from."""
    found: list[Origin | None] = []
    for node, token in zip((-1, *step.verdict.path), tokens, strict=False):
        before = found[-1] if found else step.sequence.origin
        found.append(origins.of(step.root + 1 + node, token, before))
    step.sequence.origin = found[-1] if found else None
    return tuple(found)


def _read(sequence: Sequence, tokens: Seq[int]) -> tuple[int, bool, str | None]:
    """Give the tokens one by one to constraint and stop checker, until the text is complete.

    Returns how many of them are kept, whether the last of these ends the text, and what is wrong with the next token.
    """
    request = sequence.request
    constraint, checker, stop_ids = request.constraint, request.stop_checker, request.stop_ids
    if constraint is None and checker is None and stop_ids.isdisjoint(tokens):
        return len(tokens), False, None
    for count, token in enumerate(tokens, start=1):
        try:
            complete = constraint is not None and constraint.commit(token)
        except ParlayError as error:  # a lossy rule chose a token that the constraint forbids
            return count - 1, False, str(error)
        stopped = checker is not None and checker.push(token)
        if complete or token in stop_ids or (stopped and sequence.output_length + count >= request.params.min_tokens):
            return count, True, None
    return len(tokens), False, None


def _logprobs(step: SequenceStep, count: int) -> tuple[TokenLogprobs, ...]:
    sampled = step.verdict.sampled
    paths = [sampled[:depth] for depth in range(len(step.verdict.path) + 1)]
    return tuple(row_logprobs(step.out.logits_RV[step.walk], step.sequence, paths, sampled, count))


def collect_prompt_logprobs(step: SequenceStep) -> None:
    """Add the logprobs of a prefill chunk's tokens, if the request wants them.

    The logits at each row predict the token after it.
    """
    sequence, top = step.sequence, step.sequence.request.params.prompt_logprobs
    have = len(sequence.prompt_logprobs)
    if top is None or have >= sequence.prompt_length:
        return
    # Rows before `have - 1` were collected before a preemption.
    first = step.first_logits + have - 1 - sequence.cached
    count = min(sequence.cached + len(step.pending) + 1, sequence.prompt_length) - have
    tokens = sequence.tokens[have : have + count]
    sequence.prompt_logprobs += prompt_token_logprobs(step.out.logits_RV[first : first + count], tokens, top)
