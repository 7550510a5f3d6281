"""Canvases that are whole answers: how many places they have, and how their places are read as a text.

An answer joins the text at once, with the end token after it, and the request is over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from parlay.engine.sequence_step import SequenceStep
from parlay.types import Canvas, CanvasSpec, Decided, Ends, TokenLogprobs, Verdict

SELECTORS: Mapping[str, str] = MappingProxyType(
    {
        "": "another selector, such as mask-predict",
        "noise": "selector=renoise",
        "frames": "selector=ctc",
        "graph": "selector=lookahead-path, greedy-path or viterbi-path",
    }
)
"""What fills a canvas that is read in this way."""


def begin(spec: CanvasSpec, ends: Ends, prompt: Sequence[int]) -> Canvas:
    """Begin the canvas of an answer. It has no places yet where its length is to be guessed."""
    size = 0 if ends.kind == "length" else ends.scale * max(1, len(prompt) - 1)
    return _open(spec, ends, prompt, size)


def _open(spec: CanvasSpec, ends: Ends, prompt: Sequence[int], size: int) -> Canvas:
    source = prompt[:-1] or prompt
    inputs = tuple([source[place * len(source) // size] for place in range(size)]) if ends.copies else ()
    return Canvas(spec, (None,) * size, size, inputs=inputs)


def take_numbers(ends: Ends, logits_PV: Tensor) -> Tensor:
    """Take the logits ``[P, J]`` of the tokens of numbers out of ``logits_PV``, where they then can't be drawn."""
    numbers_PJ = logits_PV[:, ends.first_number : ends.first_number + ends.numbers].clone()
    logits_PV[:, ends.first_number : ends.first_number + ends.numbers] = -torch.inf
    return numbers_PJ


def measure(max_context: int, max_canvas: int, steps: list[SequenceStep]) -> None:
    """Guess how long each answer is, by the row of its prompt's last token, and open its canvas.

    The likeliest length is tried first, then as many more as the strategy says. Nothing joins the text.
    """
    for step in steps:
        canvas, layout, prompt = step.sequence.canvas, step.sequence.strategy.layout, step.sequence.request.prompt
        assert canvas is not None
        ends = canvas.spec.ends
        assert ends is not None, "only canvases of answers have no places"
        most = max(1, min(ends.numbers - 1, max_canvas, max_context - len(prompt)))
        scores_J = step.out.logits_RV[step.root, ends.first_number : ends.first_number + most + 1]
        lengths = (scores_J[1:].topk(min(layout.lengths, most)).indices + 1).tolist()
        step.verdict = Verdict((), ())
        step.sequence.canvas = replace(_open(canvas.spec, ends, prompt, lengths[0]), rivals=tuple(lengths[1:]))


def settle(step: SequenceStep, canvas: Canvas, places: Sequence[Decided | None]) -> None:
    """Read a canvas that is filled. If another length is to be tried, begin it, else the best answer is the verdict."""
    ends, request = canvas.spec.ends, step.sequence.request
    assert ends is not None
    answer = _read(ends, [decided for decided in places if decided is not None])
    mean = sum([decided.score for decided in answer]) / len(answer) if answer else -math.inf
    best = canvas.best if canvas.best is not None and canvas.best[1] >= mean else (answer, mean)
    step.verdict = Verdict((), ())
    if canvas.rivals:
        begun = _open(canvas.spec, ends, request.prompt, canvas.rivals[0])
        step.sequence.canvas = replace(begun, rivals=canvas.rivals[1:], best=best)
        return
    end = Decided(ends.end_id, 0.0, TokenLogprobs(ends.end_id, 0.0, 1) if request.params.logprobs is not None else None)
    text = (*best[0], end)
    step.verdict = Verdict((), tuple([decided.token for decided in text]))
    step.logprobs = tuple([decided.logprobs for decided in text if decided.logprobs is not None])
    step.sequence.canvas = replace(canvas, places=(), rivals=())


def _read(ends: Ends, decided: Sequence[Decided]) -> tuple[Decided, ...]:
    """The tokens that decided places stand for, as far as the first end token."""
    if ends.kind == "frames":
        decided = collapsed(decided, ends.blank_id)
    return tuple(itertools.takewhile(lambda each: each.token != ends.end_id, decided))


def collapsed(frames: Sequence[Decided], blank: int) -> list[Decided]:
    """One of equal neighbours, the likeliest, without blanks (Graves et al. 2006)."""
    runs = [list(run) for _, run in itertools.groupby(frames, key=lambda frame: frame.token)]
    return [max(run, key=lambda frame: frame.score) for run in runs if run[0].token != blank]
