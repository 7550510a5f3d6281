"""The adaptive policy against simulated drafters, in seconds of a synthetic cost table."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.heads.guessing_ahead import with_probes
from parlay.router.arms import Arm
from parlay.router.ledger import LENT
from parlay.router.policies import Fixed, Plain, adaptive, make_policy
from parlay.router.router import Router
from parlay.types import NO_DRAFT, NOTHING_NEEDED, Budgets, Draft, Needs, Policy, SamplingParams, Spent, Tree, trees
from tests.router.views import REQUEST, SequenceView

Forward = Callable[[int], float]


def memory_bound(rows: int) -> float:
    """Three percent of a one-row forward per further row: the usual shape on one sequence."""
    return 1 + 0.03 * (rows - 1)


def steep(rows: int) -> float:
    return 1 + 0.04 * (rows - 1)


def compute_bound(rows: int) -> float:
    return float(rows)


def free(rows: int) -> float:
    return 1.0


@dataclass
class TableCost:
    seconds: Forward
    asked: int = 0
    _revisions: dict[tuple[float, ...], int] = field(default_factory=dict)

    @property
    def revision(self) -> int:
        """Another one for other prices."""
        prices = tuple(self.seconds(rows) for rows in (1, 2, 9, 65))
        return self._revisions.setdefault(prices, len(self._revisions))

    def forward(self, rows: int, context: int) -> float:
        self.asked += 1
        return self.seconds(rows)

    def record(self, rows: int, context: int, seconds: float) -> None:
        raise AssertionError("the engine records, not the policy")


@dataclass
class Drafting:
    """A drafter by its behaviour: nodes of one score, accepted at one conditional rate, at a price per node."""

    rate: float
    score: float
    node_seconds: float = 0.0
    covers: float = 1.0  # share of steps in which it finds anything
    right_at: frozenset[int] | None = None  # output tokens at which it is right, instead of by chance
    step_seconds: float = 0.0  # of each step that drafts
    opening_seconds: float = 0.0  # of a sequence's first draft besides: the drafter reads the prompt

    def right(self, place: int, coin: random.Random) -> bool:
        return coin.random() < self.rate if self.right_at is None else place in self.right_at


@dataclass
class Run:
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)
    asked: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def verified(policy: Policy, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
    """What is verified of drafts that were proposed."""
    policy.next_budgets(views, drafts)
    return policy.trim(views, drafts)


def trimmed(policy: Policy, view: SequenceView, draft: Draft) -> Draft:
    return verified(policy, [view], [draft])[0]


def spent(drafting: float, forward: float, rows: int, view: SequenceView) -> Spent:
    return Spent(drafting, forward, rows, len(view.tokens), (drafting,))


def simulate(
    policy: Policy,
    drafting: Drafting,
    forward: Forward,
    tokens: int,
    *,
    view: SequenceView | None = None,
    seed: int = 0,
) -> Run:
    """So many tokens of a sequence, new unless given, as the engine would drive the policy."""
    coin = random.Random(seed)
    view = view or SequenceView(0)
    run = Run()
    inactive, opened = 0, False
    while run.tokens < tokens:
        asked = inactive == 0
        (budget,), inactive, *_ = policy.plan([view]) if asked else ([0], inactive - 1)
        proposed = budget if coin.random() < drafting.covers else 0
        right = 0
        while right < proposed and drafting.right(run.tokens + right, coin):
            right += 1
        draft = trees.chain([0] * proposed, "toy", [drafting.score] * proposed)
        draft = trimmed(policy, view, draft) if budget else NO_DRAFT
        accepted = min(right, len(draft))
        view.tokens += [0] * accepted + [int(accepted == right)]
        draft_seconds = budget * drafting.node_seconds + bool(budget) * drafting.step_seconds
        draft_seconds += drafting.opening_seconds if budget and not opened else 0.0
        opened |= bool(budget)
        seconds = forward(1 + len(draft))
        if asked:
            policy.learn([view], [draft], [accepted], spent(draft_seconds, seconds, 1 + len(draft), view))
        run.asked += asked
        run.tokens += accepted + 1
        run.steps += 1
        run.seconds += draft_seconds + seconds
        run.sizes.append(len(draft))
    return run


@pytest.mark.parametrize("node_seconds", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("score", [0.3, 0.9, 0.99])
def test_a_drafter_that_is_always_wrong_costs_less_than_two_percent(score: float, node_seconds: float) -> None:
    policy = adaptive(TableCost(memory_bound), 32)
    drafting = Drafting(rate=0.0, score=score, node_seconds=node_seconds)
    assert simulate(policy, drafting, memory_bound, 400).speed > 0.98


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_even_a_short_answer_loses_less_than_one_percent_to_a_wrong_drafter(seconds: float) -> None:
    """128 tokens under a policy that knows nothing, rows at four percent and one percent for each step that drafts."""
    policy = adaptive(TableCost(steep), 16)
    drafting = Drafting(rate=0.0, score=0.7, step_seconds=seconds)
    assert simulate(policy, drafting, steep, 128).speed > 0.99


@pytest.mark.parametrize(
    ("node_seconds", "rate", "row", "least"),
    [(0.7, 0.93, 0.15, 1.0), (0.8, 0.93, 0.08, 0.98), (0.6, 0.72, 0.08, 0.97), (0.7, 0.97, 0.08, 1.1)],
)
def test_a_draft_that_costs_nearly_a_forward_per_node_stakes_no_more_than_it_gained(
    node_seconds: float, rate: float, row: float, least: float
) -> None:
    """The target's own layers with fewer keys, near the break-even: 64 tokens under a policy that knows nothing."""

    def forward(rows: int) -> float:
        return 1 + row * (rows - 1)

    def speed(seed: int, needs: Needs) -> float:
        policy = adaptive(TableCost(forward), 8, needs)
        return simulate(policy, Drafting(rate, rate, node_seconds), forward, 64, seed=seed).speed

    speeds = [[speed(seed, Needs(layers=layers)) for seed in range(30)] for layers in (False, True)]
    others, own = (sum(each) / len(each) for each in speeds)
    assert own >= least
    assert own > others, "its first draft told what a node costs"


