"""Prometheus counters and histograms: under vLLM's names, so that its dashboards show a Parlay server, and under
Parlay's own names for what vLLM does not count. Each server has its own registry."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from parlay.certificates.certificate import Audited
from parlay.serve.cascades import Cascades
from parlay.serve.finished import Finished
from parlay.serve.observe.energy import ServerEnergy
from parlay.serve.registry import Registry
from parlay.strategies.spelling import name_of
from parlay.types import EngineStats, Metrics, Routed

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
POSITIONS = 32
"""Draft depths with a counter each."""

_ENGINE = "0"
"""The engine's number in vLLM's labels; here each model has one engine."""
_OF_VLLM = ("model_name", "engine")
_TIMES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bounds of vLLM with which dashboards compare are among these."""
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SECONDS_OF_HTTP = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
_STEP_SIZES = tuple(2**power for power in range(15))


class Recorder:
    """Counts finished requests. `render` also reads running requests from the engines and audits from certificates."""

    def __init__(self, models: Registry, cascades: Cascades | None = None) -> None:
        self._registry = CollectorRegistry()
        self._counters = [(each, each.made(self._registry)) for each in _COUNTERS]
        self._histograms = [
            (read, Histogram(f"vllm:{name}", text, _OF_VLLM, buckets=bounds, registry=self._registry))
            for name, text, bounds, read in _HISTOGRAMS
        ]
        self.http = HttpRequests(self._registry)
        self._energy = ServerEnergy(models)
        self._registry.register(_Engines(models))
        self._registry.register(self._energy)
        if cascades is not None:
            self._registry.register(_Audits(models, cascades))
        ProcessCollector(registry=self._registry)

    def finished(self, request: Finished) -> None:
        """Count a finished request, however it ended."""
        strategy = _name(request.output.outputs[0].strategy)
        self._energy.add(request.tokens)
        for counted, counter in self._counters:
            own = (request.model, strategy if counted.name.startswith("parlay") else _ENGINE)
            for label, count in counted.read(request).items():
                counter.labels(*own, *([label] if counted.label else [])).inc(count)
        for read, histogram in self._histograms:
            value = read(request)
            if value is not None:
                histogram.labels(request.model, _ENGINE).observe(value)

    def render(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class HttpRequests:
    """Counts answered requests by path and status, under the names that dashboards for FastAPI applications know."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = prometheus_client.Counter(
            "http_requests", "Requests that were answered.", ("method", "status", "handler"), registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time from a request to the end of its answer.",
            ("method", "handler"),
            buckets=_SECONDS_OF_HTTP,
            registry=registry,
        )

    def answered(self, method: str, handler: str, status: int, seconds: float) -> None:
        self._count.labels(method, f"{status // 100}xx", handler).inc()
        self._seconds.labels(method, handler).observe(seconds)


@lru_cache(maxsize=1024)
def _name(strategy: str) -> str:
    """The strategy's name without parameters, which clients choose freely, to keep labels few."""
    return name_of(strategy)


# ----------------------------------------------------------------------------------- counted when a request ends


@dataclass(frozen=True, slots=True)
class _Counted:
    """A counter; ``read`` returns its increments by value of ``label``, or a single one without a label."""

    name: str
    help: str
    read: Callable[[Finished], Mapping[str, float]]
    label: str = ""

    def made(self, registry: CollectorRegistry) -> prometheus_client.Counter:
        of_all = _OF_VLLM if self.name.startswith("vllm:") else ("model", "strategy")
        labels = (*of_all, *([self.label] if self.label else []))
        return prometheus_client.Counter(self.name, self.help, labels, registry=registry)


def _one(read: Callable[[Finished], float]) -> Callable[[Finished], Mapping[str, float]]:
    return lambda request: {"": read(request)}


def _total(read: Callable[[Metrics], float]) -> Callable[[Finished], Mapping[str, float]]:
    """The sum over a request's samples."""
    return lambda request: {"": sum(read(sample.metrics) for sample in request.output.outputs)}


def _totals(read: Callable[[Metrics], Mapping[str, float]]) -> Callable[[Finished], Mapping[str, float]]:
    """Sums over a request's samples, by label."""

    def add(request: Finished) -> Mapping[str, float]:
        totals: defaultdict[str, float] = defaultdict(float)
        for sample in request.output.outputs:
            for label, count in read(sample.metrics).items():
                totals[label] += count
        return totals

    return add


def _routed(read: Callable[[Routed], float]) -> Callable[[Finished], Mapping[str, float]]:
    """A router's counts by drafter, without parameters, which clients choose freely."""

    def by_drafter(metrics: Metrics) -> Mapping[str, float]:
        totals: defaultdict[str, float] = defaultdict(float)
        for each in metrics.router.drafters if metrics.router is not None else ():
            totals[_name(each.drafter)] += read(each)
        return totals

    return _totals(by_drafter)


def _by_depth(counts: tuple[int, ...], first: int) -> Mapping[str, float]:
    return {str(place): count for place, count in enumerate(counts[:POSITIONS], start=first)}


def _ends(request: Finished) -> Mapping[str, float]:
    return Counter(sample.finish_reason for sample in request.output.outputs)


def _cached(request: Finished) -> int:
    """Tokens of the prompt that were cached."""
    return request.output.outputs[0].metrics.cached_tokens


def _computed(request: Finished) -> int:
    return len(request.output.prompt_token_ids) - _cached(request)


def _by_source(request: Finished) -> Mapping[str, float]:
    return {"local_compute": _computed(request), "local_cache_hit": _cached(request)}


def _by_phase(metrics: Metrics) -> Mapping[str, float]:
    return {
        "prefill": metrics.prefill_seconds,
        "draft": metrics.draft_seconds,
        "verify": metrics.verify_seconds,
        "overhead": metrics.overhead_seconds,
    }


_COUNTERS = (
    _Counted("vllm:prompt_tokens", "Tokens of prompts.", _one(lambda r: len(r.output.prompt_token_ids))),
    _Counted("vllm:prompt_tokens_cached", "Tokens of prompts that were found in the cache.", _one(_cached)),
    _Counted("vllm:prompt_tokens_by_source", "Tokens of prompts, by source: computed or cached.", _by_source, "source"),
    _Counted("vllm:generation_tokens", "Tokens of answers.", _one(lambda r: r.tokens)),
    _Counted("vllm:request_success", "Finished samples, by reason of the end.", _ends, "finished_reason"),
    _Counted("vllm:spec_decode_num_drafts", "Steps that verified a draft.", _total(lambda m: m.draft_steps)),
    _Counted("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified.",
             _total(lambda m: m.draft_tokens)),
    _Counted("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.",
             _total(lambda m: m.accepted_tokens)),
    _Counted("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens, by place in the draft, from 0.",
             _totals(lambda m: _by_depth(m.accepted_by_depth, 0)), "position"),
    _Counted("parlay_requests", "Finished samples, by reason of the end.", _ends, "finish_reason"),
    _Counted("parlay_completion_tokens", "Tokens of answers.", _one(lambda r: r.tokens)),
    _Counted("parlay_steps", "Steps of samples: a forward that commits tokens of three samples counts three times.",
             _total(lambda m: m.steps)),
    _Counted("parlay_steps_without_draft", "Steps that verified no draft.", _total(lambda m: m.steps - m.draft_steps)),
    _Counted("parlay_draft_tokens", "Drafted tokens that were verified, by drafter.",
             _totals(lambda m: m.drafted_by_source), "source"),
    _Counted("parlay_accepted_tokens", "Drafted tokens that were accepted, by drafter.",
             _totals(lambda m: m.accepted_by_source), "source"),
    _Counted("parlay_draft_tokens_by_position", "Verified drafted tokens, by place in the draft, from 1.",
             _totals(lambda m: _by_depth(m.drafted_by_depth, 1)), "position"),
    _Counted("parlay_accepted_tokens_by_position", "Accepted drafted tokens, by place in the draft, from 1.",
             _totals(lambda m: _by_depth(m.accepted_by_depth, 1)), "position"),
    _Counted("parlay_router_asked_steps", "Steps in which `auto` asked a drafter for a draft.",
             _routed(lambda d: d.asked), "drafter"),
    _Counted("parlay_router_verified_steps", "Steps in which `auto` verified a drafter's draft.",
             _routed(lambda d: d.verified), "drafter"),
    _Counted("parlay_router_expected_tokens", "Tokens that `auto` expected of the verified drafts.",
             _routed(lambda d: d.expected), "drafter"),
    _Counted("parlay_router_accepted_tokens", "Tokens of the verified drafts that were accepted.",
             _routed(lambda d: d.accepted), "drafter"),
    _Counted("parlay_router_seconds", "Time that a drafter took for `auto`.",
             _routed(lambda d: d.seconds), "drafter"),
    _Counted("parlay_router_choices", "Steps of `auto`, by the reason of its choice.",
             _totals(lambda m: m.router.reasons if m.router is not None else {}), "reason"),
    _Counted("parlay_drafter_faults", "Failures of drafters; their requests continued without drafts.",
             _total(lambda m: m.drafter_faults)),
    _Counted("parlay_step_seconds", "Time of samples' steps, by phase.",
             _totals(_by_phase), "phase"),
)  # fmt: skip
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], Callable[[Finished], float | None]], ...] = (
    ("e2e_request_latency_seconds", "Time from a request's arrival to its last token.", _TIMES, lambda r: r.seconds),
    ("time_to_first_token_seconds", "Time from a request's arrival to its first token.", _TIMES,
     lambda r: r.seconds_to_first if r.tokens else None),
    ("request_queue_time_seconds", "Time before a request's first step.", _TIMES, lambda r: r.queue_seconds),
    ("request_prefill_time_seconds", "Time of a request's steps up to its first token.", _TIMES,
     lambda r: r.prefill_seconds),
    ("request_decode_time_seconds", "Time of a request's steps after its first token.", _TIMES,
     lambda r: r.decode_seconds),
    ("request_inference_time_seconds", "Time of a request's steps.", _TIMES,
     lambda r: r.prefill_seconds + r.decode_seconds),
    ("inter_token_latency_seconds", "Mean time between tokens of a request.", _GAPS, lambda r: r.seconds_per_token),
    ("request_time_per_output_token_seconds", "Mean time per token of a request, after the first token.", _GAPS,
     lambda r: r.seconds_per_token),
    ("request_prompt_tokens", "Tokens of a request's prompt.", _SIZES, lambda r: len(r.output.prompt_token_ids)),
    ("request_prefill_kv_computed_tokens", "Tokens of a request's prompt that were not in the cache.", _SIZES,
     _computed),
    ("request_generation_tokens", "Tokens of a request's answers.", _SIZES, lambda r: r.tokens),
    ("request_max_num_generation_tokens", "Tokens of the longest sample of a request.", _SIZES, lambda r: r.longest),
    ("request_params_max_tokens", "Tokens that a request allows for its answer.", _SIZES,
     lambda r: r.params.max_tokens),
    ("request_params_n", "Samples that a request asks for.", (1, 2, 4, 8, 16), lambda r: r.params.n),
)  # fmt: skip
"""Name under ``vllm:``, help, bounds, and the request's value; None if it has none."""


