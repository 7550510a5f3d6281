"""The router against simulated drafters: it ends up with what pays, at a bounded price, and follows changes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import fmean

import pytest

from parlay.router.arms import Arm, ArmState
from parlay.router.router import Router
from parlay.router.saved_state import KeptArm
from parlay.types import trees
from tests.router.simulated_arms import Machine, SimulatedArm, TableCost
from tests.router.views import SequenceView


def always(rate: float) -> SimulatedArm:
    return SimulatedArm(rate=lambda length: rate)


COPY = replace(always(0.9), replayable=True, most=31, score=0.9)
RARE_COPY = replace(COPY, finds=lambda length: 0.05)
NO_COPY = replace(COPY, rate=lambda length: 0.0)
HEAD = replace(always(0.6), step_seconds=0.2, node_seconds=0.05, opening_seconds=1.0, most=8)
POOR_HEAD = replace(HEAD, rate=lambda length: 0.15)
"""It costs a quarter of a forward and more, and gains less."""
MODEL = replace(always(0.8), step_seconds=0.3, node_seconds=0.1, opening_seconds=2.0, most=8)


def speed(*arms: SimulatedArm, tokens: int = 400, seeds: int = 6, sequences: int = 1) -> float:
    """Tokens per second over plain decoding's, over fresh routers."""
    plain = sequences / TableCost().forward(sequences, 0)
    return fmean(Machine(arms, seed=seed).decode(tokens, sequences).speed for seed in range(seeds)) / plain


@pytest.mark.parametrize("arms", [(NO_COPY,), (POOR_HEAD,), (NO_COPY, POOR_HEAD), (NO_COPY, NO_COPY, POOR_HEAD)])
def test_drafters_that_never_pay_cost_less_than_two_percent_and_a_half(arms: tuple[SimulatedArm, ...]) -> None:
    assert speed(*arms) > 0.975


PAIRS = [(COPY, POOR_HEAD), (NO_COPY, HEAD), (POOR_HEAD, HEAD), (POOR_HEAD, MODEL), (HEAD, MODEL), (NO_COPY, MODEL)]
LOADS = [(1, 4), (1, 16)]
"""Of the two drafters each pair is tried alone, and every other pair with four sequences or with sixteen."""


@pytest.mark.parametrize(
    ("arms", "sequences"), [(arms, count) for place, arms in enumerate(PAIRS) for count in LOADS[place % 2]]
)
def test_the_best_of_several_is_found(arms: tuple[SimulatedArm, ...], sequences: int) -> None:
    """In 800 tokens of a router that knew nothing: within five percent of the best alone, known in hindsight only."""
    best = max(speed_alone(arm, sequences) for arm in arms)
    assert speed(*arms, tokens=800, seeds=seeds_of(sequences), sequences=sequences) > 0.95 * max(1.0, best)


@cache
def speed_alone(arm: SimulatedArm, sequences: int) -> float:
    """Of one arm in the test above, where each is one of several."""
    return speed(arm, tokens=800, seeds=seeds_of(sequences), sequences=sequences)


def seeds_of(sequences: int) -> int:
    """A run of several sequences is a mean over as many already."""
    return 3 if sequences == 1 else 1


def test_copying_where_there_is_something_to_copy_and_a_head_elsewhere_beats_both() -> None:
    both = speed(RARE_COPY, HEAD)
    assert both > 1.05 * max(speed(RARE_COPY), speed(HEAD))


def test_a_head_with_a_card_drafts_from_the_first_answer_on() -> None:
    """It is right in half of the cases, as its card says, and costs a third of a forward. Without a card it must first
    gain something. It is never asked without having seen the step before, where it would fail.
    """
    known = replace(always(0.5), step_seconds=0.3, expected=0.5, sees_first=True)
    copying = SimulatedArm(lambda length: 0.5, replayable=True, finds=lambda length: 0.05)
    first = [
        Machine([copying, arm], seed=seed).decode(64).speed
        for arm in (known, replace(known, expected=0.0))
        for seed in range(100)
    ]
    assert fmean(first[:100]) > 1.04
    assert fmean(first[:100]) > fmean(first[100:])


