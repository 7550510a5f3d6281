"""Counts of the server: by model and strategy, with few labels, and in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from parlay.aio import AsyncLLM
from parlay.llm.outputs import CompletionOutput, RequestOutput
from parlay.serve.finished import Finished
from parlay.serve.observe.metrics import POSITIONS, Recorder
from parlay.serve.registry import Registry
from parlay.types import Exactness, FinishReason, Metrics, Routed, RouterRecord, SamplingParams

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> TestClient:
    """An application that has counted nothing yet."""
    return TestClient(make_app())


@pytest.fixture
def recorder(engine: AsyncLLM) -> Recorder:
    return Recorder(Registry({"mini": engine}))


def output(
    *, strategy: str = "prompt-lookup:k=3", n: int = 1, tokens: int = 5, reason: FinishReason = "length"
) -> RequestOutput:
    metrics = Metrics(
        strategy=strategy,
        exactness=Exactness.BITS,
        prompt_tokens=7,
        cached_tokens=4,
        completion_tokens=tokens,
        steps=3,
        draft_steps=2,
        draft_tokens=6,
        accepted_tokens=2,
        accepted_by_source={"prompt-lookup": 2},
        drafted_by_source={"prompt-lookup": 6},
        accepted_by_depth=(1, 1, 0),
        drafted_by_depth=(2, 2, 2),
        drafter_faults=1,
        draft_seconds=0.25,
    )
    samples = tuple(
        CompletionOutput(
            index=index,
            text="",
            token_ids=(1,) * tokens,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=reason,
            stop_reason=None,
            strategy=strategy,
            exactness=Exactness.BITS,
            seed=0,
            sources=("target",) * tokens,
            metrics=metrics,
        )
        for index in range(n)
    )
    return RequestOutput(request_id="r", prompt=None, prompt_token_ids=(1,) * 7, prompt_logprobs=None, outputs=samples)


def finished(output: RequestOutput, first: float, seconds: float, model: str = "mini") -> Finished:
    params = SamplingParams(max_tokens=64, n=len(output.outputs))
    return Finished(model=model, output=output, params=params, seconds=seconds, seconds_to_first=first)


def samples(text: str) -> Samples:
    return dict(_samples(text))


def _samples(text: str) -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield (sample.name, frozenset(sample.labels.items())), sample.value


def value(told: Samples, name: str, strategy: str | None = "prompt-lookup", **labels: str) -> float:
    own = {"model": "mini", **labels} | ({"strategy": strategy} if strategy else {})
    return told[(name, frozenset(own.items()))]


def test_a_finished_request_is_counted_once_in_every_way(recorder: Recorder) -> None:
    recorder.finished(finished(output(), 0.2, 1.0))
    told = samples(recorder.render().decode())
    assert value(told, "parlay_requests_total", finish_reason="length") == 1
    assert of_vllm(told, "vllm:prompt_tokens_total") == 7
    assert value(told, "parlay_completion_tokens_total") == 5
    assert value(told, "parlay_steps_total") == 3
    assert value(told, "parlay_steps_without_draft_total") == 1
    assert value(told, "parlay_draft_tokens_total", source="prompt-lookup") == 6
    assert value(told, "parlay_accepted_tokens_total", source="prompt-lookup") == 2
    assert [value(told, "parlay_accepted_tokens_by_position_total", position=place) for place in "123"] == [1, 1, 0]
    assert value(told, "parlay_drafter_faults_total") == 1
    assert value(told, "parlay_step_seconds_total", phase="draft") == 0.25
    assert of_vllm(told, "vllm:time_to_first_token_seconds_sum") == 0.2
    assert of_vllm(told, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.2)
    assert of_vllm(told, "vllm:e2e_request_latency_seconds_bucket", le="1.0") == 1


def test_what_a_router_did_is_counted_by_drafter_without_its_parameters(recorder: Recorder) -> None:
    told = output(strategy="auto")
    drafters = (
        Routed("prompt-lookup", asked=5, verified=3, expected=2.5, accepted=4, seconds=0.5),
        Routed("prompt-lookup:k=3", asked=1, seconds=0.25),
        Routed("eagle3", asked=2, trials=1),
    )
    record = RouterRecord(drafters, {"worth most": 3, "trial": 1}, "edit")
    object.__setattr__(told.outputs[0].metrics, "router", record)
    recorder.finished(finished(told, 0.2, 1.0))
    counted = partial(value, samples(recorder.render().decode()), strategy="auto")
    assert counted("parlay_router_asked_steps_total", drafter="prompt-lookup") == 6
    assert counted("parlay_router_verified_steps_total", drafter="prompt-lookup") == 3
    assert counted("parlay_router_expected_tokens_total", drafter="prompt-lookup") == 2.5
    assert counted("parlay_router_accepted_tokens_total", drafter="prompt-lookup") == 4
    assert counted("parlay_router_seconds_total", drafter="prompt-lookup") == 0.75
    assert counted("parlay_router_asked_steps_total", drafter="eagle3") == 2
    assert counted("parlay_router_choices_total", reason="trial") == 1


def test_every_sample_counts_and_their_prompt_once(recorder: Recorder) -> None:
    recorder.finished(finished(output(n=3, reason="stop"), 0.2, 1.0))
    told = samples(recorder.render().decode())
    assert value(told, "parlay_requests_total", finish_reason="stop") == 3
    assert value(told, "parlay_completion_tokens_total") == 15
    assert of_vllm(told, "vllm:prompt_tokens_total") == 7
    assert of_vllm(told, "vllm:inter_token_latency_seconds_count") == 1


def test_a_request_that_ended_before_its_first_token_has_no_time_to_it(recorder: Recorder) -> None:
    recorder.finished(finished(output(tokens=0, reason="abort"), 0.0, 0.3))
    told = samples(recorder.render().decode())
    assert of_vllm(told, "vllm:e2e_request_latency_seconds_count") == 1
    assert not any(name.startswith("vllm:time_to_first") for name, _ in told)


def test_parameters_and_depths_that_clients_choose_make_no_labels(recorder: Recorder) -> None:
    for k in range(1, 200):
        recorder.finished(finished(output(strategy=f"prompt-lookup:k={k}"), 0.2, 1.0))
    deep = output()
    object.__setattr__(deep.outputs[0].metrics, "drafted_by_depth", (1,) * 500)
    recorder.finished(finished(deep, 0.2, 1.0))
    told = samples(recorder.render().decode())
    assert value(told, "parlay_requests_total", finish_reason="length") == 200
    assert sum(name == "parlay_draft_tokens_by_position_total" for name, _ in told) == POSITIONS


def test_queue_and_cache_are_read_when_asked(recorder: Recorder) -> None:
    told = samples(recorder.render().decode())
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:num_preemptions_total"):
        assert of_vllm(told, name) == 0
    for name in ("parlay_cache_used_tokens", "parlay_cache_room_tokens"):
        assert value(told, name, strategy=None) >= 0
    assert of_vllm(told, "vllm:prefix_cache_hits_total") >= 0


def test_what_a_finished_text_holds_in_the_cache_is_told_in_bytes(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app())
    assert client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 8}).status_code == 200
    told = samples(client.get("/metrics").text)
    assert value(told, "parlay_cache_held_bytes", strategy=None, model="parlay-mini") > 0


def test_each_server_counts_for_itself(make_app: Callable[..., FastAPI]) -> None:
    one, other = make_app(), make_app()
    one.state.recorder.finished(finished(output(), 0.2, 1.0, model="parlay-mini"))
    assert "prompt-lookup" in TestClient(one).get("/metrics").text
    response = TestClient(other).get("/metrics")
    assert "prompt-lookup" not in response.text
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_every_metric_is_named_and_explained_alike(recorder: Recorder) -> None:
    for family in text_string_to_metric_families(recorder.render().decode()):
        if not family.name.endswith("_created"):
            assert family.name.startswith(("parlay_", "vllm:", "http_request", "process_"))
            assert family.documentation.endswith(".")


# -------------------------------------------------------------------------------------------------------- vLLM's names

DASHBOARDS = (
    "http_request_duration_seconds_count",
    "http_request_duration_seconds_sum",
    "http_requests_total",
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:engine_sleep_state",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:iteration_tokens_total_bucket",
    "vllm:iteration_tokens_total_count",
    "vllm:iteration_tokens_total_sum",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_generation_tokens_count",
    "vllm:request_generation_tokens_sum",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_kv_computed_tokens_bucket",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_prompt_tokens_count",
    "vllm:request_prompt_tokens_sum",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_count",
    "vllm:request_time_per_output_token_seconds_sum",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
)
"""Metrics of the panels of vLLM's Grafana dashboards, those of ``vllm:`` with ``model_name`` and ``engine``. Left out
is what a server without connectors, pictures, adapters and blocks on a GPU has nothing to tell of."""
NOWHERE = ("none", "none", "4xx")
BOUNDS = {
    "vllm:time_to_first_token_seconds_bucket": (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
    "vllm:request_time_per_output_token_seconds_bucket": (0.025, 0.05, 0.075, 0.1),
}
"""Goals that can be chosen there."""


def of_vllm(told: Samples, name: str, **labels: str) -> float:
    return told[(name, frozenset({"model_name": "mini", "engine": "0", **labels}.items()))]


def test_every_panel_of_the_dashboards_finds_its_numbers(make_app: Callable[..., FastAPI]) -> None:
    """After two requests to a server, one that always drafts."""
    with TestClient(make_app()) as client:
        body = {"prompt": "one two three one two three one two", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        for strategy in ("prompt-lookup:policy=fixed", "none"):
            assert client.post("/v1/completions", json={**body, "strategy": strategy}).status_code == 200
        told = samples(client.get("/metrics").text)
    missing = [name for name in DASHBOARDS if not any(key == name and _whose(name, labels) for key, labels in told)]
    assert not missing
    for name, bounds in BOUNDS.items():
        assert {str(bound) for bound in bounds} <= {dict(labels)["le"] for key, labels in told if key == name}


def _whose(name: str, labels: frozenset[tuple[str, str]]) -> bool:
    if name.startswith("process_"):
        return not labels
    if not name.startswith("vllm:"):
        return dict(labels)["handler"] == "/v1/completions"
    return {("model_name", "parlay-mini"), ("engine", "0")} <= labels


def test_prompt_tokens_are_told_by_source_and_states_by_label(recorder: Recorder) -> None:
    recorder.finished(finished(output(), 0.2, 1.0))
    told = samples(recorder.render().decode())
    assert of_vllm(told, "vllm:prompt_tokens_cached_total") == 4
    assert of_vllm(told, "vllm:prompt_tokens_by_source_total", source="local_compute") == 3
    assert of_vllm(told, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 4
    assert of_vllm(told, "vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    assert of_vllm(told, "vllm:engine_sleep_state", sleep_state="awake") == 1


def test_a_clock_that_goes_back_makes_no_time_negative(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    gone_back = SimpleNamespace(monotonic=lambda: -1e6)
    monkeypatch.setattr("parlay.serve.protocol.running.time", gone_back)
    monkeypatch.setattr("parlay.serve.middleware.time", SimpleNamespace(monotonic=iter((0.0, -5.0)).__next__))
    assert client.post("/v1/completions", json={"prompt": "One", "max_tokens": 4}).status_code == 200
    monkeypatch.undo()
    told = samples(client.get("/metrics").text)
    assert all(count >= 0 for (name, _), count in told.items() if "seconds" in name)


def test_requests_are_counted_by_route_and_kind_of_status(client: TestClient) -> None:
    """Neither addresses that clients make up nor methods make labels, and who only looks is not counted."""
    for path in ("/v1/models/nothing", "/v1/models/parlay-mini", "/no/such/path", "/health"):
        client.get(path)
    client.request("BREW", "/v1/models/parlay-mini")
    told = samples(client.get("/metrics").text)
    counted = {
        tuple(dict(labels)[name] for name in ("handler", "method", "status")): count
        for (name, labels), count in told.items()
        if name == "http_requests_total"
    }
    model = "/v1/models/{model:path}"
    assert counted == {(model, "GET", "2xx"): 1, (model, "GET", "4xx"): 1, (model, "none", "4xx"): 1, NOWHERE: 1}


def test_queue_prefill_and_decode_add_up_to_the_request(recorder: Recorder) -> None:
    recorder.finished(finished(output(), 0.2, 1.0))
    told = samples(recorder.render().decode())
    parts = [of_vllm(told, f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert parts == [0.75, 0.0, 0.25]  # the draft took a quarter of a second, and nothing else any
    assert of_vllm(told, "vllm:e2e_request_latency_seconds_sum") == sum(parts)


def test_lengths_and_speculation_are_told_under_both_kinds_of_names(recorder: Recorder) -> None:
    recorder.finished(finished(output(n=2), 0.2, 1.0))
    told = samples(recorder.render().decode())
    assert of_vllm(told, "vllm:generation_tokens_total") == value(told, "parlay_completion_tokens_total") == 10
    assert of_vllm(told, "vllm:request_max_num_generation_tokens_sum") == 5
    assert of_vllm(told, "vllm:request_params_max_tokens_sum") == 64
    assert of_vllm(told, "vllm:spec_decode_num_drafts_total") == 4
    positions = [of_vllm(told, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=place) for place in "012"]
    assert positions == [2, 2, 0]
    assert of_vllm(told, "vllm:request_success_total", finished_reason="length") == 2


def test_a_request_counts_under_both_kinds_of_names(make_app: Callable[..., FastAPI]) -> None:
    with TestClient(make_app()) as client:
        body = {"prompt": "The tide turns twice a day.", "max_tokens": 9, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
        told = samples(client.get("/metrics").text)
        labels = frozenset({("model_name", "parlay-mini"), ("engine", "0")})
        assert told[("vllm:generation_tokens_total", labels)] == 9
        assert told[("vllm:request_prefill_time_seconds_sum", labels)] > 0
        assert 0 <= told[("vllm:kv_cache_usage_perc", labels)] <= 1
        assert told[("vllm:num_requests_running", labels)] == 0


def test_steps_are_counted_by_their_tokens(make_app: Callable[..., FastAPI]) -> None:
    """One step computes the prompt and writes a token; plain decoding writes one more in each of the others."""
    with TestClient(make_app()) as client:
        before = steps(client)
        body = {"prompt": [5] * 33, "max_tokens": 9, "ignore_eos": True, "strategy": "none", "cache_salt": "own"}
        assert client.post("/v1/completions", json=body).status_code == 200
        told = {name: count - before[name] for name, count in steps(client).items()}
    assert (told["bucket1.0"], told["bucket32.0"], told["bucket64.0"], told["bucket+Inf"]) == (8, 8, 9, 9)
    assert (told["count"], told["sum"]) == (9, 33 + 9)


def steps(client: TestClient) -> dict[str, float]:
    return {
        name.removeprefix("vllm:iteration_tokens_total_") + dict(labels).get("le", ""): count
        for (name, labels), count in samples(client.get("/metrics").text).items()
        if name.startswith("vllm:iteration_tokens_total_")
    }
