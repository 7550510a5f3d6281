"""Lays canvases below the root as probes that see each other, lets selectors fill them, and reads tokens off them.

A canvas is a chain of rows that are computed and read, but never kept, so it takes part in a forward as a draft does. A
`Selector` decides its places, as an accept rule decides other drafts. The tokens before the first open place join the
text; there may be none. So the text of a canvas does not depend on what else runs, and survives a preemption.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from parlay.engine import answers
from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import SequenceStep, grouped, isolated
from parlay.sampling.distributions import row_logprobs, soft_distribution
from parlay.sampling.noise import Purpose, stream
from parlay.sampling.sampler import sample
from parlay.types import (
    TARGET,
    Canvas,
    CanvasLayout,
    CanvasSpec,
    Decided,
    Draft,
    Fault,
    Fill,
    Guesses,
    ParlayError,
    TokenLogprobs,
    Verdict,
    trees,
)


def blank(spec: CanvasSpec, layout: CanvasLayout, length: int, room: int) -> Canvas:
    """A canvas with all places open, after a text of ``length`` tokens that may have ``room`` more.

    If rows of the text see their whole block, the canvas ends where that block ends.
    """
    size = spec.block or layout.size or room
    if spec.text == "block":
        size -= length % size
    size = min(size, room)
    return Canvas(spec, (None,) * size, size)


def room_of(sequence: Sequence, max_context: int) -> int:
    """How many places may follow a text.

    Canvases of noise are always whole: what exceeds the text's length is cut later.
    """
    canvas = sequence.canvas
    whole = canvas is not None and canvas.spec.noise
    return max_context - len(sequence.tokens) if whole else sequence.room(max_context)


def lay(steps: list[SequenceStep]) -> None:
    """Put each sequence's canvas below its root, if the step reaches the root.

    First decide places with forced tokens.
    """
    due = [step for step in steps if step.at_root]
    formed = [step for step in due if step.sequence.request.constraint is not None]
    isolated(_decide_forced, formed, SequenceStep.fail_by)
    for step in due:
        if step.fault is None and (canvas := step.sequence.canvas) is not None:
            if canvas.spec.noise:
                canvas = step.sequence.canvas = replace(canvas, inputs=_noise(step.sequence, canvas))
            step.draft = _draft(canvas)


def _noise(sequence: Sequence, canvas: Canvas) -> tuple[int, ...]:
    """Random tokens for all places. They follow from the seed, the position and the number of the forward."""
    key, first = sequence.request.key, len(sequence.tokens)
    drawn = [stream(key, first + place, Purpose.NOISE, canvas.forwards) for place in range(len(canvas.places))]
    return tuple([each % canvas.spec.noise for each in drawn])


def _draft(canvas: Canvas) -> Draft:
    """The canvas as a chain of probes."""
    count, reads, order = len(canvas.places), canvas.reads, canvas.order
    tree = trees.chain_tree([reads[place] for place in order])
    if canvas.spec.ordered:
        places = tuple([place + 1 for place in order])
        return Draft(tree, sources=(TARGET,) * count, probes=count, places=places)
    noted = [canvas.memory[place] for place in range(count)] if canvas.spec.noise and canvas.memory else []
    guesses = torch.stack([each[: canvas.spec.noise] for each in noted]) if noted else None
    return Draft(tree, sources=(TARGET,) * count, probes=count, together=count, guesses=guesses)


def _decide_forced(steps: list[SequenceStep]) -> None:
    """Decide the leading places where the constraint allows one token each, so that other places see them.

    At least one place stays open. Nothing is decided here if log-probabilities are wanted, because they are read off a
    row of logits, or if the selector might open the places again.
    """
    for step in steps:
        canvas, request, selector = step.sequence.canvas, step.sequence.request, step.sequence.strategy.selector
        drawn = request.params.logprobs is not None or (selector is not None and selector.revokes)
        if canvas is None or request.constraint is None or drawn or len(canvas.places) < 2:
            continue
        if forced := request.constraint.forced(len(canvas.places) - 1):
            places = (*[Decided(token, 0.0) for token in forced], *canvas.places[len(forced) :])
            step.sequence.canvas = replace(canvas, places=places)


def fill(steps: list[SequenceStep], max_context: int, max_canvas: int) -> None:
    """Let each selector fill all its canvases in one call. If it raises, only the requests that make it raise end.

    If a canvas still has to tell how long its answer is, the answer's canvas is made instead, with at most
    ``max_canvas`` places.
    """
    new = [step for step in steps if step.sequence.canvas is not None and step.sequence.canvas.measures]
    measured = [step for step in steps if step.sequence.canvas is None or not step.sequence.canvas.measures]
    for group in grouped(measured, lambda step: (id(step.sequence.strategy.selector), id(step.out))):
        isolated(partial(_fill, max_context), group, SequenceStep.fail_by)
    isolated(partial(answers.measure, max_context, max_canvas), new, SequenceStep.fail_by)


def _fill(max_context: int, steps: list[SequenceStep]) -> None:
    """Fill the canvases of one selector in one forward. State changes only after all calls that may fail."""
    sequences = [step.sequence for step in steps]
    selector, canvases = sequences[0].strategy.selector, [each.canvas for each in sequences if each.canvas is not None]
    assert selector is not None, "a canvas has a selector"
    guesses = [_guess(step, canvas, revokes=selector.revokes) for step, canvas in zip(steps, canvases, strict=True)]
    fills = [Fill((), ())] * len(steps)  # stays empty where forced tokens left nothing to guess
    if asked := [at for at, guess in enumerate(guesses) if guess.places]:
        found = selector.fill(
            [sequences[at] for at in asked], [canvases[at] for at in asked], [guesses[at] for at in asked]
        )
        for at, each in zip(asked, found, strict=True):
            fills[at] = each
    filled = [
        _filled(step, canvas, guess, each)
        for step, canvas, guess, each in zip(steps, canvases, guesses, fills, strict=True)
    ]
    for step, canvas, guess, places, each in zip(steps, canvases, guesses, filled, fills, strict=True):
        waits = each.again or _waits(step, canvas, guess, places, revokes=selector.revokes)
        _read_off(step, places, max_context, waits=waits)
        _note(step, each.memory)


def _waits(step: SequenceStep, canvas: Canvas, guesses: Guesses, places: Seq[Decided | None], *, revokes: bool) -> bool:
    """Whether decided places stay on the canvas because others are open, and might still change them.

    This holds for models that commit whole canvases and for selectors that reopen places. A constraint may allow no
    draw at later places before the first ones have joined the text: then only places that could be drawn count.
    """
    if canvas.spec.ends is not None:
        return canvas.spec.ends.guesses and None in places
    if not (revokes or canvas.spec.whole):
        return False
    some = revokes or step.sequence.request.constraint is not None
    return any(places[place] is None for place in (guesses.places if some else range(len(places))))


def _guess(step: SequenceStep, canvas: Canvas, *, revokes: bool) -> Guesses:
    """Draw a token for each open place, or for all places if the selector revokes, from the forward's rows.

    Processors see the text before a place, with masks at open places. A constraint tells what may follow only if no
    place before is open, as at the first place; places where nothing can be drawn are left out. Raises ParlayError if
    that is so at the first place.
    """
    sequence, tokens, ends = step.sequence, canvas.tokens, canvas.spec.ends
    places = _group(sequence, canvas)
    places = places if revokes else tuple([place for place in places if canvas.places[place] is None])
    logits_PV = step.out.logits_RV[_rows(step, canvas, places)]  # a copy
    if not canvas.spec.noise:
        logits_PV[:, canvas.spec.mask_id] = -torch.inf
    if (cooling := sequence.strategy.layout.cooling) is not None:
        logits_PV /= cooling.at(canvas.forwards)
    numbers_PJ = None if ends is None else answers.take_numbers(ends, logits_PV)
    paths = [tokens[:place] for place in places]
    chosen = sample(logits_PV, [sequence] * len(places), paths, [len(sequence.tokens) + place for place in places])
    if chosen and isinstance(chosen[0], Fault) and canvas.places[0] is None:
        raise ParlayError(chosen[0].reason)
    drawn = {at: token for at, token in enumerate(chosen) if not isinstance(token, Fault)}
    probs = [soft_distribution(logits_PV[at], sequence, paths[at]) for at in drawn]
    probs_PV = torch.stack(probs) if probs else logits_PV.double()
    numbers_PJ = None if numbers_PJ is None else numbers_PJ[list(drawn)]
    return Guesses(tuple([places[at] for at in drawn]), tuple(drawn.values()), probs_PV, numbers_PJ)


def _group(sequence: Sequence, canvas: Canvas) -> tuple[int, ...]:
    """The places that may be decided now: those of the first group with an open place."""
    size, places = sequence.strategy.layout.group, range(len(canvas.places))
    if not size or not canvas.open:
        return tuple(places)
    first, group = _offset(sequence, canvas), _first_group(sequence, canvas)
    return tuple([place for place in places if (first + place) // size == group])


def _first_group(sequence: Sequence, canvas: Canvas) -> int:
    """The number of the first group with an open place."""
    size = sequence.strategy.layout.group
    return (_offset(sequence, canvas) + canvas.open[0]) // size if size and canvas.open else 0


def _offset(sequence: Sequence, canvas: Canvas) -> int:
    """The number of the canvas's first place, in the count that divides places into groups."""
    if canvas.spec.ordered:
        return sequence.output_length
    return len(sequence.tokens) if canvas.spec.text == "block" else canvas.size - len(canvas.places)


