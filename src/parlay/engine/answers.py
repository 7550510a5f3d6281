"""Canvases that are whole answers: how many places they have, and how their places are read as text.

The answer joins the text at once, followed by the end token, and the request is over.
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
"""For each `CanvasLayout.reads`, the selectors that fill such a canvas, as errors name them."""


def begin(spec: CanvasSpec, ends: Ends, prompt: Sequence[int]) -> Canvas:
    """Begin the canvas of an answer.

    If the length must be guessed first, it has no places yet, or those of the source.
    """
    source = _source(prompt)
    if ends.kind == "fertilities":
        return replace(_reading(spec, tuple(source)), measures=True)
    if ends.kind == "length":
        return Canvas(spec, (), 0, measures=True)
    return _reading(spec, _evenly(spec, ends, source, ends.scale * max(1, len(prompt) - 1)))


def _source(prompt: Sequence[int]) -> Sequence[int]:
    return prompt[:-1] or prompt


def _reading(spec: CanvasSpec, inputs: tuple[int, ...]) -> Canvas:
    """A canvas whose places are all open and read these ids."""
    return Canvas(spec, (None,) * len(inputs), len(inputs), inputs=inputs)


def _evenly(spec: CanvasSpec, ends: Ends, source: Sequence[int], size: int) -> tuple[int, ...]:
    """The ids that ``size`` open places read: the source spread evenly over them, or the mask token."""
    return tuple([source[place * len(source) // size] if ends.copies else spec.mask_id for place in range(size)])


def take_numbers(ends: Ends, logits_PV: Tensor) -> Tensor:
    """Cut the logits ``[P, J]`` of the number tokens out of ``logits_PV``, so that those tokens can't be drawn."""
    numbers_PJ = logits_PV[:, ends.first_number : ends.first_number + ends.numbers].clone()
    logits_PV[:, ends.first_number : ends.first_number + ends.numbers] = -torch.inf
    return numbers_PJ


def measure(max_context: int, max_canvas: int, steps: list[SequenceStep]) -> None:
    """Guess how long each answer is, and open its canvas. No token is committed.

    The likeliest length is tried first, then as many more as the strategy says. The length is read off the row of the
    prompt's last token, or is the sum of the fertilities in the rows of the source on the canvas.
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
    """The likeliest number of copies of each token, and the ``count`` - 1 likeliest variants that change one token's.

    Gu et al. 2018 (arXiv:1711.02281) draw the variants, which is noisy parallel decoding.
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
    """The source with each token repeated as ``counts`` says: at most ``most`` tokens, at least the first one."""
    every = [token for token, count in zip(source, counts, strict=True) for _ in range(count)]
    return tuple(every[:most]) or tuple(source[:1])


def settle(step: SequenceStep, canvas: Canvas, places: Sequence[Decided | None]) -> None:
    """Read a filled canvas. If another length is still to be tried, begin it; else the best answer is the verdict."""
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
    """The tokens that decided places stand for, up to the first end token."""
    if ends.kind == "frames":
        decided = collapsed(decided, ends.blank_id)
    return tuple(itertools.takewhile(lambda each: each.token != ends.end_id, decided))


def collapsed(frames: Sequence[Decided], blank: int) -> list[Decided]:
    """Merge equal neighbours into the likeliest of them, and drop blanks (Graves et al. 2006)."""
    runs = [list(run) for _, run in itertools.groupby(frames, key=lambda frame: frame.token)]
    return [max(run, key=lambda frame: frame.score) for run in runs if run[0].token != blank]
