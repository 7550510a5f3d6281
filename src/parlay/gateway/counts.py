"""Counters of a gateway for Prometheus; each gateway has its own registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from parlay.gateway.replicas import Replica


class Counts:
    """Counters of answers; metrics of replicas are read from the replicas when rendered."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._registry = CollectorRegistry()
        self._answers: dict[int, int] = {}
        """Answers by the first digit of their status. One is counted for each request, which `Counter` would delay."""
        self.retries = Counter(
            "parlay_gateway_retries",
            "Requests sent to another replica: anew (request), or the rest of a stream (stream).",
            ("what",),
            registry=self._registry,
        )
        self.resumed = Counter(
            "parlay_gateway_streams_resumed", "Streams that another replica went on with.", registry=self._registry
        )
        self.broken = Counter(
            "parlay_gateway_streams_broken", "Streams that ended with an error event.", registry=self._registry
        )
        self._registry.register(_Answers(self._answers))
        self._registry.register(_Replicas(replicas))
        ProcessCollector(registry=self._registry)

    def began(self, status: int) -> None:
        """Count an answer that has begun."""
        kind = status // 100
        self._answers[kind] = self._answers.get(kind, 0) + 1

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class _Answers(Collector):
    """Reads the numbers of answers at each scrape."""

    def __init__(self, answers: Mapping[int, int]) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("parlay_gateway_answers", "Answers that began, by status.", labels=("status",))
        for kind, count in self._answers.items():
            family.add_metric([f"{kind}xx"], count)
        yield family


class _Replicas(Collector):
    """Reads the replicas' metrics at each scrape."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily("parlay_gateway_replica_ready", "1 where it takes requests.", labels=("replica",))
        running = GaugeMetricFamily(
            "parlay_gateway_requests_running", "Requests under way on a replica.", labels=("replica",)
        )
        losses = CounterMetricFamily(
            "parlay_gateway_replica_losses", "How often a replica was lost.", labels=("replica",)
        )
        for replica in self._replicas:
            name = [str(replica.number)]
            ready.add_metric(name, float(replica.state == "ready"))
            running.add_metric(name, replica.in_flight)
            losses.add_metric(name, replica.losses)
        yield from (ready, running, losses)
