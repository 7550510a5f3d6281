"""The router's state of one sequence, and what it does there in one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from parlay.router.arms import ArmInSequence, matched
from parlay.router.choice import LEAST, NOTHING, Choice, Offer, best_cut, best_size, offered
from parlay.router.ledger import Account, Ledger
from parlay.router.prices import AnswerLengths, StepPrices
from parlay.router.ranking import best_of, cut_to
from parlay.types import Draft, SequenceView, Stretch

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
_STRETCHES = 32
"""When there would be more, two that follow each other become one, and new ones are twice as long."""


@dataclass(slots=True, eq=False)
class Step:
    """The decision for one sequence in one step."""

    offers: list[Offer] = field(default_factory=list)
    options: list[Choice] = field(default_factory=list)
    """The best that each arm could draft."""
    asking: ArmInSequence | None = None
    """The arm that is being asked."""
    asked: dict[int, int] = field(default_factory=dict)
    """Nodes that each arm was asked for, by number."""
    seconds: float = 0.0
    """What these proposals usually take, as was known before them."""
    watching: tuple[int, ...] = ()
    wakes: ArmInSequence | None = None
    """An arm that will be tried in the next step, and sees this one."""
    choice: Choice = NOTHING
    reason: str = ""
    """Of the choice."""
    is_trial: bool = False
    forgone: float = 0.0
    """Seconds that a trial gave up, because something else would have been drafted in its place."""
    verifying: ArmInSequence | None = None
    """Whose draft is verified."""
    expected: float = 0.0
    """Tokens that it is expected to bring."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence: its accounts and arms, and the step that is under way."""

    view: SequenceView
    ledger: Ledger
    arms: list[ArmInSequence]
    priced: list[ArmInSequence]
    """Those of them that are not replayable."""
    explored: Account
    """Pays for trials of one arm where another would have been drafted."""
    answers: AnswerLengths
    """Of all sequences."""
    step: Step = field(default_factory=Step)
    steps: int = 0
    length: int = 0
    """Tokens before the step."""
    committed: Sequence[int] = ()
    """Tokens of the step."""
    history: ChoiceHistory = field(default_factory=lambda: ChoiceHistory())
    reasons: Counter[str] = field(default_factory=Counter)
    """Steps by the reason of what was chosen."""

    def begin(self, view: SequenceView) -> int:
        """A new step. Returns the tokens of the steps before it in which the router was inactive."""
        self.ledger.earn()
        missed, before = self.catch_up(view), self.step
        for arm in self.priced:
            number = arm.whole.number  # all arms see the step that reads the prompt, which is the first
            saw = self.steps == 1 or number in before.watching or number in before.asked
            arm.is_ready = not arm.whole.arm.sees_first or (saw and not missed)
        self.steps += 1
        self.step = Step()
        return missed

    def ask(self, number: int, nodes: int) -> None:
        """Note who is asked for how many nodes; 0: nobody."""
        step = self.step
        step.asking = None
        if nodes:
            step.asking = arm = self.arms[number]
            step.asked[number] = nodes
            arm.asked_at = self.length
            seconds = arm.whole.seconds.of(nodes)
            arm.counts.asked += 1
            arm.counts.expected_seconds += seconds
            step.seconds += seconds

    def take(self, draft: Draft | None, prices: StepPrices) -> None:
        """Take the proposal of the arm that was asked; None if it failed."""
        arm = self.step.asking
        if arm is not None and draft is None:
            arm.is_lost = True
        elif arm is not None and draft is not None and len(draft):
            arm.whole.probes = draft.probes
            self.step.offers.append(offered(arm, draft, self.step.asked[arm.whole.number], prices))

    # --------------------------------------------------------------------------------------------------------- choices

    def evaluate(self, prices: StepPrices, rate: float) -> Choice:
        """The best of what was proposed and of what other arms would propose, if a second is worth ``rate`` tokens.

        By the means of all arms. If nothing is, an arm still drafts while it may well pay: near the break-even a few
        unlucky drafts would end what no trial finds again soon.
        """
        self.step.options = options = [best_cut(offer, prices, rate) for offer in self.step.offers]
        best = max(options, key=_worth, default=NOTHING)
        for arm in self.priced:
            if not arm.is_lost:
                choice = best_size(arm, prices, rate, arm.record.share)
                if choice.arm is None:
                    bound = best_size(arm, prices, rate, arm.record.bound)
                    choice = bound._replace(worth=min(bound.worth, LEAST))
                options.append(choice)
                if arm.is_ready and choice.worth > best.worth:
                    best = choice
        return best

    def decide(self, wanted: Choice, prices: StepPrices, rate: float) -> Choice:
        """Decide what is done: what is wanted, if the sequence has credit for it; or a trial; or nothing."""
        step = self.step
        may = wanted.arm is None or wanted.arm.is_open or self._may_open(wanted, wanted.arm, prices)
        step.choice = wanted if self.ledger.is_funded and may else NOTHING
        step.reason = WORTH_MOST if step.choice.arm else self._why_nothing(wanted, may, prices)
        waits = self.explored.tokens_left(prices.token) if step.choice.arm else self.ledger.wait
        if waits <= 0 and step.choice.offer is None and prices.room >= TRIAL * prices.sequences:
            self._try(prices, rate)
        self.reasons[step.reason] += 1
        if step.choice.arm is not None and not step.choice.arm.is_open:
            step.choice.arm.whole.is_opening = True
        return step.choice

    def _try(self, prices: StepPrices, rate: float) -> None:
        """Choose a trial of the arm that may be best; one that has to see a step first is tried in the next."""
        step, tried = self.step, self._worth_a_trial(prices, rate)
        if tried is not None and not tried.is_ready:
            step.wakes = tried
        elif tried is not None:
            step.is_trial, step.forgone, step.reason = True, step.choice.worth * prices.token, TRIED
            step.choice = Choice(arm=tried, nodes=min(TRIAL, tried.whole.arm.most))

    def _may_open(self, wanted: Choice, arm: ArmInSequence, prices: StepPrices) -> bool:
        """Whether the arm may read the prompt: the rest of the answer is expected to save the time that it takes."""
        saved = self.answers.left(self.view) * wanted.worth * prices.token / (1 + wanted.gain)
        seconds = prices.token * prices.sequences
        return saved >= prices.of_drafting(arm.whole.reading.of(self.length)) and arm.whole.may_open(seconds, pays=True)

    def _why_nothing(self, wanted: Choice, may: bool, prices: StepPrices) -> str:
        if not prices.room:
            return OVER_POWER
        if wanted.arm is None:
            return NOT_WORTH if self.step.offers or self.priced else NOT_FOUND
        return NO_CREDIT if may else NOT_OPEN

    def _worth_a_trial(self, prices: StepPrices, rate: float) -> ArmInSequence | None:
        """The arm that may be best, by an upper confidence bound; none if what is chosen is better than it may be."""
        likeliest, chosen = None, self.step.choice
        worth = chosen.worth if chosen.arm else -1.0
        for arm in self.priced:
            ready = arm.is_open or arm.whole.may_open(prices.token * prices.sequences, pays=False)
            if ready and not arm.is_lost and arm is not chosen.arm:
                share = min(1.0, arm.record.share + _BONUS * math.sqrt(math.log(1 + self.steps) / (1 + arm.tested)))
                bound = best_size(arm, prices, rate, share).worth
                if bound > worth:
                    likeliest, worth = arm, bound
        return likeliest

    def until_trial(self, token: float) -> int:
        """Tokens to decode before the next trial, if so many seconds pass for each."""
        opening = [0 if arm.is_open else arm.whole.prompts.tokens_left(token) for arm in self.priced]
        return max(self.ledger.wait, min(opening, default=0))

    def watch(self) -> tuple[int, ...]:
        """Arms that would pay if nothing better were offered, and one that is due for a trial: they see the step, so
        that they can draft in the next one and need not catch up.
        """
        step = self.step
        watching = [step.wakes] if step.wakes else []
        if self.priced and self.ledger.is_funded:
            watching += [choice.arm for choice in step.options if choice.arm and choice.offer is None]
        step.watching = tuple({arm.whole.number for arm in watching})
        return step.watching

    @property
    def wakes(self) -> bool:
        """Whether an arm sees this step because it may draft in the next one."""
        return any(not self.arms[number].is_ready for number in self.step.watching)

    def learn_gains(self) -> None:
        """Learn what each replayable arm is worth beyond the arms that were asked before it, and others."""
        worths = {choice.arm.whole.number: choice.worth for choice in self.step.options if choice.arm is not None}
        known = 0.0
        for number, worth in worths.items():
            if number not in self.step.asked and worth > known:
                known = worth
        for number in self.step.asked:
            worth = max(known, worths.get(number, 0.0))
            self.arms[number].learn_gain(worth - known)
            known = worth

    # -------------------------------------------------------------------------------------------------------- outcomes

    def to_verify(self, prices: StepPrices, rate: float) -> Offer | None:
        """The best proposal of the step, now that all are known.

        A drawn draft that was asked for is verified whatever was drawn: anything else would change the distribution.
        """
        step = self.step
        if step.choice.arm is None or step.choice.offer is not None:
            return step.choice.offer
        own = next((offer for offer in step.offers if offer.arm is step.choice.arm), None)
        if step.is_trial or (own is not None and own.is_drawn):
            return own
        best = max([best_cut(offer, prices, rate) for offer in step.offers], key=_worth, default=NOTHING).offer
        return own if best is None and own is not None and own.draft.probes else best

    def verified(self, offer: Offer, nodes: Sequence[int]) -> Draft:
        """The offer with these nodes only; a trial has some whatever they cost."""
        if self.step.is_trial and len(nodes) < TRIAL:
            nodes = best_of((offer.nodes, offer.path_probs), TRIAL)
        self.step.verifying, self.step.expected = offer.arm, offer.gains[len(nodes)]
        return cut_to(offer.draft, nodes)

    def _drafting(self, *, priced: bool = False) -> float:
        """Seconds that the proposals of this step, or those of arms that are not replayable, usually take."""
        asked = [(self.arms[number].whole, nodes) for number, nodes in self.step.asked.items()]
        return sum([whole.booked(nodes) for whole, nodes in asked if not (priced and whole.arm.replayable)])

    def book(self, nodes: int, right: int, prices: StepPrices) -> None:
        """Book what the verified draft cost and gained, or what one of a replayable arm would have gained.

        Trials are of arms that are not replayable, so a replayable arm's draft puts none off: where copies of a token
        or two are verified every few steps, no head would be tried any more.
        """
        step, token, arm = self.step, prices.token, self.step.verifying
        self._count(nodes, right)
        if nodes or step.is_trial or not prices.is_free(self._drafting(priced=True)):
            loss = prices.of_drafting(self._drafting()) + prices.of_nodes(nodes) - right * token
            tested = arm is not None and not arm.whole.arm.replayable and nodes > 0
            self.ledger.settle(loss, token, trial=step.is_trial and not step.forgone, tested=tested)
            if step.is_trial:
                self.explored.debt = max(0.0, loss + step.forgone)
        elif not self.ledger.is_funded and step.offers:
            self.ledger.trust(self._missed_gain(prices), token)

    def _count(self, nodes: int, right: int) -> None:
        """Count the step in the history: by who drafted, or why nothing was verified."""
        step, arm = self.step, self.step.verifying
        if not nodes or arm is None:
            reason = NOT_FOUND if step.reason in (WORTH_MOST, TRIED) else step.reason
            self.history.add(reason, len(self.committed))
            return
        counts = arm.counts
        counts.verified += 1
        counts.trials += step.is_trial
        counts.expected += step.expected
        counts.accepted += right
        self.history.add(arm.whole.arm.name, len(self.committed), 1 + step.expected)

    def catch_up(self, view: SequenceView) -> int:
        """Count the steps since the last one that was learned from: the router was inactive in them."""
        length = len(view.tokens)
        missed = length - self.length - len(self.committed) if self.steps else 0
        for _ in range(missed):
            self.reasons[PAUSED] += 1
            self.history.add(PAUSED)
        self.length, self.committed = length, ()
        return missed

    def _missed_gain(self, prices: StepPrices) -> float:
        """Seconds that the best proposal of a replayable arm would have gained, had it been verified."""
        offers = [offer for offer in self.step.offers if offer.arm.whole.arm.replayable]
        wanted = max([best_cut(offer, prices, 1 / prices.token) for offer in offers], key=_worth, default=NOTHING)
        if wanted.offer is None:
            return 0.0
        _, path, _ = matched(wanted.offer.draft, self.committed)
        return min(len(path), wanted.nodes) * prices.token - prices.of_nodes(wanted.nodes)


