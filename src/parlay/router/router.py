"""Chooses a drafter and a number of nodes for each sequence and step: the policy where there are several drafters."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from itertools import accumulate

from parlay.router.acceptance import Outcome, matched
from parlay.router.arms import Arm, ArmInSequence, ArmState, restored
from parlay.router.choice import Choice, Offer, bearing
from parlay.router.choice_history import ChoiceHistory
from parlay.router.goals import USUAL, Aim
from parlay.router.ledger import TRIALS, Account, Gains, Ledger
from parlay.router.prices import AnswerLengths, StepPrices
from parlay.router.ranking import NO_CANDIDATES, Candidates, best
from parlay.router.saved_state import NOTHING_KEPT, KeptArm, Memory
from parlay.router.sequence_state import SequenceState
from parlay.types import NO_DRAFT, Budgets, Cost, Draft, Policy, Routed, RouterRecord, SequenceView, Spent

_REPRICE_EVERY = 16  # steps
_MANY = 8  # in a batch of at least this size, the rate hardly changes from step to step
_STRIDES = 16  # how many numbers of nodes are compared, about
_PAYS = -(1 << 40)  # the wait where a proposal gains more than it costs: it is asked in every step
_SLOW = 0.9  # decay, per step, of the mean seconds that the router itself takes
_EXCEEDED = (
    "plain decoding draws more than power=%g watts (requests at once: %d): nothing is drafted, and decoding goes on; "
    "run fewer requests at once, or limit the device itself"
)
_log = logging.getLogger(__name__)


class Router(Policy):
    """Chooses a drafter, or none, for each sequence and step, so that the batch decodes best by its `Goal`.

    *Asking*: replayable arms are asked first. An arm is asked in every step of a sequence where its proposals have
    lately gained more than they cost. Elsewhere it is asked so seldom that asking takes a hundredth of the time, or
    half of that with several sequences. A proposal is worth the sum of its path probabilities; these are scores,
    calibrated per arm and shifted by the arm's record in the sequence. The other arms compete by their records, each
    with its best draft size. The router takes the choice that gives the most tokens per second for the whole step
    (goodput, arXiv:2406.14066); drafting nothing is always one of the choices.

    *Learning*: after a step, every proposal is compared with the committed tokens, whether it was verified or not. So
    the router learns about replayable arms without verifying their drafts (full information, as in HedgeSpec,
    arXiv:2510.20064). It learns about the other arms from verified drafts, and from trials of the arm that may be best
    (upper confidence bound).

    *Never slower*: each sequence has a `Ledger`. Without credit, only trials are verified; a replayable arm earns
    credit by proposals that would have gained. Arms that would pay observe every step, so that they need not catch up.
    """

    def __init__(
        self,
        cost: Cost,
        arms: Sequence[Arm],
        known: Mapping[str, KeptArm] = NOTHING_KEPT,
        aim: Aim = USUAL,
    ) -> None:
        """``known``: by name, what earlier routers learned about the arms, on the same machine with the same model."""
        self._cost, self._aim, self._goal = cost, aim, aim.goal
        self._has_warned = False
        self._is_named = all(arm.name for arm in arms)  # without names there is one arm, and no choice to report
        row = cost.forward(1, 1)
        self._arms = [restored(ArmState(arm, number), known.get(arm.name), row) for number, arm in enumerate(arms)]
        self._replayable = [arm for arm in self._arms if arm.spec.replayable and arm.spec.most]
        self._copying = self._replayable  # those that a sequence of this step has
        self._gains = Gains(proved=any(arm.expected for arm in arms))
        self._trials = Account(aim.effort.trials)
        self._states: dict[int, SequenceState] = {}
        self._answers = AnswerLengths()
        self._prices = StepPrices((), self._cost, 1, 1, 0, aim=self._aim)
        self._own_seconds = 0.0  # that the router takes before a forward, per sequence
        self._others_seen = (0, 0)  # rows that other strategies had in the last two steps
        self._steps = 0
        self._next_copying = 0  # index of the next replayable arm in this step

    # ---------------------------------------------------------------------------------------------- before the forward

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        others = min(self._others_seen)  # so one chunk of another request's prompt does not count
        self._others_seen = (self._others_seen[1], self._others_seen[1])
        self._next_copying = 0
        self._look_up_prices(views, others)
        token, decoded = self._prices.token, 0
        states: list[SequenceState] = []
        usable: set[int] = set()
        for view in views:
            state = self._states.get(view.sequence) or self._opened(view)
            states.append(state)
            usable.update(state.arms)
            decoded += state.begin(token)
        self._copying = [arm for arm in self._replayable if arm.number in usable]
        for arm in self._arms:
            arm.is_opening = False
            arm.unasked += decoded // len(states)
        self._earn(decoded * token)
        return self._next(states)

    def _earn(self, seconds: float) -> None:
        """Let seconds of decoding pay off the debts of trials, and of prompts that drafters had to read."""
        for arm in self._arms:
            arm.prompts.earn(seconds)
        self._trials.earn(seconds)

    def next_budgets(self, views: Sequence[SequenceView], drafts: Sequence[Draft | None]) -> Budgets:
        states = [self._states[view.sequence] for view in views]
        for state, draft in zip(states, drafts, strict=True):
            state.take(draft, self._prices)
        return self._next(states)

    def _next(self, states: Sequence[SequenceState]) -> Budgets:
        """Budgets for the next replayable arm that is due; after the last one, for the other arms that are chosen."""
        while self._next_copying < len(self._copying):
            arm = self._copying[self._next_copying]
            self._next_copying += 1
            nodes = [0] * len(states)
            for place in self._due(states, arm):
                nodes[place] = arm.spec.most
                states[place].note_request(arm.number, arm.spec.most)
            if any(nodes):
                return Budgets(nodes, 0, [arm.number] * len(states))
        if self._next_copying > len(self._copying):
            return Budgets([0] * len(states))
        self._next_copying += 1
        return self._choose(states)

    def _due(self, states: Sequence[SequenceState], arm: ArmState) -> list[int]:
        """The sequences in which a replayable arm is asked now, by place.

        Where it pays in none of them, those that will soon be due are asked with the first that is. So all come to be
        due in the same steps, and the router can be inactive in between.
        """
        waits = self._waits(states, arm)
        ahead = self._every(self._price_of(arm)) // 2 if _PAYS < min(waits) <= 0 else 0
        return [place for place, wait in enumerate(waits) if wait <= ahead]

    def _price_of(self, arm: ArmState) -> float:
        """Seconds that one proposal of a replayable arm costs, with the router's own work."""
        return self._prices.of_drafting(arm.drafting(arm.spec.most) + self._own_seconds / len(self._copying))

    def _every(self, price: float) -> int:
        """How many tokens a sequence decodes between two proposals of this price that do not pay."""
        prices = self._prices
        return math.ceil(price * prices.sequences / (TRIALS * prices.shared * prices.plain))

    def _waits(self, states: Sequence[SequenceState], arm: ArmState) -> list[int]:
        """For each sequence, the tokens to decode before a replayable arm is asked there; `_PAYS`: it is asked in every
        step."""
        price = self._price_of(arm)
        every, gain = self._every(price), price / self._prices.token
        waits: list[int] = []
        for state in states:
            here = state.arms.get(arm.number)
            if here is None or here.is_lost:
                waits.append(max(_REPRICE_EVERY, every))
                continue
            waits.append(_PAYS if here.gain > gain else here.requested_at + every - state.length)
        return waits

    def _choose(self, states: Sequence[SequenceState]) -> Budgets:
        """Take the best choice for each sequence. Arms that are chosen without a proposal so far are asked now."""
        prices, idle = self._prices, True
        numbers, nodes, watching = [0] * len(states), [0] * len(states), []
        for place, (state, wanted) in enumerate(zip(states, self._best(states), strict=True)):
            if state.requested:
                state.learn_gains()
            chosen = state.decide(wanted, prices)
            if chosen.arm is not None and chosen.offer is None:
                numbers[place], nodes[place] = chosen.arm.state.number, chosen.nodes
                state.note_request(numbers[place], nodes[place])
            watching.append(state.watch())
            idle = idle and state.is_idle
        return Budgets(nodes, self._inactive(states) if idle else 0, numbers, watching)

    def _best(self, states: Sequence[SequenceState]) -> list[Choice]:
        """For each sequence, the choice with which the whole batch decodes best.

        Dinkelbach's method maximises the ratio of sums: at the rate found by the pass before, each choice has a worth
        of its own. A large batch starts from the rate of its last step and needs one pass.
        """
        prices, goal, many = self._prices, self._goal, len(states) >= _MANY
        chosen: list[Choice] = []
        rate = prices.rate if many and prices.rate else 1 / prices.token
        for _ in range(1 if many else goal.passes):
            if chosen and rate == prices.rate:
                break
            prices.set_rate(rate)
            chosen, value, seconds = [], 0.0, prices.plain
            for state in states:
                choice = state.evaluate(prices)
                chosen.append(choice)
                value += choice.value
                seconds += choice.seconds
            rate = goal.rate(prices.rows, value, seconds)
        prices.set_rate(rate)
        return chosen

    def _inactive(self, states: Sequence[SequenceState]) -> int:
        """How many steps may pass until an arm or a trial is due, or, with credit, until prices change."""
        waits = [_REPRICE_EVERY] if self._copying or any(state.ledger.is_funded for state in states) else []
        for arm in self._copying:
            waits += self._waits(states, arm)
        if len(self._copying) < len(self._arms):
            token = self._prices.token * len(states)
            waits += [state.until_trial(token) for state in states]
        return max(0, min(waits, default=_REPRICE_EVERY) - 1)

    def trim(self, views: Sequence[SequenceView], drafts: Sequence[Draft]) -> list[Draft]:
        prices, shares = self._prices, self._goal.shares
        states = [self._states[view.sequence] for view in views]
        offers: list[Offer | None] = []
        candidates: list[Candidates] = []
        ranked: list[float] = []
        fixed, room, drafting = 0, prices.room, 0.0
        for state in states:
            drafting += state.seconds
            offer = state.to_verify(prices)
            if offer is not None and offer.draft.probes and not offer.is_drawn:
                offer.bearing = bearing(offer, prices)
            rows = 0 if offer is None else offer.fixed_rows + (offer.arm.state.trial if state.is_trial else 0)
            if offer is None or (
                rows > room and not offer.is_drawn
            ):  # even the probes alone may exceed the power limit
                offers.append(None)
                candidates.append(NO_CANDIDATES)
                continue
            nodes, path_probs = offer.candidates
            shared = shares(path_probs)
            offers.append(offer)
            candidates.append((nodes, shared))
            ranked += shared
            fixed, room = fixed + offer.fixed_rows, room - rows
        ranked.sort(reverse=True)
        kept = best(candidates, ranked, self._count(ranked[: max(0, room)], drafting, fixed))
        return [
            NO_DRAFT if offer is None else state.verified(offer, nodes)
            for state, offer, nodes in zip(states, offers, kept, strict=True)
        ]

    def _count(self, ranked: Sequence[float], drafting: float, fixed: int) -> int:
        """How many ranked nodes to verify beside ``fixed`` rows that are verified anyway; if equal, the fewest."""
        prices, goal, gains = self._prices, self._goal, [0.0, *accumulate(ranked)]
        best, most = 0, 0.0
        for count in (*range(0, len(ranked), -(-len(ranked) // _STRIDES) or 1), len(ranked)):
            seconds = prices.of_step(drafting, prices.rows + fixed + count)
            rate = goal.tokens(prices.rows, gains[count]) / seconds
            if rate > most:
                best, most = count, rate
        return best

    # ----------------------------------------------------------------------------------------------- after the forward

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        rows = 0
        states: list[SequenceState] = []
        booked: list[tuple[int, int, int]] = []
        for view, draft, right in zip(views, drafts, accepted, strict=True):
            nodes = len(draft.tree.tokens)
            rows += (1 + nodes) * view.request.copies
            state = self._states.get(view.sequence)
            if state is not None:
                state.committed = view.tokens[state.length :]
                states.append(state)
                booked.append((nodes, draft.probes, right))
        self._others_seen = (self._others_seen[1], max(0, spent.rows - rows))
        self._learn_seconds(states, spent)
        tested: dict[ArmState, tuple[list[ArmInSequence], list[Outcome]]] = {}
        for state, (nodes, probes, right) in zip(states, booked, strict=True):
            state.book(nodes, probes, right, self._prices)
            for offer in state.offers:
                arms, outcomes = tested.setdefault(offer.arm.state, ([], []))
                arms.append(offer.arm)
                outcomes.append(matched(offer.draft, state.committed))
        for arm_state, (arms, outcomes) in tested.items():
            for arm, outcome, count in zip(arms, outcomes, arm_state.calibration.learn(outcomes), strict=True):
                arm.learn(outcome, count)

    def _learn_seconds(self, states: Sequence[SequenceState], spent: Spent) -> None:
        """Learn how long proposals and the router itself take."""
        forward, row = self._cost.forward(spent.rows, spent.context), 0.0
        slowdown = max(1.0, spent.verify_seconds / forward)
        for arm, seconds in zip(self._arms, spent.by_drafter, strict=False):
            number = arm.number
            if spent.called and not spent.called[number]:
                continue
            drafting = [state for state in states if number in state.requested and state.has_run(number)]
            if drafting:
                count, each, levels, read = len(drafting), seconds / len(drafting), 0.0, 0
                for state in drafting:
                    drafts = [offer.draft for offer in state.offers if offer.arm.state is arm]
                    levels += arm.levels_drafted(state.requested[number], drafts)
                    read = max(read, state.arms[number].charge(each, state.length))
                if count == 1 and read and seconds / slowdown < 0.5 * arm.seconds.of(levels):
                    read = 0  # far too quick to have read the prompt
                target = self._cost.forward(read, read) if read else 0.0
                arm.learn_seconds(levels / count, each, slowdown, forward / count, read=read, target=target)
                arm.row = row = row or self._cost.forward(1, 1)
        if spent.planning_seconds:
            own = spent.planning_seconds / slowdown / len(states)
            own = min(own, 4 * self._own_seconds or own)
            self._own_seconds += (1 - _SLOW) * (own - self._own_seconds)

    def kept(self) -> dict[str, KeptArm]:
        """The state to keep of each arm that has drafted anything, by name."""
        return {arm.spec.name: arm.kept() for arm in self._arms if arm.calibration.drafts}

    def report(self, sequence: int) -> RouterRecord | None:
        """Report what the router did in a sequence: by drafter, by reason, and over time. None for an unnamed arm."""
        if not self._is_named:
            return None
        state = self._states.get(sequence)
        if state is None or state.history is None:
            return RouterRecord()
        state.catch_up()
        drafters = tuple([Routed(arm.state.spec.name, *astuple(arm.counts)) for arm in state.arms.values()])
        power = "" if self._aim.power is None else str(self._aim.power)
        return RouterRecord(drafters, dict(state.reasons), state.view.request.kind, state.history.stretches(), power)

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            # A short answer may end before the router is active again: count its tokens, too.
            self._earn((len(state.view.tokens) - state.length) * self._prices.token)
            self._answers.learn(state.view)

    # ---------------------------------------------------------------------------------------------------------- states

    def _look_up_prices(self, views: Sequence[SequenceView], others: int) -> None:
        """Make new prices if the batch or an estimate has changed, and every `_REPRICE_EVERY` steps."""
        count, tokens, rows = len(views), 0, 0
        for view in views:
            tokens += len(view.tokens)
            rows += view.request.copies
        self._steps += 1
        context, copies = tokens // count, rows / count
        key = count, copies, others, self._cost.revision, context.bit_length(), self._steps // _REPRICE_EVERY
        if self._prices.key != key:
            rows = count + round(others / copies)
            self._prices = StepPrices(key, self._cost, count, rows, context, aim=self._aim, copies=copies)
            self._trials.share = self._aim.effort.trials * self._prices.shared
            if self._prices.exceeds_power and not self._has_warned:
                self._has_warned = True
                _log.warning(_EXCEEDED, self._aim.most_watts, len(views))
        else:
            self._prices.begin()

    def _opened(self, view: SequenceView) -> SequenceState:
        trials, growth = self._aim.effort.trials, self._aim.effort.growth
        ledger = Ledger(self._prices.token, self._gains, trials=trials, growth=growth)
        kind, predicts = view.request.kind, view.request.predicts
        own = [arm for arm in self._arms if predicts or arm.spec.named or not arm.spec.predicts]
        arms = {arm.number: ArmInSequence.of(arm, kind) for arm in own}
        suiting = [arm for arm in arms.values() if arm.state.spec.most and arm.state.spec.suits(kind)]
        priced = [arm for arm in suiting if not arm.state.spec.replayable]
        history = ChoiceHistory() if self._is_named else None
        state = SequenceState(view, ledger, Account(trials), self._trials, self._answers, arms, priced, history)
        self._states[view.sequence] = state
        return state


class RememberingRouter(Router):
    """A router that starts from what the memory holds for one owner, and updates the memory after each request.

    An update takes some 15 microseconds, so no request waits for it, and a process that is killed has lost little.
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