# ------------------------------------------------------------------------------------------------- read when scraped


class _Engines(Collector):
    """The engines' own counts at the time of the scrape."""

    def __init__(self, models: Registry) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []  # no engine is read at registration

    def collect(self) -> Iterator[Metric]:
        stats = {model.name: model.service.stats() for model in self._models.loaded}
        for family, name, text, read in _READINGS:
            own = name.startswith("parlay_")
            metric = family(name, text, labels=["model"] if own else _OF_VLLM)
            for model, each in stats.items():
                metric.add_metric([model] if own else [model, _ENGINE], read(each))
            yield metric
        yield from _states(stats)
        yield _steps(stats)


_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
_READINGS: tuple[tuple[_Family, str, str, Callable[[EngineStats], float]], ...] = (
    (GaugeMetricFamily, "vllm:num_requests_waiting", "Samples that wait to start.", lambda s: s.waiting),
    (GaugeMetricFamily, "vllm:num_requests_running", "Samples that are being computed.", lambda s: s.running),
    (CounterMetricFamily, "vllm:num_preemptions",
     "Times that a sample gave up its memory to others, to be computed again later.", lambda s: s.preemptions),
    (GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Used share of the cache, from 0 to 1.",
     lambda s: s.cache_tokens_used / s.cache_tokens_total),
    (CounterMetricFamily, "vllm:prefix_cache_queries", "Tokens of prompts that were looked up in the cache.",
     lambda s: s.prefix_tokens_asked),
    (CounterMetricFamily, "vllm:prefix_cache_hits", "Tokens of prompts that were found in the cache.",
     lambda s: s.prefix_tokens_found),
    (GaugeMetricFamily, "parlay_cache_used_tokens", "Tokens whose keys and values are cached.",
     lambda s: s.cache_tokens_used),
    (GaugeMetricFamily, "parlay_cache_room_tokens", "Tokens that the cache can hold.",
     lambda s: s.cache_tokens_total),
    (GaugeMetricFamily, "parlay_cache_held_bytes",
     "Bytes of caches and of drafters' states, for running texts and for finished ones that can be reused.",
     lambda s: s.cache_bytes),
)  # fmt: skip


