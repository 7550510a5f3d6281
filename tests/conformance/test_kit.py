"""The kit finds what is wrong: a test that can't fail is a defect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance import (
    CHECKS,
    DISTRIBUTION_STAGE,
    Divergence,
    KitLength,
    Stage,
    Subject,
    check_drafter,
    check_runner,
    default_stages,
    run_check,
    toy_stage,
)
from parlay.testing.conformance import __main__ as conformance_main
from parlay.testing.conformance.compare import Excuse, same_tokens
from parlay.testing.conformance.stage import PLAIN, StageRequest, decode
from parlay.testing.conformance.strain import CONTEXT
from parlay.testing.conformance.universal import agree, prompt
from parlay.testing.toys import ToyRunner
from parlay.types import (
    NO_DRAFT,
    NO_SKIP,
    AcceptRule,
    Draft,
    Drafter,
    Exactness,
    Fault,
    Output,
    SamplingParams,
    Segment,
    SequenceView,
    Skip,
    Verdict,
    trees,
)

STAGE = toy_stage("toy")
ANSWER = toy_drafters.answer_by(STAGE.logits_of)


class Hasty(SharedNoise):
    """Accepts the first child below the root without looking."""

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        verdicts = super().accept(views, drafts, logits_RV, roots)
        return [
            Verdict((0,), (draft.tree.tokens[0], 0)) if len(draft) and isinstance(verdict, Verdict) else verdict
            for draft, verdict in zip(drafts, verdicts, strict=True)
        ]


class Misplaced(SharedNoise):
    """Judges every node by the logits of the row after its own."""

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        return super().accept(views, drafts, logits_RV.roll(-1, 0), roots)


class Eager(SharedNoise):
    """Claims the distribution, but always keeps a drafted token that has any chance at all."""

    exactness = Exactness.DISTRIBUTION

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        verdicts = super().accept(views, drafts, logits_RV, roots)
        return [
            Verdict((0,), (draft.tree.tokens[0], draft.tree.tokens[0])) if len(draft) else verdict
            for draft, verdict in zip(drafts, verdicts, strict=True)
        ]


def guessing(stage: Stage) -> Callable[[object], Drafter]:
    answer = toy_drafters.answer_by(stage.logits_of)
    return lambda _: toy_drafters.sometimes(answer, stage.vocab_size, (True, False))


@pytest.mark.parametrize("rule", [Hasty, Misplaced])
@pytest.mark.parametrize("check", ["greedy", "sampled", "mixed", "endings"])
def test_a_wrong_rule_is_found_out(rule: type[AcceptRule], check: str) -> None:
    finding = run_check(check, Subject("wrong", guessing(STAGE), rule), STAGE)
    assert not finding.passed
    assert "Divergence" in finding.detail


def test_a_wrong_distribution_is_found_out_where_tokens_are_not_promised() -> None:
    stage = default_stages()[DISTRIBUTION_STAGE]
    drafter = toy_drafters.ToyDrafter(lambda view, budget: trees.chain([len(view.tokens) % 3], "x"))
    finding = run_check("distribution", Subject("eager", lambda _: drafter, Eager), stage, KitLength(200, 2000))
    assert not finding.passed
    assert "distribution" in finding.detail or "probability" in finding.detail


COPY_BACK = 9


def copying(view: SequenceView, budget: int) -> Draft:
    """What came so many tokens before."""
    return trees.chain(list(view.tokens[-COPY_BACK : len(view.tokens) - COPY_BACK + budget]), "copy")


def appending(view: SequenceView, budget: int) -> Draft:
    view.tokens.append(0)  # type: ignore[attr-defined]
    return NO_DRAFT


def popping(view: SequenceView, budget: int) -> Draft:
    view.tokens.pop()  # type: ignore[attr-defined]
    return copying(view, budget)


def rewriting(view: SequenceView, budget: int) -> Draft:
    view.tokens[len(view.tokens) // 2] = 3  # type: ignore[index]
    return copying(view, budget)


@pytest.mark.parametrize("guess", [appending, popping, rewriting])
def test_a_drafter_that_writes_into_its_view_is_found_out_and_told_so(guess: toy_drafters.Guess) -> None:
    finding = run_check("greedy", Subject("writing", lambda _: toy_drafters.ToyDrafter(guess)), STAGE)
    assert not finding.passed
    assert "propose: ValueError: it changed the tokens of a view" in finding.detail


def failing_at_the_end(view: SequenceView, budget: int) -> Draft:
    if len(view.tokens) + budget >= CONTEXT - 1:
        raise IndexError("no row of the table for it")
    return copying(view, budget)


def test_a_drafter_that_fails_at_the_end_of_the_context_is_found_out_with_its_own_words() -> None:
    finding = run_check("context", Subject("ending", lambda _: toy_drafters.ToyDrafter(failing_at_the_end)), STAGE)
    assert not finding.passed
    assert "failed in propose: IndexError: no row of the table for it" in finding.detail


class BeyondTheEnd(SharedNoise):
    """Commits a token more than the target chose where the text nearly fills the context."""

    def accept(
        self, views: Sequence[SequenceView], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        verdicts = super().accept(views, drafts, logits_RV, roots)
        return [
            Verdict(verdict.path, (*verdict.sampled[:-1], 1))
            if isinstance(verdict, Verdict) and len(view.tokens) > CONTEXT - 4
            else verdict
            for view, verdict in zip(views, verdicts, strict=True)
        ]


def test_a_text_that_is_wrong_at_the_end_of_the_context_alone_is_found_out() -> None:
    finding = run_check("context", Subject("wrong", lambda _: toy_drafters.ToyDrafter(copying), BeyondTheEnd), STAGE)
    assert not finding.passed
    assert "Divergence" in finding.detail


def test_a_drafter_that_never_proposes_has_not_been_tested() -> None:
    finding = run_check(
        "context", Subject("silent", lambda _: toy_drafters.ToyDrafter(lambda view, budget: NO_DRAFT)), STAGE
    )
    assert not finding.passed
    assert "it proposed nothing" in finding.detail


def test_a_draft_too_few_is_the_drafters_fault() -> None:
    class Short(toy_drafters.ToyDrafter):
        def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
            return super().propose(views, budgets)[1:]

    finding = run_check("greedy", Subject("short", lambda _: Short(copying)), STAGE)
    assert "it gave 0 drafts for 1 views" in finding.detail


def test_logits_of_minus_infinity_are_no_difference() -> None:
    """Some models never say the ids that pad their vocabulary."""

    def padded(ids: Sequence[int]) -> Tensor:
        logits_V = STAGE.logits_of(ids).clone()
        logits_V[-1] = -math.inf
        return logits_V

    report = check_runner(lambda capacity: ToyRunner(padded, STAGE.vocab_size, capacity=capacity), padded)
    assert report.passed, str(report)


def test_a_drafter_that_stops_the_engine_is_a_finding_and_not_a_crash() -> None:
    def broken(_: object) -> Drafter:
        raise RuntimeError("can't be built")

    report = check_drafter(broken, stages=[STAGE])
    assert not report.passed
    assert len(report.failures) == len(CHECKS) - 1
    assert "can't be built" in str(report)


class Forgetful(ToyRunner):
    """Keeps one token less than it says after a path of two."""

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        return super().keep(sequence, path[:1] if len(path) == 2 else path) + (len(path) == 2)


def test_a_wrong_cache_is_found_out() -> None:
    stage = replace(STAGE, open_runner=lambda capacity: Forgetful(STAGE.logits_of, STAGE.vocab_size, capacity=capacity))
    finding = run_check("greedy", Subject("oracle", lambda _: toy_drafters.oracle(ANSWER)), stage)
    assert not finding.passed


class Counting(ToyRunner):
    """Remembers what the engine made of it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(STAGE.logits_of, STAGE.vocab_size, capacity=capacity)
        self.forks = 0
        self.opened = 0
        self.longest_prefill = 0

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        self.opened += 1
        return super().open(sequence, tokens, salt)

    def fork(self, sequence: int, copy: int) -> None:
        self.forks += 1
        super().fork(sequence, copy)

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        self.longest_prefill = max(self.longest_prefill, *(len(segment.pending) for segment in segments))
        return super().forward(segments, taps, skip)