def test_texts_that_are_too_short_to_draft_for_do_not_say_what_drafts_cost() -> None:
    """The target's own layers propose nothing within their window, which takes no time."""

    def forward(rows: int) -> float:
        return 1 + 0.08 * (rows - 1)

    speeds = []
    for seed in range(6):
        policy = adaptive(TableCost(forward), 8, Needs(layers=True))
        simulate(policy, Drafting(0.93, 0.93, covers=0.0), forward, 100, view=SequenceView(0), seed=seed)
        policy.release(0)
        long = simulate(policy, Drafting(0.93, 0.93, 0.8), forward, 64, view=SequenceView(1), seed=seed)
        speeds.append(long.speed)
    assert sum(speeds) / len(speeds) > 0.98


def test_right_until_it_is_trusted_is_no_slower_than_plain() -> None:
    """What it gained is all that it can lose; when it is right again, that is found out and gains again."""
    right = frozenset(place for place in range(640) if place % 64 < 12)
    run = simulate(adaptive(TableCost(steep), 16), Drafting(0.0, 0.7, right_at=right), steep, 640)
    assert run.speed > 1.03
    once = frozenset(range(12))
    assert simulate(adaptive(TableCost(steep), 16), Drafting(0.0, 0.7, right_at=once), steep, 128).speed > 1.03


