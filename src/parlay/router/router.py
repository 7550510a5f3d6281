"""The policy of strategies with several drafters: for each sequence and step the drafter, and how many nodes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial

from parlay.router.acceptance import Outcome
from parlay.router.arms import Arm, ArmInSequence, ArmState, matched, restored
from parlay.router.choice import Choice
from parlay.router.goals import USUAL, Aim
from parlay.router.ledger import TRIALS, Account, Gains, Ledger
from parlay.router.prices import AnswerLengths, StepPrices
from parlay.router.ranking import NO_CANDIDATES, best, best_count
from parlay.router.saved_state import NOTHING_KEPT, KeptArm, Memory
from parlay.router.sequence_state import TRIAL, SequenceState
from parlay.types import NO_DRAFT, Budgets, Cost, Draft, Policy, RouterRecord, SequenceView, Spent

_LOOK = 16  # steps after which prices are looked at again
_MANY = 8  # sequences from which on the rate of the batch hardly changes from step to step
_SLOW = 0.9  # decay of the router's own seconds, per step
_EXCEEDED = (
    "plain decoding draws more than power=%g watts (requests at once: %d): nothing is drafted, and decoding goes on; "
    "run fewer requests at once, or limit the device itself"
)
_log = logging.getLogger(__name__)


class Router(Policy):
    """Chooses a drafter, or none, for each sequence and step, so that the batch decodes best by its `Goal`.

    *Asking*: replayable arms are asked first, each where its proposals have lately gained more than they cost, and
    elsewhere so seldom that asking takes a hundredth of the time. A proposal is worth the sum of its path
    probabilities: scores calibrated by arm, shifted by the arm's record in the sequence. Against these stand the other
    arms at their best size, by their records. The best choice counts, by tokens per second of the whole step
    (goodput, arXiv:2406.14066); nothing is always among them.

    *Learning*: every proposal of a step is compared with the text that was committed, verified or not, so that
    replayable arms are known without verifying them (full information, as in HedgeSpec, arXiv:2510.20064). The other
    arms are known by what was verified, and by trials of the one that may be best (upper confidence bound).

    *Never slower*: each sequence has a `Ledger`. Without credit nothing is verified but trials; a replayable arm whose
    proposal would have gained earns some. Arms that would pay see all steps, so that they need not catch up.
    """

    def __init__(
        self,
        cost: Cost,
        arms: Sequence[Arm],
        known: Mapping[str, KeptArm] = NOTHING_KEPT,
        aim: Aim = USUAL,
    ) -> None:
        """``known``: by name what others have learned of the arms, on the same machine with the same model."""
        self._cost, self._aim, self._goal = cost, aim, aim.goal
        self._has_warned = False
        row = cost.forward(1, 1)
        self._arms = [restored(ArmState(arm, number), known.get(arm.name), row) for number, arm in enumerate(arms)]
        self._copying = [arm for arm in self._arms if arm.arm.replayable and arm.arm.most]
        self._gains = Gains(proved=any(arm.expected for arm in arms))
        self._states: dict[int, SequenceState] = {}
        self._answers = AnswerLengths()
        self._prices = self._priced((), 1, 1, 0)
        self._own_seconds = 0.0  # of the router before a forward, per sequence
        self._others_seen = (0, 0)  # rows of other strategies in the last two steps
        self._rate = 0.0  # worth of a second, in tokens, as this step is expected to come out
        self._steps = 0
        self._next_copying = 0  # the replayable arm that is looked at next in this step

    # ---------------------------------------------------------------------------------------------- before the forward

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        others = min(self._others_seen)  # a single chunk of another request's prompt does not count
        self._others_seen = (self._others_seen[1], self._others_seen[1])
        self._next_copying = 0
        for arm in self._arms:
            arm.is_opening = False
        self._look_up_prices(views, others)
        self._earn([self._state(view) for view in views], [self._state(view).begin(view) for view in views])
        return self._next(views)

    def next_budgets(self, views: Sequence[SequenceView], drafts: Sequence[Draft | None]) -> Budgets:
        for view, draft in zip(views, drafts, strict=True):
            self._states[view.sequence].take(draft, self._prices)
        return self._next(views)

    def _next(self, views: Sequence[SequenceView]) -> Budgets:
        """Asks the next replayable arm that is due; after the last of them, whichever other arms are chosen."""
        states = [self._states[view.sequence] for view in views]
        for arm in self._copying[self._next_copying :]:
            self._next_copying += 1
            nodes = [arm.arm.most if wait <= 0 else 0 for wait in self._waits(states, arm)]
            if any(nodes):
                return _asking(states, [arm.number] * len(states), nodes)
        if self._next_copying > len(self._copying):
            return Budgets([0] * len(states))
        self._next_copying += 1
        return self._choose(states)

    def _waits(self, states: Sequence[SequenceState], arm: ArmState) -> list[int]:
        """For each sequence the tokens to decode there before a replayable arm is asked."""
        prices = self._prices
        token, own = prices.token, self._own_seconds / len(self._copying)
        price = prices.of_drafting(arm.seconds.of(arm.arm.most) + own)
        every = math.ceil(price * prices.sequences / (TRIALS * prices.plain))
        local = [state.arms[arm.number] for state in states]
        return [
            _LOOK if here.is_lost else 0 if here.gain * token > price else here.asked_at + every - state.length
            for here, state in zip(local, states, strict=True)
        ]

    def _choose(self, states: Sequence[SequenceState]) -> Budgets:
        """The best choice of each sequence; arms that have proposed nothing yet are asked now."""
        wanted = self._best(states)
        numbers, nodes = [0] * len(states), [0] * len(states)
        for place, (state, each) in enumerate(zip(states, wanted, strict=True)):
            if state.step.asked:
                state.learn_gains()
            done = state.decide(each, self._prices, self._rate)
            if done.arm is not None and done.offer is None:
                numbers[place], nodes[place] = done.arm.whole.number, done.nodes
        watching = [state.watch() for state in states]
        idle = not any(state.step.asked or state.step.choice.arm or state.wakes for state in states)
        return _asking(states, numbers, nodes, self._inactive(states) if idle else 0, watching)

    def _best(self, states: Sequence[SequenceState]) -> list[Choice]:
        """For each sequence the choice with which the batch decodes best.

        Maximises a ratio of sums by Dinkelbach's method: at the rate of the pass before, each choice has a worth of its
        own. A large batch goes on from the rate of its last step.
        """
        prices = self._prices
        if len(states) < _MANY or not self._rate:
            self._rate = 1 / prices.token
        chosen: list[Choice] = []
        for _ in range(self._goal.passes if len(states) < _MANY else 1):
            chosen = [state.evaluate(prices, self._rate) for state in states]
            worth = sum([self._goal.worth(choice.gain) for choice in chosen])
            seconds = prices.plain + sum([choice.seconds for choice in chosen])
            self._rate = self._goal.rate(prices.rows, worth, seconds)
        return chosen

    def _inactive(self, states: Sequence[SequenceState]) -> int:
        """Steps until an arm is due again, or the next trial; with credit, until prices are looked at again."""
        waits = [_LOOK] if self._copying or any(state.ledger.is_funded for state in states) else []
        for arm in self._copying:
            waits += self._waits(states, arm)
        if len(self._copying) < len(self._arms):
            token = self._prices.token * len(states)
            waits += [state.until_trial(token) for state in states]
        return max(0, min(waits, default=_LOOK) - 1)

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        states, prices = [self._states[view.sequence] for view in views], self._prices
        offers = [state.to_verify(prices, self._rate) for state in states]
        shares = self._goal.shares
        candidates = [NO_CANDIDATES if each is None else (each.nodes, shares(each.path_probs)) for each in offers]
        ranked = sorted([share for _, shared in candidates for share in shared], reverse=True)
        rows = prices.rows + sum([each.fixed_rows for each in offers if each is not None])
        drafting, tokens = sum([state.step.seconds for state in states]), partial(self._goal.tokens, prices.rows)
        room = prices.room - (rows - prices.rows) - TRIAL * sum([state.step.is_trial for state in states])
        count = best_count(ranked[: max(0, room)], tokens, lambda count: prices.of_step(drafting, rows + count))
        kept = best(candidates, ranked, count)
        return [
            NO_DRAFT if each is None else state.verified(each, nodes)
            for state, each, nodes in zip(states, offers, kept, strict=True)
        ]

    # ----------------------------------------------------------------------------------------------- after the forward

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        nodes = list(map(len, drafts))
        self._others_seen = (self._others_seen[1], max(0, spent.rows - len(views) - sum(nodes)))
        known = [place for place, view in enumerate(views) if view.sequence in self._states]
        states = [self._states[views[place].sequence] for place in known]
        for place, state in zip(known, states, strict=True):
            state.committed = views[place].tokens[state.length :]
        self._learn_seconds(states, spent)
        for place, state in zip(known, states, strict=True):
            state.book(nodes[place], accepted[place], self._prices)
        self._earn(states, [len(state.committed) for state in states])
        self._learn_outcomes(states)

    def _earn(self, states: Sequence[SequenceState], tokens: Sequence[int]) -> None:
        """Pay off what trials and prompts have cost by what each sequence has decoded."""
        for state, count in zip(states, tokens, strict=True):
            state.explored.earn(count * self._prices.token)
        for arm in self._arms:
            arm.prompts.earn(sum(tokens) * self._prices.token)

    def _learn_outcomes(self, states: Sequence[SequenceState]) -> None:
        """Learn from each arm's proposals, verified or not."""
        known: dict[ArmState, tuple[list[ArmInSequence], list[Outcome]]] = {}
        for state in states:
            for offer in state.step.offers:
                local, outcomes = known.setdefault(offer.arm.whole, ([], []))
                local.append(offer.arm)
                outcomes.append(matched(offer.draft, state.committed))
        for whole, (local, outcomes) in known.items():
            for arm, outcome, tested in zip(local, outcomes, whole.calibration.learn(outcomes), strict=True):
                arm.learn(outcome, tested)

    def _learn_seconds(self, states: Sequence[SequenceState], spent: Spent) -> None:
        """Learn how long proposals and the router itself take."""
        forward = self._cost.forward(spent.rows, spent.context)
        slowdown = max(1.0, spent.verify_seconds / forward)
        for arm, seconds in zip(self._arms, spent.by_drafter, strict=False):
            asked = {state: state.step.asked[arm.number] for state in states if arm.number in state.step.asked}
            if asked:
                nodes = sum(asked.values()) / len(asked)
                each, read = seconds / len(asked), 0
                for state in asked:
                    read = max(read, state.arms[arm.number].charge(each, state.length))
                arm.learn_seconds(nodes, each, slowdown, forward / len(asked), read=read)
                arm.row = self._cost.forward(1, 1)
        if spent.planning_seconds:
            own = spent.planning_seconds / slowdown / len(states)
            own = min(own, 4 * self._own_seconds or own)
            self._own_seconds += (1 - _SLOW) * (own - self._own_seconds)

    def kept(self) -> dict[str, KeptArm]:
        """By name what was learned of each arm that has drafted anything."""
        return {arm.arm.name: arm.kept() for arm in self._arms if arm.calibration.drafts}

    def report(self, sequence: int) -> RouterRecord | None:
        """By drafter what was done, steps by the reason, and when; nothing of an arm without a name, the only one."""
        if not all(arm.arm.name for arm in self._arms):
            return None
        state = self._states.get(sequence)
        if state is None:
            return RouterRecord()
        state.catch_up(state.view)
        drafters = tuple([arm.counts.record(arm.whole.arm.name) for arm in state.arms])
        power = "" if self._aim.power is None else str(self._aim.power)
        return RouterRecord(drafters, dict(state.reasons), state.view.request.kind, state.history.stretches(), power)

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            self._answers.learn(state.view)

    # ---------------------------------------------------------------------------------------------------------- states

    def _look_up_prices(self, views: Sequence[SequenceView], others: int) -> None:
        """Look up the prices of this batch, anew only if the batch or an estimate has changed."""
        context = sum([len(view.tokens) for view in views]) // max(1, len(views))
        self._steps += 1
        key = len(views), others, self._cost.revision, context.bit_length(), self._steps // _LOOK
        if self._prices.key != key:
            self._prices, self._rate = self._priced(key, len(views), len(views) + others, context), 0.0
            if self._prices.exceeds_power and not self._has_warned:
                self._has_warned = True
                _log.warning(_EXCEEDED, self._aim.most_watts, len(views))
        else:
            self._prices.begin()

    def _priced(self, key: tuple[int, ...], sequences: int, rows: int, context: int) -> StepPrices:
        return StepPrices(key, self._cost, sequences, rows, context, aim=self._aim)

    def _state(self, view: SequenceView) -> SequenceState:
        state = self._states.get(view.sequence)
        if state is None:
            trials, growth = self._aim.effort.trials, self._aim.effort.growth
            ledger = Ledger(view, self._prices.token, self._gains, trials=trials, growth=growth)
            arms = [ArmInSequence.of(arm, view.request.kind) for arm in self._arms]
            suiting = [arm for arm in arms if arm.whole.arm.most and arm.whole.arm.suits(view.request.kind)]
            priced = [arm for arm in suiting if not arm.whole.arm.replayable]
            state = SequenceState(view, ledger, arms, priced, Account(trials), self._answers)
            self._states[view.sequence] = state
        return state


class RememberingRouter(Router):
    """Begins with what the memory holds of the owner of its requests, and tells the memory after each of them.

    That takes some 15 microseconds, so no request waits for it and a process that is killed has lost little.
    """

    def __init__(self, memory: Memory, owner: str, cost: Cost, arms: Sequence[Arm], aim: Aim = USUAL) -> None:
        super().__init__(cost, arms, memory.recall(owner), aim)
        self._memory, self._owner, self._last_kept = memory, owner, self.kept()

    def release(self, sequence: int) -> None:
        super().release(sequence)
        learned = self.kept()
        if learned != self._last_kept:
            self._memory.keep(self._owner, learned)
            self._last_kept = learned


def _asking(
    states: Sequence[SequenceState],
    arms: Sequence[int],
    nodes: Sequence[int],
    inactive: int = 0,
    watching: Sequence[tuple[int, ...]] = (),
) -> Budgets:
    """So many nodes of the arms of these numbers."""
    for state, arm, count in zip(states, arms, nodes, strict=True):
        state.ask(arm, count)
    return Budgets(nodes, inactive, arms, watching)
