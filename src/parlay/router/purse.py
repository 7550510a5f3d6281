"""What one sequence's drafts may lose, and when one that lost it may try again."""

from __future__ import annotations

import math

from parlay.router.estimates import longest
from parlay.types import Cost, Spent, View

STAKE = 0.5  # forwards that a sequence's drafts may lose before they have gained anything
FIRST_WAIT = 8  # steps without a tested node before a probe
LOSS = 0.01  # share of plain decoding's time that failed probes may take
OPENING = 0.05  # and first drafts, for which a drafter reads the prompt, where drafts are not expected to pay
FREE = 0.01  # of a forward: drafting that costs less counts as free


class Bill:
    """Seconds of one step: for a proposal, for the rows of one draft, and what a forward of one row would take.

    Of ``draft_seconds``, ``usual`` are what a proposal takes once the prompt is read, and ``likely`` what this
    one took by its own work: what slowed the forward has slowed drafting too.
    """

    __slots__ = ("_cost", "_seconds", "_spent", "draft_seconds", "likely", "plain", "usual")

    def __init__(self, cost: Cost, spent: Spent, usual: float) -> None:
        """``usual`` is what a proposal like these takes once the prompt is read, 0 if nobody knows."""
        self.plain = cost.forward(1, spent.context)
        self.draft_seconds = spent.draft_seconds
        self.usual = min(spent.draft_seconds, usual)
        slowdown = max(1.0, spent.verify_seconds / cost.forward(spent.rows, spent.context))
        undelayed = max(self.usual, spent.draft_seconds / slowdown)
        self.likely = min(undelayed, longest(usual, self.plain) if usual else self.plain)
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


class Openings:
    """When a drafter that is not expected to pay may be tried on another sequence, whose prompt it must read first."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = 0  # tokens that all sequences together are still to decode

    def settle(self, loss: float) -> None:
        """One has lost so many forwards, or gained them."""
        self.left = max(0, math.ceil(loss / OPENING))


class Purse:
    """Fills with what drafts gain and pays what they lose, in forwards; probes are drafted on credit, now and then.

    That a drafter reads the prompt is not paid from it: it is done once, and counts among `Openings`.
    """

    __slots__ = ("_counted", "_openings", "_spent_at", "_view", "_wait", "forwards", "new", "probing")

    def __init__(self, view: View, openings: Openings) -> None:
        self.forwards = STAKE
        self.probing = False  # in this step
        self.new = True  # nothing drafted yet: the first proposal reads the prompt
        self._view = view
        self._openings = openings
        self._counted = self._spent_at = len(view.tokens)  # the latter when rows were last spent
        self._wait = FIRST_WAIT  # tokens from then to a probe: each step without a draft adds one

    def count(self) -> None:
        """Tell the openings what was decoded since the last time."""
        length = len(self._view.tokens)
        self._openings.left -= length - self._counted
        self._counted = length

    def look(self) -> None:
        """See whether this is a step for a probe."""
        self.count()
        self.probing = self.until_probe(1) <= 0

    def until_probe(self, together: int) -> int:
        """Steps that are still to be waited for, in which so many sequences decode together."""
        steps = self._spent_at + self._wait - len(self._view.tokens)
        return max(steps, -(-self._openings.left // together)) if self.new else steps

    def settle(self, rows: int, accepted: int, bill: Bill) -> None:
        """Reckon what the rows of a draft have lost or gained; a probe that lost is waited out, the next one longer."""
        if rows == 0 and bill.draft_seconds <= FREE * bill.plain:
            self.new = False
            return  # it found nothing, for nothing: the next step may probe
        won = accepted * bill.plain - bill.rows(rows)
        loss = ((bill.usual if self.new else bill.likely) - won) / bill.plain
        if self.new:
            self.new = False
            self._openings.settle((bill.draft_seconds - won) / bill.plain)
        self.forwards = max(0.0, self.forwards - loss)
        if self.probing:
            double = 2 * self._wait if rows else FIRST_WAIT  # it may well find something next time
            self._wait = max(double, math.ceil(loss / LOSS)) if loss > 0 else FIRST_WAIT
        if rows or self.probing:
            self._spent_at = len(self._view.tokens)
