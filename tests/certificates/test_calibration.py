"""`parlay calibrate`: from prompts to a certificate that opens a strategy, or to the reason why there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from parlay import LLM, SamplingParams
from parlay.bench.certify import speed
from parlay.calibration import calibrate, fewest
from parlay.certificates.requirement import Floor
from parlay.cli import main
from parlay.strategies.spelling import parse
from parlay.testing.diffusion import save_diffusion
from parlay.types import Exactness, Metrics
from tests.certificates.conftest import GREEDY, PROMPTS
from tests.certificates.wrong import WRONG, WRONG_ALONE
from tests.cli.conftest import MINI

RIGHT = "prompt-lookup:rule=typical"
"""Greedy requests: exact match."""
FOUR = Floor(floor=0.4)
"""Four good answers of four show this much."""


def ids(llm: LLM) -> list[tuple[int, ...]]:
    return [llm.job(prompt).samples[0].request.prompt for prompt in PROMPTS]


def test_strategies_are_certified_up_to_the_first_that_fails(llm: LLM) -> None:
    prompts = ids(llm)
    asked = [parse(RIGHT), parse(WRONG), parse(f"{RIGHT},k=4")]
    result = calibrate(llm, [*prompts, prompts[0]], asked, FOUR, GREEDY, progress=False)
    assert [(one.good, one.answers, one.certified) for one in result.shown] == [
        (4, 4, True),
        (0, 4, False),
        (4, 4, False),  # good, but it stands behind one that failed
    ]
    assert result.certificate is not None
    assert [one.strategy for one in result.certificate.strategies] == [RIGHT]


def test_nothing_is_certified_where_the_first_fails(llm: LLM) -> None:
    assert calibrate(llm, ids(llm), [parse(WRONG)], FOUR, GREEDY, progress=False).certificate is None


def test_what_is_lossy_for_a_request_alone_is_not_certified_by_answers_that_were_decoded_together(llm: LLM) -> None:
    result = calibrate(llm, ids(llm), [parse(WRONG_ALONE)], FOUR, GREEDY, progress=False)
    assert (result.shown[0].good, result.certificate) == (0, None)


def test_the_speed_of_canvases_is_that_of_requests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others rows cost what they take, so canvases would seem slow to whoever asks for one answer at a time."""
    save_diffusion("nemotron", tmp_path / "both")
    with LLM(str(tmp_path / "both")) as llm:
        together, generate = list[int](), llm.generate

        def counted(prompts: list[list[int]], *rest: object, **named: object) -> object:
            together.append(len(prompts))
            return generate(prompts, *rest, **named)

        monkeypatch.setattr(llm, "generate", counted)
        prompts = [(5, 9, 11 + number) for number in range(30)]
        floor, params = Floor(floor=0.1), SamplingParams(temperature=0, max_tokens=4)
        calibrate(llm, prompts, [parse("denoise:k=4,selector=confidence")], floor, params, progress=False)
    assert together == [14, 14, 14, 14, *[1] * 32], "one turn to warm up; then each prompt in both ways"


def test_an_escape_makes_a_bad_strategy_good_enough(llm: LLM) -> None:
    """The drafter is so wrong that its first token is not committed."""
    result = calibrate(llm, ids(llm), [parse(f"{WRONG},threshold.escape=0.9")], FOUR, GREEDY, progress=False)
    assert result.shown[0].certified
    assert result.shown[0].escaped == 4


def test_what_can_not_be_shown_is_refused_before_anything_runs(llm: LLM) -> None:
    assert fewest(Floor(floor=0.9)) == 29
    prompts = ids(llm)
    for strategy, floor, params, told in (
        (RIGHT, Floor(floor=0.9), GREEDY, "at least 29 different prompts"),
        (RIGHT, Floor(floor=1.0), GREEDY, "no sample can prove"),
        ("prompt-lookup", FOUR, GREEDY, "is bits, not lossy"),
        (RIGHT, FOUR, SamplingParams(logit_bias={1: 1.0}), "edit logits"),
        (RIGHT, FOUR, SamplingParams(max_tokens=None), "max_tokens"),
    ):
        with pytest.raises(ValueError, match=told):
            calibrate(llm, prompts, [parse(strategy)], floor, params, progress=False)


