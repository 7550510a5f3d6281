"""Runs the target's forward over drafts, and calls the accept rules on its logits.

No other forward's logits commit tokens. If a forward or a rule raises, only the requests that make it raise end.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import NamedTuple

import torch

from parlay.engine.sequence_step import SequenceStep, charge, grouped, isolated, listed, message_of
from parlay.sampling.rules.shared_noise import follow_tokens
from parlay.sampling.sampler import ranked
from parlay.types import (
    NO_DRAFT,
    Exactness,
    Fault,
    Finish,
    Output,
    ParlayError,
    Runner,
    RunnerLost,
    RunnerSpec,
    Segment,
    Verdict,
    place_of,
    trees,
)

logger = logging.getLogger(__name__)


class Begun(NamedTuple):
    """A forward in flight: the steps it verifies, their segments, and a function that waits for its output."""

    steps: list[SequenceStep]
    segments: list[Segment]
    finish: Finish


def begin(runner: Runner, steps: list[SequenceStep]) -> Begun | None:
    """Begin one forward for all steps.

    None if there are no steps, or if beginning failed: `finish` then runs the steps again and finds the ones that fail.
    """
    segments = _segments(runner.spec, steps)
    try:
        return Begun(steps, segments, runner.begin(segments, _taps(steps))) if steps else None
    except RunnerLost:
        raise
    except Exception:
        return None


def finish(runner: Runner, steps: list[SequenceStep], begun: Begun | None) -> float:
    """Wait for the output of a forward in flight. If that forward failed, `verify` runs ``steps`` again.

    ``steps`` are those whose requests have not ended meanwhile.
    """
    try:
        out = None if begun is None else begun.finish()
    except RunnerLost:
        raise
    except Exception as error:
        logger.warning("a forward for %d requests failed (%s): it is run again", len(steps), message_of(error))
        out = None
    if out is None or begun is None:
        return verify(runner, steps)
    return _take(runner.spec, begun.steps, begun.segments, out)


def verify(runner: Runner, steps: list[SequenceStep]) -> float:
    """Run all steps in one forward. If it fails, run each step alone; one that fails alone runs without its draft.

    A forward commits nothing, so it can be repeated: it overwrites its rows. Returns the seconds spent on taps, with
    which the drafters that asked for taps have been charged.
    """
    tapping = 0.0
    taps = _taps(steps)

    def forward(steps: list[SequenceStep]) -> None:
        nonlocal tapping
        segments = _segments(runner.spec, steps)
        tapping += _take(runner.spec, steps, segments, runner.forward(segments, taps))

    def failed(
        step: SequenceStep, error: Exception
    ) -> None:  # a function that names itself would keep the runner until a collection
        if step.draft.tree.tokens and step.sequence.canvas is None:
            step.draft = NO_DRAFT
            isolated(forward, [step], _failed_alone)
        else:
            _failed_alone(step, error)

    if steps:
        isolated(forward, steps, failed)
    return tapping


def _taps(steps: list[SequenceStep]) -> list[int]:
    return sorted({tap for step in steps if step.sequence.layers is not None for tap in step.taps})


def _take(spec: RunnerSpec, steps: list[SequenceStep], segments: list[Segment], out: Output) -> float:
    """Tell each step which rows of the output are its own. Returns the seconds that taps took.

    A model that fills canvases must never write its mask token, which stands for an open place. So the mask's logit
    becomes -inf before anybody reads the rows. `denoise` does that for canvases.
    """
    if out.taps:
        charge([(step, drafter) for step in steps for drafter in step.tapped], out.tap_seconds)
    row = 0
    for step, segment, (start, end) in zip(steps, segments, pairwise(out.starts), strict=True):
        step.out, step.first_row, step.first_logits = out, row, start
        step.root = end - len(segment.tree.tokens) - 1  # the draft's rows are the segment's last
        if spec.canvas is not None and step.sequence.canvas is None:
            out.logits_RV[start:end, spec.canvas.mask_id] = -torch.inf
        row += len(segment.pending) + len(segment.tree.tokens)
        if lost := out.lost.get(segment.sequence):
            step.sequence.lose_members(lost)
    return out.tap_seconds


def _failed_alone(step: SequenceStep, error: Exception) -> None:
    step.fail(f"the model failed on this request: {message_of(error)}", error)


def _segments(spec: RunnerSpec, steps: list[SequenceStep]) -> list[Segment]:
    """The steps' segments. If all steps are judged by the likeliest tokens alone, these ask for nothing else."""
    likeliest = spec.likeliest and all(step.reads_likeliest for step in steps)
    return [_segment(step, likeliest) for step in steps]


