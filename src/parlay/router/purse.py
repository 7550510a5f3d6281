"""What one sequence's drafts may lose, and when one that lost it may try again."""

from __future__ import annotations

import math

from parlay.types import Cost, Spent

STAKE = 0.5  # forwards that a sequence's drafts may lose before they have gained anything
FIRST_WAIT = 8  # steps without a tested node before a probe
LOSS = 0.01  # share of plain decoding's time that failed probes may take
FREE = 0.01  # of a forward: drafting that costs less counts as free


class Bill:
    """Seconds of one step: for a proposal, for the rows of one draft, and what a forward of one row would take."""

    __slots__ = ("_cost", "_seconds", "_spent", "draft_seconds", "plain")

    def __init__(self, cost: Cost, spent: Spent) -> None:
        self.draft_seconds = spent.draft_seconds
        self.plain = cost.forward(1, spent.context)
        self._cost = cost
        self._spent = spent
        self._seconds: dict[int, float] = {0: 0.0}

    def rows(self, count: int) -> float:
        """What so many of the step's rows have added to it."""
        seconds = self._seconds.get(count)
        if seconds is None:
            rows, context = self._spent.rows, self._spent.context
            seconds = self._cost.forward(rows, context) - self._cost.forward(rows - count, context)
            self._seconds[count] = seconds
        return seconds


class Purse:
    """Fills with what drafts gain and pays what they lose, in forwards; probes are drafted on credit, now and then."""

    __slots__ = ("_spent_at", "_wait", "forwards", "new", "probing")

    def __init__(self, length: int) -> None:
        """``length`` is that of the text, here and below: each step without a draft adds one token to it."""
        self.forwards = STAKE
        self.probing = False  # in this step
        self.new = True  # nothing drafted yet: the first proposal reads the prompt
        self._spent_at = length  # when rows were last spent
        self._wait = FIRST_WAIT  # steps from then to a probe

    def until_probe(self, length: int) -> int:
        """Steps that are still to be waited for."""
        return self._spent_at + self._wait - length

    def settle(self, rows: int, accepted: int, bill: Bill, length: int) -> None:
        """Reckon what the rows of a draft have lost or gained; a probe that lost is waited out, the next one longer."""
        draft_seconds = 0.0 if self.new else bill.draft_seconds
        self.new = False
        if rows == 0 and draft_seconds <= FREE * bill.plain:
            return  # it found nothing, for nothing: the next step may probe
        loss = (draft_seconds + bill.rows(rows)) / bill.plain - accepted
        self.forwards = max(0.0, self.forwards - loss)
        if self.probing:
            self._wait = max(2 * self._wait, math.ceil(loss / LOSS)) if loss > 0 else FIRST_WAIT
        if rows or self.probing:
            self._spent_at = length
