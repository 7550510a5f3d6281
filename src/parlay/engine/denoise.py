"""Canvases: laid below the root as probes that see each other, filled by a selector, and read off into the text.

A canvas is a chain of rows that are computed, read and never kept, so it takes part in a forward as drafts do. Where
other sequences have an accept rule, a `Selector` decides places. The tokens before the first open place join the text,
which may be none. So the text of a canvas does not depend on what else runs, and it outlives a preemption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from parlay.engine import answers
from parlay.engine.sequence import Sequence as Text
from parlay.engine.sequence_step import SequenceStep, grouped, isolated, named
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
    """Begin a canvas, all open, after a text of ``length`` tokens that may have ``room`` more.

    Where rows of the text see their whole block, it ends where the block does that its first place is in.
    """
    size = spec.block or layout.size or room
    if spec.text == "block":
        size -= length % size
    size = min(size, room)
    return Canvas(spec, (None,) * size, size)


def room_of(sequence: Text, max_context: int) -> int:
    """How many places may follow a text. Canvases of noise are whole: what lies beyond the text's end is cut off."""
    canvas = sequence.canvas
    whole = canvas is not None and canvas.spec.noise
    return max_context - len(sequence.tokens) if whole else sequence.room(max_context)


def lay(steps: list[SequenceStep]) -> None:
    """Put each sequence's canvas below its root, if the step reaches it. What its form leaves no choice is decided."""
    due = [step for step in steps if step.at_root]
    formed = [step for step in due if step.sequence.request.constraint is not None]
    isolated(_decide_forced, formed, lambda step, error: step.fail(named(error), error))
    for step in due:
        if step.fault is None and (canvas := step.sequence.canvas) is not None:
            if canvas.spec.noise:
                canvas = step.sequence.canvas = replace(canvas, inputs=_noise(step.sequence, canvas))
            step.draft = _draft(canvas)


def _noise(sequence: Text, canvas: Canvas) -> tuple[int, ...]:
    """Random tokens for all places, which follow from the seed, the position and the number of the forward."""
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
    """Decide the first places where the form allows one token each, so that the others see them. One place stays open.

    Where log-probabilities are wanted, forced tokens are drawn as others are, because a row has to tell of each; and
    where the selector may open them again.
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
    """Let each selector fill all its canvases at once. If it raises, only the requests that make it raise end.

    A canvas that tells how long the answer is makes room for the answer's, of at most ``max_canvas`` places.
    """
    new = [step for step in steps if step.sequence.canvas is not None and step.sequence.canvas.measures]
    measured = [step for step in steps if step.sequence.canvas is None or not step.sequence.canvas.measures]
    for group in grouped(measured, lambda step: (id(step.sequence.strategy.selector), id(step.out))):
        isolated(partial(_fill, max_context), group, lambda step, error: step.fail(named(error), error))
    isolated(partial(answers.measure, max_context, max_canvas), new, lambda step, error: step.fail(named(error), error))


def _fill(max_context: int, steps: list[SequenceStep]) -> None:
    """Canvases of one selector in one forward. Nothing is changed before all is known, so a failure leaves nothing."""
    sequences = [step.sequence for step in steps]
    selector, canvases = sequences[0].strategy.selector, [each.canvas for each in sequences if each.canvas is not None]
    assert selector is not None, "a canvas has a selector"
    guesses = [_guess(step, canvas, revokes=selector.revokes) for step, canvas in zip(steps, canvases, strict=True)]
    fills = [Fill((), ())] * len(steps)  # of those whose forced tokens left nothing to guess
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


def _waits(
    step: SequenceStep, canvas: Canvas, guesses: Guesses, places: Sequence[Decided | None], *, revokes: bool
) -> bool:
    """Whether decided places stay on the canvas: while one is open, in models that want that or if they may be opened.

    A form may leave nothing to draw at later places before the first ones have joined the text.
    """
    if canvas.spec.ends is not None:
        return canvas.spec.ends.guesses and None in places
    if not (revokes or canvas.spec.whole):
        return False
    some = revokes or step.sequence.request.constraint is not None
    return any(places[place] is None for place in (guesses.places if some else range(len(places))))


def _guess(step: SequenceStep, canvas: Canvas, *, revokes: bool) -> Guesses:
    """Guess the open places, or all, by the forward's rows; not those where no token can be drawn yet.

    Processors see the text before a place, with masks where it is open. A constraint can say what may follow only where
    nothing is open before, which is so at the first place. Raises ParlayError if no token can be drawn there.
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


def _group(sequence: Text, canvas: Canvas) -> tuple[int, ...]:
    """The places that may be decided now: those of the first group that has an open one."""
    size, places = sequence.strategy.layout.group, range(len(canvas.places))
    if not size or not canvas.open:
        return tuple(places)
    first, group = _offset(sequence, canvas), _first_group(sequence, canvas)
    return tuple([place for place in places if (first + place) // size == group])


def _first_group(sequence: Text, canvas: Canvas) -> int:
    """The number of the first group of a canvas that has an open place."""
    size = sequence.strategy.layout.group
    return (_offset(sequence, canvas) + canvas.open[0]) // size if size and canvas.open else 0


def _offset(sequence: Text, canvas: Canvas) -> int:
    """The number of the first place as groups are counted."""
    if canvas.spec.ordered:
        return sequence.output_length
    return len(sequence.tokens) if canvas.spec.text == "block" else canvas.size - len(canvas.places)


def _rows(step: SequenceStep, canvas: Canvas, places: tuple[int, ...]) -> list[int]:
    """The rows of logits that say what stands in these places."""
    first = step.root if canvas.spec.shift else step.root + 1
    if not canvas.spec.ordered:
        return [first + place for place in places]
    row_of = {place: row for row, place in enumerate(canvas.order)}
    return [first + row_of[place] for place in places]


def _filled(step: SequenceStep, canvas: Canvas, guesses: Guesses, fill: Fill) -> list[Decided | None]:
    """The places as the selector decided. Raises ValueError for what a selector may not do."""
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


def _logprobs(step: SequenceStep, canvas: Canvas, fill: Fill) -> Sequence[TokenLogprobs | None]:
    """Read log-probabilities off the rows that decide the tokens, if the request wants them."""
    top = step.sequence.request.params.logprobs
    if top is None:
        return [None] * len(fill.places)
    logits_PV = step.out.logits_RV[_rows(step, canvas, fill.places)]
    return row_logprobs(logits_PV, step.sequence, [canvas.tokens[:place] for place in fill.places], fill.tokens, top)


def _read_off(step: SequenceStep, places: list[Decided | None], max_context: int, *, waits: bool) -> None:
    """Make the decided places before the first open one the verdict, and keep the others for the next step.

    While the canvas ``waits`` all stay, because they may be opened again. The first place that breaks the request's
    form is opened again. Nothing is open before it then, so its next token is drawn among those that may follow.
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
    """Keep what the selector noted of places that are still on the canvas."""
    canvas, gone = step.sequence.canvas, len(step.verdict.sampled)
    if memory and canvas is not None and canvas.forwards:
        kept = {place - gone: each for place, each in memory.items() if place >= gone}
        step.sequence.canvas = replace(canvas, memory=kept)
