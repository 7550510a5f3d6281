"""The only forward whose logits commit tokens. If it raises, only the requests that make it raise end."""

from __future__ import annotations

from itertools import pairwise

from parlay.engine.isolation import isolated, named
from parlay.engine.sequence_step import SequenceStep, charge
from parlay.types import NO_DRAFT, Runner, Segment


def verify(runner: Runner, steps: list[SequenceStep]) -> float:
    """Run all steps in one forward. If it fails, run each alone; one that fails alone runs without its draft.

    A forward commits nothing, so steps may run again: their rows are written anew. Returns the seconds spent on taps,
    which the drafters that asked for them are charged.
    """
    tapping = 0.0
    taps = sorted({tap for step in steps if step.sequence.layers is not None for tap in step.taps})

    def forward(steps: list[SequenceStep]) -> None:
        nonlocal tapping
        segments = [_segment(step) for step in steps]
        out = runner.forward(segments, taps)
        tapping += out.tap_seconds
        if taps:
            charge([(step, drafter) for step in steps for drafter in step.tapped], out.tap_seconds)
        row = 0
        for step, segment, (start, end) in zip(steps, segments, pairwise(out.starts), strict=True):
            step.out, step.first_row, step.first_logits = out, row, start
            step.root = end - len(segment.tree.tokens) - 1  # the draft's rows are the segment's last
            row += segment.rows

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


def _failed_alone(step: SequenceStep, error: Exception) -> None:
    step.fail(f"the model failed on this request: {named(error)}", error)


def _segment(step: SequenceStep) -> Segment:
    pending, wants_prompt = len(step.pending), step.sequence.request.params.prompt_logprobs is not None
    logits_from = 0 if wants_prompt else pending - 1 if step.at_root else pending
    tree, inputs = step.draft.tree, step.draft.inputs
    return Segment(
        step.sequence.sequence, step.pending, tree, logits_from, features=inputs, together=step.draft.together
    )