def test_short_answers_are_not_each_opened_to_a_drafter_that_never_pays() -> None:
    """A draft model half as dear as its target, which takes five forwards to read a prompt, and 48 tokens each."""
    policy = adaptive(TableCost(steep), 16)
    hopeless = Drafting(rate=0.1, score=0.7, node_seconds=0.5, opening_seconds=5.0)

    def answer(number: int, drafting: Drafting, tokens: int) -> Run:
        run = simulate(policy, drafting, steep, tokens, view=SequenceView(number), seed=number)
        policy.release(number)
        return run

    runs = [answer(number, hopeless, 48) for number in range(60)]
    assert sum(run.tokens for run in runs[2:]) / sum(run.seconds for run in runs[2:]) > 0.93
    assert 1 < sum(any(run.sizes) for run in runs[2:]) < 40
    good = Drafting(rate=0.98, score=0.7, node_seconds=0.05, opening_seconds=5.0)
    later = [answer(number, good, 200) for number in range(100, 110)]
    assert later[-1].speed > 2, "but it is found out when it does"


def test_what_earlier_answers_gained_carries_a_drafter_over_first_misses() -> None:
    """A draft head that is right every other time, and short answers: most begin with a miss or two."""

    def forward(rows: int) -> float:
        return 1.0 + 0.08 * (rows - 1)

    policy = adaptive(TableCost(forward), 16)
    head = Drafting(rate=0.5, score=0.5, step_seconds=0.2, opening_seconds=1.5)
    runs = []
    for number in range(60):
        runs.append(simulate(policy, head, forward, 64, view=SequenceView(number), seed=number))
        policy.release(number)
    later = runs[20:]
    best = max(goodput(0.5, lambda rows: forward(rows) + 0.2, size) for size in range(1, 5))
    assert sum(run.tokens for run in later) / sum(run.seconds for run in later) > 1 + 0.7 * (best - 1)


_KNOWN = Needs(expected=0.7)  # of a drafter whose card says how often it was right on held-out texts
_HEAD = Needs(taps=(1, 2), expected=0.6)  # of a draft head with a card


def test_a_head_that_was_right_on_held_out_texts_drafts_from_the_start() -> None:
    """Right every other time, and a draft at a third of a forward: the very first answers are as quick as may be."""
    head = Drafting(rate=0.5, score=0.5, step_seconds=0.3)
    runs = []
    for seed in range(40):
        policy = adaptive(TableCost(memory_bound), 16, _HEAD)
        runs.append(simulate(policy, head, memory_bound, 64, seed=seed))
    best = max(goodput(0.5, lambda rows: memory_bound(rows) + 0.3, size) for size in range(1, 5))
    assert sum(run.tokens for run in runs) / sum(run.seconds for run in runs) > 1 + 0.7 * (best - 1)


def test_a_head_that_is_wrong_here_loses_a_few_tokens_once() -> None:
    """Whatever its card says."""
    policy, wrong = adaptive(TableCost(memory_bound), 16, _HEAD), Drafting(rate=0.0, score=0.5, step_seconds=0.3)
    runs = [simulate(policy, wrong, memory_bound, 400, view=SequenceView(number)) for number in range(4)]
    assert runs[0].seconds < 400 + 1.5 * LENT
    assert sum(run.seconds for run in runs[1:]) < 1.02 * 1200


def test_a_drafter_that_reads_states_sees_the_step_before_it_drafts() -> None:
    """The step that reads the prompt is the first of these, and after a pause there is another."""
    policy, view = adaptive(TableCost(memory_bound), 4, _HEAD), SequenceView(0)
    wrong = trees.chain([0, 0], "toy", [0.5, 0.5])
    seen: list[tuple[int, bool]] = []
    inactive = 0
    for _ in range(60):
        called = not inactive
        (nodes,), inactive, _, watching = policy.plan([view]) if called else Budgets([0], inactive - 1)
        seen.append((nodes, any(watching)))
        draft = trimmed(policy, view, wrong) if nodes else NO_DRAFT
        view.tokens.append(1)
        if called:
            policy.learn([view], [draft], [0], spent(0.3 * bool(nodes), 1.0, 1 + len(draft), view))
    begins = [step for step in range(1, 60) if seen[step][0] and not seen[step - 1][0]]
    assert len(begins) > 1
    assert all(seen[step - 1] == (0, True) for step in begins)
    assert seen[0] == (0, True)


