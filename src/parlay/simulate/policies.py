"""Options of a simulated fleet: how it grows and shrinks, how its servers fail, and how requests are routed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parlay.options import Options, UsageError, option

_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling(Options):
    """Sets the number of servers by the number of unfinished requests, as Ray Serve does.

    The wanted number of servers is computed every ``scale_interval`` seconds. If it has been higher than the present
    number for ``up_delay`` seconds, servers start; they take requests ``start_delay`` seconds later. If it has been
    lower for ``down_delay`` seconds, some servers take no new requests, and stop once they have finished their last.
    Raises UsageError for a value out of range.
    """

    min_replicas: int = option(1, "fewest replicas", low=1)
    max_replicas: int = option(1, "most replicas", low=1)
    target_ongoing: float = option(8.0, "wanted number of unfinished requests per replica", low=0.01, high=1e6)
    scale_interval: float = option(10.0, "seconds between two checks of the number of replicas", low=0.1, high=_DAY)
    up_delay: float = option(30.0, "seconds for which more replicas must be wanted before they start", low=0, high=_DAY)
    down_delay: float = option(
        600.0, "seconds for which fewer replicas must be wanted before some stop", low=0, high=_DAY
    )
    start_delay: float = option(60.0, "seconds from the start of a replica to its first request", low=0, high=_DAY)

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.max_replicas < self.min_replicas:
            raise UsageError(
                f"--autoscale {self.min_replicas}:{self.max_replicas}: the first number must not be the larger one"
            )


def read_range(text: str) -> tuple[int, int]:
    """Read the fewest and the most replicas from a text such as ``1:8``. Raises UsageError for any other text."""
    low, colon, high = (part.strip() for part in text.partition(":"))
    if not (colon and low.isdecimal() and high.isdecimal()):
        raise UsageError(f"--autoscale {text}: give the fewest and the most replicas, as in 1:8")
    return int(low), int(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures(Options):
    """Says which servers die and when. A dead server comes back after ``down_time`` seconds with an empty cache.

    A server's requests go to other servers ``detect_delay`` seconds after its death. With ``on_failure=retry`` these
    write the answers anew. With ``on_failure=continue`` they read the tokens that were already written and continue
    them. Raises UsageError for a value out of range.
    """

    mtbf: float | None = option(None, "mean seconds until a replica dies", low=1, high=1e12, metavar="SECONDS")
    kill: str = option("", "seconds at which the replica with the most requests dies", metavar="SECONDS,...")
    down_time: float = option(60.0, "seconds until a dead replica is up again", low=0, high=1e12)
    detect_delay: float = option(1.0, "seconds until a dead replica's requests go to others", low=0, high=_DAY)
    on_failure: str = option(
        "retry",
        "generate a dead replica's answers again, or continue them where they stopped",
        choices=("retry", "continue"),
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        _ = self.kills

    @property
    def kills(self) -> tuple[float, ...]:
        """The times in ``kill``, in seconds from the beginning of the traffic."""
        try:
            times = tuple(float(part) for part in self.kill.split(",") if part.strip())
        except ValueError:
            times = (-1.0,)
        if not all(0 <= each < math.inf for each in times):
            raise UsageError(f"--kill {self.kill}: give seconds from 0 on, joined by commas")
        return times

    @property
    def any(self) -> bool:
        """Whether a server ever dies."""
        return self.mtbf is not None or bool(self.kills)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A fleet: the number of servers, the routing of requests, and the failures.

    ``autoscaling``, if there is any, sets the number of servers in place of ``replicas``. ``routing`` is a name in
    `parlay.simulate.routing.ROUTERS`.
    """

    replicas: int = 1
    routing: str = "least-loaded"
    autoscaling: Autoscaling | None = None
    failures: Failures | None = None


ONE_REPLICA = Fleet()