def test_the_command_writes_what_generate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, certificate = tmp_path / "prompts.txt", tmp_path / "certificate.json"
    prompts.write_text("\n".join(PROMPTS))
    asked = [*MINI, "--strategy", RIGHT, "--floor", "0.4", "--max-tokens", "8", "-o", str(certificate)]
    assert main(["calibrate", str(prompts), *asked]) == 0
    assert "certified; 5 of 5" in capsys.readouterr().out
    given = ["generate", PROMPTS[0], *MINI, "--max-tokens", "8", "--json", "--certificate", str(certificate)]
    assert main([*given, "--exactness", "lossy:floor=0.4", "--strategy", RIGHT]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["strategy"] == RIGHT
    assert main([*given, "--exactness", "lossy:floor=0.5", "--strategy", RIGHT]) == 2
    assert capsys.readouterr().err.startswith("parlay: error: --exactness lossy:floor=0.5")


def test_contradictory_flags_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hello", *MINI, "--strategy", RIGHT, "--exactness", "seed"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as end:
        main(["generate", "Hello", *MINI, "--exactness", "bit"])
    assert end.value.code == 2


def test_a_floor_that_is_not_kept_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, certificate = tmp_path / "prompts.txt", tmp_path / "certificate.json"
    prompts.write_text("\n".join(PROMPTS))
    asked = [*MINI, "--strategy", WRONG, "--floor", "0.4", "--max-tokens", "8", "-o", str(certificate)]
    assert main(["calibrate", str(prompts), *asked]) == 1
    assert "no certificate was written" in capsys.readouterr().err
    assert not certificate.exists()


def test_a_place_that_takes_no_certificate_is_told_before_the_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device would be replaced by the file, too: its name is all that the new file would take over."""
    os.mkfifo(tmp_path / "pipe")
    for place, wrong in ((tmp_path, "is a folder"), (tmp_path / "pipe", "is not a regular file")):
        assert main(["calibrate", "nowhere.txt", "--floor", "0.4", "-o", str(place)]) == 2
        assert wrong in capsys.readouterr().err


def test_too_few_prompts_are_told_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS[:2]))
    asked = ["--model", str(tmp_path / "nowhere"), "--strategy", RIGHT, "--floor", "0.95"]
    assert main(["calibrate", str(prompts), *asked, "-o", str(tmp_path / "out.json")]) == 2
    assert "needs at least 59 different prompts" in capsys.readouterr().err


def test_thresholds_are_not_tested_on_what_they_were_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {number}:"}) + "\n" for number in range(30)))
    flags = "--model parlay-mini --draft-model parlay-mini-draft --strategy big-little --floor 0.9 --max-tokens 2"
    asked = ("calibrate", str(prompts), "--fit", str(prompts), "-o", str(tmp_path / "out.json"), *flags.split())
    assert main(asked) != 0
    assert "30 of the examples of --fit are also among the prompts" in capsys.readouterr().err


def test_answers_that_are_there_after_one_step_are_as_fast_as_they_were_whole() -> None:
    """A canvas that is filled at once has no tokens after its first step; drafts have at most a token in it."""

    def answers(tokens: int, first: int, *, seconds: float, prefill: float) -> list[Metrics]:
        own = {"completion_tokens": tokens, "first_step_tokens": first}
        return [Metrics("", Exactness.BITS, **own, prefill_seconds=prefill, verify_seconds=seconds - prefill)] * 2

    exact = answers(11, 1, seconds=12.0, prefill=2.0)
    assert speed(answers(11, 1, seconds=7.0, prefill=2.0), exact) == pytest.approx(2.0), "after the first step"
    assert speed(answers(11, 11, seconds=3.0, prefill=3.0), exact) == pytest.approx(4.0)
    assert speed(answers(12, 10, seconds=4.0, prefill=3.0), exact) == pytest.approx((12 / 4) / (11 / 12))
    assert speed(answers(0, 0, seconds=1.0, prefill=1.0), exact) == 1.0
