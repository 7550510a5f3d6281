"""Makes random traffic with the distributions that ServeGen found in production (Xiang et al. 2025, arXiv:2505.09999).

A few clients send most of the requests, each in bursts of its own: times between a client's requests are
gamma-distributed. Prompt lengths are log-normal with a Pareto tail, and answer lengths are exponential. We chose the
lengths of each kind of work; none of them were measured.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from parlay.options import nearest
from parlay.simulate.traffic import Arrival, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The requests of one kind of work. Measured acceptance rates are listed under the same ``name``.

    Prompt lengths are log-normal with the median ``prompt`` tokens and the standard deviation ``spread`` of their
    logarithm. A share ``tail`` of them has a Pareto distribution that begins at ``prompt`` instead. Answers have
    ``output`` tokens on average. The times between a client's requests have the coefficient of variation ``bursts``.
    All prompts begin with the same ``common`` tokens. A session has ``turns`` requests on average. Each later one
    arrives on average ``think`` seconds after the last answer, and its prompt is the whole text so far and a question.
    """

    name: str
    prompt: float
    spread: float
    output: float
    tail: float = 0.05
    bursts: float = 1.5
    common: int = 0
    turns: float = 1.0
    think: float = 60.0


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "chat": Kind(name="open chat", prompt=120, spread=1.0, output=250, common=200, turns=3, bursts=1.2),
        "code": Kind(name="code", prompt=900, spread=0.9, output=200, bursts=2.0),
        "edits": Kind(name="edits of code", prompt=1200, spread=0.7, output=500, bursts=2.0),
        "documents": Kind(name="questions on documents", prompt=3000, spread=0.6, output=120, turns=2),
        "summaries": Kind(name="summaries", prompt=2500, spread=0.6, output=180),
        "extraction": Kind(name="extraction", prompt=800, spread=0.5, output=100, common=300, bursts=3.0),
        "maths": Kind(name="maths", prompt=150, spread=0.5, output=600),
        "translation": Kind(name="translation", prompt=250, spread=0.8, output=250),
    }
)
"""Kinds of work, by the word that stands for each in a mixture."""

_CLIENTS = 8
"""Number of clients of each kind. The i-th client sends 1 / i times as many requests as the first."""
_PARETO = 1.5  # exponent of the tail
_MAX_PROMPT = 1 << 17  # tokens of a prompt
_DAY = 86_400.0
_LEAD = 5.0
"""The first sessions begin this many times their mean length before the traffic, so that it begins with some running.
"""
_ANSWER_SPEED = 20.0  # assumed tokens per second of answers: a user reads the answer, then thinks