def test_a_head_that_begins_to_pay_after_a_pause_is_found() -> None:
    late = SimulatedArm(lambda length: 0.9 * (length > 100), step_seconds=0.1, sees_first=True)
    runs = [Machine([late], seed=seed).decode(400) for seed in range(6)]
    assert all(run.verified["0"] > 10 for run in runs)
    assert fmean(run.speed for run in runs) > 1.7


def test_short_copies_that_are_verified_every_few_steps_put_off_no_trial_of_a_head() -> None:
    """The head is never right in the first hundred tokens, then nearly always. Copies of a token go on all along."""
    copies = replace(always(0.5), replayable=True, most=2, score=0.5, finds=lambda length: 0.5)
    head = replace(HEAD, rate=lambda length: 0.9 * (length > 100), sees_first=True)
    for seed in range(6):
        run = Machine((copies, head), seed=seed).decode(400)
        assert run.verified["0"] > 10
        assert run.verified["1"] > 10


def test_a_change_of_regime_is_followed_within_twelve_steps() -> None:
    """Prose that a head drafts, then a copied document: within five percent of hindsight, but for twelve steps."""
    copied = range(200, 400)
    copy = replace(COPY, rate=lambda length: 0.97 if length in copied else 0.0)
    for seed in range(12):
        mixed, alone = Machine((copy, HEAD), seed=seed).decode(400), Machine((copy,), seed=seed).decode(400)
        assert steps_in(mixed.lengths, copied) <= 1.05 * steps_in(alone.lengths, copied) + 12


def passed(lengths: list[int], tokens: int) -> int:
    """The first step after which the text is so long."""
    return next(step for step, length in enumerate(lengths) if length >= tokens)


def steps_in(lengths: list[int], part: range) -> int:
    return passed(lengths, part.stop) - passed(lengths, part.start)


@pytest.mark.parametrize("drafter", [COPY, HEAD], ids=["copy", "head"])
def test_a_drafter_that_dies_is_dropped_within_two_steps(drafter: SimulatedArm) -> None:
    runs = [Machine((replace(drafter, dies_at=40), NO_COPY), seed=seed).decode(400) for seed in range(12)]
    assert fmean(sum(0 in asks for asks in run.asked[:40]) for run in runs) > 20
    assert all(sum(0 in asks for asks in run.asked[40:]) <= 2 for run in runs)


def test_a_drafter_that_slows_down_is_dropped_within_two_steps() -> None:
    """From a fifth of a forward to three forwards, where it gains less than one."""
    machine = Machine((replace(HEAD, slows=lambda step: 1.0 if step < 60 else 15.0),))
    run = machine.decode(400)
    assert sum(map(bool, run.asked[:60])) > 30
    assert sum(map(bool, run.asked[60:64])) <= 2
    assert sum(map(bool, run.asked[64:])) <= 0.1 * len(run.asked[64:]), "trials find out whether it has recovered"


@pytest.mark.parametrize("factor", [0.0, 1e6])
def test_a_clock_that_jumps_changes_nothing_for_long(factor: float) -> None:
    """One proposal that seems to take no time, or a week."""
    jump = replace(HEAD, slows=lambda step: factor if step == 60 else 1.0)
    seconds = Machine((HEAD,)).decode(600)
    jumped = Machine((jump,)).decode(600)
    assert jumped.steps <= 1.03 * seconds.steps


def test_sequences_in_which_copies_do_not_pay_are_asked_in_the_same_steps() -> None:
    """So in most steps nothing is planned, although the requests came one after another."""
    machine = Machine((NO_COPY,))
    views = [SequenceView(number) for number in range(16)]
    for joined in range(1, 16):
        machine.step(views[:joined])
        machine.pause = 0  # an engine asks again when a request joins
    for _ in range(400):
        machine.step(views)
    late = [sum(asks.values()) for asks in machine.run.asked[-200:]]
    assert late.count(16) >= 10, "all are still asked"
    assert sum(asked > 0 for asked in late) <= 1.1 * late.count(16), "and together"