def _states(stats: Mapping[str, EngineStats]) -> Iterator[Metric]:
    """States that vLLM reports by label. Engines here never sleep or defer."""
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Samples that wait to start, by reason.", labels=(*_OF_VLLM, "reason")
    )
    awake = GaugeMetricFamily(
        "vllm:engine_sleep_state", "1 for the engine's state, 0 for the others.", labels=(*_OF_VLLM, "sleep_state")
    )
    for model, now in stats.items():
        for reason, count in (("capacity", now.waiting), ("deferred", 0)):
            waiting.add_metric([model, _ENGINE, reason], count)
        for state in ("awake", "weights_offloaded", "discard_all"):
            awake.add_metric([model, _ENGINE, state], state == "awake")
    yield waiting
    yield awake


def _steps(stats: Mapping[str, EngineStats]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "vllm:iteration_tokens_total", "Tokens of a step: of prompts that it computed, and of answers.", labels=_OF_VLLM
    )
    for model, now in stats.items():
        bounds = [
            (str(float(bound)), sum(count for size, count in now.steps.items() if size <= bound))
            for bound in _STEP_SIZES
        ]
        family.add_metric([model, _ENGINE], [*bounds, ("+Inf", sum(now.steps.values()))], now.step_tokens)
    return family


class _Audits(Collector):
    """Results of audits of lossy answers, for each loaded model and each cascade.

    A gate that is in several certificates counts once. The counts come from the certificates' files, so they continue
    after a restart.
    """

    def __init__(self, models: Registry, cascades: Cascades) -> None:
        self._models, self._cascades = models, cascades

    def describe(self) -> list[Metric]:
        return []  # no certificate is read at registration

    def collect(self) -> Iterator[Metric]:
        labels = ("model", "gate")
        made = CounterMetricFamily("parlay_audits", "Lossy answers that were decoded exactly, too.", labels=labels)
        bad = CounterMetricFamily("parlay_audits_disagreed", "Audited answers that did not agree.", labels=labels)
        floor = GaugeMetricFamily("parlay_audits_floor", "Certified share of good answers.", labels=labels)
        revoked = GaugeMetricFamily("parlay_audits_revoked", "1 if audits contradict the floor.", labels=labels)
        for names, found in self._by_labels().items():
            made.add_metric(names, sum(each.evidence.audited for each in found))
            bad.add_metric(names, sum(each.evidence.bad for each in found))
            floor.add_metric(names, min(each.claim.floor for each in found))
            revoked.add_metric(names, any(each.evidence.revoked for each in found))
        yield from (made, bad, floor, revoked)

    def _by_labels(self) -> dict[tuple[str, str], Sequence[Audited]]:
        found: defaultdict[tuple[str, str], list[Audited]] = defaultdict(list)
        for model in self._models.loaded:
            for each in model.gate.audited():
                found[model.name, each.gate].append(each)
        for large, each in self._cascades.audited().items():
            found[large, each.gate].append(each)
        return dict(found)
