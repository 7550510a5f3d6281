"""What the server counts, for Prometheus. Every server has a registry of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from parlay.llm.outputs import CompletionOutput
from parlay.serve.finished import Finished
from parlay.serve.observe.http_metrics import HttpRequests
from parlay.serve.observe.vllm_metrics import ENGINE, POSITIONS, WHOSE, VllmNames, states
from parlay.serve.registry import Registry
from parlay.strategies.spelling import name_of
from parlay.types import EngineStats, Metrics, Routed, RouterRecord

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_TIMES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOSE = ("model", "strategy")

_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "parlay_requests": ("Samples that came to an end, n of them for a request with n.", ("finish_reason",)),
    "parlay_prompt_tokens": ("Tokens of prompts, once for each request.", ()),
    "parlay_prompt_cached_tokens": ("Tokens of prompts that were found in the cache.", ()),
    "parlay_completion_tokens": ("Tokens of output.", ()),
    "parlay_steps": ("Forwards of the target that committed tokens, for each sample in them.", ()),
    "parlay_steps_without_draft": ("Those steps that verified no draft.", ()),
    "parlay_draft_tokens": ("Drafted tokens that the target verified.", ("source",)),
    "parlay_accepted_tokens": ("Drafted tokens that joined the output.", ("source",)),
    "parlay_draft_tokens_by_position": ("Verified tokens by place in their draft, from 1.", ("position",)),
    "parlay_accepted_tokens_by_position": ("Accepted tokens by place in their draft, from 1.", ("position",)),
    "parlay_router_asked_steps": ("Steps in which a router asked a drafter.", ("drafter",)),
    "parlay_router_verified_steps": ("Those of them whose draft it had verified.", ("drafter",)),
    "parlay_router_expected_tokens": ("Tokens that these drafts were expected to bring.", ("drafter",)),
    "parlay_router_accepted_tokens": ("Tokens that they brought.", ("drafter",)),
    "parlay_router_seconds": ("Time that a drafter took that a router asked.", ("drafter",)),
    "parlay_router_choices": ("Steps of a router by the reason of what it chose.", ("reason",)),
    "parlay_drafter_faults": ("Drafters that failed; their requests went on plainly.", ()),
    "parlay_step_seconds": ("Time of the steps that samples took part in, by what it went into.", ("phase",)),
}
_HISTOGRAMS = {
    "parlay_time_to_first_token_seconds": ("From a request's arrival to its first token.", _TIMES),
    "parlay_inter_token_latency_seconds": ("Mean time between two tokens of a request, after the first.", _GAPS),
    "parlay_request_seconds": ("From a request's arrival to its last token.", _TIMES),
    "parlay_queue_seconds": ("Time that a request waited.", _TIMES),
}


class Recorder:
    """Counts requests as they finish. `render` reads what is running from the engines."""

    def __init__(self, models: Registry, *others: Collector) -> None:
        """``others`` are asked when it renders."""
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, text, (*_WHOSE, *labels), registry=self._registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, _WHOSE, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._vllm = VllmNames(self._registry)
        self.http = HttpRequests(self._registry)
        for collector in (_Engines(models), *others):
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def finished(self, request: Finished) -> None:
        """Count one request that is over, whatever its end."""
        self._vllm.finished(request)
        samples = request.output.outputs
        whose = (request.model, _name(samples[0].strategy))
        self._counters["parlay_prompt_tokens"].labels(*whose).inc(len(request.output.prompt_token_ids))
        self._counters["parlay_prompt_cached_tokens"].labels(*whose).inc(samples[0].metrics.cached_tokens)
        for sample in samples:
            self._count(whose, sample)
        self._observe("parlay_request_seconds", whose, request.seconds)
        self._observe("parlay_queue_seconds", whose, request.queue_seconds)
        if request.tokens > 0:
            self._observe("parlay_time_to_first_token_seconds", whose, request.seconds_to_first)
        if request.seconds_per_token is not None:
            self._observe("parlay_inter_token_latency_seconds", whose, request.seconds_per_token)

    def render(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self._registry)

    def _count(self, whose: tuple[str, str], sample: CompletionOutput) -> None:
        metrics = sample.metrics
        self._add("parlay_requests", whose, {sample.finish_reason: 1})
        for name, labelled in _by_label(metrics).items():
            self._add(name, whose, labelled)
        for name, labelled in _routed(metrics.router).items():
            self._add(name, whose, labelled)
        for name, value in _plain(metrics).items():
            self._counters[name].labels(*whose).inc(value)

    def _add(self, name: str, whose: tuple[str, str], counts: Mapping[str, float]) -> None:
        for label, value in counts.items():
            self._counters[name].labels(*whose, label).inc(value)

    def _observe(self, name: str, whose: tuple[str, str], value: float) -> None:
        self._histograms[name].labels(*whose).observe(value)


def _plain(metrics: Metrics) -> dict[str, float]:
    return {
        "parlay_completion_tokens": metrics.completion_tokens,
        "parlay_steps": metrics.steps,
        "parlay_steps_without_draft": metrics.steps - metrics.draft_steps,
        "parlay_drafter_faults": metrics.drafter_faults,
    }


def _by_label(metrics: Metrics) -> dict[str, Mapping[str, float]]:
    return {
        "parlay_draft_tokens": metrics.drafted_by_source,
        "parlay_accepted_tokens": metrics.accepted_by_source,
        "parlay_draft_tokens_by_position": _positions(metrics.drafted_by_depth),
        "parlay_accepted_tokens_by_position": _positions(metrics.accepted_by_depth),
        "parlay_step_seconds": {
            "prefill": metrics.prefill_seconds,
            "draft": metrics.draft_seconds,
            "verify": metrics.verify_seconds,
            "overhead": metrics.overhead_seconds,
        },
    }


def _routed(record: RouterRecord | None) -> dict[str, Mapping[str, float]]:
    """By drafter, without its parameters, which clients may choose freely."""
    if record is None:
        return {}
    counted: dict[str, dict[str, float]] = {name: defaultdict(float) for name in _ROUTED}
    for each in record.drafters:
        for name, read in _ROUTED.items():
            counted[name][_name(each.drafter)] += read(each)
    return {**counted, "parlay_router_choices": record.reasons}


_ROUTED: Mapping[str, Callable[[Routed], float]] = {
    "parlay_router_asked_steps": lambda each: each.asked,
    "parlay_router_verified_steps": lambda each: each.verified,
    "parlay_router_expected_tokens": lambda each: each.expected,
    "parlay_router_accepted_tokens": lambda each: each.accepted,
    "parlay_router_seconds": lambda each: each.seconds,
}


def _positions(counts: tuple[int, ...]) -> dict[str, float]:
    return {str(place): count for place, count in enumerate(counts[:POSITIONS], start=1)}


@lru_cache(maxsize=1024)
def _name(strategy: str) -> str:
    """The strategy's name without parameters, because clients choose those freely and labels must stay few."""
    return name_of(strategy)