def drafted(policy: Router, number: int, length: int, *, most: int | None = None) -> bool:
    """Whether a good drafter that takes ten forwards to read the prompt drafts in an answer of such a length.

    The request names the limit ``most``, or just that length.
    """
    good = Drafting(rate=0.7, score=0.7, step_seconds=0.1, opening_seconds=10.0)
    request = replace(REQUEST, params=SamplingParams(max_tokens=most or length))
    view = SequenceView(number, request, tokens=[1] * 500, prompt_length=500)
    run = simulate(policy, good, steep, length, view=view, seed=number)
    policy.release(number)
    return any(run.sizes)


def test_a_prompt_is_not_read_for_an_answer_too_short_to_save_that_time() -> None:
    """A good drafter takes ten forwards to read a prompt: it does for answers of 200 tokens, not for those of 8."""
    policy = adaptive(TableCost(steep), 16)
    assert all(drafted(policy, number, 200) for number in range(8))
    assert sum(drafted(policy, number, 8) for number in range(8, 28)) <= 2
    assert drafted(policy, 28, 200)


def test_how_long_answers_were_says_whether_a_prompt_is_read_where_no_limit_does() -> None:
    policy = adaptive(TableCost(steep), 16)
    assert all(drafted(policy, number, 200, most=4000) for number in range(4))
    assert sum(drafted(policy, number, 4, most=4000) for number in range(4, 34)) <= 20
    assert not any(drafted(policy, number, 4, most=4000) for number in range(34, 64))
    assert drafted(policy, 64, 200, most=4000), "one that goes on is drafted for, though the others were short"


def test_a_drafter_that_is_right_only_later_is_trusted_within_a_few_probes() -> None:
    late = frozenset(range(100, 400))
    run = simulate(adaptive(TableCost(steep), 16), Drafting(0.0, 0.7, right_at=late), steep, 400)
    assert run.speed > 2
    early = simulate(adaptive(TableCost(steep), 16), Drafting(0.0, 0.7, right_at=late), steep, 100)
    assert early.speed > 0.985


def test_a_long_copy_that_was_wrong_once_is_trusted_again_within_a_few_tokens() -> None:
    """A step without a draft shows one token of a long proposal, so a right one earns credit, for short drafts first.

    Charged for all its nodes, no long proposal could have gained, and the rest of the text was decoded plainly.
    """

    def dear(rows: int) -> float:
        return 1 + 0.2 * (rows - 1)

    policy = Router(TableCost(dear), [Arm("copy", 63, replayable=True)])
    for number in range(12):
        simulate(policy, Drafting(1.0, 0.7), dear, 400, view=SequenceView(number))
        policy.release(number)
    once_wrong = Drafting(0.0, 0.7, right_at=frozenset(range(1, 400)))
    run = simulate(policy, once_wrong, dear, 200, view=SequenceView(12))
    assert run.sizes[0] == 63
    assert run.sizes[1:6] == sorted(run.sizes[1:6])
    assert run.speed > 3


def test_a_pause_looks_up_hardly_any_costs() -> None:
    """A step without a draft costs its forward: the policy is seldom asked, and with an empty purse needs no costs."""
    cost = TableCost(steep)
    policy = adaptive(cost, 16)
    drafting = Drafting(rate=0.0, score=0.7)
    view = SequenceView(0)
    simulate(policy, drafting, steep, 50, view=view)
    cost.asked = 0
    run = simulate(policy, drafting, steep, 400, view=view)
    assert sum(map(bool, run.sizes)) < 12
    assert run.asked < 20, "most steps do not even ask the policy"
    assert cost.asked < 40


