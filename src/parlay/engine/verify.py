"""The only forward whose logits commit tokens. If it raises, only the requests that make it raise end."""

from __future__ import annotations

from itertools import pairwise

from parlay.engine.isolation import isolated, named
from parlay.engine.sequence_step import Turn, charge
from parlay.types import NO_DRAFT, Runner, Segment


def verify(runner: Runner, turns: list[Turn]) -> float:
    """Run all turns in one forward. If it fails, run each alone; a turn that fails alone runs without its draft.

    A forward commits nothing, so turns may run again: their rows are written anew. Returns the seconds spent on taps,
    which the drafters that asked for them are charged.
    """
    tapping = 0.0
    taps = sorted({tap for turn in turns for tap in turn.taps})

    def forward(turns: list[Turn]) -> None:
        nonlocal tapping
        segments = [_segment(turn) for turn in turns]
        out = runner.forward(segments, taps)
        tapping += out.tap_seconds
        charge([(turn, drafter) for turn in turns for drafter in turn.tapped], out.tap_seconds)
        row = 0
        for turn, segment, (start, end) in zip(turns, segments, pairwise(out.starts), strict=True):
            turn.out, turn.first_row, turn.first_logits = out, row, start
            turn.root = end - len(segment.tree.tokens) - 1  # the draft's rows are the segment's last
            row += segment.rows

    def failed(turn: Turn, error: Exception) -> None:  # one that named itself would keep the runner until a collection
        if turn.draft.tree.tokens:
            turn.draft = NO_DRAFT
            isolated(forward, [turn], _failed_alone)
        else:
            _failed_alone(turn, error)

    if turns:
        isolated(forward, turns, failed)
    return tapping


def _failed_alone(turn: Turn, error: Exception) -> None:
    turn.fail(f"the model failed on this request: {named(error)}", error)


def _segment(turn: Turn) -> Segment:
    pending, wants_prompt = len(turn.pending), turn.sequence.request.params.prompt_logprobs is not None
    logits_from = 0 if wants_prompt else pending - 1 if turn.at_root else pending
    tree, inputs = turn.draft.tree, turn.draft.inputs
    return Segment(turn.sequence.sequence, turn.pending, tree, logits_from, features=inputs)
