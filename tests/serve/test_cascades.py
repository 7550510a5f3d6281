"""Two models in one server: the small one answers what it is sure of, for those who allow it, until audits say no."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.calibration import calibrate_cascade
from parlay.cli import main
from parlay.quality.agreement import SCORE
from parlay.quality.allowed import Floor
from parlay.quality.cascade import Cascade, Threshold, sureness
from parlay.quality.certificate import Certificate, Certified, Claim, Sampling, write
from parlay.serve.app import create_app
from parlay.serve.cascades import Link
from tests.serve.conftest import Shared

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ASKED = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "max_tokens": 8}
FLOOR = {"exactness": "lossy:floor=0.9"}
Served = Callable[..., TestClient]


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, AsyncLLM]]:
    made = {"large": Shared(LLM("parlay-mini")), "small": Shared(LLM("parlay-mini-draft"))}
    yield dict(made)
    for model in made.values():
        asyncio.run(model.end())


@pytest.fixture
def served(models: dict[str, AsyncLLM], tmp_path: Path) -> Served:
    """``served(least, share)``: a server with a cascade of that threshold, whose certificate claims a floor of 0.9."""

    def make(least: float, share: float = 0.0) -> TestClient:
        claim = Claim(answers=100, prompts="", max_tokens=8, floor=0.9, score=SCORE, agreement=1.0, confidence=0.95)
        bindings = [models[name].llm.gate.binding() for name in ("small", "large")]
        threshold = Threshold(least=least, good=100, by_small=50)
        path = tmp_path / "cascade.json"
        write(Cascade(*bindings, Sampling.of(GREEDY), claim, threshold), path)
        return TestClient(create_app(models, cascades={"large": Link("small", path, share)}))

    return make


def answered_by(client: TestClient, **fields: object) -> str:
    reply = client.post("/v1/chat/completions", json={"model": "large", **ASKED, **fields})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["model"])


def test_what_the_small_model_is_sure_of_it_answers_and_the_rest_goes_to_the_large_one(served: Served) -> None:
    assert answered_by(served(0.0), **FLOOR) == "small"
    assert answered_by(served(1.0), **FLOOR) == "large"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"exactness": "bits"},
        {"exactness": "lossy"},
        {"exactness": "lossy:floor=0.95"},
        {**FLOOR, "temperature": 0.5},
        {**FLOOR, "max_tokens": 9},
        {**FLOOR, "strategy": "none"},
        {**FLOOR, "response_format": {"type": "json_object"}},
    ],
)
def test_whoever_does_not_allow_it_or_asks_otherwise_gets_the_large_model(served: Served, fields: object) -> None:
    assert answered_by(served(0.0), **fields) == "large"  # type: ignore[arg-type]


def test_a_stream_comes_from_the_model_that_is_named_in_it(served: Served) -> None:
    body = {"model": "large", **ASKED, **FLOOR, "stream": True}
    lines = served(0.0).post("/v1/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {"small"}


def test_audits_revoke_a_cascade_whose_answers_are_not_those_of_the_large_model(served: Served) -> None:
    with served(0.0, share=1.0) as client:
        by = [answered_by(client, **FLOOR) for _ in range(30)]
        text = client.get("/metrics").text
    assert by[0] == "small"
    assert by[-1] == "large"
    told = metrics_of(text, "large", "cascade:small")
    assert (told["floor"], told["revoked"]) == (0.9, 1)
    assert told["total"] == told["disagreed_total"] > 0


def metrics_of(text: str, model: str, gate: str) -> dict[str, float]:
    """What /metrics says of the audits of one gate."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        sample.name.removeprefix("parlay_audits_"): sample.value
        for sample in samples
        if sample.name.startswith("parlay_audits_") and sample.labels == {"model": model, "gate": gate}
    }


def test_metrics_tell_of_the_audits_of_each_certified_strategy(tmp_path: Path) -> None:
    path = certificate(tmp_path)
    llm = LLM("parlay-mini", certificates=[path], audit_share=1)
    with TestClient(create_app({"mini": AsyncLLM(llm)})) as client:
        assert metrics_of(client.get("/metrics").text, "mini", STRATEGY) == QUIET
        body = {"model": "mini", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, **FLOOR}
        assert client.post("/v1/completions", json=body).json()["parlay"]["exactness"] == "lossy"
        deadline = time.monotonic() + 60
        while (told := metrics_of(client.get("/metrics").text, "mini", STRATEGY)) == QUIET:
            assert time.monotonic() < deadline
    assert told == {**QUIET, "total": 1.0}


STRATEGY = "prompt-lookup:rule=typical"
QUIET = {"total": 0.0, "disagreed_total": 0.0, "floor": 0.9, "revoked": 0.0}


def certificate(folder: Path) -> Path:
    """For a lossy strategy whose greedy answers are the exact ones."""
    with LLM("parlay-mini") as llm:
        binding = llm.gate.binding()
    claim = Claim(answers=100, prompts="", max_tokens=8, floor=0.9, score=SCORE, agreement=1.0, confidence=0.95)
    path = folder / "certificate.json"
    certified = Certified(strategy=STRATEGY, good=100, speed=1.5)
    write(Certificate(binding, Sampling.of(GREEDY), claim, (certified,)), path)
    return path


def test_a_calibration_finds_the_threshold_below_which_answers_go_wrong() -> None:
    with LLM("parlay-mini") as large, LLM("parlay-mini") as same, LLM("parlay-mini-draft") as small:
        prompts = [large.job(f"The {word} was").samples[0].request.prompt for word in ("cat", "king", "day", "sea")]
        pairs, floor = [(ids, ids) for ids in prompts], Floor(floor=0.4)
        found = calibrate_cascade(same, large, pairs, floor, GREEDY)
        assert found is not None
        assert (found.threshold.least, found.threshold.by_small, found.threshold.good) == (0.0, 4, 4)
        assert calibrate_cascade(small, large, pairs, floor, GREEDY) is None
        with pytest.raises(ValueError, match="greedy"):
            calibrate_cascade(same, large, pairs, floor, SamplingParams(max_tokens=8))


def test_a_model_is_as_sure_as_its_first_tokens_are_likely() -> None:
    assert sureness([]) == 0.0
    assert sureness([0.0] * 16 + [-9.0] * 50) == 1.0


def test_a_cascade_of_models_that_are_not_served_is_a_usage_error(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served(0.5)
    assert main(["serve", "parlay-mini", "--port", "0", "--cascade", str(tmp_path / "cascade.json")]) == 2
    assert "is not served with these weights" in capsys.readouterr().err
