"""Two models in one server: the small one answers what it is sure of, for those who allow it, until audits say no."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from parlay import LLM, SamplingParams
from parlay.aio import AsyncLLM
from parlay.calibration import calibrate_cascade
from parlay.certificates.bounds import SCORE
from parlay.certificates.cascade import CascadeThreshold, RequestCascade, sureness
from parlay.certificates.certificate import Certificate, Certified, Claim, Sampling, write
from parlay.certificates.requirement import Floor
from parlay.cli import main
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
        threshold = CascadeThreshold(least=least, good=100, by_small=50)
        path = tmp_path / "cascade.json"
        write(RequestCascade(*bindings, Sampling.of(GREEDY), claim, threshold), path)
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


TEXT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
SHAPES = [("/v1/chat/completions", ASKED), ("/v1/completions", TEXT)]


@pytest.mark.parametrize(("path", "asked"), SHAPES)
@pytest.mark.parametrize(("least", "name"), [(0.0, "small"), (1.0, "large")])
def test_a_stream_comes_whole_from_the_model_that_is_named_in_it(
    served: Served, path: str, asked: dict[str, object], least: float, name: str
) -> None:
    """Its text and its usage are those of the same request to that model alone: nothing was sent and taken back."""
    client = served(least)
    alone = client.post(path, json={"model": name, **asked}).json()
    assert client.post(path, json={"model": "large", **asked, **FLOOR}).json()["choices"] == alone["choices"]
    body = {"model": "large", **asked, **FLOOR, "stream": True, "stream_options": {"include_usage": True}}
    lines = client.post(path, json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {chunk["model"] for chunk in chunks} == {name}
    text = "".join(piece_of(choice) for chunk in chunks for choice in chunk["choices"])
    assert text == piece_of(alone["choices"][0])
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][key] == alone["usage"][key]


def piece_of(choice: dict[str, Any]) -> str:
    """The text of a choice of either protocol, or of a chunk of one."""
    told = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    return told.get("content") or ""


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": ["One", "Two"]},
        {"suffix": " the end."},
        {"echo": True},
        {"best_of": 2},
        {"response_format": {"type": "json_object"}},
        {"exactness": "seed"},
    ],
)
def test_a_completion_that_only_one_model_can_read_or_that_has_several_answers_is_not_for_the_small_one(
    served: Served, fields: dict[str, object]
) -> None:
    reply = served(0.0).post("/v1/completions", json={"model": "large", **TEXT, **FLOOR, **fields}).json()
    assert reply.get("model", reply.get("error", {}).get("param")) in ("large", "suffix")


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
    """Counts in /metrics of the audits of one gate."""
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
        deadline = time.monotonic() + 600
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
