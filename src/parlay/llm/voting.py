"""Self-consistency: several chains of thought of one prompt vote on the answer (Wang et al. 2022, arXiv:2203.11171).

The chains are the samples of one job. They share the prompt's cache and decode together. Whenever chains have ended,
the ballot decides whether the others can still change the outcome. If not, they are stopped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from parlay.text.answers import NUMBER, PatternFailed, check_rule, find_answer
from parlay.types import FieldError, FinishReason, SamplingParams

MOST_CHAINS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteParams:
    """How ``n`` chains of thought decide on one answer.

    ``answer`` finds a chain's answer: ``number`` takes the last number, ``boxed`` the content of the last
    ``\\boxed{}``, and any other text is a regular expression, whose first group (or the whole match) is the answer at
    its last match. A chain without an answer casts no vote; nor does a chain under ``number`` that ``max_tokens`` cut.

    ``by="votes"``: the answer of most chains wins; if equal, the answer of the lowest chain. ``by="score"``: among the
    chains with an answer, the one with the highest mean log-probability wins (best of n); all chains run to their ends.

    ``early`` stops the other chains when they can't change the winner any more, so the answer is that of the full vote.
    ``confidence`` stops them sooner: when the leading answer has two votes and would win the full vote with this
    probability (`lead`). For this, a chain counts only when all chains before it have ended, because the quickest
    chains are short, and short ones are wrong more often. The answer may then differ from that of the full vote.
    ``at_once``: how many chains decode at a time, by default all, so that no vote takes longer than the full one. With
    fewer, only as many chains begin as could decide the vote if they agree, which costs the fewest tokens but may take
    longer. With ``refill``, another chain begins whenever one ends, until the vote is over: more tokens, less time.
    Raises ValueError for values out of range.
    """

    n: int = 8
    answer: str = NUMBER
    by: Literal["votes", "score"] = "votes"
    early: bool = True
    confidence: float | None = None
    at_once: int | None = None
    refill: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.n <= MOST_CHAINS:
            raise FieldError("vote.n", f"must be between 2 and {MOST_CHAINS}, got {self.n}: it is the number of chains")
        if self.by not in ("votes", "score"):
            raise FieldError("vote.by", f"must be votes or score, got {self.by!r}")
        if self.confidence is not None and not 0.5 < self.confidence < 1:
            raise FieldError("vote.confidence", f"must be between 0.5 and 1, got {self.confidence:g}")
        if self.confidence is not None and (self.by == "score" or not self.early):
            raise FieldError(
                "vote.confidence",
                "works only with vote.by votes and vote.early true: remove it",
                "vote.by",
                "vote.early",
            )
        if self.at_once is not None and not 1 <= self.at_once <= self.n:
            raise FieldError(
                "vote.at_once", f"must be between 1 and {self.n}, the number of chains, got {self.at_once}"
            )
        if self.refill and self.at_once is None:
            raise FieldError(
                "vote.refill",
                "needs vote.at_once, the number of chains that decode together: set it, or remove vote.refill",
                "vote.at_once",
            )

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters of the chains. Raises ValueError for parameters whose chains can't vote."""
        if params.n != 1:
            raise FieldError("n", f"is {params.n}, but vote.n sets the number of chains: remove n", "vote.n")
        if params.greedy:
            raise FieldError("temperature", "is 0, so all chains of a vote would be equal: set it above 0, such as 0.7")
        check_rule(self.answer)
        wanted = 0 if self.by == "score" and params.logprobs is None else params.logprobs
        return replace(params, n=self.n, logprobs=wanted)


def sampling_of(vote: object, params: SamplingParams) -> SamplingParams:
    """See `VoteParams.sampling`. Raises ValueError if ``vote`` is not a `VoteParams`, such as a number of chains."""
    if not isinstance(vote, VoteParams):
        raise FieldError("vote", f"must be a VoteParams, got {vote!r:.60}: write vote=VoteParams(n=...)")
    return vote.sampling(params)