def test_costs_that_change_in_a_pause_are_seen() -> None:
    """Rows cost a forward each, and later nothing: the plan that stood is made anew."""
    price = [1.0]
    policy = adaptive(TableCost(lambda rows: 1 + price[0] * (rows - 1)), 8)
    view = SequenceView(0)
    for _ in range(4):
        assert policy.plan([view]).nodes == [0]
    price[0] = 0.0
    assert max(policy.plan([view]).nodes[0] for _ in range(16)) == 4


def goodput(rate: float, forward: Forward, size: int) -> float:
    return sum(rate**depth for depth in range(size + 1)) / forward(1 + size)


@pytest.mark.parametrize("rate", [0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    "forward",
    [
        lambda rows: 1 + 0.1 * (rows - 1),
        lambda rows: 1 + 0.02 * (rows - 1) + max(0, rows - 5),  # a step up beyond five rows
        lambda rows: 3.0 + 0.2 * rows**1.5,
    ],
)
def test_the_size_is_that_of_the_best_goodput(rate: float, forward: Forward) -> None:
    """(1 + a + ... + a^k) / v(1 + k) over the synthetic table, scores and depth known; within one node of the best."""
    sizes = range(17)
    best = max(sizes, key=lambda size: goodput(rate, forward, size))
    drafting = Drafting(rate=rate, score=rate)
    found = simulate(adaptive(TableCost(forward), 16), drafting, forward, 4000).sizes[200:]
    assert abs(max(set(found), key=found.count) - best) <= 1


def test_probes_of_a_wrong_drafter_get_rare() -> None:
    """The wait doubles: a thousand steps see no more than a handful of probes of two nodes."""
    policy = adaptive(TableCost(lambda rows: 1 + 0.1 * (rows - 1)), 32)
    sizes = simulate(policy, Drafting(rate=0.0, score=0.9), memory_bound, 1200).sizes[200:]
    assert 1 <= sum(map(bool, sizes)) <= 6
    assert max(sizes) == 2


def test_a_second_request_to_a_wrong_drafter_costs_even_less() -> None:
    policy = adaptive(TableCost(memory_bound), 32)
    drafting = Drafting(rate=0.0, score=0.9, node_seconds=0.05)
    first = simulate(policy, drafting, memory_bound, 200, view=SequenceView(0))
    second = simulate(policy, drafting, memory_bound, 200, view=SequenceView(1))
    assert first.speed < second.speed
    assert second.speed > 0.99


@pytest.mark.parametrize("score", [0.5, 0.9])
def test_a_strong_drafter_gets_its_whole_budget_within_six_steps(score: float) -> None:
    policy = adaptive(TableCost(memory_bound), 16)
    assert simulate(policy, Drafting(rate=1.0, score=score), memory_bound, 200).sizes[6] == 16


def test_free_verification_takes_the_whole_budget() -> None:
    policy = adaptive(TableCost(free), 16)
    assert set(simulate(policy, Drafting(rate=0.5, score=0.5), free, 400).sizes[20:]) == {16}


def test_nothing_is_drafted_when_each_row_costs_a_forward() -> None:
    policy = adaptive(TableCost(compute_bound), 16)
    run = simulate(policy, Drafting(rate=0.8, score=0.8), compute_bound, 1000)
    assert sum(run.sizes) < 0.02 * run.tokens
    assert run.speed > 0.98


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("node_seconds", [0.0, 0.1])
def test_speed_comes_close_to_the_best_fixed_budget(rate: float, node_seconds: float) -> None:
    """The best budget is picked with hindsight; the policy pays for finding out, and its pauses and probes."""
    drafting = Drafting(rate=rate, score=rate, node_seconds=node_seconds)
    budgets = (0, 1, 2, 3, 4, 6, 8, 12, 16)
    best = max(simulate(Fixed(budget), drafting, memory_bound, 4000).speed for budget in budgets)
    policies = [adaptive(TableCost(memory_bound), 16) for _ in range(4)]
    runs = [simulate(policy, drafting, memory_bound, 1000, seed=seed) for seed, policy in enumerate(policies)]
    assert sum(run.speed for run in runs) / 4 > 0.92 * best


@pytest.mark.parametrize("score", [0.2, 0.6, 0.95])
def test_wrong_scores_are_put_right(score: float) -> None:
    """A drafter that misjudges itself does nearly as well as one that does not."""
    honest = simulate(adaptive(TableCost(memory_bound), 16), Drafting(0.8, 0.8), memory_bound, 3000)
    wrong = simulate(adaptive(TableCost(memory_bound), 16), Drafting(0.8, score), memory_bound, 3000)
    assert wrong.speed > 0.93 * honest.speed


def test_a_drafter_that_becomes_good_is_found_again() -> None:
    policy = adaptive(TableCost(memory_bound), 16)
    view = SequenceView(0)
    simulate(policy, Drafting(rate=0.0, score=0.8, node_seconds=0.05), memory_bound, 300, view=view)
    later = simulate(policy, Drafting(rate=0.95, score=0.8, node_seconds=0.05), memory_bound, 1500, view=view)
    assert later.speed > 2


def test_copying_now_and_then_is_nearly_as_quick_as_with_a_fixed_budget() -> None:
    drafting = Drafting(rate=0.93, score=0.9, covers=0.6)
    fixed = simulate(Fixed(16), drafting, memory_bound, 3000)
    run = simulate(adaptive(TableCost(memory_bound), 16), drafting, memory_bound, 3000)
    assert run.tokens / run.steps > 0.9 * fixed.tokens / fixed.steps


def test_a_drafter_without_matches_costs_nothing() -> None:
    policy = adaptive(TableCost(memory_bound), 16)
    assert simulate(policy, Drafting(rate=0.9, score=0.9, covers=0.0), memory_bound, 100).speed == 1


def warm(policy: Router, rate: float, score: float) -> None:
    simulate(policy, Drafting(rate, score), memory_bound, 2000, view=SequenceView(99))


def test_a_tree_keeps_its_likeliest_nodes_and_their_ancestors() -> None:
    """Chances are products along the path, so a deep sure path beats a shallow unlikely sibling."""
    policy = adaptive(TableCost(lambda rows: 1 + 0.15 * (rows - 1)), 8)
    warm(policy, 0.9, 0.9)
    tree = Tree((1, 2, 3, 4), (-1, -1, 0, 2))
    draft = Draft(tree, sources=("toy",) * 4, scores=(0.9, 0.05, 0.9, 0.9))
    view = SequenceView(0)
    policy.plan([view])
    assert trimmed(policy, view, draft).tree == Tree((1, 3, 4), (-1, 0, 1))


def test_a_tree_learns_from_the_path_that_was_committed() -> None:
    """The second child is the one that is always accepted: the first must lose its place."""
    policy = adaptive(TableCost(memory_bound), 8)
    view = SequenceView(0)
    draft = Draft(Tree((1, 2), (-1, -1)), sources=("toy",) * 2, scores=(0.85, 0.15))
    for _ in range(80):
        policy.plan([view])
        kept = trimmed(policy, view, draft)
        accepted = int(2 in kept.tree.tokens)
        view.tokens += [2, 9] if accepted else [9]
        policy.learn([view], [kept], [accepted], Spent(0.0, 1.0, 1 + len(kept), 10))
    expensive = adaptive(TableCost(lambda rows: 1 + 0.3 * (rows - 1)), 8)
    expensive._arms[0].calibration = policy._arms[0].calibration
    expensive.plan([view])
    assert trimmed(expensive, view, draft).tree.tokens == (2,)


def test_one_batch_shares_its_rows_by_chance() -> None:
    """With rows to spare for one only, the sequence whose draft is surer gets them."""
    policy = adaptive(TableCost(lambda rows: 2 + 0.5 * max(0, rows - 2)), 4, _KNOWN)
    views = [SequenceView(0), SequenceView(1)]
    policy.plan(views)
    sure, unsure = trees.chain([1, 2], "toy", [0.95, 0.95]), trees.chain([1, 2], "toy", [0.3, 0.3])
    assert [len(draft) for draft in verified(policy, views, [unsure, sure])] == [0, 2]


def test_drafts_that_go_on_being_right_are_not_weighed_each_time() -> None:
    cost = TableCost(steep)
    policy = adaptive(cost, 16)
    view = SequenceView(0)
    simulate(policy, Drafting(rate=1.0, score=0.9), steep, 400, view=view)
    cost.asked = 0
    run = simulate(policy, Drafting(rate=1.0, score=0.9), steep, 1700, view=view)
    assert set(run.sizes[5:]) == {16}
    assert cost.asked < 12 * run.steps, "weighing one draft takes twenty looks alone"


def test_an_unsure_draft_after_sure_ones_is_weighed() -> None:
    """Long copies held to their ends; then a draft comes that says of itself that it is a guess."""
    policy = adaptive(TableCost(lambda rows: 1 + 0.1 * (rows - 1)), 16)
    view = SequenceView(0)

    def step(score: float) -> int:
        budget = policy.plan([view]).nodes[0]
        kept = trimmed(policy, view, trees.chain([7] * budget, "toy", [score] * budget))
        view.tokens += [7] * len(kept) + [1]
        policy.learn([view], [kept], [len(kept)], spent(0.0, 1.0, 1 + len(kept), view))
        return len(kept)

    assert [step(0.97) for _ in range(30)][-1] == 16
    assert step(0.2) < 8


@pytest.mark.parametrize(("score", "stays"), [(0.9, True), (0.8, False)])
def test_nodes_that_do_not_pay_stay_above_probes_that_do(score: float, *, stays: bool) -> None:
    """The last nodes of a chain cost more than they may bring. Below them hang probes, without which the next step has
    no draft: they are worth more than their rows, unless the walk hardly ever ends there.
    """
    policy, view = adaptive(TableCost(lambda rows: 1 + 0.2 * (rows - 1)), 16), SequenceView(0)
    for _ in range(40):
        budget = policy.plan([view]).nodes[0]
        kept = trimmed(policy, view, trees.chain([7] * budget, "toy", [0.97] * budget))
        view.tokens += [7] * len(kept) + [1]
        policy.learn([view], [kept], [len(kept)], spent(0.0, 1.0, 1 + len(kept), view))
    chain = trees.chain([1] * 10, "toy", [score] * 10)
    probed = with_probes(chain, [0] * 10 + [2], "toy")
    policy.plan([view])
    assert len(trimmed(policy, view, chain)) < 9
    policy.plan([view])
    left = trimmed(policy, view, probed)
    assert left.tree == probed.tree if stays else left.probes == 0


def test_drawn_drafts_and_probe_rows_are_never_trimmed() -> None:
    """Nodes that cost more than they may bring are drawn ones, and others beside probes."""
    policy = adaptive(TableCost(lambda rows: 1 + 0.3 * (rows - 1)), 8, _KNOWN)
    views = [SequenceView(0), SequenceView(1)]
    drawn = Draft(Tree((1, 1), (-1, -1)), kind="iid", sources=("toy",) * 2, scores=(0.01, 0.01))
    probing = Draft(Tree((1, 2), (-1, -1)), sources=("toy",) * 2, scores=(0.01, 0.01), probes=1)
    assert min(policy.plan(views).nodes) > 0
    kept = verified(policy, views, [drawn, probing])
    assert kept[0] is drawn
    assert (kept[1].tree.tokens, kept[1].probes) == ((2,), 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.001, 0.999)), min_size=1, max_size=6))
