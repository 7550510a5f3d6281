"""The same counts under vLLM's names, so that its Grafana dashboards show a Parlay server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from parlay.llm.outputs import CompletionOutput
from parlay.serve.finished import Finished
from parlay.types import EngineStats

WHOSE = ("model_name", "engine")
ENGINE = "0"
"""vLLM numbers its engines; here each model has one."""
POSITIONS = 32
"""Depths of drafts that are counted one by one."""

_TIMES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Dashboards compare with some of vLLM's own bounds, so those are among them."""
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SAMPLES = (1, 2, 4, 8, 16)
_STEP_SIZES = tuple(2**power for power in range(15))

_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "vllm:prompt_tokens": ("Tokens of prompts.", ()),
    "vllm:prompt_tokens_cached": ("Tokens of prompts that were found in the cache.", ()),
    "vllm:prompt_tokens_by_source": ("Tokens of prompts by where they came from.", ("source",)),
    "vllm:generation_tokens": ("Tokens of output.", ()),
    "vllm:request_success": ("Samples that came to an end.", ("finished_reason",)),
    "vllm:spec_decode_num_drafts": ("Steps that verified a draft.", ()),
    "vllm:spec_decode_num_draft_tokens": ("Drafted tokens that the target verified.", ()),
    "vllm:spec_decode_num_accepted_tokens": ("Drafted tokens that joined the output.", ()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("The same by place in the draft, from 0.", ("position",)),
}
_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "vllm:e2e_request_latency_seconds": ("From a request's arrival to its last token.", _TIMES),
    "vllm:time_to_first_token_seconds": ("From a request's arrival to its first token.", _TIMES),
    "vllm:request_queue_time_seconds": ("Time that a request waited.", _TIMES),
    "vllm:request_prefill_time_seconds": ("Time of a request's steps up to its first token.", _TIMES),
    "vllm:request_decode_time_seconds": ("Time of a request's steps after its first token.", _TIMES),
    "vllm:request_inference_time_seconds": ("Both together.", _TIMES),
    "vllm:inter_token_latency_seconds": ("Mean time between two tokens of a request, after the first.", _GAPS),
    "vllm:request_time_per_output_token_seconds": ("The same, once for each request.", _GAPS),
    "vllm:request_prompt_tokens": ("Tokens of a request's prompt.", _SIZES),
    "vllm:request_prefill_kv_computed_tokens": ("Tokens of a request's prompt that were not in the cache.", _SIZES),
    "vllm:request_generation_tokens": ("Tokens of a request's output.", _SIZES),
    "vllm:request_max_num_generation_tokens": ("Tokens of a request's longest sample.", _SIZES),
    "vllm:request_params_max_tokens": ("Most tokens of output that a request asked for.", _SIZES),
    "vllm:request_params_n": ("Samples that a request asked for.", _SAMPLES),
}


class VllmNames:
    """Counts requests as they finish. What the engines do now is read elsewhere, under both kinds of names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters = {
            name: Counter(name, text, (*WHOSE, *labels), registry=registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, WHOSE, buckets=buckets, registry=registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }

    def finished(self, request: Finished) -> None:
        for name, value in _observations(request).items():
            self._histograms[name].labels(request.model, ENGINE).observe(value)
        cached, computed = request.output.outputs[0].metrics.cached_tokens, _computed(request)
        self._count("vllm:prompt_tokens", request.model, cached + computed)
        self._count("vllm:prompt_tokens_cached", request.model, cached)
        for source, count in (("local_compute", computed), ("local_cache_hit", cached)):
            self._count("vllm:prompt_tokens_by_source", request.model, count, source)
        self._count("vllm:generation_tokens", request.model, request.tokens)
        for sample in request.output.outputs:
            self._sample(request.model, sample)

    def _sample(self, model: str, sample: CompletionOutput) -> None:
        metrics = sample.metrics
        self._count("vllm:request_success", model, 1, sample.finish_reason)
        self._count("vllm:spec_decode_num_drafts", model, metrics.draft_steps)
        self._count("vllm:spec_decode_num_draft_tokens", model, metrics.draft_tokens)
        self._count("vllm:spec_decode_num_accepted_tokens", model, metrics.accepted_tokens)
        for position, accepted in enumerate(metrics.accepted_by_depth[:POSITIONS]):
            self._count("vllm:spec_decode_num_accepted_tokens_per_pos", model, accepted, str(position))

    def _count(self, name: str, model: str, count: int, *labels: str) -> None:
        self._counters[name].labels(model, ENGINE, *labels).inc(count)


def states(stats: Mapping[str, EngineStats]) -> Iterator[Metric]:
    """What the engines of the models tell of themselves in more than one number. None sleeps or defers here."""
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Samples that wait, by what for.", labels=(*WHOSE, "reason")
    )
    awake = GaugeMetricFamily(
        "vllm:engine_sleep_state", "1 for the state that the engine is in.", labels=(*WHOSE, "sleep_state")
    )
    for model, now in stats.items():
        for reason, count in (("capacity", now.waiting), ("deferred", 0)):
            waiting.add_metric([model, ENGINE, reason], count)
        for state in ("awake", "weights_offloaded", "discard_all"):
            awake.add_metric([model, ENGINE, state], state == "awake")
    yield waiting
    yield awake
    yield _steps(stats)


def _steps(stats: Mapping[str, EngineStats]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "vllm:iteration_tokens_total", "Tokens that a step computed of prompts and committed.", labels=WHOSE
    )
    for model, now in stats.items():
        bounds = [
            (str(float(bound)), sum(count for size, count in now.steps.items() if size <= bound))
            for bound in _STEP_SIZES
        ]
        family.add_metric([model, ENGINE], [*bounds, ("+Inf", sum(now.steps.values()))], now.step_tokens)
    return family


def _observations(request: Finished) -> dict[str, float]:
    found: dict[str, float] = {
        "vllm:e2e_request_latency_seconds": request.seconds,
        "vllm:request_queue_time_seconds": request.queue_seconds,
        "vllm:request_prefill_time_seconds": request.prefill_seconds,
        "vllm:request_decode_time_seconds": request.decode_seconds,
        "vllm:request_inference_time_seconds": request.prefill_seconds + request.decode_seconds,
        "vllm:request_prompt_tokens": len(request.output.prompt_token_ids),
        "vllm:request_prefill_kv_computed_tokens": _computed(request),
        "vllm:request_generation_tokens": request.tokens,
        "vllm:request_max_num_generation_tokens": request.longest,
        "vllm:request_params_n": request.params.n,
    }
    if request.params.max_tokens is not None:
        found["vllm:request_params_max_tokens"] = request.params.max_tokens
    if request.tokens:
        found["vllm:time_to_first_token_seconds"] = request.seconds_to_first
    if request.seconds_per_token is not None:
        found["vllm:inter_token_latency_seconds"] = request.seconds_per_token
        found["vllm:request_time_per_output_token_seconds"] = request.seconds_per_token
    return found


def _computed(request: Finished) -> int:
    """How many tokens of the prompt were not in the cache."""
    return len(request.output.prompt_token_ids) - request.output.outputs[0].metrics.cached_tokens
