"""Checks segments that run in a cheaper form than the model's own, and lays out what else their rows see or write."""

from __future__ import annotations

import torch

from parlay.cache import Rows
from parlay.types import HIDDEN_STEP, PAGE_TOKENS, Features, Join, RunnerSpec, Segment


def check_form(spec: RunnerSpec, segment: Segment, cached: int, heads: int) -> None:
    """Raises ValueError for hidden or chosen keys that a runner can't provide.

    The segment has ``cached`` cached tokens, and each layer has ``heads`` key heads.
    """
    first, end = segment.hidden
    if not spec.hides or first % HIDDEN_STEP or end % HIDDEN_STEP or not 0 <= first <= end:
        raise ValueError(f"{spec.name}: tokens {first} to {end} can't be hidden; steps are {HIDDEN_STEP}")
    if end > cached + min(0, segment.base):
        raise ValueError(f"tokens {first} to {end} can't be hidden: only cached ones that do not run can be")
    if segment.chosen is None and not segment.votes:
        return
    joins = segment.features is not None and segment.features.join is not None
    if not spec.chooses or joins or segment.together:
        raise ValueError(f"{spec.name}: these rows can't see chosen pages, nor vote for any")
    if segment.chosen is not None:
        shape = tuple(segment.chosen.pages_LKC.shape[:2])
        if segment.chosen.hidden != segment.hidden or shape != (spec.num_layers, heads):
            raise ValueError(
                f"{spec.name}: pages were chosen of tokens {segment.chosen.hidden} for {shape} layers and heads, but "
                f"{segment.hidden} are hidden, and there are {(spec.num_layers, heads)}"
            )


def with_choice(place: Rows, segment: Segment, layers: int, heads: int) -> Rows:
    """The place of the segment's rows, with the pages chosen for them and memory for their votes."""
    if not segment.votes:
        return place._replace(chosen=segment.chosen)
    votes_LKTP = torch.zeros(layers, heads, place.end - place.base, place.start // PAGE_TOKENS)
    return place._replace(chosen=segment.chosen, votes=votes_LKTP)


def check_features(spec: RunnerSpec, segment: Segment, features: Features, *, even: bool) -> None:
    """Raises ValueError for features whose sizes don't match the segment's rows or the runner.

    ``even``: all layers have the same heads and sizes.
    """
    rows, hidden = features.rows_KH.shape
    if rows > segment.rows or hidden != spec.hidden_size:
        raise ValueError(
            f"features of {rows} rows and {hidden} numbers for a segment that runs {segment.rows} rows of "
            f"{spec.hidden_size}"
        )
    if features.prefix is not None and not (even and spec.takes(features.prefix)):
        raise ValueError(f"a prefix of {tuple(features.prefix.states.shape)} numbers is another model's")
    if features.join is not None:
        _check_join(spec, segment, features.join, rows, even=even)


def _check_join(spec: RunnerSpec, segment: Segment, join: Join, rows: int, *, even: bool) -> None:
    if not even:
        raise ValueError(f"{spec.name}: its layers differ or see other layers' keys, so no row can join at one")
    if not 0 <= join.layer < spec.num_layers:
        raise ValueError(f"no row can join at layer {join.layer}: layers are 0 to {spec.num_layers - 1}")
    if rows > len(segment.tree) or segment.base > len(segment.pending) - 1:
        raise ValueError("rows that join are nodes, and what they begin from runs in the same forward")
    shape = len(join.up_RH), spec.hidden_size
    for matrix in (join.down_RH, join.up_RH):
        if tuple(matrix.shape) != shape or matrix.dtype != torch.float32 or not matrix.is_contiguous():
            raise ValueError(
                f"rows join by {matrix.dtype} {list(matrix.shape)}: both matrices are float32 {list(shape)}, contiguous"
            )