def test_nothing_that_was_drawn_decides_whether_a_drawn_draft_is_verified(nodes: list[tuple[int, float]]) -> None:
    """Neither its tokens nor their scores, and not how many there are: else the text's distribution would change."""
    policy = adaptive(TableCost(lambda rows: 1 + 0.3 * (rows - 1)), 8)
    tokens, scores = zip(*nodes, strict=True)
    drawn = Draft(trees.chain_tree(tokens), kind="iid", sources=("toy",) * len(nodes), scores=scores)
    view = SequenceView(0)
    assert policy.plan([view]).nodes[0] > 0
    assert trimmed(policy, view, drawn) is drawn


def test_a_crowd_of_other_rows_ends_drafting_but_one_prompt_does_not() -> None:
    """Rows are nearly free up to eight and cost a forward each beyond."""
    policy = adaptive(TableCost(lambda rows: 1 + 0.01 * rows + max(0, rows - 8)), 4)
    view = SequenceView(0)
    draft = trees.chain([1] * 4, "toy", [0.8] * 4)

    def step(others: int) -> int:
        policy.plan([view])
        kept = trimmed(policy, view, draft)
        view.tokens += [1] * len(kept) + [2]
        policy.learn([view], [kept], [len(kept)], Spent(0.0, 1.0, 1 + len(kept) + others, len(view.tokens)))
        return len(kept)

    assert [step(others) for others in (0, 0, 500, 0, 0)] == [4] * 5
    assert [step(others) for others in (500, 500, 500, 500)][-1] == 0
    assert [step(others) for others in (0, 0, 0)][-1] == 4