def read_mixture(text: str) -> dict[str, float]:
    """Read shares by kind, as in ``chat=3,code=1``. A word alone has the share 1. Raises ValueError for other texts."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        word, equals, share = (each.strip() for each in part.partition("="))
        if word not in KINDS:
            raise ValueError(f"--mixture {text}: there is no kind {word!r}: {nearest(word, KINDS)}")
        try:
            shares[word] = float(share) if equals else 1.0
        except ValueError:
            shares[word] = -1.0
        if not 0 < shares[word] < math.inf:
            raise ValueError(f"--mixture {text}: the share of {word} must be a number above 0, as in {word}=2")
    return shares


def mixture(shares: Mapping[str, float], *, rate: float, seconds: float, seed: int, daily: float = 0.0) -> Traffic:
    """Make the random traffic of a mixture: ``rate`` requests per second on average, for ``seconds`` seconds.

    Each kind gets its share of the requests. The same ``seed`` gives the same traffic.
    ``daily``, from 0 to 1, is the amplitude of the rate around its mean, as a share of the mean. The rate is lowest at
    the beginning of a day and highest twelve hours later. Raises ValueError if the rate or the time is not above 0.
    """
    if not (0 < rate < math.inf and 0 < seconds < math.inf and 0 <= daily <= 1):
        raise ValueError(
            f"a mixture needs a rate and a duration above 0 and daily from 0 to 1, got {rate:g}, {seconds:g}, {daily:g}"
        )
    whole = sum(shares.values())
    weights = [1 / (place + 1) for place in range(_CLIENTS)]
    streams = [
        _client(KINDS[word], rate * share / whole * weight / sum(weights), seconds, daily, f"{seed} {word} {place}")
        for word, share in shares.items()
        for place, weight in enumerate(weights)
    ]
    arrivals = list(heapq.merge(*streams, key=lambda each: each.seconds))
    if not arrivals:
        raise ValueError(
            f"no request arrives at {rate:g} requests/s in {seconds:g} s: give a longer time or higher rate"
        )
    name = ", ".join(f"{word} {share / whole:.0%}" for word, share in shares.items())
    return Traffic(f"mixture of {name}, {rate:g} requests/s", arrivals, ("The requests are random, not recorded.",))


def _client(kind: Kind, rate: float, seconds: float, daily: float, seed: str) -> Iterator[Arrival]:
    """Yield one client's requests in the order of their times. Later requests of a session wait in a heap until then.

    ``rate`` is the client's mean number of requests per second; sessions begin ``kind.turns`` times less often.
    """
    draw = random.Random(seed)
    shape = 1 / kind.bursts**2
    scale = kind.turns / (rate * shape)
    waiting: list[tuple[float, int, Arrival]] = []
    number, begun = 0, draw.random() * scale * shape - (_LEAD * kind.turns * kind.think if kind.turns > 1 else 0.0)
    while (when := _with_daily_rhythm(begun, daily)) < seconds:
        while waiting and waiting[0][0] <= when:
            yield heapq.heappop(waiting)[2]
        for each in _session(kind, when, draw, f"{seed} {number}"):
            number += 1
            if each.seconds >= 0:
                heapq.heappush(waiting, (each.seconds, number, each))
        begun += draw.gammavariate(shape, scale)
    while waiting and waiting[0][0] < seconds:
        yield heapq.heappop(waiting)[2]


def _session(kind: Kind, when: float, draw: random.Random, name: str) -> Iterator[Arrival]:
    """Yield the requests of one session, which begins at the time ``when``."""
    history = 0
    while True:
        prompt = min(_MAX_PROMPT, history + (0 if history else kind.common) + _prompt(kind, draw))
        output = 1 + int(draw.expovariate(1 / kind.output))
        single = kind.turns <= 1
        yield Arrival(when, prompt, output, kind.name, "" if single else name, history, kind.common)
        if single or draw.random() < 1 / kind.turns:
            return
        history = prompt + output
        when += output / _ANSWER_SPEED + draw.expovariate(1 / kind.think)


def _prompt(kind: Kind, draw: random.Random) -> int:
    if draw.random() < kind.tail:
        return 1 + int(kind.prompt * draw.paretovariate(_PARETO))
    return 1 + int(draw.lognormvariate(math.log(kind.prompt), kind.spread))


def _with_daily_rhythm(even: float, daily: float) -> float:
    """Return the time at which traffic with a daily rhythm has as many requests as even traffic at ``even`` seconds.

    The rate at the time t, relative to its mean, is 1 - daily * cos(2 pi t / day). Its integral up to t is
    t - daily * sin(2 pi t / day) * day / (2 pi), which is inverted here.
    """
    if not daily:
        return even
    days, rest = divmod(even, _DAY)
    after = bisect.bisect_right(range(int(_DAY)), rest, key=lambda second: _expected(second, daily))
    before, come = _expected(after - 1, daily), _expected(after, daily)
    return days * _DAY + after - 1 + (rest - before) / max(1e-9, come - before)


def _expected(seconds: float, daily: float) -> float:
    """Return the integral of the relative rate from 0 to ``seconds``; see `_with_daily_rhythm`."""
    return seconds - daily * math.sin(2 * math.pi * seconds / _DAY) * _DAY / (2 * math.pi)


def timed(lengths: Traffic, rate: float, seed: int) -> Traffic:
    """Return the requests with random arrival times: a Poisson process of ``rate`` requests per second.

    Raises ValueError if the rate is not above 0.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate:g} requests/s must be above 0")
    draw = random.Random(f"{seed} arrivals")
    now, arrivals = 0.0, []
    for each in lengths.arrivals:
        arrivals.append(each._replace(seconds=now))
        now += draw.expovariate(rate)
    return replace(lengths, arrivals=arrivals, notes=(*lengths.notes, f"Times are random: {rate:g} requests/s."))