def test_what_pays_at_one_load_and_not_at_another_is_known_by_load() -> None:
    """A head pays alone and costs at sixteen: one router meets both in turn."""
    machine, plain = Machine((HEAD,)), TableCost().forward(16, 0)
    alone: list[float] = []
    crowd: list[float] = []
    for turn in range(6):
        alone.append(tokens_per_second(machine, 200, 1, first=100 * turn))
        crowd.append(tokens_per_second(machine, 200, 16, first=100 * turn + 1) / (16 / plain))
    assert min(crowd[1:]) > 0.97
    assert fmean(alone) > 1.25, "what it costs at sixteen says nothing of one"


def tokens_per_second(machine: Machine, tokens: int, sequences: int, first: int) -> float:
    """Of this part of the machine's run."""
    before = machine.run.seconds
    machine.decode(tokens, sequences, first)
    return tokens * sequences / (machine.run.seconds - before)


def test_drafters_that_are_as_good_do_not_take_turns() -> None:
    """Switching costs catching up; equals give no reason for it."""
    run = Machine((HEAD, HEAD)).decode(600)
    choices = [min(asks) for asks in run.asked if asks]
    assert sum(one != other for one, other in pairwise(choices)) <= 0.15 * len(choices)


def free(rows: int) -> float:
    return 1.0


def regret(arms: tuple[SimulatedArm, ...], best: float, steps: int, seeds: int) -> list[float]:
    """After each step: tokens that always drafting with the best arm would have brought beyond, mean over seeds."""
    lost = [0.0] * steps
    for seed in range(seeds):
        machine, view = Machine(arms, TableCost(free), seed=seed), SequenceView(seed)
        for step in range(steps):
            machine.step([view])
            lost[step] += (best * (step + 1) - (len(view.tokens) - 1)) / seeds
    return lost


def tokens_per_step(rate: float, nodes: int) -> float:
    return sum(rate**depth for depth in range(nodes + 1))


RATES, NODES, STEPS, SEEDS, SLACK = (0.2, 0.5, 0.8), 4, 80, 100, 1.5


def test_regret_among_replayable_drafters_stays_below_the_curve_of_hedge() -> None:
    """range * sqrt(T ln K / 2), with a slack of a half."""
    arms = tuple(
        replace(always(rate), replayable=True, most=NODES, score=rate, step_seconds=0.0) for rate in RATES
    )  # fmt: skip
    lost = regret(arms, tokens_per_step(max(RATES), NODES), STEPS, SEEDS)
    curve = [NODES * math.sqrt((step + 1) * math.log(len(RATES)) / 2) for step in range(STEPS)]
    assert all(one <= SLACK * most for one, most in zip(lost, curve, strict=True))


def test_regret_among_drafters_that_must_be_tried_stays_below_the_curve_of_ucb() -> None:
    """The sum over worse arms of 8 ln T / gap + (1 + pi^2 / 3) gap, in units of the range, with a slack of a half."""
    arms = tuple(replace(always(rate), most=NODES, step_seconds=0.0) for rate in RATES)
    means = [tokens_per_step(rate, NODES) / NODES for rate in RATES]
    gaps = [max(means) - mean for mean in means if mean < max(means)]
    lost = regret(arms, tokens_per_step(max(RATES), NODES), STEPS, SEEDS)
    for step in range(1, STEPS):
        curve = NODES * sum(8 * math.log(step + 1) / gap + (1 + math.pi**2 / 3) * gap for gap in gaps)
        assert lost[step] <= SLACK * curve


PLAIN_TEXT = (replace(COPY, rate=lambda length: 0.02, finds=lambda length: 0.3), HEAD)
EDITS = (COPY, replace(HEAD, rate=lambda length: 0.1))


def seconds_of_turns(kinds: tuple[str, str], seed: int) -> float:
    """Short requests for prose and edits in turn, after the first of each; what the router is told of them varies."""
    machine = Machine(PLAIN_TEXT, seed=seed)
    for number in range(8):
        machine.arms = (PLAIN_TEXT, EDITS)[number % 2]
        if number == 2:
            began = machine.run.seconds
        machine.decode(60, first=number, kind=kinds[number % 2])
    return machine.run.seconds - began