def test_no_budget_is_plain_decoding() -> None:
    view = SequenceView(0)
    for policy in (
        Plain(),
        adaptive(TableCost(memory_bound), 0),
        make_policy("fixed", 0, TableCost(free), NOTHING_NEEDED),
    ):
        assert policy.plan([view]).nodes == [0]
        assert policy.trim([view], [NO_DRAFT]) == [NO_DRAFT]


def test_policies_by_name() -> None:
    assert make_policy("fixed", 5, TableCost(free), NOTHING_NEEDED).plan([SequenceView(0)]).nodes == [5]
    assert make_policy("adaptive", 5, TableCost(free), NOTHING_NEEDED).plan([SequenceView(0)]).nodes == [4]


def simulate_with_probes(policy: Router, rate: float, probes: int, tokens: int, seed: int = 0) -> Run:
    """One sequence whose drafter carries probes on top of its nodes, and finds nodes only once probes have run."""
    coin = random.Random(seed)
    view, run, filled = SequenceView(0), Run(), 0
    while run.tokens < tokens:
        budget = policy.plan([view]).nodes[0]
        nodes = min(budget, 4) if filled >= 3 else 0
        right = 0
        while right < nodes and coin.random() < rate:
            right += 1
        draft = NO_DRAFT
        if budget:
            parents = (*range(-1, nodes - 1), *(-1 for _ in range(probes)))
            tree = Tree((0,) * len(parents), parents)
            draft = Draft(tree, sources=("toy",) * len(tree), scores=(0.5,) * len(tree), probes=probes)
            draft = trimmed(policy, view, draft)
            filled += 1
        accepted = min(right, len(draft) - draft.probes)
        view.tokens += [0] * accepted + [int(accepted == right)]
        seconds = memory_bound(1 + len(draft))
        policy.learn([view], [draft], [accepted], spent(0.0, seconds, 1 + len(draft), view))
        run.tokens += accepted + 1
        run.steps += 1
        run.seconds += seconds
        run.sizes.append(len(draft))
    return run


@pytest.mark.parametrize("probes", [8, 40])
def test_probes_that_never_pay_cost_less_than_three_percent(probes: int) -> None:
    """Their rows are free of nothing: nodes that cost no row still come with the window that finds them."""
    policy = adaptive(TableCost(memory_bound), 16)
    assert simulate_with_probes(policy, 0.0, probes, 1500).speed > 0.97


def test_probes_whose_nodes_are_accepted_are_kept_on() -> None:
    policy = adaptive(TableCost(memory_bound), 16)
    run = simulate_with_probes(policy, 0.9, 8, 1500)
    assert run.speed > 2
    assert sum(size >= 8 for size in run.sizes) > 0.95 * run.steps