def _rows(step: SequenceStep, canvas: Canvas, places: tuple[int, ...]) -> list[int]:
    """The rows of logits that predict these places."""
    first = step.root if canvas.spec.shift else step.root + 1
    if not canvas.spec.ordered:
        return [first + place for place in places]
    row_of = {place: row for row, place in enumerate(canvas.order)}
    return [first + row_of[place] for place in places]


def _filled(step: SequenceStep, canvas: Canvas, guesses: Guesses, fill: Fill) -> list[Decided | None]:
    """The places as the selector left them. Raises ValueError if the selector broke its contract."""
    if not fill.places and any(canvas.places[place] is None for place in guesses.places):
        raise ValueError("the selector decided no place of a canvas")
    allowed = set(guesses.places)
    if not allowed.issuperset((*fill.places, *fill.reopened)) or len(fill.places) != len(fill.tokens):
        raise ValueError(f"the selector decided places {fill.places} by {fill.tokens}: it was asked of {allowed}")
    places = list(canvas.places)
    for place in fill.reopened:
        places[place] = None
    for place, token, logprobs in zip(fill.places, fill.tokens, _logprobs(step, canvas, fill), strict=True):
        score = guesses.probs_PV[guesses.places.index(place), token].log().item()
        places[place] = Decided(token, score, logprobs)
    return places