def test_requests_of_a_kind_begin_with_what_paid_for_others_of_it() -> None:
    told = sum(seconds_of_turns(("prose", "edit"), seed) for seed in range(24))
    untold = sum(seconds_of_turns(("", ""), seed) for seed in range(24))
    mixed_up = sum(seconds_of_turns(("edit", "edit"), seed) for seed in range(24))
    assert told < 0.97 * untold
    assert mixed_up < 1.01 * untold, "a kind that says nothing costs nothing"


def test_a_head_for_a_kind_of_requests_is_asked_for_these_alone() -> None:
    machine = Machine((HEAD, replace(always(0.85), step_seconds=0.2, node_seconds=0.05, most=8, domain="code")))
    machine.decode(200, kind="prose")
    assert "1" not in machine.run.verified
    steps = machine.run.steps
    machine.decode(200, first=1, kind="code")
    assert machine.run.verified["1"] > 0.8 * (machine.run.steps - steps)


@pytest.mark.parametrize(("rate", "least"), [(0.8, 2.0), (0.05, 0.975)], ids=["pays", "never pays"])
def test_short_answers_pay_off_prompts_that_a_drafter_has_read(rate: float, least: float) -> None:
    """Each is over before the router is active again. The first prompt takes long, as where a model wakes up."""
    arm = replace(always(rate), step_seconds=0.2, opening_seconds=4.0, most=8)
    machine = Machine((arm,))
    machine.decode(10)
    machine.arms = (replace(arm, opening_seconds=0.3),)
    tokens, seconds = machine.run.tokens, machine.run.seconds
    for number in range(1, 200):
        machine.decode(10, first=number)
    assert (machine.run.tokens - tokens) / (machine.run.seconds - seconds) > least


def test_a_long_prompt_is_not_read_by_a_head_where_answers_turn_out_short() -> None:
    """Reading takes as long as ten forwards. No request says how long its answer may become."""
    machine = Machine((replace(HEAD, opening_seconds=10.0, expected=0.6),))

    def is_asked(number: int, length: int) -> bool:
        view, before = SequenceView(number, tokens=[1] * 500, prompt_length=500), len(machine.run.asked)
        while len(view.tokens) - 500 < length:
            machine.step([view])
        machine.router.release(number)
        return any(machine.run.asked[before:])

    assert is_asked(0, 200)
    short = [is_asked(number, 4) for number in range(1, 41)]
    assert not any(short[20:])
    assert is_asked(41, 200), "one that goes on is drafted for"


@pytest.mark.parametrize("seconds", [300.0, 3000.0])
def test_a_prompt_that_took_long_to_read_once_ends_no_drafting(seconds: float) -> None:
    """A model's pages came from a disk, or the machine slept: other prompts are read soon."""
    machine = Machine((MODEL,))
    machine.arms = [replace(MODEL, opening_seconds=seconds)]
    machine.decode(200)
    machine.arms, before = [MODEL], machine.run.verified["0"]
    for number in range(1, 6):
        machine.decode(200, first=number)
    usual = Machine((MODEL,))
    for number in range(6):
        usual.decode(200, first=number)
    assert machine.run.verified["0"] - before >= 0.6 * usual.run.verified["0"] * 5 / 6


AHEAD = replace(always(0.95), ahead=16, step_seconds=0.01, most=12, score=0.95)
"""Its drafts are guessed by 16 rows of the step before: with `TableCost` these alone cost .64 of a forward."""


@pytest.mark.parametrize("share", [None, 0.5, 0.9], ids=["unknown", "half", "most"])
def test_a_drafter_that_guesses_ahead_is_used_in_short_answers(share: float | None) -> None:
    """Its first rows in an answer can only lose. What they guess is verified all the same, whatever is remembered."""
    machine = Machine([AHEAD])
    if share is not None:
        machine.router = Router(machine.cost, [Arm("0", AHEAD.most)], {"0": remembered(share)})
    for number in range(60):
        machine.decode(20, first=number)
    assert machine.run.speed > 3


