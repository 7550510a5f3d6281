"""The simulator says what the real engine does in virtual time: same scheduler, same costs, no model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulation import cases
from benchmarks.simulation.virtual import run as run_engine
from parlay.simulate.drafting import PLAIN, Drafting
from parlay.simulate.jobs import ReplicaLimits

PROCESSOR, GPU, *_ = cases.SERVERS
CHAINS = Drafting("chains", 4, {"": (0.6,)}, adapts=False)
EXACT = 2e-4
"""Steps of one event have their mean number of rows, and the seconds of a GPU are not quite linear in rows."""


@pytest.mark.parametrize("load", cases.LOADS)
@pytest.mark.parametrize("drafting", [PLAIN, CHAINS], ids=["plain", "chains"])
@pytest.mark.parametrize("server", [PROCESSOR, GPU], ids=["processor", "gpu"])
def test_steps_rows_throughput_and_latencies_are_those_of_the_engine(
    server: cases.Server, drafting: Drafting, load: float
) -> None:
    """Also with drafts, because both have the same ones right."""
    server, sizes = replace(server, drafting=drafting), cases.lengths(40, 5)
    traffic = cases.arrivals(sizes, load * cases.capacity(server, sizes), 5)
    real = run_engine(traffic.arrivals, server.cost, server.limits, server.drafting)
    predicted = cases.simulated(server, traffic)
    found = cases.differences(real, predicted)
    assert (predicted.steps, round(predicted.rows)) == (real.steps, real.rows)
    assert max(map(abs, found.values())) < EXACT, found


def test_requests_that_come_together_start_together() -> None:
    sizes = cases.lengths(12, 6)
    traffic = cases.arrivals(sizes, 1.0, 6)
    traffic = replace(traffic, arrivals=[each._replace(seconds=0.0) for each in traffic.arrivals])
    real = run_engine(traffic.arrivals, GPU.cost, GPU.limits, GPU.drafting)
    found = cases.differences(real, cases.simulated(GPU, traffic))
    assert max(map(abs, found.values())) < cases.GOAL, found


@pytest.mark.parametrize("drafting", [PLAIN, CHAINS], ids=["plain", "chains"])
def test_where_memory_is_short_sequences_wait_skip_drafts_and_are_preempted_as_in_the_engine(
    drafting: Drafting,
) -> None:
    server = replace(PROCESSOR, limits=ReplicaLimits(cache_tokens=6000), drafting=drafting)
    sizes = cases.lengths(40, 7)
    traffic = cases.arrivals(sizes, 1.3 * cases.capacity(server, sizes), 7)
    real = run_engine(traffic.arrivals, server.cost, server.limits, server.drafting)
    predicted = cases.simulated(server, traffic)
    found = cases.differences(real, predicted)
    assert predicted.preemptions == real.preemptions > 0
    assert (predicted.steps, round(predicted.rows)) == (real.steps, real.rows)
    assert max(map(abs, found.values())) < EXACT, found
