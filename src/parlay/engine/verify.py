"""The only forward whose logits commit tokens, and the accept rules, which decide by them how far drafts are right.

If a forward or a rule raises, only the requests that make it raise end.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import NamedTuple

import torch

from parlay.engine.sequence_step import SequenceStep, charge, grouped, isolated, named
from parlay.sampling.sampler import ranked
from parlay.types import NO_DRAFT, Exactness, Fault, Finish, Output, Runner, RunnerLost, RunnerSpec, Segment, trees

logger = logging.getLogger(__name__)


class Begun(NamedTuple):
    """A forward of steps that is under way: what runs of them, and what waits for its output."""

    steps: list[SequenceStep]
    segments: list[Segment]
    finish: Finish


def begin(runner: Runner, steps: list[SequenceStep]) -> Begun | None:
    """Begin the forward of all steps; None where there are none, or it fails: `verify` finds out which of them do."""
    segments = [_segment(step) for step in steps]
    try:
        return Begun(steps, segments, runner.begin(segments, _taps(steps))) if steps else None
    except RunnerLost:
        raise
    except Exception:
        return None


def finish(runner: Runner, steps: list[SequenceStep], begun: Begun | None) -> float:
    """Wait for the output of a forward that has begun; see `verify`, which runs ``steps`` if it fails.

    These are the steps that are still of interest: requests may have ended meanwhile.
    """
    try:
        out = None if begun is None else begun.finish()
    except RunnerLost:
        raise
    except Exception as error:
        logger.warning("a forward for %d requests failed (%s): it is run again", len(steps), named(error))
        out = None
    if out is None or begun is None:
        return verify(runner, steps)
    return _take(runner.spec, begun.steps, begun.segments, out)


def verify(runner: Runner, steps: list[SequenceStep]) -> float:
    """Run all steps in one forward. If it fails, run each alone; one that fails alone runs without its draft.

    A forward commits nothing, so steps may run again: their rows are written anew. Returns the seconds spent on taps,
    which the drafters that asked for them are charged.
    """
    tapping = 0.0
    taps = _taps(steps)

    def forward(steps: list[SequenceStep]) -> None:
        nonlocal tapping
        segments = [_segment(step) for step in steps]
        tapping += _take(runner.spec, steps, segments, runner.forward(segments, taps))

    def failed(
        step: SequenceStep, error: Exception
    ) -> None:  # one that named itself would keep the runner until a collection
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
    """Show each step its rows of the output. Returns the seconds spent on taps, which their drafters are charged.

    A mask stands for an open place, so a model that has one never writes it: its logit becomes -inf before anybody
    reads the rows. Canvases are read in `denoise`.
    """
    if out.taps:
        charge([(step, drafter) for step in steps for drafter in step.tapped], out.tap_seconds)
    row = 0
    for step, segment, (start, end) in zip(steps, segments, pairwise(out.starts), strict=True):
        step.out, step.first_row, step.first_logits = out, row, start
        step.root = end - len(segment.tree.tokens) - 1  # the draft's rows are the segment's last
        if spec.canvas is not None and step.sequence.canvas is None:
            out.logits_RV[start:end, spec.canvas.mask_id] = -torch.inf
        row += segment.rows
        if lost := out.lost.get(segment.sequence):
            step.sequence.lose_members(lost)
    return out.tap_seconds


def _failed_alone(step: SequenceStep, error: Exception) -> None:
    step.fail(f"the model failed on this request: {named(error)}", error)


def _segment(step: SequenceStep) -> Segment:
    pending, wants_prompt = len(step.pending), step.sequence.request.params.prompt_logprobs is not None
    logits_from = 0 if wants_prompt else pending - 1 if step.at_root else pending
    tree, inputs = step.draft.tree, step.draft.inputs
    return Segment(
        step.sequence.sequence,
        step.pending,
        tree,
        logits_from,
        features=inputs,
        together=step.draft.together,
        stale=step.stale,
        adapter=step.sequence.request.adapter,
        mask_adapter=step.draft.mask_adapter,
        places=step.draft.places,
        guesses=step.draft.guesses,
    )


def accept(steps: list[SequenceStep]) -> None:
    """Each rule decides all its steps at once. If it raises, only the requests that make it raise end.

    A lossy verdict that would take its text's running score below the floor is not committed: the text goes on
    under the rule that its strategy names for this, from this step on.
    """
    _decide(steps)
    if escaping := [step for step in steps if step.sequence.strategy.escape is not None and _escapes(step)]:
        _decide(escaping)


def is_spoilt(step: SequenceStep) -> bool:
    """Whether the root's logits are NaN, and a node of the draft may have made them so.

    Attention gives what a row must not see the weight 0, and 0 times NaN is NaN.
    """
    drafted = step.fault is not None and bool(step.draft.tree.tokens)
    return drafted and bool(step.out.logits_RV[step.root].isnan().any())


def _decide(steps: list[SequenceStep]) -> None:
    for group in grouped(steps, lambda step: (id(step.sequence.rule), id(step.out))):
        isolated(_judge, group, lambda step, error: step.fail(named(error), error))


def _escapes(step: SequenceStep) -> bool:
    """Whether the text escapes in this step; until then, its score is kept. A stop that cuts the verdict ends it."""
    sequence, escape, tokens = step.sequence, step.sequence.strategy.escape, step.verdict.sampled
    if escape is None or step.fault is not None or sequence.escaped_at is not None:
        return False
    logits_NV = step.out.logits_RV[[step.root, *(step.root + 1 + node for node in step.verdict.path)]]
    below_N = logits_NV[range(len(tokens)), list(tokens)] - logits_NV.max(dim=1).values
    confidence = sequence.confidence + float(below_N.double().exp().sum())
    if confidence >= escape.floor * (sequence.output_length + len(tokens)):
        sequence.confidence = confidence
        return False
    sequence.escape()
    return True


def _judge(steps: list[SequenceStep]) -> None:
    """Decide steps that have one rule and one forward's output."""
    rule, logits_RV = steps[0].sequence.rule, steps[0].out.logits_RV
    views, drafts = [step.sequence for step in steps], [step.draft for step in steps]
    verdicts = rule.accept(views, drafts, logits_RV, [step.root for step in steps])
    for step, verdict in list(zip(steps, verdicts, strict=True)):
        if isinstance(verdict, Fault):
            step.fault = verdict
        else:
            step.verdict = verdict


def rank(steps: list[SequenceStep]) -> None:
    """Note the tokens that the sampler prefers at the root, then at each node on the node's own path."""
    for step in steps:
        needs, tree = step.sequence.needs, step.draft.tree
        count = max([needs[drafter].top_k for drafter in step.wants_top_k])
        if count == 1 and not tree.tokens and step.sequence.rule.exactness is Exactness.BITS:
            step.top_k = (step.verdict.sampled[:1],)  # the rule asked the sampler already
            continue
        paths = [[], *([tree.tokens[above] for above in trees.path_to(tree, node)] for node in range(len(tree)))]
        logits_RV = step.out.logits_RV[step.root : step.root + len(paths)]
        step.top_k = tuple(ranked(logits_RV, [step.sequence] * len(paths), paths, count))
