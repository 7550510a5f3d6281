"""Votes of chains of thought: the answer of the full vote, from fewer chains."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from parlay import LLM, RequestFailed, RequestOutput, SamplingParams, VoteParams
from parlay.aio import AsyncLLM
from parlay.llm.request_options import RequestOptions
from parlay.llm.voting import Ballot, lead

PROMPT = "The weather was"
PARAMS = SamplingParams(temperature=0.9, max_tokens=6, seed=11)
LETTER = "[aeiou](?!.*[aeiou])"
"""The last vowel."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", seed=1) as model:
        yield model


def majority(answers: Sequence[str | None]) -> str | None:
    """The slow reference: most votes, and of as many the answer of the lowest chain."""
    counts = Counter(answer for answer in answers if answer is not None)
    return max(counts, key=lambda answer: (counts[answer], -answers.index(answer)), default=None)


def run(answers: Sequence[str | None], params: VoteParams, choose: random.Random) -> Ballot:
    """A vote whose chains say ``answers`` and end in a drawn order."""
    ballot, running = Ballot(params), list[int]()
    while not ballot.over:
        running += ballot.due()
        chain = running.pop(choose.randrange(len(running)))
        ballot.count(chain, answers[chain] or "", "stop", 0.0)
    return ballot


def test_places_of_chains_that_ended_are_filled_until_the_vote_is_over() -> None:
    """Without that, no more begin than could decide."""
    for refill, begun in ((False, [3, 0, 2]), (True, [4, 1, 1])):
        ballot = Ballot(VoteParams(n=8, confidence=0.9, at_once=4, refill=refill))
        found = [len(ballot.due())]
        for chain, answer in ((0, "1"), (1, "2")):
            ballot.count(chain, answer, "stop", 0.0)
            found.append(len(ballot.due()))
        assert found == begun
    with pytest.raises(ValueError, match=r"vote\.refill needs vote\.at_once"):
        VoteParams(refill=True)


@pytest.mark.parametrize(("at_once", "refill"), [(None, False), (1, False), (3, False), (2, True)])
@pytest.mark.parametrize("chains", [3, 4, 5])
def test_stopping_early_never_changes_the_answer(chains: int, at_once: int | None, refill: bool) -> None:
    """Of all ways to answer, with chains that end in drawn orders."""
    choose, params = random.Random(chains), VoteParams(n=chains, at_once=at_once, refill=refill)
    ended = 0
    for answers in itertools.product(["1", "2", "3", None], repeat=chains):
        outcome = run(answers, params, choose).output()
        assert outcome.answer == majority(answers)
        assert outcome.answer is None or answers[outcome.index] == outcome.answer
        assert outcome.votes == Counter(answer for answer in outcome.answers if answer is not None)
        ended += chains - len(outcome.stopped)
    assert ended < chains * 4**chains


def test_no_more_chains_begin_than_can_decide_the_vote() -> None:
    choose = random.Random(1)
    assert run(["7"] * 8, VoteParams(n=8, at_once=6), choose).begun == 4  # of as many votes the lowest chain's count
    assert run(["7"] * 9, VoteParams(n=9, at_once=6), choose).begun == 5
    assert run(["7"] * 8, VoteParams(n=8, at_once=6, confidence=0.9), choose).begun == 3
    assert run(["7"] * 8, VoteParams(n=8, at_once=6, confidence=0.6), choose).begun == 2, "one vote is no agreement"
    assert run(["7"] * 8, VoteParams(n=8, at_once=2), choose).begun in (4, 5)
    assert run(["7"] * 8, VoteParams(n=8, at_once=6, early=False), choose).begun == 8
    assert run(["7"] * 8, VoteParams(n=8), choose).begun == 8
    assert run([None] * 8, VoteParams(n=8, at_once=6), choose).begun == 8


def test_with_a_confidence_quick_chains_do_not_count_before_slow_ones() -> None:
    ballot = Ballot(VoteParams(n=40, confidence=0.9))
    ballot.due()
    for chain in (*range(5, 20), 0, 1):
        ballot.count(chain, "2" if chain < 5 else "1", "stop", 0.0)
        assert not ballot.over
    ballot.count(2, "2", "stop", 0.0)
    outcome = ballot.output()
    assert (outcome.ended, outcome.answer, outcome.votes) == ("confidence", "2", {"2": 3})
    assert (outcome.agreement, outcome.answers[5], outcome.answers[3]) == (1.0, "1", None)


