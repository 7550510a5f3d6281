"""A router's knowledge of one sequence, and its decisions for it in one step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from parlay.router.acceptance import matched
from parlay.router.arms import ArmInSequence
from parlay.router.choice import LEAST, NOTHING, Choice, Offer, best_cut, best_size, offered
from parlay.router.choice_history import ChoiceHistory
from parlay.router.ledger import Account, Ledger
from parlay.router.prices import AnswerLengths, StepPrices
from parlay.router.ranking import best_of
from parlay.types import Draft, SequenceView, trees

WORTH_MOST = "worth most"
TRIED = "trial"
NOT_FOUND = "nothing proposed"
NOT_WORTH = "not worth its cost"
OVER_POWER = "above the limit of power"
NO_CREDIT = "no credit after losses"
NOT_OPEN = "prompt not read yet"
PAUSED = "paused"
_worth = attrgetter("worth")  # key of a choice
_BONUS = 0.5  # how much better than measured an untested drafter's share may be


@dataclass(frozen=True, slots=True)
class Laid:
    """A draft of probes alone, which prepares a draft of ``nodes`` nodes in the next step; both are booked together.

    Booked alone it could only lose. A sequence that spends the last of its credit on it would never see what the probes
    found.
    """

    arm: ArmInSequence
    nodes: int
    loss: float
    is_trial: bool
    forgone: float


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence's accounts and arms, and the state of its current step."""

    view: SequenceView
    ledger: Ledger
    explored: Account
    """Pays for trials in steps where another arm would have drafted."""
    trials: Account
    """Pays for the trials of all sequences: in a large batch, one sequence tries an arm for the others."""
    answers: AnswerLengths
    """The answer lengths of all sequences."""
    arms: dict[int, ArmInSequence]
    """By number: all but those that need a prediction which the request does not have."""
    priced: list[ArmInSequence]
    """The arms that suit the sequence and are not replayable."""
    history: ChoiceHistory | None
    """None if no history is wanted."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of steps by the reason of the choice."""
    steps: int = 0
    length: int = 0
    """Number of tokens before this step."""
    committed: Sequence[int] = ()
    """Tokens that this step committed."""

    offers: list[Offer] = field(default_factory=list)
    """The drafts proposed in this step."""
    options: list[Choice] = field(default_factory=list)
    """The best choice that each arm offers."""
    requesting: ArmInSequence | None = None
    """The arm that is being asked now."""
    requested: dict[int, int] = field(default_factory=dict)
    """How many nodes each arm was asked for in this step, by the arm's number."""
    seconds: float = 0.0
    """Seconds that these proposals usually take, as known before they were made."""
    watching: tuple[int, ...] = ()
    tried_next: ArmInSequence | None = None
    """An arm that will be tried in the next step, and therefore observes this one."""
    choice: Choice = NOTHING
    reason: str = ""
    """Why ``choice`` was made."""
    is_trial: bool = False
    forgone: float = 0.0
    """Seconds that the step's trial cost because another draft was given up for it."""
    laid: Laid | None = None
    """What the last step's probes prepared for this step."""
    verifying: ArmInSequence | None = None
    """The arm whose draft is verified."""
    expected: float = 0.0
    """How many of the draft's tokens are expected to be accepted."""

    def __post_init__(self) -> None:
        self.length = len(self.view.tokens)

    def begin(self, token: float) -> int:
        """Begin a step. Returns the tokens decoded since the last one; each pays off debts with ``token`` seconds."""
        decoded = len(self.view.tokens) - self.length
        missed = self.catch_up()
        if self.ledger.trials.debt:
            self.ledger.trials.earn(decoded * self.ledger.token)
        if self.explored.debt:
            self.explored.earn(decoded * token)
        for arm in self.priced:
            if arm.state.spec.sees_first:  # all arms see the step that reads the prompt, which is the first
                number = arm.state.number
                arm.is_ready = not missed and (self.steps == 1 or number in self.watching or number in self.requested)
        self.steps += 1
        self.offers, self.requested, self.seconds, self.tried_next, self.verifying = [], {}, 0.0, None, None
        return decoded

    def note_request(self, number: int, nodes: int) -> None:
        """Note that the arm with this number is asked for ``nodes`` nodes."""
        self.requesting = arm = self.arms[number]
        self.requested[number] = nodes
        arm.requested_at, arm.state.unasked = self.length, 0
        seconds = arm.state.drafting(nodes)
        arm.counts.asked += 1
        arm.counts.expected_seconds += seconds
        self.seconds += seconds

    def take(self, draft: Draft | None, prices: StepPrices) -> None:
        """Store the draft of the arm that was asked. None: the arm failed."""
        arm, self.requesting = self.requesting, None
        if arm is None:
            return
        if draft is None:
            arm.is_lost = True
        elif draft.tree.tokens:
            if draft.probes and (len(draft) > draft.probes or not arm.state.probes):
                arm.state.probes = draft.probes  # a draft without probes, as at the end of a text, is no guide
            self.offers.append(offered(arm, draft, self.requested[arm.state.number], prices))

    def has_run(self, number: int) -> bool:
        """Whether asking this arm took time. A drafter on the target's own layers that proposes nothing takes none."""
        return not self.arms[number].state.spec.layers or any(each.arm.state.number == number for each in self.offers)

    # --------------------------------------------------------------------------------------------------------- choices

    def evaluate(self, prices: StepPrices) -> Choice:
        """The best choice among this step's offers and what the other arms would propose.

        Arms are compared by their mean records. If none pays by its mean, an arm may still draft by its confidence
        bound: near break-even, a few unlucky drafts would otherwise end drafting until a trial finds the arm again.
        """
        self.options, best = [], NOTHING
        if self.offers:
            self.options = [best_cut(offer, prices) for offer in self.offers]
            best = max(self.options, key=_worth)
        elif not self.ledger.is_funded:
            return NOTHING
        for arm in self.priced:
            if not arm.is_lost:
                stake = arm.stake(prices.token)
                choice = best_size(arm, prices, arm.record.share, stake=stake)
                if choice is NOTHING:
                    choice = best_size(arm, prices, arm.record.bound, LEAST, stake)
                self.options.append(choice)
                if choice.worth > best.worth and arm.is_ready:
                    best = choice
        return best

    def decide(self, wanted: Choice, prices: StepPrices) -> Choice:
        """Decide what to draft: the wanted choice, if the sequence has credit for it; or a trial; or nothing."""
        arm = wanted.arm
        may = arm is None or arm.is_open or self._may_open(wanted, arm, prices)
        self.is_trial, self.forgone = False, 0.0
        if arm is not None and may and self.ledger.is_funded:
            self.choice, self.reason, tries = wanted, WORTH_MOST, self.explored.is_paid_off
        else:
            self.choice, self.reason = NOTHING, self._why_nothing(wanted, may, prices)
            tries = self.ledger.trials.is_paid_off
        if self.laid is not None:
            self._go_on(self.laid, prices)
        elif tries and self.trials.is_paid_off:
            self._try(prices)
        if self.history is not None:
            self.reasons[self.reason] += 1
        if self.choice.arm is not None and not self.choice.arm.is_open:
            self.choice.arm.state.is_opening = True
        return self.choice

    def _try(self, prices: StepPrices) -> None:
        """Choose a trial of the arm that may be best.

        An arm that must observe a step first is tried in the next step.
        """
        tried = self._worth_a_trial(prices)
        if tried is not None and not tried.is_ready:
            self.tried_next = tried
        elif tried is not None:
            self.is_trial, self.forgone, self.reason = True, self.choice.worth * prices.token, TRIED
            nodes = tried.state.trial
            self.choice = Choice(arm=tried, nodes=nodes)
            self.trials.debt = prices.of_drafting(tried.state.drafting(nodes)) + prices.of_nodes(nodes)

    def _go_on(self, laid: Laid, prices: StepPrices) -> None:
        """Draft what probes prepared, if nothing else is chosen, or if they were a trial and a copy is chosen."""
        free = self.choice is NOTHING or (laid.is_trial and self.choice.offer is not None)
        if free and prices.room >= laid.arm.state.trial_rows * prices.sequences:
            self.is_trial, self.forgone, self.reason = True, self.choice.worth * prices.token, TRIED
            self.choice = Choice(arm=laid.arm, nodes=laid.nodes)

    def _may_open(self, wanted: Choice, arm: ArmInSequence, prices: StepPrices) -> bool:
        """Whether the arm may read the prompt: the rest of the answer should save more time than reading takes."""
        saved = self.answers.left(self.view) * wanted.worth * prices.token / (1 + wanted.gain)
        pays, seconds = saved >= prices.of_drafting(arm.state.reading.of(self.length)), prices.token * prices.sequences
        return pays and arm.state.may_open(seconds, pays=True)

    def _why_nothing(self, wanted: Choice, may: bool, prices: StepPrices) -> str:
        if not prices.room:
            return OVER_POWER
        if wanted.arm is not None:
            return NO_CREDIT if may else NOT_OPEN
        return NOT_WORTH if self.offers or self.priced else NOT_FOUND

    def _worth_a_trial(self, prices: StepPrices) -> ArmInSequence | None:
        """The arm that may be best, by an upper confidence bound. None if the present choice is better than any.

        In place of a draft that was already proposed, only arms with probes are tried: they need two steps without such
        drafts.
        """
        likeliest, chosen = None, self.choice
        worth = chosen.worth if chosen.arm else -1.0
        for arm in self.priced:
            if arm is chosen.arm or arm.is_lost or (chosen.offer is not None and not arm.state.probes):
                continue
            room = prices.room >= arm.state.trial_rows * prices.sequences
            if room and (arm.is_open or arm.state.may_open(prices.token * prices.sequences, pays=False)):
                share = min(1.0, arm.record.share + _BONUS * math.sqrt(math.log(1 + self.steps) / (1 + arm.tested)))
                bound = math.inf if arm.state.is_forgotten else best_size(arm, prices, share).worth
                if bound > worth:
                    likeliest, worth = arm, bound
        return likeliest

    def until_trial(self, token: float) -> int:
        """How many tokens to decode until the next trial, at ``token`` seconds for each."""
        opening = [0 if arm.is_open else arm.state.prompts.tokens_left(token) for arm in self.priced]
        own, shared = self.ledger.trials.tokens_left(self.ledger.token), self.trials.tokens_left(token)
        return max(own, shared, min(opening, default=0))

    def watch(self) -> tuple[int, ...]:
        """Numbers of the arms that observe the step, so that they can draft in the next one without catching up.

        They are the arms that would pay if no better draft were offered, and one that is due for a trial. An arm that
        is asked observes the step anyway.
        """
        watching: list[ArmInSequence] = []
        if self.ledger.is_funded:
            for choice in self.options:
                if (arm := choice.arm) and choice.offer is None and arm.state.number not in self.requested:
                    watching.append(arm)
        if self.tried_next is not None and self.tried_next not in watching:
            watching.append(self.tried_next)
        self.watching = tuple([arm.state.number for arm in watching])
        return self.watching

    @property
    def is_idle(self) -> bool:
        """Whether no arm is asked or chosen in this step, and none needs to observe it to draft in the next."""
        asks = self.requested or self.choice.arm is not None
        return not asks and all(self.arms[number].is_ready for number in self.watching)

    def learn_gains(self) -> None:
        """Learn what each replayable arm's proposal adds to those of arms asked before it and of the others."""
        known, proposed = 0.0, dict.fromkeys(self.requested, 0.0)
        for choice in self.options:
            if choice.offer is None:
                known = max(known, choice.worth)
            else:
                proposed[choice.offer.arm.state.number] = choice.worth
        for number, proposal in proposed.items():
            self.arms[number].learn_gain(max(0.0, proposal - known))
            known = max(known, proposal)

    # -------------------------------------------------------------------------------------------------------- outcomes

    def to_verify(self, prices: StepPrices) -> Offer | None:
        """The best proposal of the step, now that all of them are known.

        A drawn draft that was asked for is always verified: a choice that depends on what was drawn would change the
        distribution. So are probes: otherwise a copy in every step would keep a better arm from ever drafting. A
        sequence's only arm has no competitor; `Router.trim` cuts its nodes that do not pay.
        """
        arm, offers = self.choice.arm, self.offers
        if arm is None or self.choice.offer is not None:
            return self.choice.offer
        if len(self.arms) == 1 and offers:
            return offers[0]
        own = offers[-1] if offers and offers[-1].arm is arm else None  # the chosen arm was asked last
        if self.is_trial or (own is not None and (own.is_drawn or own.is_probes)):
            return own
        best = max([best_cut(offer, prices) for offer in offers], key=_worth, default=NOTHING).offer
        return own if best is None and own is not None and own.draft.probes else best

    def verified(self, offer: Offer, nodes: Sequence[int]) -> Draft:
        """Cut the offer to ``nodes``. A trial keeps some nodes whatever they cost, and a drawn draft stays whole."""
        if self.is_trial and len(nodes) < offer.arm.state.trial:
            nodes = best_of((offer.nodes, offer.path_probs), offer.arm.state.trial)
        if offer.bearing:
            nodes = sorted({*nodes, *offer.bearing})
        self.verifying, self.expected = offer.arm, offer.gains[len(nodes)]
        draft = self._credited(offer) if self.view.request.predicts else offer.draft
        whole = draft.kind != "point" or len(nodes) == len(draft.tree.tokens) - draft.probes
        return draft if whole else trees.prune(draft, nodes)

    def _credited(self, offer: Offer) -> Draft:
        """The offer's draft. Tokens that it copies, and that the prediction proposed too, come from the prediction."""
        predicted = [each.draft for each in self.offers if each.arm.state.spec.predicts]
        copies = offer.arm.state.spec.replayable and not offer.arm.state.spec.predicts
        return trees.credited(offer.draft, predicted[0]) if predicted and copies else offer.draft

    def book(self, nodes: int, probes: int, right: int, prices: StepPrices) -> None:
        """Book what the verified draft cost and gained, or what a replayable arm's draft would have gained.

        ``probes`` of its ``nodes`` were computed but not verified. The loss of a draft of probes alone is booked with
        the draft that follows it in the next step.

        Only arms that are not replayable are tried, so drafts of replayable arms do not postpone trials: where copies
        of a token or two are verified every few steps, no head would ever be tried again.
        """
        if self.history is not None:
            self._count(self.history, nodes, right)
        drafting = copying = 0.0
        for number, requested in self.requested.items():
            state = self.arms[number].state
            seconds = state.booked(requested) if self.has_run(number) else 0.0
            if not state.spec.replayable:
                outcome = prices.of_nodes(nodes) - right * prices.token if self.verifying is self.arms[number] else 0.0
                self.arms[number].book(prices.of_drafting(seconds) + outcome, prices.token)
            drafting += seconds
            copying += seconds if state.spec.replayable else 0.0
        laid, self.laid = self.laid, None
        if nodes or laid is not None or self.is_trial or not prices.is_free(drafting - copying):
            token, arm = prices.token, self.verifying
            loss = prices.of_drafting(drafting) + prices.of_nodes(nodes) - right * token
            if laid is not None:
                loss, self.forgone = loss + laid.loss, self.forgone + laid.forgone
                self.is_trial = laid.is_trial
            elif arm is not None and 0 < nodes == probes:
                self.laid = Laid(arm, self.requested[arm.state.number], loss, self.is_trial, self.forgone)
                return
            tested = arm is not None and not arm.state.spec.replayable and nodes > 0
            self.ledger.settle(loss, token, trial=self.is_trial and not self.forgone, tested=tested)
            if self.is_trial:
                self.explored.debt = self.trials.debt = max(0.0, loss + self.forgone)
        elif self.offers and not self.ledger.is_funded:
            self._trust(prices)

    def _count(self, history: ChoiceHistory, nodes: int, right: int) -> None:
        """Add the step to the history: who drafted, or why nothing was verified."""
        arm = self.verifying
        if not nodes or arm is None:
            reason = NOT_FOUND if self.reason in (WORTH_MOST, TRIED) else self.reason
            history.add(reason, len(self.committed))
            return
        counts = arm.counts
        counts.verified += 1
        counts.trials += self.is_trial
        counts.expected += self.expected
        counts.accepted += right
        history.add(arm.state.spec.name, len(self.committed), 1 + self.expected)

    def catch_up(self) -> int:
        """Count the steps since the router last learned: it was inactive in them."""
        length = len(self.view.tokens)
        missed = length - self.length - len(self.committed)
        if missed and self.history is not None:
            self.reasons[PAUSED] += missed
            for _ in range(missed):
                self.history.add(PAUSED)
        self.length, self.committed = length, ()
        return missed

    def _trust(self, prices: StepPrices) -> None:
        self.ledger.trust(self._missed_gain(prices), prices.token)
        if self.ledger.is_funded:
            nodes = prices.within(self.ledger.credit)
            for offer in self.offers:
                offer.arm.restart(nodes)

    def _missed_gain(self, prices: StepPrices) -> float:
        """Seconds that a replayable arm's best proposal would have gained, had it been verified.

        Without a draft a step commits one token, so no more of a proposal is compared, and no more of it is charged.
        """
        offers = [offer for offer in self.offers if offer.arm.state.spec.replayable]
        wanted = max([best_cut(offer, prices) for offer in offers], key=_worth, default=NOTHING)
        if wanted.offer is None:
            return 0.0
        _, path, _ = matched(wanted.offer.draft, self.committed)
        nodes = min(len(self.committed), wanted.nodes)
        return min(len(path), nodes) * prices.token - prices.of_nodes(nodes)
