"""Simulated requests: when each one arrives, and how long its prompt and its answer are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, NamedTuple

TooLong = Literal["refuse", "drop", "cut"]


class Arrival(NamedTuple):
    """One request. ``seconds`` count from the beginning of the traffic; ``prompt`` and ``output`` are in tokens.

    All requests of a ``kind`` begin with the same ``common`` tokens. The first ``history`` tokens repeat the prompt and
    answer of the last request of the ``session``. A server that served these tokens before may have them cached.
    """

    seconds: float
    prompt: int
    output: int
    kind: str = ""
    session: str = ""
    history: int = 0
    common: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in the order of their arrival, with notes for the reader."""

    name: str
    arrivals: Sequence[Arrival]
    notes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = field(init=False)
    """The kinds of the requests, in the order of their first request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(dict.fromkeys(each.kind for each in self.arrivals)))

    @property
    def span(self) -> float:
        """Seconds from the first request to the last."""
        return self.arrivals[-1].seconds - self.arrivals[0].seconds if self.arrivals else 0.0

    @property
    def mean_prompt(self) -> float:
        """Mean number of prompt tokens."""
        return fmean(each.prompt for each in self.arrivals)

    @property
    def mean_output(self) -> float:
        """Mean number of answer tokens."""
        return fmean(each.output for each in self.arrivals)

    def faster(self, times: float) -> Traffic:
        """Return the same requests, arriving ``times`` times as fast."""
        arrivals = [each._replace(seconds=each.seconds / times) for each in self.arrivals]
        return Traffic(self.name, arrivals, (*self.notes, f"Requests come {times:g} times as fast."))

    def first(self, most: int) -> Traffic:
        """Return the traffic with only the first ``most`` requests."""
        return replace_arrivals(self, self.arrivals[:most])


def replace_arrivals(traffic: Traffic, arrivals: Sequence[Arrival], *notes: str) -> Traffic:
    """Return the traffic with other requests and additional notes."""
    return replace(traffic, arrivals=arrivals, notes=(*traffic.notes, *notes))


def within(traffic: Traffic, context: int, cache: int, too_long: TooLong) -> Traffic:
    """Return the traffic with only requests that a server can take, or versions of them that it can.

    A request may have at most ``context`` tokens, and they must fit into a cache of ``cache`` tokens. ``too_long`` says
    whether a longer request is refused, dropped or cut, its prompt first. Raises ValueError for a refused request, and
    if no request is left.
    """
    most = min(context, cache)
    limit = f"context is {context:,}" if context <= cache else f"cache of a replica holds {cache:,}"
    kept: list[Arrival] = []
    if most < 2:  # a prompt and an answer have at least one token each
        raise ValueError(f"{traffic.name} has no request that fits: the {limit} tokens")
    long = 0
    for number, each in enumerate(traffic.arrivals, start=1):
        if each.prompt + each.output > most:
            if too_long == "refuse":
                raise ValueError(
                    f"{traffic.name}: request {number} has {each.prompt:,} tokens and an answer of {each.output:,}, "
                    f"but the {limit}: give --too-long drop or cut, or allow more"
                )
            long += 1
            if too_long == "drop":
                continue
            each = _cut(each, most)
        kept.append(each)
    if not kept:
        raise ValueError(f"{traffic.name} has no request that fits: the {limit} tokens")
    if not long:
        return traffic
    done = "left out" if too_long == "drop" else "cut"
    return replace_arrivals(traffic, kept, f"{long:,} requests were {done}, because the {limit} tokens.")


def _cut(each: Arrival, most: int) -> Arrival:
    output = min(each.output, most - 1)
    prompt = min(each.prompt, most - output)
    return each._replace(
        prompt=prompt, output=output, history=min(each.history, prompt), common=min(each.common, prompt)
    )


def with_histories(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Return the requests with their ``history``: all tokens of the last request of the same session.

    A prompt that is shorter than these tokens gets no history.
    """
    texts: dict[str, int] = {}
    found = []
    for each in arrivals:
        before = texts.get(each.session, 0) if each.session else 0
        found.append(each._replace(history=before) if 0 < before <= each.prompt else each)
        if each.session:
            texts[each.session] = each.prompt + each.output
    return found
