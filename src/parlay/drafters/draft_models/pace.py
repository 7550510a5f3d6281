"""Measures how fast a drafter and its target work, and picks the fastest way of drafting.

A text can be drafted for before each forward, during its own forwards, or during those of the other half of a batch.
Each way is rated by the tokens per second that it gives a text.
"""

from __future__ import annotations

from dataclasses import dataclass

from parlay.drafters.options import ParallelDraftOptions

LEAST = 2
"""The fewest tokens to draft during a forward. The first one stands for the token that the forward commits last."""
_FIRST = 4  # how many tokens to draft while the speeds are unknown
_NEWEST = 0.2  # weight of the newest measurement of a speed
_LATE = 2.0  # a measurement is cut to this multiple of the estimate: it may include reading a prompt
_EXPECTED, _SUPPOSED = 0.7, 4.0  # prior share of right guesses, and its weight in tokens
_KEPT = 0.98  # decay per tested token
_SURE = 0.98  # upper limit of the share of right guesses
_SPARE = 0.25  # a token counts as fitting if at most this part of it does not
_BETTER = 1.05  # factor by which another way must be faster to be taken
_TRIAL = 2  # steps in which drafting during forwards is measured
_AGAIN, _RARELY = 256, 1 << 14  # steps until it is measured again if it did not pay, doubled each time


@dataclass(slots=True)
class _Share:
    """The share of guessed tokens that were right, among those tested recently."""

    right: float = _EXPECTED * _SUPPOSED
    tested: float = _SUPPOSED

    @property
    def chance(self) -> float:
        return min(_SURE, self.right / self.tested)

    def learn(self, right: int, tested: int) -> None:
        self.right, self.tested = _KEPT**tested * self.right + right, _KEPT**tested * self.tested + tested


@dataclass(slots=True)
class _Speeds:
    """Seconds of a forward and of a drafted token; 0 if unknown."""

    forward: float = 0.0
    token: float = 0.0

    @property
    def known(self) -> bool:
        return self.forward > 0 and self.token > 0

    def learn(self, *, forward: float = 0.0, token: float = 0.0) -> None:
        """Learn from measurements; 0 stands for none."""
        self.forward = _newer(self.forward, forward)
        self.token = _newer(self.token, token)


