"""Limits what drafts may cost a sequence: what drafts have gained, and a small share of decoding time for trials."""

from __future__ import annotations

import math

START = 0.5  # tokens of plain decoding: the credit of a sequence that has drafted nothing yet
TRIALS = 0.01  # share of a sequence's decoding time that its trials may lose
AT_ONCE = 0.5  # factor on that share for several sequences together: one tries for the others
LENT = 4.0  # tokens: how much of other sequences' gains a sequence without credit may lose
FIRST_WAIT = 8  # tokens without a draft before the first trial
GROWTH = 2.0  # factor on the wait after each trial that loses
_NEVER = 1 << 40  # tokens


class Account:
    """Seconds that trials have lost. A ``share`` of the decoding time pays them off; until then nothing may be lost."""

    __slots__ = ("debt", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self.debt = 0.0

    def earn(self, seconds: float) -> None:
        """Pay off debt with seconds of decoding."""
        self.debt = max(0.0, self.debt - self.share * seconds)

    @property
    def is_paid_off(self) -> bool:
        return not self.debt and self.share > 0

    def tokens_left(self, seconds: float) -> int:
        """Tokens to decode, at ``seconds`` each, until the debt is paid off. Without a share it never is."""
        return math.ceil(self.debt / (self.share * seconds)) if self.share else _NEVER


class Gains:
    """Tokens of plain decoding that a strategy's drafts have lately gained, over all sequences.

    The next drafts may lose that many tokens. So a drafter that pays is not given up when the first drafts of a text
    fail. A drafter with evidence from held-out texts (``proved``) begins with a gain.
    """

    __slots__ = ("tokens",)

    def __init__(self, *, proved: bool = False) -> None:
        self.tokens = LENT if proved else 0.0

    def book(self, loss: float, token: float) -> None:
        """Book a proposal's loss in seconds; a gain is below 0. Plain decoding takes ``token`` seconds per token."""
        self.tokens = min(max(0.0, self.tokens - loss / token), LENT)


class Ledger:
    """One sequence's accounts.

    ``credit`` is what its drafts have gained beyond their cost. It pays for drafts that are expected to gain; without
    credit, the `Gains` of all sequences pay. Without either, or if no draft is expected to gain, only trials are
    drafted. Each trial that loses multiplies the debt that must be paid off before the next one, at least by
    ``growth``.
    """

    __slots__ = ("_gains", "_growth", "_price", "credit", "token", "trials")

    def __init__(self, token: float, gains: Gains, *, trials: float = TRIALS, growth: float = GROWTH) -> None:
        """``token``: seconds of plain decoding per token of this sequence. ``trials``: the share of time for trials."""
        self._gains = gains
        self.credit = START * token
        self.token = token
        self.trials, self._growth = Account(trials), growth
        self.trials.debt = self._price = FIRST_WAIT * trials * token  # debt after the next trial

    @property
    def is_funded(self) -> bool:
        """Whether drafts that are expected to gain may be verified."""
        return self.credit > 0 or self._gains.tokens > 0

    def settle(self, loss: float, token: float, *, trial: bool, tested: bool) -> None:
        """Book a proposal's loss in seconds; a gain is below 0. ``tested``: some of its nodes were verified."""
        self.token = token
        self.credit = max(0.0, self.credit - loss)
        self._gains.book(loss, token)
        least = FIRST_WAIT * self.trials.share * token
        if trial:
            self._price = max(self._growth * self._price if tested else least, loss) if loss > 0 else least
        if trial or tested:
            self.trials.debt = self._price

    def trust(self, gain: float, token: float) -> None:
        """Give credit for a draft that was not verified but would have gained ``gain`` seconds; at most `START`."""
        self.token = token
        self.credit = max(self.credit, min(START * token, gain))