Ended = Literal["all", "decided", "confidence", "interrupted"]
"""Why a vote is over: all chains have ended, the rest can't change it, the confidence is reached, or it was
interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteOutput:
    """The outcome of a vote.

    ``answers``: each chain's answer, in order; None if it has none, or has not ended. ``answer``: the winner; None if
    no chain has an answer. ``index``: the chain that represents the outcome: the first with the winning answer, the one
    with the highest score, or the first of all. ``votes``: number of votes by answer, most votes first, over chains
    that ended by themselves or at ``max_tokens``; if a confidence ended the vote, only over the first chains, which
    decided it. ``agreement``: the winner's share of them. ``stopped``: chains that were stopped early; their texts so
    far are in ``outputs``. ``error``: why the vote failed.
    """

    answer: str | None
    index: int
    votes: Mapping[str, int]
    agreement: float
    answers: tuple[str | None, ...]
    stopped: tuple[int, ...]
    ended: Ended
    error: str | None = None


class _Count(NamedTuple):
    """Votes of one answer, and the negated number of the lowest chain that gave it, so that the greatest count wins."""

    votes: int
    priority: int


@dataclass(slots=True)
class Ballot:
    """A vote under way: which chains have begun, and the answers of those that have ended."""

    params: VoteParams
    begun: int = 0
    answers: dict[int, str | None] = field(default_factory=dict)
    """Answers of the chains that ended by themselves or at ``max_tokens``."""
    scores: dict[int, float] = field(default_factory=dict)
    failed: bool = False
    """Whether a chain ended with a fault."""
    error: str | None = None
    _first: int = 0
    """How many leading chains count towards the confidence: all chains up to there have ended."""
    _settled: bool = False
    """Whether the leading chains have reached the confidence. Then no more are counted."""

    def due(self) -> range:
        """The chains to begin now. They count as begun from here on."""
        first, self.begun = self.begun, self.begun + self._wanted()
        return range(first, self.begun)

    def count(self, chain: int, text: str, reason: FinishReason, score: float) -> None:
        """Note how a chain ended. ``score``: the mean log-probability of its tokens."""
        self.failed = self.failed or reason == "error"
        if reason not in ("stop", "length"):
            return
        self.scores[chain], self.answers[chain] = score, None
        cut = reason == "length" and self.params.answer == NUMBER
        if self.error is None and not cut:
            try:
                self.answers[chain] = find_answer(self.params.answer, text)
            except PatternFailed as error:
                self.error = f"vote.answer: {error}"
        while not self._settled and self._first in self.answers:
            self._first += 1
            self._settled = self._is_sure(self._counts(range(self._first)), self._first)

    @property
    def over(self) -> bool:
        """Whether the other chains may be stopped."""
        return self.failed or self.error is not None or self._ended is not None

    def output(self) -> VoteOutput:
        """The outcome so far."""
        ended = self._ended
        counted = range(self._first) if ended == "confidence" else self.answers
        counts = self._counts(counted)
        votes = {answer: counts[answer].votes for answer in sorted(counts, key=counts.__getitem__, reverse=True)}
        index = self._winner(counts)
        answer = self.answers.get(index)
        return VoteOutput(
            answer=answer,
            index=index,
            votes=votes,
            agreement=votes[answer] / len(counted) if answer is not None else 0.0,
            answers=tuple(self.answers.get(chain) for chain in range(self.params.n)),
            stopped=tuple(chain for chain in range(self.params.n) if chain not in self.answers),
            ended=ended or "interrupted",
            error=self.error,
        )

    def _winner(self, counts: Mapping[str, _Count]) -> int:
        if not counts:
            return min(self.answers, default=0)
        if self.params.by == "votes":
            return -max(counts.values()).priority
        return max((chain for chain, answer in self.answers.items() if answer is not None), key=self.scores.__getitem__)

    def _counts(self, chains: Collection[int], guessed: Collection[int] = ()) -> dict[str, _Count]:
        """The votes of these chains, as if all ``guessed`` chains had given the leading answer."""
        given: dict[str, list[int]] = {}
        for chain in sorted(set(chains).intersection(self.answers)):
            answer = self.answers[chain]
            if answer is not None:
                given.setdefault(answer, []).append(chain)
        if guessed:
            leader = max(given, key=lambda answer: (len(given[answer]), -given[answer][0]), default="")
            given[leader] = sorted([*given.get(leader, ()), *guessed])
        return {answer: _Count(len(chains), -chains[0]) for answer, chains in given.items()}

    @property
    def _ended(self) -> Ended | None:
        """Why the vote is over; None if it is not."""
        if len(self.answers) == self.params.n:
            return "all"
        if self._is_decided(self._counts(self.answers), self.answers):
            return "decided"
        return "confidence" if self._settled else None

    def _is_decided(self, counts: Mapping[str, _Count], ended: Collection[int]) -> bool:
        """Whether the chains that have not ended can't change the winner."""
        if self.params.by == "score" or not self.params.early or not counts:
            return False
        left = [chain for chain in range(self.params.n) if chain not in ended]
        leader, *others = sorted(counts.values(), reverse=True)
        # In the worst case all remaining chains agree on one other answer, perhaps a new one.
        best = [_Count(other.votes + len(left), max(other.priority, -left[0])) for other in others]
        return leader > max(best, default=_Count(0, 0)) and leader > _Count(len(left), -left[0])

    def _is_sure(self, counts: Mapping[str, _Count], ended: int) -> bool:
        """Whether the counts of the ``ended`` first chains reach the confidence. At least two must agree."""
        if self.params.confidence is None:
            return False
        first, second, *_ = *sorted((count.votes for count in counts.values()), reverse=True), 0, 0
        return first > 1 and lead(first, second, self.params.n - ended) >= self.params.confidence

    def _wanted(self) -> int:
        """How many chains to begin now."""
        params, left = self.params, self.params.n - self.begun
        running = [chain for chain in range(self.begun) if chain not in self.answers]
        if self.over:
            return 0
        if params.at_once is None:
            return left
        left = min(left, params.at_once - len(running))
        if params.refill:
            return left
        for more in range(left):
            guessed = [*running, *range(self.begun, self.begun + more)]
            counts, ended = self._counts(self.answers, guessed), self.begun + more
            if guessed and (self._is_sure(counts, ended) or self._is_decided(counts, range(ended))):
                return more
        return left


def lead(first: int, second: int, left: int) -> float:
    """The probability that the answer with ``first`` votes leads the one with ``second`` after ``left`` more votes.

    Each remaining vote goes to one of the two: to the first with a probability p ~ Beta(first + 1, second + 1).
    Adaptive consistency (Aggarwal et al. 2023, arXiv:2305.11860) asks for P(p > 1/2), which stands for infinitely many
    votes.
    """
    total = math.comb(first + second + left + 1, left)
    least = max(0, (left + second - first) // 2 + 1)  # k votes for the first: first + k > second + left - k
    ways = (math.comb(first + k, k) * math.comb(second + left - k, left - k) for k in range(least, left + 1))
    return sum(ways) / total
