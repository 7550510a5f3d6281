"""Which drafted tokens are right is settled by the place in the answer, whoever verifies it and when."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest

from parlay.cost.speed import best_tree
from parlay.simulate.drafting import Drafting, Drafts, uniforms
from parlay.simulate.policies import Failures, Fleet
from parlay.simulate.traffic import Arrival, Traffic
from tests.simulate.toy import run

CHAINS = Drafting("chains", 4, {"": (0.6,)}, adapts=False)


def alone(count: int) -> Traffic:
    """Requests so far apart that none waits for another."""
    return Traffic("alone", [Arrival(60.0 * place, 100, 50 + place) for place in range(count)])


def test_numbers_belong_to_the_seed_the_request_and_the_place() -> None:
    numbers = uniforms(3, 7, 400)
    assert np.array_equal(uniforms(3, 7, 50), numbers[:50])
    assert not np.isin(uniforms(3, 8, 400), numbers).any()
    assert not np.isin(uniforms(4, 7, 400), numbers).any()
    assert np.array_equal(uniforms(-1, 7, 50), uniforms((1 << 64) - 1, 7, 50))


def test_numbers_are_evenly_distributed_over_requests_and_places() -> None:
    numbers = np.array([uniforms(0, request, 100) for request in range(200)])
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(numbers[:, 0].mean() - 0.5) < 0.1
    assert abs((numbers < 0.6).mean() - 0.6) < 0.02


@pytest.mark.parametrize("ranks", [(0.6,), (0.5, 0.2, 0.1), (0.0,)])
@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_a_step_commits_as_many_tokens_on_average_as_the_tree_promises(ranks: tuple[float, ...], nodes: int) -> None:
    drafts = Drafts(ranks)
    steps = [len(drafts.path(drafts.right(uniforms(0, request, 2000)), nodes, 0)) - 1 for request in range(20)]
    assert 2000 / fmean(steps) == pytest.approx(best_tree(ranks, nodes).tokens, rel=0.02)


def test_a_sure_chain_writes_all_its_nodes_and_one_token_more_but_no_token_too_many() -> None:
    drafts = Drafts((1.0,))
    right = drafts.right(uniforms(0, 0, 12))
    assert drafts.path(right, 4, 0) == [0, 5, 10, 12]
    assert drafts.path(right, 4, 7) == [7, 12]


def test_whether_a_draft_is_right_does_not_depend_on_the_step_that_verifies_it() -> None:
    """From any place on, a chain is accepted up to the first token that is wrong."""
    drafts = Drafts((0.6,))
    right = drafts.right(uniforms(0, 5, 200))
    for begun in range(199):
        following = drafts.path(right, 4, begun)[1]
        accepted = right[begun : following - 1]
        assert not any(accepted)
        assert len(accepted) == 4 or following == 200 or right[following - 1]


def test_an_answer_takes_the_same_steps_on_whichever_server() -> None:
    traffic = alone(30)
    one = run(traffic, drafting=CHAINS)
    for routing in ("round-robin", "two-choices"):
        several = run(traffic, Fleet(replicas=3, routing=routing), drafting=CHAINS)
        assert several.steps == one.steps
        assert list(several.whole) == pytest.approx(list(one.whole))
    assert run(traffic, drafting=CHAINS, seed=1).steps != one.steps


def test_an_answer_written_anew_after_a_death_takes_the_same_steps_as_before() -> None:
    traffic = Traffic("one", [Arrival(0.0, 100, 400)])
    calm = run(traffic, drafting=CHAINS)
    died = run(traffic, Fleet(failures=Failures(kill="0.5", down_time=1.0)), drafting=CHAINS)
    assert died.deaths == 1
    assert died.steps - calm.steps == pytest.approx(0.5 / 0.0105, rel=0.05)  # those before the death, in vain
    assert died.whole[0] - calm.whole[0] == pytest.approx(1.5)


def test_longer_drafts_of_the_same_request_never_take_more_steps() -> None:
    """With common random numbers this holds for each request, not only on average."""
    drafts = Drafts((0.7,))
    for request in range(50):
        right = drafts.right(uniforms(0, request, 120))
        steps = [len(drafts.path(right, nodes, 0)) for nodes in range(1, 9)]
        assert steps == sorted(steps, reverse=True)