def _segment(step: SequenceStep, likeliest: bool) -> Segment:
    pending, wants_prompt = len(step.pending), step.sequence.request.params.prompt_logprobs is not None
    logits_from = 0 if wants_prompt else pending - 1 if step.at_root else pending
    return Segment(
        step.sequence.sequence,
        step.pending,
        step.draft.tree,
        logits_from,
        features=step.draft.inputs,
        together=step.draft.together,
        stale=step.sequence.canvas is not None and step.stale,
        adapter=step.sequence.request.adapter,
        mask_adapter=step.draft.mask_adapter,
        places=step.draft.places,
        guesses=step.draft.guesses,
        likeliest=likeliest,
    )


def accept(steps: list[SequenceStep]) -> None:
    """Let each rule judge all its steps in one call. If it raises, only the requests that make it raise end.

    A lossy verdict that would take its text's running score below the floor is discarded. From that step on, the text
    is decoded under the rule of the strategy's `Escape`.
    """
    _decide(steps)
    if escaping := [step for step in steps if step.sequence.strategy.escape is not None and _escapes(step)]:
        _decide(escaping)


def is_spoilt(step: SequenceStep) -> bool:
    """Whether the root's logits are NaN, and a node of the draft may have caused it.

    Attention multiplies the values of rows that a row must not see by 0, and 0 times NaN is NaN.
    """
    drafted = step.fault is not None and bool(step.draft.tree.tokens)
    return drafted and not step.out.likeliest and bool(step.out.logits_RV[step.root].isnan().any())


def _decide(steps: list[SequenceStep]) -> None:
    for group in grouped(steps, lambda step: (id(step.sequence.rule), id(step.out))):
        isolated(_judge, group, _fail_by_rule)


def _fail_by_rule(step: SequenceStep, error: Exception) -> None:
    """End the request because its accept rule failed. Errors of Parlay's own say what is wrong by themselves."""
    reason = message_of(error)
    if not isinstance(error, ParlayError):
        reason = f"accept rule {type(step.sequence.rule).__name__} failed at {place_of(error)} ({reason})"
    step.fail(reason, error)


def _escapes(step: SequenceStep) -> bool:
    """Whether the sequence must leave its lossy rule in this step. If not, its running score is updated."""
    sequence, escape, tokens = step.sequence, step.sequence.strategy.escape, step.verdict.sampled
    if escape is None or step.fault is not None or sequence.escaped_at is not None:
        return False
    logits_NV = step.out.logits_RV[step.walk]
    below_N = logits_NV[range(len(tokens)), list(tokens)] - logits_NV.max(dim=1).values
    confidence = sequence.confidence + float(below_N.double().exp().sum())
    if confidence >= escape.floor * (sequence.output_length + len(tokens)):
        sequence.confidence = confidence
        return False
    sequence.escape()
    return True


def _judge(steps: list[SequenceStep]) -> None:
    """Call the rule on steps that share it and share one forward's output.

    If the forward told likeliest tokens alone, all steps are under exact rules, whose verdicts are the same then.
    """
    rule, out = steps[0].sequence.rule, steps[0].out
    views, drafts, roots = zip(*[(step.sequence, step.draft, step.root) for step in steps], strict=True)
    if out.likeliest:
        verdicts = follow_tokens(drafts, out.likeliest, roots)
    else:
        verdicts = rule.accept(views, drafts, out.logits_RV, roots)
    name = f"accept of rule {type(rule).__name__}"
    for step, verdict in zip(steps, listed(verdicts, (Verdict, Fault), len(steps), name), strict=True):
        if isinstance(verdict, Fault):
            step.fault = verdict
        else:
            step.verdict = verdict


def rank(steps: list[SequenceStep]) -> None:
    """Store the tokens that the sampler ranks highest at the root and at each node, for drafters that want them."""
    for step in steps:
        needs, tree = step.sequence.needs, step.draft.tree
        count = max([needs[drafter].top_k for drafter in step.wants_top_k])
        if count == 1 and not tree.tokens and step.sequence.rule.exactness is Exactness.BITS:
            step.top_k = (step.verdict.sampled[:1],)  # the rule asked the sampler already
            continue
        paths = [[], *([tree.tokens[above] for above in trees.path_to(tree, node)] for node in range(len(tree)))]
        logits_RV = step.out.logits_RV[step.root : step.root + len(paths)]
        step.top_k = tuple(ranked(logits_RV, [step.sequence] * len(paths), paths, count))