def test_a_drafter_that_guesses_ahead_is_used_by_several_at_once() -> None:
    machine = Machine([replace(AHEAD, ahead=6, most=8, rate=lambda length: 0.9)])
    for number in range(0, 32, 4):
        machine.decode(60, sequences=4, first=number)
    assert machine.run.speed > 1.7 * 4 / machine.cost.forward(4, 0)


def test_a_drafter_that_guesses_ahead_is_found_where_each_step_has_a_copy() -> None:
    """It needs two steps in a row, so its trials take the place of copies, which are right half of the time."""
    copy = replace(always(0.5), replayable=True, most=10, score=0.5)
    machine = Machine([copy, replace(AHEAD, rate=lambda length: 0.98)])
    for number in range(60):
        machine.decode(30, first=number)
    assert machine.run.verified["1"] > 2 * machine.run.verified["0"]


def test_a_drafter_that_guesses_ahead_drafts_enough_from_the_first_to_pay_for_its_rows() -> None:
    """Beside copies that are mostly right a draft of a few nodes could not, and an answer is over before it grows."""
    copy = replace(always(0.65), replayable=True, most=10, score=0.65)
    ahead = replace(AHEAD, most=16, rate=lambda length: 0.99)
    machine = Machine([copy, ahead], TableCost(lambda rows: 1 + 0.12 * (rows - 1)))
    for number in range(90):
        machine.decode(17, first=number)
    assert machine.run.speed > 2.1


def test_a_drafter_that_guesses_ahead_in_vain_costs_little() -> None:
    for ahead, rate in ((6, 0.1), (16, 0.1), (16, 0.3)):
        for tokens, requests in ((20, 60), (300, 10)):
            machine = Machine([replace(AHEAD, ahead=ahead, rate=lambda length, rate=rate: rate)])
            for number in range(requests):
                machine.decode(tokens, first=number)
            assert machine.run.speed > 0.98, (ahead, rate, tokens)


def test_first_proposals_in_answers_show_that_a_drafter_became_cheaper() -> None:
    """It was twenty times as dear. Each of its trials is the first in its answer, and takes less than that."""
    head = replace(always(0.9), step_seconds=0.2, node_seconds=0.01, most=8)
    machine = Machine([head])
    machine.router = Router(machine.cost, [Arm("0", head.most)], {"0": remembered(0.5, seconds=4.0)})
    for number in range(100):
        machine.decode(40, first=number)
    then = machine.run.tokens, machine.run.seconds
    for number in range(100, 150):
        machine.decode(40, first=number)
    assert (machine.run.tokens - then[0]) / (machine.run.seconds - then[1]) > 2


def test_a_drafter_that_is_remembered_as_poor_is_tried_again() -> None:
    """What was remembered is right of another machine and other texts, where no trial of it would be worth its cost."""
    cheap = replace(always(0.2), step_seconds=0.002, most=8)
    head = replace(always(0.92), step_seconds=0.2, node_seconds=0.01, most=8, score=0.5)
    there = Machine(
        [replace(cheap, rate=lambda length: 0.6), replace(head, rate=lambda length: 0.6, step_seconds=0.6)],
        TableCost(lambda rows: 1 + 0.4 * (rows - 1)),
    )
    for number in range(5):
        there.decode(100, first=number)
    here = Machine([cheap, head], TableCost(lambda rows: 1 + 0.1 * (rows - 1)))
    here.router = Router(here.cost, [Arm("0", 8), Arm("1", 8)], there.router.kept())
    for number in range(0, 96, 4):
        here.decode(120, sequences=4, first=number)
    assert here.run.verified["1"] > here.run.steps


def remembered(share: float, seconds: float = AHEAD.step_seconds) -> KeptArm:
    """Of a drafter that was asked often, and this share of whose guesses were right; its proposals took so long."""
    state = ArmState(Arm("0", AHEAD.most), 0)
    draft = trees.chain([0] * 2, "0", [share] * 2)
    for place in range(60):
        right = range(2) if place < 60 * share else range(0)
        state.calibration.learn([(draft, right, range(2) if right else range(1))])
        state.record.learn(len(right), not right, 2 if right else 1, 1.0)
        state.seconds.learn(2, seconds, 1.0)
    state.row = 1.0
    return state.kept()