class Pace:
    """Decides when to draft and how much, from measurements.

    During a forward as many tokens are drafted as fit into it, as in PEARL, unless the number is set. With
    ``form=auto``, texts are drafted for before each forward until another way is known to be faster. How much forwards
    and drafting slow each other is measured in a few steps, but only if drafting during forwards would be faster
    without that.
    """

    def __init__(self, options: ParallelDraftOptions) -> None:
        self._set = options.ahead
        self._measures, self._chooses = not options.ahead and options.form != "amusd", options.form == "auto"
        self._alone, self._beside = _Speeds(), _Speeds()  # without and with drafting during forwards
        self._share = _Share()
        self._of_half = 0.0  # seconds of a token drafted for half of the texts
        self._drafted = 0.0  # tokens of a draft written before a forward
        self._slower = 1.0  # factor by which drafting during forwards slows them
        self._halves_may_pay = False
        self._drafts_beside = not self._chooses
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
        """How many tokens to draft before a forward if no draft is ready. 0: the forward runs without a draft
        meanwhile.

        With a draft ready, a step takes one forward, and leaves the next draft ready if all tokens are right. Each
        choice is rated by tokens and seconds until no draft is ready again.
        """
        if not self._measures or not self._beside.known:
            return 0
        rates = self._rates_during(budget, self._beside)
        return rates.index(max(rates))

    def drafts_beside(self, budget: int) -> bool:
        """Whether to draft during the text's own forward; with ``form=auto``, only if that is faster."""
        if not self._chooses or not self._alone.known:
            return self._drafts_beside
        if self._trial:
            self._trial -= 1
            return True
        if not self._beside.known:
            return self._tries_beside(budget)
        first = self._rate_before(budget, self._alone.forward)
        during = max(self._rates_during(budget, self._beside))
        self._drafts_beside = during > first * (1 / _BETTER if self._drafts_beside else _BETTER)
        self._steps = 0 if self._drafts_beside else self._steps + 1
        if self._steps >= self._again:  # the machine may have spare cores by now
            self._steps, self._again, self._beside = 0, min(2 * self._again, _RARELY), _Speeds()
        return self._drafts_beside

    def _tries_beside(self, budget: int) -> bool:
        """Whether drafting during forwards would be faster if neither slowed the other. If so, it is measured."""
        first = self._rate_before(budget, self._alone.forward)
        best = max(self._rates_during(budget, self._alone))
        if not self._halves_may_pay and best <= _BETTER * first:
            return False
        self._halves_may_pay, self._trial = False, _TRIAL - 1
        return True

    def halves_pay(self, budget: int, whole: float, half: float, *, now: bool) -> bool:
        """Whether two halves of a batch are faster in turn, each drafted for while the other is verified.

        ``whole`` and ``half``: seconds of a forward over all texts and over half of them; ``now``: whether they run in
        halves at present. No draft is wasted then, but there are two forwards.
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

    # -------------------------------------------------------------------------------------------------- measurements

    def learn_forward(self, seconds: float, *, beside: bool) -> None:
        """Learn the seconds of a forward over all texts, with the work around it.

        ``beside``: tokens were drafted meanwhile.
        """
        (self._beside if beside else self._alone).learn(forward=seconds)

    def learn_token(self, seconds: float, *, halves: bool) -> None:
        """Learn the seconds per token drafted during a forward, for all texts or for half of them."""
        if halves:
            self._of_half = _newer(self._of_half, seconds)
        else:
            self._beside.learn(token=seconds)

    def learn_alone(self, seconds: float, drafted: float) -> None:
        """Learn the seconds per token drafted while nothing else ran, and how many tokens a draft had."""
        self._alone.learn(token=seconds)
        self._drafted = _newer(self._drafted, drafted)

    def learn_outcome(self, right: int, tested: int) -> None:
        """Learn how many of the tested guesses were right."""
        self._share.learn(right, tested)

    # --------------------------------------------------------------------------------------------------------- rates

    def _rates_during(self, budget: int, speeds: _Speeds) -> list[float]:
        """Tokens per second of drafting during forwards, by how many tokens are drafted first if no draft is ready."""
        tokens, chance = self._fitting(speeds), self._share.chance
        ready, step = min(budget, tokens - 1), max(speeds.forward, tokens * speeds.token)
        steps = 1 / (1 - chance ** (ready + 1))  # mean number of consecutive steps that begin with a draft
        rates = [(1 + chance * steps * _tokens(chance, ready)) / (step * (1 + chance * steps))]
        for drafted in range(1, budget + 1):
            all_right = chance ** (drafted + 1)
            tokens_of_all = _tokens(chance, drafted) + all_right * steps * _tokens(chance, ready)
            first = drafted * (self._alone.token or speeds.token)
            rates.append(tokens_of_all / (first + step * (1 + all_right * steps)))
        return rates

    def _rate_before(self, budget: int, forward: float) -> float:
        """Tokens per second of drafting before each forward, with drafts as long as lately."""
        drafted = min(budget, self._drafted or budget)
        return _tokens(self._share.chance, drafted) / (drafted * self._alone.token + forward)

    def _rate_of_halves(self, budget: int, half: float, token: float) -> float:
        """Tokens per second of two halves in turn, with the best number of drafted tokens."""
        chance, counts = self._share.chance, range(1, max(budget, 1) + 1)
        return max(_tokens(chance, count) / (2 * max(half, count * token)) for count in counts)


def _newer(known: float, measured: float) -> float:
    if measured <= 0:
        return known
    return known + _NEWEST * (min(measured, _LATE * known) - known) if known else measured


def _tokens(chance: float, drafted: float) -> float:
    """Expected tokens of a step whose draft has ``drafted`` tokens, each right with this probability."""
    return float((1 - chance ** (drafted + 1)) / (1 - chance))
