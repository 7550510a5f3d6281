"""The policy of strategies with several drafters: for each sequence and step the drafter, and how many nodes."""

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
from parlay.router.ledger import AT_ONCE, TRIALS, Account, Gains, Ledger
from parlay.router.prices import AnswerLengths, StepPrices
from parlay.router.ranking import NO_CANDIDATES, Candidates, best
from parlay.router.saved_state import NOTHING_KEPT, KeptArm, Memory
from parlay.router.sequence_state import SequenceState
from parlay.types import NO_DRAFT, Budgets, Cost, Draft, Policy, Routed, RouterRecord, SequenceView, Spent

_LOOK = 16  # steps after which prices are looked at again
_MANY = 8  # sequences from which on the rate of the batch hardly changes from step to step
_STRIDES = 16  # about so many counts of nodes are compared
_SLOW = 0.9  # decay of the router's own seconds, per step
_EXCEEDED = (
    "plain decoding draws more than power=%g watts (requests at once: %d): nothing is drafted, and decoding goes on; "
    "run fewer requests at once, or limit the device itself"
)
_log = logging.getLogger(__name__)


class Router(Policy):
    """Chooses a drafter, or none, for each sequence and step, so that the batch decodes best by its `Goal`.

    *Asking*: replayable arms are asked first, each where its proposals have lately gained more than they cost, and
    elsewhere so seldom that asking takes a hundredth of the time, with several sequences half of that. A proposal is
    worth the sum of its path probabilities: scores calibrated by arm, shifted by the arm's record in the sequence.
    Against these stand the other arms at their best size, by their records. The best choice counts, by tokens per
    second of the whole step (goodput, arXiv:2406.14066); nothing is always among them.

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
        self._is_named = all(arm.name for arm in arms)  # else there is one arm, and no choice to report
        row = cost.forward(1, 1)
        self._arms = [restored(ArmState(arm, number), known.get(arm.name), row) for number, arm in enumerate(arms)]
        self._copying = [arm for arm in self._arms if arm.arm.replayable and arm.arm.most]
        self._gains = Gains(proved=any(arm.expected for arm in arms))
        self._trials = Account(aim.effort.trials)
        self._states: dict[int, SequenceState] = {}
        self._answers = AnswerLengths()
        self._prices = StepPrices((), self._cost, 1, 1, 0, aim=self._aim)
        self._own_seconds = 0.0  # of the router before a forward, per sequence
        self._others_seen = (0, 0)  # rows of other strategies in the last two steps
        self._steps = 0
        self._next_copying = 0  # the replayable arm that is looked at next in this step

    # ---------------------------------------------------------------------------------------------- before the forward

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        others = min(self._others_seen)  # a single chunk of another request's prompt does not count
        self._others_seen = (self._others_seen[1], self._others_seen[1])
        self._next_copying = 0
        self._look_up_prices(views, others)
        states = [self._states.get(view.sequence) or self._opened(view) for view in views]
        token, decoded = self._prices.token, 0
        for state in states:
            decoded += state.begin(token)
        for arm in self._arms:
            arm.is_opening = False
            arm.unasked += decoded // len(states)
        self._trials.share = self._aim.effort.trials * _shared(len(views))
        self._earn(decoded * token)
        return self._next(states)

    def _earn(self, seconds: float) -> None:
        """Let seconds of decoding pay off what trials and prompts that drafters read have cost."""
        for arm in self._arms:
            arm.prompts.earn(seconds)
        self._trials.earn(seconds)

    def next_budgets(self, views: Sequence[SequenceView], drafts: Sequence[Draft | None]) -> Budgets:
        states = [self._states[view.sequence] for view in views]
        for state, draft in zip(states, drafts, strict=True):
            state.take(draft, self._prices)
        return self._next(states)

    def _next(self, states: Sequence[SequenceState]) -> Budgets:
        """Ask the next replayable arm that is due; after the last of them, whichever other arms are chosen."""
        while self._next_copying < len(self._copying):
            arm = self._copying[self._next_copying]
            self._next_copying += 1
            nodes = [arm.arm.most if wait <= 0 else 0 for wait in self._waits(states, arm)]
            if any(nodes):
                for state, count in zip(states, nodes, strict=True):
                    if count:
                        state.note_request(arm.number, count)
                return Budgets(nodes, 0, [arm.number] * len(states))
        if self._next_copying > len(self._copying):
            return Budgets([0] * len(states))
        self._next_copying += 1
        return self._choose(states)

    def _waits(self, states: Sequence[SequenceState], arm: ArmState) -> list[int]:
        """Count for each sequence the tokens to decode there before a replayable arm is asked."""
        prices, number = self._prices, arm.number
        price = prices.of_drafting(arm.seconds.of(arm.arm.most) + self._own_seconds / len(self._copying))
        allowed = TRIALS * _shared(prices.sequences) * prices.plain
        every, gain = math.ceil(price * prices.sequences / allowed), price / prices.token
        waits: list[int] = []
        for state in states:
            here = state.arms[number]
            wait = 0 if here.gain > gain else here.requested_at + every - state.length
            waits.append(_LOOK if here.is_lost else wait)
        return waits

    def _choose(self, states: Sequence[SequenceState]) -> Budgets:
        """Make the best choice of each sequence; arms that have proposed nothing yet are asked now."""
        prices, idle = self._prices, True
        numbers, nodes, watching = [0] * len(states), [0] * len(states), []
        for place, (state, wanted) in enumerate(zip(states, self._best(states), strict=True)):
            if state.requested:
                state.learn_gains()
            chosen = state.decide(wanted, prices)
            if chosen.arm is not None and chosen.offer is None:
                numbers[place], nodes[place] = chosen.arm.whole.number, chosen.nodes
                state.note_request(numbers[place], nodes[place])
            watching.append(state.watch())
            idle = idle and state.is_idle
        return Budgets(nodes, self._inactive(states) if idle else 0, numbers, watching)

    def _best(self, states: Sequence[SequenceState]) -> list[Choice]:
        """Find for each sequence the choice with which the batch decodes best.

        Maximises a ratio of sums by Dinkelbach's method: at the rate of the pass before, each choice has a worth of its
        own. A large batch goes on from the rate of its last step.
        """
        prices, goal, many = self._prices, self._goal, len(states) >= _MANY
        chosen: list[Choice] = []
        rate = prices.rate if many and prices.rate else 1 / prices.token
        for _ in range(1 if many else goal.passes):
            if chosen and rate == prices.rate:
                break
            prices.set_rate(rate)
            chosen = [state.evaluate(prices) for state in states]
            value, seconds = 0.0, prices.plain
            for choice in chosen:
                value += choice.value
                seconds += choice.seconds
            rate = goal.rate(prices.rows, value, seconds)
        prices.set_rate(rate)
        return chosen

    def _inactive(self, states: Sequence[SequenceState]) -> int:
        """Count the steps until an arm or a trial is due; with credit, until prices are looked at again."""
        waits = [_LOOK] if self._copying or any(state.ledger.is_funded for state in states) else []
        for arm in self._copying:
            waits += self._waits(states, arm)
        if len(self._copying) < len(self._arms):
            token = self._prices.token * len(states)
            waits += [state.until_trial(token) for state in states]
        return max(0, min(waits, default=_LOOK) - 1)

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
            rows = 0 if offer is None else offer.fixed_rows + (offer.arm.whole.trial if state.is_trial else 0)
            if offer is None or (rows > room and not offer.is_drawn):  # probes alone may draw more than the limit
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
        """Count the ranked nodes to verify, with so many rows that are verified anyway; of equals the fewest."""
        rows, gains = self._prices.rows, [0.0, *accumulate(ranked)]
        counts: list[int] = [*range(0, len(ranked), -(-len(ranked) // _STRIDES) or 1), len(ranked)]
        tokens = self._goal.tokens(rows, [gains[count] for count in counts])
        steps = self._prices.of_steps(drafting, [rows + fixed + count for count in counts])
        rates = [each / seconds for each, seconds in zip(tokens, steps, strict=True)]
        return counts[rates.index(max(rates))]

    # ----------------------------------------------------------------------------------------------- after the forward

    def learn(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], accepted: Sequence[int], spent: Spent
    ) -> None:
        rows = 0
        known: list[tuple[SequenceState, Draft, int]] = []
        for view, draft, right in zip(views, drafts, accepted, strict=True):
            nodes = len(draft.tree.tokens)
            rows += (1 + nodes) * view.request.copies
            state = self._states.get(view.sequence)
            if state is not None:
                state.committed = view.tokens[state.length :]
                known.append((state, draft, right))
        self._others_seen = (self._others_seen[1], max(0, spent.rows - rows))
        self._learn_seconds([state for state, _, _ in known], spent)
        tested: dict[ArmState, list[tuple[ArmInSequence, Outcome]]] = {}
        for state, draft, right in known:
            state.book(len(draft.tree.tokens), draft.probes, right, self._prices)
            for offer in state.offers:
                arm, outcome = offer.arm, matched(offer.draft, state.committed)
                if arm.whole in tested:
                    tested[arm.whole].append((arm, outcome))
                else:
                    tested[arm.whole] = [(arm, outcome)]
        for whole, pairs in tested.items():
            expected = whole.calibration.learn([outcome for _, outcome in pairs])
            for (arm, outcome), count in zip(pairs, expected, strict=True):
                arm.learn(outcome, count)

    def _learn_seconds(self, states: Sequence[SequenceState], spent: Spent) -> None:
        """Learn what proposals and the router itself take."""
        forward = self._cost.forward(spent.rows, spent.context)
        slowdown = max(1.0, spent.verify_seconds / forward)
        for arm, seconds in zip(self._arms, spent.by_drafter, strict=False):
            number = arm.number
            drafting = [state for state in states if number in state.requested and state.has_run(number)]
            if drafting and (not spent.called or spent.called[number]):
                count, each, nodes, read = len(drafting), seconds / len(drafting), 0, 0
                for state in drafting:
                    nodes += state.requested[number]
                    read = max(read, state.arms[number].charge(each, state.length))
                if count == 1 and seconds / slowdown < 0.5 * arm.seconds.of(nodes):
                    read = 0  # with the prompt it took far less than a later one was thought to
                target = self._cost.forward(read, read) if read else 0.0
                arm.learn_seconds(nodes / count, each, slowdown, forward / count, read=read, target=target)
                arm.row = self._cost.forward(1, 1)
        if spent.planning_seconds:
            own = spent.planning_seconds / slowdown / len(states)
            own = min(own, 4 * self._own_seconds or own)
            self._own_seconds += (1 - _SLOW) * (own - self._own_seconds)

    def kept(self) -> dict[str, KeptArm]:
        """Return by name what was learned of each arm that has drafted anything."""
        return {arm.arm.name: arm.kept() for arm in self._arms if arm.calibration.drafts}

    def report(self, sequence: int) -> RouterRecord | None:
        """Report what was done by drafter, steps by the reason, and when; nothing of an arm without a name."""
        if not self._is_named:
            return None
        state = self._states.get(sequence)
        if state is None or state.history is None:
            return RouterRecord()
        state.catch_up()
        drafters = tuple([Routed(arm.whole.arm.name, *astuple(arm.counts)) for arm in state.arms])
        power = "" if self._aim.power is None else str(self._aim.power)
        return RouterRecord(drafters, dict(state.reasons), state.view.request.kind, state.history.stretches(), power)

    def release(self, sequence: int) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            # A short answer is over before the router is active again: its tokens count, too.
            self._earn((len(state.view.tokens) - state.length) * self._prices.token)
            self._answers.learn(state.view)

    # ---------------------------------------------------------------------------------------------------------- states

    def _look_up_prices(self, views: Sequence[SequenceView], others: int) -> None:
        """Look up prices anew if the batch or an estimate has changed, and now and then."""
        context = sum([len(view.tokens) for view in views]) // max(1, len(views))
        self._steps += 1
        copies = sum([view.request.copies for view in views]) / max(1, len(views))
        key = len(views), copies, others, self._cost.revision, context.bit_length(), self._steps // _LOOK
        if self._prices.key != key:
            rows = len(views) + round(others / copies)
            self._prices = StepPrices(key, self._cost, len(views), rows, context, aim=self._aim, copies=copies)
            if self._prices.exceeds_power and not self._has_warned:
                self._has_warned = True
                _log.warning(_EXCEEDED, self._aim.most_watts, len(views))
        else:
            self._prices.begin()

    def _opened(self, view: SequenceView) -> SequenceState:
        trials, growth = self._aim.effort.trials, self._aim.effort.growth
        ledger = Ledger(self._prices.token, self._gains, trials=trials, growth=growth)
        arms = [ArmInSequence.of(arm, view.request.kind) for arm in self._arms]
        suiting = [arm for arm in arms if arm.whole.arm.most and arm.whole.arm.suits(view.request.kind)]
        priced = [arm for arm in suiting if not arm.whole.arm.replayable]
        history = ChoiceHistory() if self._is_named else None
        state = SequenceState(view, ledger, Account(trials), self._trials, self._answers, arms, priced, history)
        self._states[view.sequence] = state
        return state


def _shared(sequences: int) -> float:
    """Which part of the share of trials so many sequences may lose."""
    return 1.0 if sequences == 1 else AT_ONCE


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