def _logprobs(step: SequenceStep, canvas: Canvas, fill: Fill) -> Seq[TokenLogprobs | None]:
    """Log-probabilities from the rows that decided the tokens, if the request wants them."""
    top = step.sequence.request.params.logprobs
    if top is None:
        return [None] * len(fill.places)
    logits_PV = step.out.logits_RV[_rows(step, canvas, fill.places)]
    return row_logprobs(logits_PV, step.sequence, [canvas.tokens[:place] for place in fill.places], fill.tokens, top)


def _read_off(step: SequenceStep, places: list[Decided | None], max_context: int, *, waits: bool) -> None:
    """Make the decided places before the first open one the verdict, and keep the others for the next step.

    While the canvas ``waits`` all places stay, because they may be opened again. The first place that breaks the
    constraint is opened again: no place before it is open then, so its next token is drawn among the allowed ones.
    """
    sequence, canvas = step.sequence, step.sequence.canvas
    assert canvas is not None
    if canvas.spec.ends is not None and not waits:
        answers.settle(step, canvas, places)
        return
    ready = [] if waits else [decided for decided in takewhile(lambda decided: decided is not None, places) if decided]
    if (constraint := sequence.request.constraint) is not None:
        legal = constraint.legal([decided.token for decided in ready])
        if legal < len(ready):
            places[legal], ready = None, ready[:legal]
    step.verdict = Verdict((), tuple([decided.token for decided in ready]))
    step.logprobs = tuple([decided.logprobs for decided in ready if decided.logprobs is not None])
    rest, room = tuple(places[len(ready) :]), room_of(sequence, max_context) - len(ready)
    if rest:
        rest += (None,) * (min(canvas.size, room) - len(rest) if canvas.spec.ordered else 0)
        full = 0 if canvas.open else canvas.full + 1
        left = replace(canvas, places=rest, forwards=canvas.forwards + 1, full=full, memory={})
        sequence.canvas = replace(left, fresh=_first_group(sequence, left) != _first_group(sequence, canvas))
    else:
        length = len(sequence.tokens) + len(ready)
        sequence.canvas = blank(canvas.spec, sequence.strategy.layout, length, room)


def _note(step: SequenceStep, memory: Mapping[int, Tensor]) -> None:
    """Keep the selector's notes on places that are still on the canvas."""
    canvas, gone = step.sequence.canvas, len(step.verdict.sampled)
    if memory and canvas is not None and canvas.forwards:
        kept = {place - gone: each for place, each in memory.items() if place >= gone}
        step.sequence.canvas = replace(canvas, memory=kept)
