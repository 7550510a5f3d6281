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
    """Begin the canvas of an answer. Where its length is to be guessed, it has no places yet, or reads the source."""
    source = _source(prompt)
    if ends.kind == "fertilities":
        return replace(_reading(spec, tuple(source)), measures=True)
    if ends.kind == "length":
        return Canvas(spec, (), 0, measures=True)
    return _reading(spec, _evenly(spec, ends, source, ends.scale * max(1, len(prompt) - 1)))


def _source(prompt: Sequence[int]) -> Sequence[int]:
    return prompt[:-1] or prompt


def _reading(spec: CanvasSpec, inputs: tuple[int, ...]) -> Canvas:
    """A canvas all of whose places are open and read these ids."""
    return Canvas(spec, (None,) * len(inputs), len(inputs), inputs=inputs)


def _evenly(spec: CanvasSpec, ends: Ends, source: Sequence[int], size: int) -> tuple[int, ...]:
    """Return what so many places read: the source, spread evenly, or the mask."""
    return tuple([source[place * len(source) // size] if ends.copies else spec.mask_id for place in range(size)])


def take_numbers(ends: Ends, logits_PV: Tensor) -> Tensor:
    """Take the logits ``[P, J]`` of the tokens of numbers out of ``logits_PV``, where they then can't be drawn."""
    numbers_PJ = logits_PV[:, ends.first_number : ends.first_number + ends.numbers].clone()
    logits_PV[:, ends.first_number : ends.first_number + ends.numbers] = -torch.inf
    return numbers_PJ


def measure(max_context: int, max_canvas: int, steps: list[SequenceStep]) -> None:
    """Guess how long each answer is, and open its canvas. Nothing joins the text.

    The likeliest length is tried first, then as many more as the strategy says. Rows tell it: that of the prompt's last
    token, or those of the source on the canvas, whose fertilities add up to it.
    """
    for step in steps:
        canvas, layout, prompt = step.sequence.canvas, step.sequence.strategy.layout, step.sequence.request.prompt
        assert canvas is not None
        ends = canvas.spec.ends
        assert ends is not None, "only canvases of answers measure them"
        most = max(1, min(ends.numbers - 1, max_canvas, max_context - len(prompt)))
        numbers = slice(ends.first_number, ends.first_number + most + 1)
        if ends.kind == "fertilities":
            scores_PJ = step.out.logits_RV[step.root + 1 : step.root + 1 + len(canvas.places), numbers]
            found = [copied(_source(prompt), each, most) for each in fertilities(scores_PJ, layout.lengths)]
        else:
            scores_J = step.out.logits_RV[step.root, numbers]
            lengths = (scores_J[1:].topk(min(layout.lengths, most)).indices + 1).tolist()
            found = [_evenly(canvas.spec, ends, _source(prompt), length) for length in lengths]
        step.verdict = Verdict((), ())
        step.sequence.canvas = replace(_reading(canvas.spec, found[0]), rivals=tuple(found[1:]))


def fertilities(scores_PJ: Tensor, count: int) -> list[list[int]]:
    """The likeliest numbers of copies of each token, and ``count`` - 1 of the likeliest in which one token has another.

    Gu et al. 2018 (arXiv:1711.02281) draw the others, which is noisy parallel decoding.
    """
    best_P = scores_PJ.argmax(-1)
    losses_PJ = scores_PJ.gather(1, best_P[:, None]) - scores_PJ
    losses_PJ.scatter_(1, best_P[:, None], math.inf)
    found, wide = [best_P.tolist()], scores_PJ.shape[1]
    for change in (
        losses_PJ.flatten().topk(min(count - 1, losses_PJ.numel() - len(best_P)), largest=False).indices.tolist()
    ):
        other = list(found[0])
        other[change // wide] = change % wide
        found.append(other)
    return found


def copied(source: Sequence[int], counts: Sequence[int], most: int) -> tuple[int, ...]:
    """A source in which each token stands so many times, at most ``most`` tokens and at least its first."""
    every = [token for token, count in zip(source, counts, strict=True) for _ in range(count)]
    return tuple(every[:most]) or tuple(source[:1])


def settle(step: SequenceStep, canvas: Canvas, places: Sequence[Decided | None]) -> None:
    """Read a canvas that is filled. If another length is to be tried, begin it, else the best answer is the verdict."""
    ends, request = canvas.spec.ends, step.sequence.request
    assert ends is not None
    answer = _read(ends, [decided for decided in places if decided is not None])
    mean = sum([decided.score for decided in answer]) / len(answer) if answer else -math.inf
    best = canvas.best if canvas.best is not None and canvas.best[1] >= mean else (answer, mean)
    step.verdict = Verdict((), ())
    if canvas.rivals:
        begun = _reading(canvas.spec, canvas.rivals[0])
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
