"""The soak passes in small, and it would notice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.serving.cases import SAMPLING, Case, cases
from benchmarks.serving.soak import MALFORMED, Soak, main
from benchmarks.serving.tally import growth
from parlay import ParlayError
from parlay.aio import AsyncLLM
from parlay.llm.request_options import RequestOptions

CASE = Case("complete", "The weather was", SAMPLING[0], RequestOptions(strategy="prompt-lookup"))


def test_the_quick_soak_keeps_every_promise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "soak.md"
    assert main(["--quick", "--out", str(report)]) == 0
    result = json.loads(capsys.readouterr().out)
    fates = result["fates"]  # what is nearly over when its client goes may still complete
    assert (fates["refused"], fates["cancelled"] + fates["completed"]) == (3, 57)
    assert result["samples_equal_to_plain"] == result["samples_exact"] > 50
    assert result["samples_not_exact"] > 0
    assert result["drafter_faults"] >= 1
    assert report.read_text(encoding="utf-8").startswith("# Soak\n\nPassed: 60 requests")


def test_every_kind_of_request_has_its_share() -> None:
    kinds = [case.kind for case in cases(2000, 0, ["x"], SAMPLING)]
    assert [kinds.count(kind) for kind in ("cancelled", "malformed", "failing", "complete")] == [200, 100, 20, 1680]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_each_malformed_request_is_one(service: AsyncLLM, number: int) -> None:
    with pytest.raises((ValueError, ParlayError)):
        asyncio.run(service.generate(*MALFORMED[number]()))


def test_a_text_that_differs_is_told(service: AsyncLLM) -> None:
    async def run() -> list[str]:
        soak = Soak(service, [CASE])
        await soak.learn()
        await soak.run(1)
        assert not soak.tally.wrong
        soak.known[CASE.key] = [(*soak.known[CASE.key][0][:-1], 0)]
        await soak.run(1)
        return soak.tally.wrong

    (line,) = asyncio.run(run())
    assert "differs" in line


def test_memory_is_compared_from_the_first_quarter_on() -> None:
    memory = {100 * hundred: 1000 for hundred in range(1, 21)}
    assert growth({**memory, 100: 1, 2000: 1030}) == pytest.approx(0.03)
    assert growth({60: 5}) is None
