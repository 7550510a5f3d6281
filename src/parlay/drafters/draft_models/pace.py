"""How quickly a drafter and its target work, and which way of drafting that makes the quickest.

A text is drafted for before each forward, during its own forwards, or during those of the other half of a batch. Each
way is rated by the tokens per second that a text then has.
"""

from __future__ import annotations

from dataclasses import dataclass

from parlay.drafters.options import ParallelDraftOptions

LEAST = 2
"""Tokens that are drafted during a forward: the first one stands for what the forward commits after its draft."""
_FIRST = 4  # as many, while the speeds are not known
_NEWEST = 0.2  # weight of the newest measurement of a speed
_LATE = 2.0  # times what is known: no measurement counts for more, for beside it a prompt may have been read
_EXPECTED, _SUPPOSED = 0.7, 4.0  # share of guesses that are right, while few were tested, and its weight in tokens
_KEPT = 0.98  # weight of older tokens, for each that is tested
_SURE = 0.98  # share beyond which no guess counts as right
_SPARE = 0.25  # part of a token by which a forward may be too short for it
_BETTER = 1.05  # how much quicker another way must seem before it is taken
_TRIAL = 2  # steps in which it is measured how drafting and forwards go together
_AGAIN, _RARELY = 256, 1 << 14  # steps until that is done again where it did not pay: each time twice as many


@dataclass(slots=True)
class _Share:
    """The share of guessed tokens that were right, of those that were tested lately."""

    right: float = _EXPECTED * _SUPPOSED
    tested: float = _SUPPOSED

    @property
    def chance(self) -> float:
        return min(_SURE, self.right / self.tested)

    def learn(self, right: int, tested: int) -> None:
        self.right, self.tested = _KEPT**tested * self.right + right, _KEPT**tested * self.tested + tested


@dataclass(slots=True)
class _Speeds:
    """Seconds of a forward and of a drafted token, 0 while not known."""

    forward: float = 0.0
    token: float = 0.0

    @property
    def known(self) -> bool:
        return self.forward > 0 and self.token > 0

    def learn(self, *, forward: float = 0.0, token: float = 0.0) -> None:
        """Learn from measurements; 0: there is none."""
        self.forward = _newer(self.forward, forward)
        self.token = _newer(self.token, token)