@pytest.mark.parametrize(
    ("check", "seen"),
    [
        ("forks", lambda runner: runner.forks >= 3),
        ("preemption", lambda runner: runner.opened > 6),
        ("chunks", lambda runner: 1 < runner.longest_prefill <= 7),
        ("constrained", lambda runner: runner.opened + runner.forks > 4),
    ],
)
def test_a_strain_is_one(check: str, seen: Callable[[Counting], bool]) -> None:
    """What the check is named for does happen."""
    runners: list[Counting] = []

    def open_runner(capacity: int) -> Counting:
        runners.append(Counting(capacity))
        return runners[-1]

    assert run_check(check, PLAIN, replace(STAGE, open_runner=open_runner)).passed
    assert seen(runners[-1])


GAP = 4e-4
"""How far the runner of `near_tie` is off in one logit."""


def near_tie(exactness: Exactness, noise_bound: float, at: int = 20) -> Stage:
    """After ``at`` ids two tokens lie GAP / 2 apart, and the runner's numerical noise turns them around."""

    def true(ids: Sequence[int]) -> Tensor:
        logits_V = STAGE.logits_of(ids).clone()
        if len(ids) == at:
            logits_V[3], logits_V[5] = 40.0, 40.0 + GAP / 2
        return logits_V

    def disturbed(ids: Sequence[int]) -> Tensor:
        logits_V = true(ids)
        if len(ids) == at:
            logits_V[3] += GAP
        return logits_V

    def open_runner(capacity: int) -> ToyRunner:
        runner = ToyRunner(disturbed, STAGE.vocab_size, capacity=capacity)
        runner.spec = replace(runner.spec, exactness=exactness)
        return runner

    return replace(STAGE, open_runner=open_runner, logits_of=true, noise_bound=noise_bound, known={})


