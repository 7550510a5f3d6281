"""Texts that are filled in any order: beside others in one batch, whatever the order, and counted right.

The toy's row of a place depends on the text, on all of the canvas and on the place. A selector that is handed to the
engine says in which order places are filled; the reference fills them one canvas after another, alone, without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from parlay.engine import Engine
from parlay.router.policies import Fixed, Plain
from parlay.sampling.rules import SharedNoise
from parlay.sampling.sampler import sample
from parlay.testing.reference import ReferenceText
from parlay.testing.toy_constraint import ToyConstraint, ToyGrammar
from parlay.testing.toy_drafters import oracle
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import (
    Canvas,
    CanvasLayout,
    CanvasSpec,
    Event,
    Exactness,
    Fill,
    Guesses,
    NoiseKey,
    Request,
    SamplingParams,
    Selector,
    SequenceView,
    Strategy,
    tokens_per_step,
)
from tests.engine.toy_engine import ANSWER, LOGITS, PLAIN, VOCAB, engine

MASK = VOCAB - 1
OWN_ROWS = CanvasSpec(MASK, block=6)
ROWS_BEFORE = CanvasSpec(MASK, block=6, shift=True)
ORDERED = CanvasSpec(MASK, block=6, ordered=True)
DRAFTED = Strategy("oracle", (oracle(ANSWER),), SharedNoise(), Fixed(4))


@dataclass(frozen=True)
class Surest:
    """The ``count`` places whose likeliest token is likeliest."""

    count: int = 1
    exactness: Exactness = Exactness.SEED
    revokes: bool = False

    def fill(self, views: Sequence[SequenceView], canvases: Sequence[Canvas], guesses: Sequence[Guesses]) -> list[Fill]:
        return [self._fill(each) for each in guesses]

    def _fill(self, guesses: Guesses) -> Fill:
        best = guesses.probs_PV.amax(-1).topk(min(self.count, len(guesses.places))).indices.tolist()
        return Fill(tuple(guesses.places[at] for at in best), tuple(guesses.tokens[at] for at in best))


class Backwards(Surest):
    """The last open place first, so that nothing can join the text before all is filled."""

    def _fill(self, guesses: Guesses) -> Fill:
        return Fill(guesses.places[-1:], guesses.tokens[-1:])


@dataclass(frozen=True)
class SecondThoughts(Surest):
    """All places at once, and in the next forward the two that were least sure again (Mask-Predict)."""

    revokes: bool = True

    def fill(self, views: Sequence[SequenceView], canvases: Sequence[Canvas], guesses: Sequence[Guesses]) -> list[Fill]:
        return [self._round(canvas, each) for canvas, each in zip(canvases, guesses, strict=True)]

    def _round(self, canvas: Canvas, guesses: Guesses) -> Fill:
        tokens = dict(zip(guesses.places, guesses.tokens, strict=True))
        if canvas.forwards:
            again = tuple(place for place in canvas.open if place in tokens)
            return Fill(again, tuple(tokens[place] for place in again))
        least = tuple(guesses.probs_PV.amax(-1).argsort()[:2].tolist())
        first = tuple(place for place in guesses.places if place not in least)
        return Fill(first, tuple(tokens[place] for place in first), reopened=least)


class Refuses(Surest):
    def _fill(self, guesses: Guesses) -> Fill:
        raise RuntimeError("no place pleases")


class Idle(Surest):
    def _fill(self, guesses: Guesses) -> Fill:
        return Fill((), ())


SELECTORS: dict[str, Surest] = {
    "one by one": Surest(),
    "three at once": Surest(3),
    "backwards": Backwards(),
    "revoking": SecondThoughts(),
}


class Maskless(ToyConstraint):
    """A grammar of all tokens but the mask."""

    def allowed(self, start: int, path: Sequence[int]) -> torch.Tensor | None:
        allowed_V = super().allowed(start, path)
        return None if allowed_V is None else torch.cat([allowed_V, torch.tensor([False])])


def canvas(selector: Selector) -> Strategy:
    return Strategy("canvas", (), SharedNoise(), Plain(), selector=selector)


def request(name: str, prompt: int = 5, tokens: int = 15, **fields: object) -> Request:
    own = {"temperature": 0.9, "max_tokens": tokens, **fields}
    return Request(
        id=name,
        prompt=tuple((7 * place + len(name)) % MASK for place in range(prompt)),
        params=SamplingParams(**own),  # type: ignore[arg-type]
        key=NoiseKey(hash_of(name)),
    )


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def runner(spec: CanvasSpec = OWN_ROWS, *, capacity: int = 65_536, max_context: int = 4096) -> ToyRunner:
    return ToyRunner(LOGITS, VOCAB, canvas=spec, capacity=capacity, max_context=max_context)


def run(target: Engine) -> dict[str, list[Event]]:
    """All events by request, to the end; the cache is proved after each step."""
    events: dict[str, list[Event]] = {}
    for _ in range(5000):
        if target.idle:
            return events
        for event in target.step():
            events.setdefault(event.request, []).append(event)
        target.runner.check()
    raise AssertionError("the engine makes no progress")


def tokens(events: Sequence[Event]) -> list[int]:
    return [one.token for event in events for one in event.committed]


def alone(one: Request, strategy: Strategy, target: Engine | None = None) -> list[Event]:
    target = target or engine(runner())
    target.add(one, strategy)
    return run(target)[one.id]


def reference(one: Request, selector: Surest, spec: CanvasSpec, logits_of: RandomLogits = LOGITS) -> list[int]:
    """The text by a loop of its own: one canvas after another, every row recomputed from its text."""
    limit = len(one.prompt) + (one.params.max_tokens or 0)
    view = ReferenceText(one, list(one.prompt), len(one.prompt))
    while len(view.tokens) < limit:
        places: list[int | None] = [None] * min(spec.block, limit - len(view.tokens))
        forwards = 0
        while places:
            places += [None] * (min(spec.block, limit - len(view.tokens)) - len(places) if spec.ordered else 0)
            ids = [MASK if token is None else token for token in places]
            rows = [[*view.tokens, *ids, *ids[: place + 1]] for place in range(len(ids))]
            rows = _ordered_rows(view.tokens, ids) if spec.ordered else rows
            rows = [list(view.tokens), *rows[:-1]] if spec.shift else rows
            wanted = [at for at, token in enumerate(places) if selector.revokes or token is None]
            logits_PV = torch.stack([logits_of(rows[at]) for at in wanted])
            logits_PV[:, MASK] = -torch.inf
            chosen = sample(logits_PV, [view] * len(wanted), [ids[:at] for at in wanted])
            heat = one.params.temperature or 1
            probs_PV = (logits_PV / heat).double().softmax(-1)
            seen = Canvas(spec, tuple(None if token is None else (token, 0.0) for token in places), 6, forwards)  # type: ignore[misc]
            (fill,) = selector.fill([view], [seen], [Guesses(tuple(wanted), tuple(chosen), probs_PV)])  # type: ignore[arg-type]
            for at in fill.reopened:
                places[at] = None
            for at, token in zip(fill.places, fill.tokens, strict=True):
                places[at] = token
            forwards += 1
            if selector.revokes and None in places:
                continue
            while places and places[0] is not None:
                view.tokens.append(places[0])
                del places[0]
    return view.output


def _ordered_rows(text: Sequence[int], ids: Sequence[int]) -> list[list[int]]:
    """Each place's text where decided places come first, with the positions of all rows as far as its own."""
    order = sorted(range(len(ids)), key=lambda place: ids[place] == MASK)
    found = {
        place: [*(at + 1 for at in order[: row + 1]), *text, *(ids[at] for at in order[: row + 1])]
        for row, place in enumerate(order)
    }
    return [found[place] for place in range(len(ids))]