# ------------------------------------------------------------------------------------------------- read when scraped


class _Engines(Collector):
    """The engines' own counts at the moment of asking."""

    def __init__(self, models: Registry) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []  # nothing is asked of the engines when this is registered

    def collect(self) -> Iterator[Metric]:
        stats = {model.name: model.llm.stats() for model in self._models.loaded}
        for reading in _READINGS:
            labels, more = (["model"], []) if reading.name.startswith("parlay_") else (list(WHOSE), [ENGINE])
            family = reading.kind(reading.name, reading.help, labels=labels)
            for model, each in stats.items():
                family.add_metric([model, *more], reading.read(each))
            yield family
        yield from states(stats)


@dataclass(frozen=True, slots=True)
class _Reading:
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    help: str
    read: Callable[[EngineStats], float]


_READINGS = (
    _Reading(GaugeMetricFamily, "parlay_samples_waiting", "Samples that wait for a place.", lambda s: s.waiting),
    _Reading(GaugeMetricFamily, "vllm:num_requests_waiting", "Samples that wait for a place.", lambda s: s.waiting),
    _Reading(GaugeMetricFamily, "parlay_samples_running", "Samples that take part in steps.", lambda s: s.running),
    _Reading(GaugeMetricFamily, "vllm:num_requests_running", "Samples that take part in steps.", lambda s: s.running),
    *(
        _Reading(
            CounterMetricFamily,
            name,
            "Samples that gave up their memory to others, to be computed again later.",
            lambda s: s.preemptions,
        )
        for name in ("parlay_preemptions", "vllm:num_preemptions")
    ),
    _Reading(
        GaugeMetricFamily,
        "parlay_cache_used_tokens",
        "Tokens whose keys and values are held.",
        lambda s: s.cache_tokens_used,
    ),
    _Reading(
        GaugeMetricFamily, "parlay_cache_room_tokens", "Tokens that can be held in all.", lambda s: s.cache_tokens_total
    ),
    _Reading(
        GaugeMetricFamily,
        "vllm:kv_cache_usage_perc",
        "Which part of the cache is held, from 0 to 1.",
        lambda s: s.cache_tokens_used / s.cache_tokens_total,
    ),
    *(
        _Reading(
            CounterMetricFamily,
            name,
            "Tokens of prompts that were looked up in the cache.",
            lambda s: s.prefix_tokens_asked,
        )
        for name in ("parlay_prefix_asked_tokens", "vllm:prefix_cache_queries")
    ),
    *(
        _Reading(CounterMetricFamily, name, "Those that were there.", lambda s: s.prefix_tokens_found)
        for name in ("parlay_prefix_found_tokens", "vllm:prefix_cache_hits")
    ),
)