@dataclass(slots=True)
class _Stretch:
    steps: int = 0
    tokens: int = 0
    expected: float = 0.0
    choices: Counter[str] = field(default_factory=Counter)

    def join(self, other: _Stretch) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.expected += other.expected
        self.choices += other.choices


class ChoiceHistory:
    """The choices over the life of a sequence, in a bounded number of stretches; see `Stretch`."""

    __slots__ = ("_long", "_stretches")

    def __init__(self) -> None:
        self._long = 1  # steps of a stretch
        self._stretches: list[_Stretch] = []

    def add(self, choice: str, tokens: int = 1, expected: float = 1.0) -> None:
        """One step: what was verified in it, or why nothing was, and the tokens that it committed and should have."""
        if not self._stretches or self._stretches[-1].steps == self._long:
            if len(self._stretches) == _STRETCHES:
                self._halve()
            self._stretches.append(_Stretch())
        latest = self._stretches[-1]
        latest.steps += 1
        latest.tokens += tokens
        latest.expected += expected
        latest.choices[choice] += 1

    def _halve(self) -> None:
        for first, second in zip(self._stretches[::2], self._stretches[1::2], strict=True):
            first.join(second)
        self._stretches = self._stretches[::2]
        self._long *= 2

    def stretches(self) -> tuple[Stretch, ...]:
        return tuple([Stretch(each.steps, each.tokens, each.expected, dict(each.choices)) for each in self._stretches])
