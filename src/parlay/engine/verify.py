"""The only forward whose logits commit tokens. One that raises ends those requests that make it raise, and no other."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from parlay.engine.scheduler import Turn
from parlay.engine.sequence import Sequence
from parlay.types import NO_DRAFT, Output, Runner, Segment

logger = logging.getLogger(__name__)

NO_OUTPUT = Output(torch.empty(0, 0), (0,))


@dataclass(frozen=True, slots=True)
class Verified:
    """The turns that were computed, their output, and the sequences for which that can't be done, with the reason."""

    batch: list[Turn]
    out: Output
    failed: list[tuple[Sequence, str]]


def verify(runner: Runner, batch: list[Turn], taps: Seq[int]) -> Verified:
    """Run all turns at once or, where that fails, each alone; a turn that fails alone is tried without its draft.

    A forward commits nothing, so turns may run again: their rows are written anew.
    """
    try:
        return Verified(batch, _forward(runner, batch, taps), [])
    except Exception as error:
        logger.warning("a step of %d sequences failed (%s): each is tried alone", len(batch), _named(error))
    outs: list[Output] = []
    sound: list[Turn] = []
    failed: list[tuple[Sequence, str]] = []
    for turn in batch:
        try:
            outs.append(_alone(runner, turn, taps))
            sound.append(turn)
        except Exception as error:
            logger.warning("request %s ends: %s", turn.sequence.request.id, _named(error), exc_info=True)
            failed.append((turn.sequence, f"the model failed on this request: {_named(error)}"))
    return Verified(sound, _joined(outs, taps) if outs else NO_OUTPUT, failed)


def _forward(runner: Runner, batch: list[Turn], taps: Seq[int]) -> Output:
    return runner.forward([_segment(turn) for turn in batch], taps)


def _alone(runner: Runner, turn: Turn, taps: Seq[int]) -> Output:
    if len(turn.draft):
        try:
            return _forward(runner, [turn], taps)
        except Exception:
            turn.draft = NO_DRAFT
    return _forward(runner, [turn], taps)


def _segment(turn: Turn) -> Segment:
    pending, wants_prompt = len(turn.pending), turn.sequence.request.params.prompt_logprobs is not None
    logits_from = 0 if wants_prompt else pending - 1 if turn.at_root else pending
    return Segment(turn.sequence.sequence, turn.pending, turn.draft.tree, logits_from)


def _joined(outs: Seq[Output], taps: Seq[int]) -> Output:
    """Outputs of one segment each, as the output of all."""
    starts = [0]
    for out in outs:
        starts.append(starts[-1] + out.starts[-1])
    logits_RV = torch.cat([out.logits_RV for out in outs])
    return Output(logits_RV, tuple(starts), {layer: torch.cat([out.taps[layer] for out in outs]) for layer in taps})


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
