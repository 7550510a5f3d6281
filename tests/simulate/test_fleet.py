"""Fleets: routing, scaling, failures, and loads that are too much."""

from __future__ import annotations

import pytest

from parlay.simulate.drafting import PLAIN, Drafting
from parlay.simulate.fleet import Outcome
from parlay.simulate.jobs import Job, ReplicaLimits
from parlay.simulate.policies import ONE_REPLICA, Autoscaling, Failures, Fleet, read_range
from parlay.simulate.replica import Replica
from parlay.simulate.report import Goals, Prices, figures, percentiles
from parlay.simulate.routing import LeastLoaded
from parlay.simulate.traffic import Arrival, Traffic, with_histories
from parlay.types import PowerModel
from tests.simulate.toy import at_random, run, steady


def p90(out: Outcome) -> float:
    found = figures(out).whole
    assert found is not None
    return found.p90


@pytest.mark.parametrize("routing", ["least-loaded", "round-robin", "two-choices", "prefix-affinity"])
def test_every_request_is_answered_once_and_the_seed_repeats_it(routing: str) -> None:
    traffic, fleet = at_random(200, 8.0), Fleet(replicas=3, routing=routing)
    one, again = run(traffic, fleet), run(traffic, fleet)
    assert one == again
    assert one.finished == len(one.first) == 200
    assert one.tokens == sum(each.output for each in traffic.arrivals)
    assert min(one.first) > 0


def test_more_replicas_answer_sooner_and_are_used_less() -> None:
    traffic = at_random(300, 6.0)
    waits, used = [], []
    for replicas in (1, 2, 4):
        out = run(traffic, Fleet(replicas=replicas))
        waits.append(p90(out))
        used.append(out.busy / out.paid)
    assert waits == sorted(waits, reverse=True)
    assert used == sorted(used, reverse=True)


def test_a_load_that_never_drains_is_reported_and_ends() -> None:
    out = run(steady(3000, 0.02), drain=5.0)
    assert 0 < out.finished < out.requests
    assert out.unfinished_after == 5.0
    assert out.backlog > 1


def test_affinity_finds_the_last_turn_of_a_session_where_others_do_not() -> None:
    turns = [
        Arrival(10.0 * turn + session, 100 * (turn + 1), 20, session=str(session))
        for turn in range(6)
        for session in range(8)
    ]
    traffic = Traffic("sessions", with_histories(sorted(turns)))
    found = {
        routing: run(traffic, Fleet(replicas=4, routing=routing)) for routing in ("prefix-affinity", "two-choices")
    }
    shares = {routing: out.found / out.asked for routing, out in found.items()}
    assert shares["prefix-affinity"] > 0.7
    assert shares["prefix-affinity"] > 1.5 * shares["two-choices"]


def test_affinity_leaves_a_server_that_has_too_much_to_do() -> None:
    """All requests have one key, yet no server has much more than its share."""
    traffic = Traffic("one key", [Arrival(0.05 * place, 100, 50, common=64) for place in range(100)])
    bounded = run(traffic, Fleet(replicas=4, routing="prefix-affinity"))
    even = run(traffic, Fleet(replicas=4))
    assert p90(bounded) < 1.5 * p90(even)


def test_an_answer_that_goes_on_elsewhere_wastes_nothing_and_a_retried_one_does() -> None:
    traffic = steady(60, 0.1, output=100)
    calm = run(traffic, Fleet(replicas=2))
    kept, retried = (
        run(traffic, Fleet(replicas=2, failures=Failures(kill="3", on_failure=way))) for way in ("continue", "retry")
    )
    assert kept.deaths == retried.deaths == 1
    assert kept.failed_over == retried.failed_over > 0
    assert kept.finished == retried.finished == 60
    assert kept.lost == 0 < retried.lost
    assert max(calm.whole) < max(kept.whole) < max(retried.whole)


def test_where_no_server_comes_back_the_rest_is_unfinished() -> None:
    out = run(steady(20, 0.1), Fleet(failures=Failures(kill="1.2", down_time=1e9)), drain=10.0)
    assert out.deaths == 1
    assert 0 < out.finished < 20


def test_servers_die_as_often_as_their_mean_time_says() -> None:
    out = run(steady(1000, 1.0), Fleet(replicas=10, failures=Failures(mtbf=500.0, down_time=5.0)))
    assert 12 <= out.deaths <= 30
    assert out.finished == 1000


