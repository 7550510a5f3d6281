"""What audits of lossy answers have found, for Prometheus, read from the certificates when it is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from parlay.certificates.certificate_file import Audited
from parlay.serve.cascades import Cascades
from parlay.serve.registry import Registry

_LABELS = ("model", "gate")


class Audits(Collector):
    """Of each model that is loaded, and of each cascade. A gate in several certificates is told of once.

    Counts are those of the certificates' files, so they go on after a restart.
    """

    def __init__(self, models: Registry, cascades: Cascades) -> None:
        self._models, self._cascades = models, cascades

    def describe(self) -> list[Metric]:
        return []  # no certificate is read when this is registered

    def collect(self) -> Iterator[Metric]:
        made = CounterMetricFamily("parlay_audits", "Answers that were compared with exact decoding.", labels=_LABELS)
        bad = CounterMetricFamily("parlay_audits_disagreed", "Those that were not good.", labels=_LABELS)
        floor = GaugeMetricFamily("parlay_audits_floor", "Certified least share of good answers.", labels=_LABELS)
        revoked = GaugeMetricFamily("parlay_audits_revoked", "1 if audits contradict that.", labels=_LABELS)
        for labels, found in self._by_labels().items():
            made.add_metric(labels, sum(each.evidence.audited for each in found))
            bad.add_metric(labels, sum(each.evidence.bad for each in found))
            floor.add_metric(labels, min(each.claim.floor for each in found))
            revoked.add_metric(labels, any(each.evidence.revoked for each in found))
        yield from (made, bad, floor, revoked)

    def _by_labels(self) -> dict[tuple[str, str], Sequence[Audited]]:
        found: defaultdict[tuple[str, str], list[Audited]] = defaultdict(list)
        for model in self._models.loaded:
            for each in model.gate.audited():
                found[model.name, each.gate].append(each)
        for large, each in self._cascades.audited().items():
            found[large, each.gate].append(each)
        return dict(found)
