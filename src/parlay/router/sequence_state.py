"""What a router remembers of one sequence, and what it does there in one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from parlay.router.arms import ArmInSequence, matched
from parlay.router.choice import NOTHING, Choice, Offer, StepPrices, best_cut, best_size, offered
from parlay.router.choice_history import Life
from parlay.router.goals import Goal
from parlay.router.ledger import Account, Ledger
from parlay.router.prices import AnswerLengths
from parlay.router.ranking import best_of, cut_to
from parlay.types import Draft, SequenceView

TRIAL = 2  # nodes of a trial
WORTH_MOST = "worth most"
TRIED = "trial"
NOT_FOUND = "nothing proposed"
NOT_WORTH = "not worth its cost"
OVER_POWER = "above the limit of power"
NO_CREDIT = "no credit after losses"
NOT_OPEN = "prompt not read yet"
PAUSED = "paused"
_worth = attrgetter("worth")  # of a choice
_BONUS = 0.5  # how far the share of a drafter that was hardly tested may be better than it seems


@dataclass(slots=True, eq=False)
class InSequence:
    """One sequence: its accounts and arms, and the part that it has in this step."""

    view: SequenceView
    ledger: Ledger
    arms: list[ArmInSequence]
    priced: list[ArmInSequence]
    """Those of them that are not replayable."""
    explored: Account
    """Pays for trials of one arm where another would have been drafted."""
    answers: AnswerLengths
    """Of all sequences."""
    steps: int = 0
    length: int = 0
    """Tokens before the step."""
    committed: Sequence[int] = ()
    """Tokens of the step."""
    offers: list[Offer] = field(default_factory=list)
    asked: ArmInSequence | None = None
    """Whoever is being asked."""
    asked_for: dict[int, int] = field(default_factory=dict)
    """Nodes that each arm was asked for in this step, by number."""
    asking: float = 0.0
    """Seconds that these proposals usually take, as was known before them."""
    watching: tuple[int, ...] = ()
    wakes: ArmInSequence | None = None
    """An arm that will be tried in the next step, and sees this one."""
    choice: Choice = NOTHING
    is_trial: bool = False
    forgone: float = 0.0
    """Seconds that a trial gave up, because something else would have been drafted in its place."""
    options: list[Choice] = field(default_factory=list)
    """The best that each arm could draft."""
    verifying: ArmInSequence | None = None
    """Whose draft is verified."""
    expected: float = 0.0
    """Tokens that it is expected to bring."""
    life: Life = field(default_factory=Life)
    reason: str = ""
    """Of what was chosen in this step."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Steps by the reason of what was chosen."""

    def begin(self, view: SequenceView) -> None:
        """A new step."""
        self.ledger.earn()
        missed = self.catch_up(view)
        for arm in self.priced:
            number = arm.whole.number  # all arms see the step that reads the prompt, which is the first
            saw = self.steps == 1 or number in self.watching or number in self.asked_for
            arm.is_ready = not arm.whole.arm.sees_first or (saw and not missed)
        self.steps += 1
        self.offers, self.options, self.asked_for, self.asking = [], [], {}, 0.0
        self.asked, self.choice, self.is_trial, self.forgone, self.watching = None, NOTHING, False, 0.0, ()
        self.verifying, self.expected, self.wakes = None, 0.0, None

    def ask(self, number: int, nodes: int) -> None:
        """Note who is asked for how many nodes."""
        self.asked = arm = self.arms[number]
        self.asked_for[number] = nodes
        arm.asked_at = self.length
        seconds = arm.whole.seconds.of(nodes)
        arm.counts.asked += 1
        arm.counts.expected_seconds += seconds
        self.asking += seconds

    def take(self, arm: ArmInSequence, draft: Draft | None, floor: float, goal: Goal) -> None:
        """What the arm that was asked has proposed; None if it failed."""
        if draft is None:
            arm.is_lost = True
        elif len(draft):
            self.offers.append(offered(arm, draft, floor, goal))

    # --------------------------------------------------------------------------------------------------------- choices

    def evaluate(self, prices: StepPrices, rate: float) -> Choice:
        """The best of what was proposed and of what other arms would propose, if a second is worth ``rate`` tokens."""
        self.options = [best_cut(offer, prices, rate) for offer in self.offers]
        best = max(self.options, key=_worth, default=NOTHING)
        for arm in self.priced:
            if not arm.is_lost:
                choice = best_size(arm, prices, rate, arm.record.share)
                self.options.append(choice)
                if arm.is_ready and choice.worth > best.worth:
                    best = choice
        return best

    def decide(self, wanted: Choice, prices: StepPrices, rate: float) -> Choice:
        """What is done: what is wanted, if the sequence has credit for it; or a trial; or nothing."""
        may = wanted.arm is None or wanted.arm.is_open or self._may_open(wanted, wanted.arm, prices)
        self.choice = wanted if self.ledger.is_funded and may else NOTHING
        reason = WORTH_MOST if self.choice.arm else self._why_nothing(wanted, may, prices)
        waits = self.explored.tokens_left(prices.token) if self.choice.arm else self.ledger.wait(1)
        if waits <= 0 and self.choice.offer is None and prices.room >= TRIAL * prices.sequences:
            tried = self._worth_a_trial(prices, rate)
            if tried is not None and not tried.is_ready:
                self.wakes = tried
            elif tried is not None:
                self.is_trial, self.forgone = True, self.choice.worth * prices.token
                self.choice = Choice(arm=tried, nodes=min(TRIAL, tried.whole.arm.most))
                reason = TRIED
        self.reasons[reason] += 1
        self.reason = reason
        if self.choice.arm is not None and not self.choice.arm.is_open:
            self.choice.arm.whole.is_opening = True
        return self.choice

    def _may_open(self, wanted: Choice, arm: ArmInSequence, prices: StepPrices) -> bool:
        """Whether the arm may read the prompt: the rest of the answer is expected to save the time that it takes."""
        saved = self.answers.left(self.view) * wanted.worth * prices.token / (1 + wanted.gain)
        seconds = prices.token * prices.sequences
        return saved >= prices.of_drafting(arm.whole.reading.of(self.length)) and arm.whole.may_open(seconds, pays=True)

    def _why_nothing(self, wanted: Choice, may: bool, prices: StepPrices) -> str:
        if not prices.room:
            return OVER_POWER
        if wanted.arm is None:
            return NOT_WORTH if self.offers or self.priced else NOT_FOUND
        return NO_CREDIT if may else NOT_OPEN

    def _worth_a_trial(self, prices: StepPrices, rate: float) -> ArmInSequence | None:
        """The arm that may be best, by an upper confidence bound; none if what is chosen is better than it may be."""
        likeliest, worth = None, self.choice.worth if self.choice.arm else -1.0
        for arm in self.priced:
            ready = arm.is_open or arm.whole.may_open(prices.token * prices.sequences, pays=False)
            if ready and not arm.is_lost and arm is not self.choice.arm:
                share = min(1.0, arm.record.share + _BONUS * math.sqrt(math.log(1 + self.steps) / (1 + arm.tested)))
                bound = best_size(arm, prices, rate, share).worth
                if bound > worth:
                    likeliest, worth = arm, bound
        return likeliest

    def watch(self) -> tuple[int, ...]:
        """Arms that would pay if nothing better were offered, and one that is due for a trial: they see the step, so
        that they can draft in the next one and need not catch up.
        """
        watching = [self.wakes] if self.wakes else []
        if self.priced and self.ledger.is_funded:
            watching += [choice.arm for choice in self.options if choice.arm and choice.offer is None]
        self.watching = tuple({arm.whole.number for arm in watching})
        return self.watching

    def learn_gains(self) -> None:
        """What the proposal of each replayable arm is worth beyond those of the arms asked before it, and of others."""
        worths = {choice.arm.whole.number: choice.worth for choice in self.options if choice.arm is not None}
        known = 0.0
        for number, worth in worths.items():
            if number not in self.asked_for and worth > known:
                known = worth
        for number in self.asked_for:
            worth = max(known, worths.get(number, 0.0))
            self.arms[number].learn_gain(worth - known)
            known = worth

    # -------------------------------------------------------------------------------------------------------- outcomes

    def to_verify(self, prices: StepPrices, rate: float) -> Offer | None:
        """The best proposal of the step, now that all are known."""
        if self.is_trial:
            return next((offer for offer in self.offers if offer.arm is self.choice.arm), None)
        if self.choice.arm is None or self.choice.offer is not None:
            return self.choice.offer
        return max([best_cut(offer, prices, rate) for offer in self.offers], key=_worth, default=NOTHING).offer

    def verified(self, offer: Offer, nodes: Sequence[int]) -> Draft:
        """The offer with these nodes only; a trial has some whatever they cost."""
        if self.is_trial and len(nodes) < TRIAL:
            nodes = best_of((offer.nodes, offer.path_probs), TRIAL)
        self.verifying, self.expected = offer.arm, offer.gains[len(nodes)]
        return cut_to(offer.draft, nodes)

    @property
    def drafting(self) -> float:
        """Seconds that the proposals of this step usually take, as is known after them."""
        return sum([self.arms[number].whole.seconds.of(nodes) for number, nodes in self.asked_for.items()])

    def book(self, nodes: int, right: int, prices: StepPrices) -> None:
        """Book what the verified draft cost and gained, or what one of a replayable arm would have gained.

        Trials are of arms that are not replayable, so a replayable arm's draft puts none off: where copies of a token
        or two are verified every few steps, no head would be tried any more.
        """
        token = prices.token
        tested = self.verifying is not None and not self.verifying.whole.arm.replayable and nodes > 0
        self.explored.earn(len(self.committed) * token)
        self._live(nodes)
        if nodes and self.verifying is not None:
            counts = self.verifying.counts
            counts.verified += 1
            counts.trials += self.is_trial
            counts.expected += self.expected
            counts.accepted += right
        if nodes or self.is_trial:
            loss = prices.of_drafting(self.drafting) + prices.of_nodes(nodes) - right * token
            self.ledger.settle(loss, token, trial=self.is_trial and not self.forgone, tested=tested)
            if self.is_trial:
                self.explored.debt = max(0.0, loss + self.forgone)
        elif not self.ledger.is_funded and self.offers:
            self.ledger.trust(self.missed(prices), token)

    def _live(self, nodes: int) -> None:
        """Count the step among those of its life: by who drafted, or why nothing was verified."""
        if nodes and self.verifying is not None:
            self.life.step(self.verifying.whole.arm.name, len(self.committed), 1 + self.expected)
        else:
            self.life.step(NOT_FOUND if self.reason in (WORTH_MOST, TRIED) else self.reason, len(self.committed))

    def catch_up(self, view: SequenceView) -> int:
        """Count the steps since the last one that was learned from: the router was inactive in them."""
        length = len(view.tokens)
        missed = length - self.length - len(self.committed) if self.steps else 0
        for _ in range(missed):
            self.reasons[PAUSED] += 1
            self.life.step(PAUSED)
        self.length, self.committed = length, ()
        return missed

    def missed(self, prices: StepPrices) -> float:
        """Seconds that the best proposal of a replayable arm would have gained, had it been verified."""
        offers = [offer for offer in self.offers if offer.arm.whole.arm.replayable]
        wanted = max([best_cut(offer, prices, 1 / prices.token) for offer in offers], key=_worth, default=NOTHING)
        if wanted.offer is None:
            return 0.0
        _, path, _ = matched(wanted.offer.draft, self.committed)
        return min(len(path), wanted.nodes) * prices.token - prices.of_nodes(wanted.nodes)