def test_what_a_confidence_settles_does_not_hang_on_which_chains_end_first() -> None:
    settled, choose = 0, random.Random(3)
    for _ in range(20):
        answers = [choose.choice(["1", "1", "1", "2", None]) for _ in range(24)]
        outcomes = [
            run(answers, VoteParams(n=24, confidence=0.9, at_once=at_once, refill=refill), choose).output()
            for at_once, refill in ((None, False), (4, False), (4, True), (9, True), (9, True))
        ]
        found = {outcome.answer for outcome in outcomes if outcome.ended == "confidence"}
        assert len(found) <= 1
        assert all(each.answer == majority(answers) for each in outcomes if each.ended != "confidence")
        settled += len(found)
    assert settled > 10


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (4, 0), (5, 3), (20, 11)])
def test_the_confidence_is_that_of_an_urn_and_with_votes_without_end_the_tail_of_the_beta_law(
    first: int, second: int
) -> None:
    """Drawing p and then votes is Polya's urn, into which each vote puts another one of its kind."""
    ahead = {first - second: 1.0}
    for drawn in range(7):
        assert lead(first, second, drawn) == pytest.approx(sum(chance for by, chance in ahead.items() if by > 0))
        more: dict[int, float] = {}
        for by, chance in ahead.items():
            share = ((first + second + drawn + by) / 2 + 1) / (first + second + drawn + 2)
            more[by + 1] = more.get(by + 1, 0) + chance * share
            more[by - 1] = more.get(by - 1, 0) + chance * (1 - share)
        ahead = more
    points = 20_000
    density = [((place + 0.5) / points) ** first * (1 - (place + 0.5) / points) ** second for place in range(points)]
    assert lead(first, second, 9_999) == pytest.approx(sum(density[points // 2 :]) / sum(density), abs=1e-3)


def check(output: RequestOutput, every: RequestOutput, params: VoteParams) -> None:
    """The outcome against samples that were all decoded by themselves."""
    vote = output.vote
    assert vote is not None
    wanted = [next((letter for letter in reversed(one.text) if letter in "aeiou"), None) for one in every.outputs]
    assert vote.answer == majority(wanted)
    for chain, one in enumerate(output.outputs):
        assert one.token_ids == every.outputs[chain].token_ids[: len(one.token_ids)]
        assert vote.answers[chain] == (None if chain in vote.stopped else wanted[chain])
        assert (one.finish_reason == "abort") == (chain in vote.stopped)
    assert vote.agreement == vote.votes[vote.answer] / (params.n - len(vote.stopped))
    assert output.chosen.index == vote.index


@pytest.mark.parametrize("at_once", [None, 2, 8])
def test_the_chains_are_samples_and_those_left_over_are_stopped(llm: LLM, at_once: int | None) -> None:
    (every,) = llm.generate(PROMPT, SamplingParams(n=8, temperature=0.9, max_tokens=6, seed=11))
    params = VoteParams(n=8, answer=LETTER, at_once=at_once)
    for output in llm.generate([PROMPT, PROMPT], PARAMS, vote=params):
        check(output, every, params)
    assert llm.engine.idle
    assert not llm.engine.stats().running


def test_a_vote_in_a_service_is_that_of_the_python_api() -> None:
    async def both() -> tuple[RequestOutput, RequestOutput]:
        options = RequestOptions(vote=VoteParams(n=8, answer=LETTER))
        async with AsyncLLM(LLM("parlay-mini", dtype="float32")) as service:
            every = service.generate(PROMPT, SamplingParams(n=8, temperature=0.9, max_tokens=6, seed=11))
            found = await asyncio.gather(every, service.generate(PROMPT, PARAMS, options))
            stats = service.stats()
            assert (stats.running, stats.waiting) == (0, 0)
            return found[0], found[1]

    every, output = asyncio.run(both())
    check(output, every, VoteParams(n=8))


def test_the_likeliest_chain_wins_by_score(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, PARAMS, vote=VoteParams(n=4, answer=LETTER, by="score"))
    assert output.vote is not None
    scores = [(one.cumulative_logprob or 0.0) / len(one.token_ids) for one in output.outputs]
    answered = [chain for chain, answer in enumerate(output.vote.answers) if answer is not None]
    assert output.vote.index == max(answered, key=scores.__getitem__)
    assert output.vote.stopped == ()


def test_answers_that_nobody_can_find_are_no_vote(llm: LLM) -> None:
    for answer in ("boxed", "number"):  # max_tokens cuts the chains, whose last number may be any
        (output,) = llm.generate(PROMPT, PARAMS, vote=VoteParams(n=3, answer=answer))
        assert output.vote is not None
        assert (output.vote.answer, output.vote.index, output.vote.votes, output.vote.stopped) == (None, 0, {}, ())


def test_a_pattern_that_never_ends_fails_its_own_request(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="regular expression took more than"):
        llm.generate(PROMPT, PARAMS, vote=VoteParams(n=4, answer=r"(.|\w|[^x]|\s)*x{9}$", at_once=1))
    assert llm.engine.idle
    (output,) = llm.generate(PROMPT, PARAMS, vote=VoteParams(n=3, answer=LETTER))
    assert output.vote is not None


@pytest.mark.parametrize(
    ("params", "vote", "message"),
    [
        (PARAMS, {"n": 1}, "vote.n must be between 2 and 128, got 1"),
        (PARAMS, {"n": 500}, "vote.n must be between 2 and 128, got 500"),
        (PARAMS, {"confidence": 0.4}, "vote.confidence must be between 0.5 and 1"),
        (PARAMS, {"confidence": 0.9, "by": "score"}, "vote.confidence works only with"),
        (PARAMS, {"n": 4, "at_once": 5}, "vote.at_once must be between 1 and 4, the number of chains, got 5"),
        (PARAMS, {"answer": "("}, "vote.answer is not a regular expression"),
        (SamplingParams(temperature=0), {}, "temperature is 0"),
        (SamplingParams(n=3), {}, "n is 3, but vote.n sets"),
    ],
)
def test_what_is_no_vote_is_refused(llm: LLM, params: SamplingParams, vote: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        llm.generate(PROMPT, params, vote=VoteParams(**vote))  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_a_number_of_chains_alone_is_no_vote(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^vote must be a VoteParams, got 8: write vote=VoteParams\(n=\.\.\.\)$"):
        llm.generate(PROMPT, PARAMS, vote=8)  # type: ignore[arg-type]