@pytest.mark.parametrize("spec", [OWN_ROWS, ROWS_BEFORE, ORDERED], ids=["own rows", "rows before", "ordered"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", SELECTORS)
def test_a_canvas_is_filled_as_by_a_loop_of_its_own(name: str, temperature: float, spec: CanvasSpec) -> None:
    one = request("a", temperature=temperature)
    events = alone(one, canvas(SELECTORS[name]), engine(runner(spec)))
    assert tokens(events) == reference(one, SELECTORS[name], spec)
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize("limits", [{}, {"max_rows": 8, "max_sequences": 8}, {"max_draft_rows": 7}])
def test_canvases_plain_and_drafted_texts_share_every_forward_and_change_no_other(limits: dict[str, int]) -> None:
    strategies = {"plain": PLAIN, "drafted": DRAFTED} | {name: canvas(each) for name, each in SELECTORS.items()}
    wanted = {name: request(name, prompt=3 + place, tokens=11 + place) for place, name in enumerate(strategies)}
    together = engine(runner(), **limits)
    for name, one in wanted.items():
        together.add(one, strategies[name])
    events = run(together)
    assert {name: tokens(own) for name, own in events.items()} == {
        name: tokens(alone(one, strategies[name])) for name, one in wanted.items()
    }
    assert all(own[-1].finish_reason == "length" for own in events.values())
    metrics = events["drafted"][-1].metrics
    assert metrics is not None
    assert metrics.accepted_tokens > 0


def test_a_preempted_canvas_goes_on_where_it_was() -> None:
    small = engine(runner(capacity=80), max_rows=40)
    wanted = [request(f"r{number}", prompt=4 + number, tokens=45) for number in range(5)]
    for one in wanted:
        small.add(one, canvas(SELECTORS["one by one"]))
    events = run(small)
    assert small.stats().preemptions > 0
    for one in wanted:
        assert tokens(events[one.id]) == tokens(alone(one, canvas(SELECTORS["one by one"])))


def test_steps_that_commit_nothing_count_as_steps() -> None:
    """So tokens per step are the tokens per forward of papers; a backwards canvas commits its six at once."""
    target = engine(runner())
    events = alone(request("a", tokens=12), canvas(Backwards()), target)
    assert [len(event.committed) for event in events] == [0, 0, 0, 0, 0, 6] * 2
    metrics = events[-1].metrics
    assert metrics is not None
    assert (metrics.steps, metrics.completion_tokens, metrics.tokens_per_step) == (12, 12, 1.0)
    assert (metrics.draft_steps, metrics.draft_tokens, metrics.first_step_tokens) == (0, 0, 0)
    stats = target.stats()
    assert (stats.step_tokens, sum(stats.steps.values()), stats.finished) == (5 + 12, 12, {"length": 1})
    three = alone(request("a", tokens=12), canvas(Surest(3)))[-1].metrics
    assert three is not None
    assert three.tokens_per_step == tokens_per_step(12, 4) == 3.0


def test_only_the_root_and_the_canvas_run_in_a_step_that_follows_one_without_tokens() -> None:
    rows: list[int] = []

    class Watched(ToyRunner):
        def forward(self, segments, taps=(), skip=frozenset()):  # type: ignore[no-untyped-def]
            rows.append(sum(segment.rows for segment in segments))
            return super().forward(segments, taps, skip)

    alone(request("a", prompt=5, tokens=6), canvas(Backwards()), engine(Watched(LOGITS, VOCAB, canvas=OWN_ROWS)))
    assert rows == [5 + 6, *[1 + 6] * 5]


def test_a_stop_inside_a_canvas_ends_the_text_there() -> None:
    one = request("a")
    whole = tokens(alone(one, canvas(Backwards())))
    stop = whole[3]
    stopped = replace(one, stop_ids=frozenset({stop}))
    events = alone(stopped, canvas(Backwards()))
    assert tokens(events) == whole[: whole.index(stop) + 1]
    assert events[-1].finish_reason == "stop"
    later = replace(stopped, params=replace(one.params, min_tokens=14))
    assert len(tokens(alone(later, canvas(Backwards())))) >= 14


def test_an_aborted_canvas_keeps_what_has_joined_the_text() -> None:
    one = request("a")
    whole = tokens(alone(one, canvas(Surest(2))))
    target = engine(runner())
    target.add(one, canvas(Surest(2)))
    events = [event for _ in range(5) for event in target.step()]
    last = target.abort("a", "error", "the machine is needed")
    assert last is not None
    assert last.metrics is not None
    assert (last.finish_reason, last.error) == ("error", "the machine is needed")
    assert tokens(events) == whole[: last.metrics.completion_tokens]
    assert target.idle


def test_logprobs_are_those_of_the_rows_that_decided_the_tokens() -> None:
    events = alone(request("a", tokens=6, temperature=0.0, logprobs=1), canvas(Backwards()))
    (last,) = [one for event in events for one in event.committed if one.logprobs][-1:]
    text = [*request("a").prompt]
    ids = [MASK] * 6
    logits_V = LOGITS([*text, *ids, *ids])
    assert last.logprobs is not None
    assert last.logprobs.logprob == pytest.approx(logits_V.log_softmax(-1)[last.token].item())


@pytest.mark.parametrize("name", SELECTORS)
def test_a_text_of_a_given_form_has_it_in_whatever_order_it_is_filled(name: str) -> None:
    grammar = ToyGrammar(MASK, length=13)
    one = replace(request("a", tokens=20), constraint=Maskless(grammar))
    events = alone(one, canvas(SELECTORS[name]))
    text = tokens(events)
    assert (len(text), events[-1].finish_reason, events[-1].error) == (13, "stop", None)
    assert all(token in grammar.following(text[:place]) for place, token in enumerate(text))


@pytest.mark.parametrize(("selector", "reason"), [(Refuses(), "no place pleases"), (Idle(), "decided no place")])
def test_a_selector_that_fails_ends_its_own_requests_only(selector: Surest, reason: str) -> None:
    target = engine(runner())
    target.add(request("bad"), canvas(selector))
    for name, strategy in (("good", canvas(Surest())), ("plain", PLAIN)):
        target.add(request(name), strategy)
    events = run(target)
    assert events["bad"][-1].finish_reason == "error"
    assert reason in str(events["bad"][-1].error)
    assert tokens(events["good"]) == tokens(alone(request("good"), canvas(Surest())))
    assert tokens(events["plain"]) == tokens(alone(request("plain"), PLAIN))


def test_what_can_never_run_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="strategy canvas fills canvases, but toy writes its text in order"):
        engine().add(request("a"), canvas(Surest()))
    with pytest.raises(ValueError, match="fills 15 places at once, but a step takes 8"):
        engine(runner(CanvasSpec(MASK)), max_draft_rows=8).add(request("a"), canvas(Surest()))
    with pytest.raises(ValueError, match="the cache of toy holds 19"):
        engine(runner(capacity=19)).add(request("a"), canvas(Surest()))
    noisy = engine(runner(CanvasSpec(-1, block=6, noise=VOCAB)))
    with pytest.raises(ValueError, match="reads places, but a canvas of toy is read as noise: choose selector=renoise"):
        noisy.add(request("a"), canvas(Surest()))
    formed = replace(request("a"), constraint=Maskless(ToyGrammar(MASK, length=13)))
    with pytest.raises(ValueError, match="fills canvases of noise, so structured output is not supported: remove it"):
        noisy.add(formed, replace(canvas(Surest()), layout=CanvasLayout(reads="noise")))
    with pytest.raises(ValueError, match="a selector and drafters"):
        Strategy("both", DRAFTED.drafters, SharedNoise(), Plain(), selector=Surest())


@pytest.mark.parametrize("make", [lambda: {"max_tokens": 0}, lambda: {"max_tokens": 1}])
def test_the_shortest_texts_end_by_their_length(make: Callable[[], dict[str, int]]) -> None:
    (length,) = make().values()
    events = alone(request("a", tokens=length), canvas(Surest()))
    assert (len(tokens(events)), events[-1].finish_reason) == (length, "length")
