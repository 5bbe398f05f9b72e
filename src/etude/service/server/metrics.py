"""What a service tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from etude.service.server.service import Service


class _Collector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        """Return what there is to tell, as it is now."""
        service, counts = self._service, self._service.counts
        yield CounterMetricFamily(
            "etude_trained_tokens", "Tokens that went through a forward pass.", counts.trained_tokens
        )
        yield CounterMetricFamily("etude_drawn_tokens", "Tokens drawn.", counts.drawn_tokens)
        yield CounterMetricFamily("etude_steps", "Steps of optimizers.", counts.steps)
        yield CounterMetricFamily("etude_failures", "Requests that failed.", counts.failures)
        busy = CounterMetricFamily("etude_busy_seconds", "Time spent working.", labels=["what"])
        for what, spent_s in counts.busy_s.items():
            busy.add_metric([what], spent_s)
        yield busy
        waiting = GaugeMetricFamily("etude_waiting_requests", "Requests not done yet.", labels=["kind"])
        query = "SELECT kind, COUNT(*) AS n FROM requests WHERE state='pending' GROUP BY kind"
        for row in service.store.all(query):
            waiting.add_metric([row["kind"]], row["n"])
        yield waiting
        yield GaugeMetricFamily(
            "etude_models", "Models known.", service.store.one("SELECT COUNT(*) AS n FROM models")["n"]
        )
        yield GaugeMetricFamily("etude_resident_models", "Models in memory.", len(service.training.resident))


def render_metrics(service: Service) -> bytes:
    """Return the figures of a service as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(_Collector(service))
    return generate_latest(registry)