def test_a_server_that_is_killed_does_not_die_more_often_from_then_on() -> None:
    kills = ",".join(str(10 * each) for each in range(1, 60))
    out = run(steady(1000, 1.0), Fleet(failures=Failures(mtbf=500.0, kill=kills, down_time=0.5)))
    assert 59 <= out.deaths < 75


def test_replicas_start_under_load_and_stop_after_it() -> None:
    busy = [Arrival(0.02 * place, 100, 50) for place in range(2000)]
    calm = [Arrival(60 + place, 100, 50) for place in range(300)]
    scaling = Autoscaling(min_replicas=1, max_replicas=6, target_ongoing=4, up_delay=0, down_delay=30, start_delay=5)
    out = run(Traffic("peak", busy + calm), Fleet(autoscaling=scaling))
    assert out.finished == out.requests
    assert 2 <= out.most_replicas <= 6
    assert out.paid < 3 * out.span
    assert p90(out) < p90(run(Traffic("peak", busy + calm)))


def test_drafts_pay_while_a_server_is_idle_and_are_left_out_when_it_is_full() -> None:
    drafting = Drafting("drafts", 8, {"": (0.7,)})
    one = Traffic("one", [Arrival(0.0, 100, 200)])
    assert run(one, drafting=drafting).steps < 0.5 * run(one).steps
    dear = Drafting("drafts", 8, {"": (0.7,)}, seconds=lambda sequences, nodes, context: 1.0 * sequences)
    assert run(one, drafting=dear).steps == run(one).steps


def test_money_and_energy_follow_from_paid_and_busy_time() -> None:
    out = run(steady(10, 1.0))
    found = figures(out, Goals(first=1.0), Prices(hour=3.6, power=PowerModel(100, 0.5, "modelled"), idle_watts=10))
    assert found.dollars == pytest.approx(out.paid / 1000)
    assert found.joules == pytest.approx(100 * out.busy + 0.5 * out.rows + 10 * (out.paid - out.busy))
    assert found.in_time == 1.0
    assert found.tokens_per_dollar == pytest.approx(500 / (out.paid / 1000))


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("nodes", [0, 3, 9])
def test_a_cache_that_holds_few_texts_still_answers_all_with_and_without_drafts(nodes: int, adapts: bool) -> None:
    drafting = Drafting("trees", nodes, {"": (0.5, 0.2)}, adapts=adapts)
    dying = Fleet(failures=Failures(kill="5,20", on_failure="continue"))
    for fleet in (ONE_REPLICA, dying):
        out = run(at_random(100, 20.0), fleet, limits=ReplicaLimits(cache_tokens=1100), drafting=drafting)
        assert out.finished == 100
        assert out.preemptions > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: run(steady(1, 1.0), Fleet(replicas=0)), "a fleet needs at least 1 replica"),
        (lambda: run(Traffic("none", [])), "none has no requests"),
        (lambda: run(steady(1, 1.0), Fleet(routing="luck")), "routing 'luck' is not known"),
        (lambda: Autoscaling(min_replicas=3, max_replicas=2), "--autoscale 3:2"),
        (lambda: read_range("3"), "as in 1:8"),
        (lambda: Failures(kill="soon"), "--kill soon"),
        (lambda: Failures(mtbf=0), "mtbf must be at least 1, got 0"),
        (lambda: ReplicaLimits(max_num_seqs=600), "must be at least max_num_seqs"),
    ],
)
def test_mistakes_are_one_line(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_percentiles_are_those_of_the_nearest_rank() -> None:
    found = [percentiles(list(map(float, range(count, 0, -1)))) for count in (1, 2, 10, 100)]
    assert [(each.p50, each.p90, each.p99) for each in found if each is not None] == [
        (1, 1, 1), (1, 2, 2), (5, 9, 10), (50, 90, 99)
    ]  # fmt: skip


def test_a_router_of_many_requests_keeps_no_entry_of_each() -> None:
    router, request = LeastLoaded(0), Arrival(0.0, 10, 10)
    replicas = [Replica(number, lambda *_: 1.0, PLAIN, ReplicaLimits(), 0) for number in range(3)]
    for replica in replicas:
        router.add(replica)
    for number in range(3000):
        router.pick(request).submit(Job(request), float(number))
        for replica in replicas:
            router.changed(replica)
    assert len(router._heap) < 100
    assert max(replica.load for replica in replicas) - min(replica.load for replica in replicas) <= 1