def difference(stage: Stage) -> Excuse | None:
    ask = StageRequest(prompt(stage, 1, 12), SamplingParams(temperature=0.0, max_tokens=30))
    oracle = Subject("oracle", lambda _: toy_drafters.oracle(toy_drafters.answer_by(stage.logits_of)))
    (sample,) = decode(stage.open_runner(1000), [(ask, oracle.strategy(stage, 4))])
    return same_tokens(stage, ask, stage.expected(ask).output, sample)


def test_a_difference_within_the_stored_noise_is_excused_and_measured() -> None:
    excuse = difference(near_tie(Exactness.SEED, noise_bound=1e-3))
    assert excuse is not None
    assert excuse.position == 8
    assert excuse.gap == pytest.approx(GAP, rel=0.05)


def test_a_difference_beyond_the_stored_noise_is_none_however_close_the_tie() -> None:
    with pytest.raises(Divergence, match=r"token 8 is 3 .* plain decoding says 5; .* its two highest 0.000"):
        difference(near_tie(Exactness.SEED, noise_bound=1e-4))


def test_nothing_is_excused_at_bits() -> None:
    with pytest.raises(Divergence):
        difference(near_tie(Exactness.BITS, noise_bound=1e-3))


def test_an_excused_text_counts_as_passed_and_is_reported() -> None:
    finding = run_check("greedy", PLAIN, near_tie(Exactness.SEED, noise_bound=1e-3, at=45), KitLength(30, 0))
    assert finding.passed
    assert "differ within numerical noise" in finding.detail


def test_a_wrong_text_is_no_noise() -> None:
    """A token that neither row of logits leads to is a bug, whatever the noise bound."""
    stage = replace(near_tie(Exactness.SEED, noise_bound=100.0), known={})
    ask = StageRequest(prompt(stage, 1, 12), SamplingParams(temperature=0.0, max_tokens=30))
    wrong = Subject("wrong", guessing(STAGE), Hasty)
    with pytest.raises(Divergence):
        agree(stage, [(ask, wrong.strategy(stage, 4))])


def test_the_command_says_what_it_found_and_writes_it_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conformance_main, "SHORT", KitLength(10, 200))
    page = tmp_path / "conformance.md"
    assert conformance_main.main(["none", "--write", str(page)]) == 0
    assert "none: passed" in capsys.readouterr().out
    assert "| `none` | 13/13 |" in page.read_text()


def test_the_command_refuses_a_strategy_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance_main.main(["nonne"]) == 2
    assert "did you mean none" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_tests_strategies_in_several_processes_and_says_in_one_line_what_they_refuse(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert conformance_main.main(["nonsense", "--processes", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown strategy 'nonsense'")