class Pace:
    """Says when to draft and how much, by what is measured.

    During a forward as many tokens are drafted as fit into one, as PEARL does, unless their number is set. With
    ``form=auto`` texts are drafted for before each forward until another way is known to be quicker. What forwards and
    drafting take beside each other is measured in a few steps, if that can be quicker at all: if each took what it
    takes alone.
    """

    def __init__(self, options: ParallelDraftOptions) -> None:
        self._set = options.ahead
        self._measures, self._chooses = not options.ahead and options.form != "amusd", options.form == "auto"
        self._alone, self._beside = _Speeds(), _Speeds()  # while nothing is drafted during forwards, and else
        self._share = _Share()
        self._of_half = 0.0  # seconds of a token that is drafted for half of the texts
        self._drafted = 0.0  # tokens of a draft that is written before a forward
        self._slower = 1.0  # how many times as long forwards take because of what is drafted during them
        self._halves_may_pay = False
        self._flies = not self._chooses
        self._trial = self._steps = 0
        self._again = _AGAIN

    @property
    def tokens(self) -> int:
        """How many tokens to draft during a forward."""
        if self._set:
            return self._set
        return self._fitting(self._beside) if self._beside.known else _FIRST

    def _fitting(self, speeds: _Speeds) -> int:
        return self._set or max(LEAST, int(speeds.forward / speeds.token + _SPARE))

    # --------------------------------------------------------------------------------------------------- what to do

    def before(self, budget: int) -> int:
        """How many tokens to draft before a forward for which none are there. 0: it runs meanwhile, without a draft.

        With a draft ready, a step takes one forward, and leaves the next one ready if all tokens are right. Each choice
        is rated by the tokens and the seconds until no draft is ready again.
        """
        if not self._measures or not self._beside.known:
            return 0
        rates = self._rates_during(budget, self._beside)
        return rates.index(max(rates))

    def flies(self, budget: int) -> bool:
        """Whether to draft during the text's own forward, with ``form=auto`` as far as that is quicker."""
        if not self._chooses or not self._alone.known:
            return self._flies
        if self._trial:
            self._trial -= 1
            return True
        if not self._beside.known:
            return self._flies_for_trial(budget)
        first = self._rate_before(budget, self._alone.forward)
        during = max(self._rates_during(budget, self._beside))
        self._flies = during > first * (1 / _BETTER if self._flies else _BETTER)
        self._steps = 0 if self._flies else self._steps + 1
        if self._steps >= self._again:  # the machine may have cores to spare by now
            self._steps, self._again, self._beside = 0, min(2 * self._again, _RARELY), _Speeds()
        return self._flies

    def _flies_for_trial(self, budget: int) -> bool:
        """Whether drafting during forwards is quicker if both take what they take alone; then that is measured."""
        first = self._rate_before(budget, self._alone.forward)
        best = max(self._rates_during(budget, self._alone))
        if not self._halves_may_pay and best <= _BETTER * first:
            return False
        self._halves_may_pay, self._trial = False, _TRIAL - 1
        return True

    def halves_pay(self, budget: int, whole: float, half: float, *, now: bool) -> bool:
        """Whether the halves of a batch are quicker in turn, each drafted for while the other one is verified.

        ``whole`` and ``half`` are the seconds of a forward of all texts and of half of them, and ``now`` says whether
        they run in halves at present. Nothing is drafted in vain then, but there are two forwards.
        """
        speeds = self._beside
        if not now and speeds.forward and whole:
            self._slower = max(1.0, speeds.forward / whole)
        if not speeds.known:
            token = self._alone.token
            halves = self._rate_of_halves(budget, half, token) if token else 0.0
            self._halves_may_pay = halves > _BETTER * self._rate_before(budget, whole)
            return False
        halves = self._rate_of_halves(budget, half * self._slower, self._of_half or speeds.token)
        together = max(self._rates_during(budget, _Speeds(whole * self._slower, speeds.token)))
        if self._chooses:
            together = max(together, self._rate_before(budget, whole))
        return halves > together * (1 if now else _BETTER)

    # ------------------------------------------------------------------------------------------------- what is known

    def learn_forward(self, seconds: float, *, beside: bool) -> None:
        """Learn what a forward of all texts took, and what is done around it, beside drafting or not."""
        (self._beside if beside else self._alone).learn(forward=seconds)

    def learn_token(self, seconds: float, *, halves: bool) -> None:
        """Learn what a token took that was drafted during a forward, for all texts or for half of them."""
        if halves:
            self._of_half = _newer(self._of_half, seconds)
        else:
            self._beside.learn(token=seconds)

    def learn_alone(self, seconds: float, drafted: float) -> None:
        """Learn what a token took that was drafted while nothing ran, and how many there were in a draft."""
        self._alone.learn(token=seconds)
        self._drafted = _newer(self._drafted, drafted)

    def learn_outcome(self, right: int, tested: int) -> None:
        """So many of the guessed tokens that were tested were right."""
        self._share.learn(right, tested)

    # --------------------------------------------------------------------------------------------------------- rates

    def _rates_during(self, budget: int, speeds: _Speeds) -> list[float]:
        """Rate drafting during forwards, by the tokens that are drafted first where no draft is ready."""
        tokens, chance = self._fitting(speeds), self._share.chance
        ready, step = min(budget, tokens - 1), max(speeds.forward, tokens * speeds.token)
        steps = 1 / (1 - chance ** (ready + 1))  # that begin with a draft, one after another, on average
        rates = [(1 + chance * steps * _tokens(chance, ready)) / (step * (1 + chance * steps))]
        for drafted in range(1, budget + 1):
            all_right = chance ** (drafted + 1)
            tokens_of_all = _tokens(chance, drafted) + all_right * steps * _tokens(chance, ready)
            first = drafted * (self._alone.token or speeds.token)
            rates.append(tokens_of_all / (first + step * (1 + all_right * steps)))
        return rates

    def _rate_before(self, budget: int, forward: float) -> float:
        """Rate drafting before each forward, as much as lately."""
        drafted = min(budget, self._drafted or budget)
        return _tokens(self._share.chance, drafted) / (drafted * self._alone.token + forward)

    def _rate_of_halves(self, budget: int, half: float, token: float) -> float:
        """Rate two halves in turn, at the best number of tokens."""
        chance, counts = self._share.chance, range(1, max(budget, 1) + 1)
        return max(_tokens(chance, count) / (2 * max(half, count * token)) for count in counts)


def _newer(known: float, measured: float) -> float:
    if measured <= 0:
        return known
    return known + _NEWEST * (min(measured, _LATE * known) - known) if known else measured


def _tokens(chance: float, drafted: float) -> float:
    """Tokens of a step on average whose draft has so many, each right with this chance."""
    return float((1 - chance ** (drafted + 1)) / (1 - chance))
