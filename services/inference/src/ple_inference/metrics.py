"""Prometheus metrics of one process, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ple_rpc.stats import ClientStats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LOOKUP_SECONDS = (0.0001, 0.00025, 0.0005, *_SECONDS)


class Metrics:
    """What is counted; names begin with ple_inference_."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "ple_inference_requests_total", "Requests by how they ended", ["outcome"], registry=self.registry
        )
        self.prompt_tokens = Counter(
            "ple_inference_prompt_tokens_total", "Tokens of prompts", registry=self.registry
        )
        self.generation_tokens = Counter(
            "ple_inference_generation_tokens_total", "Tokens of answers", registry=self.registry
        )
        self.ttft_s = Histogram(
            "ple_inference_time_to_first_token_seconds",
            "From a request's admission to its first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.inter_token_s = Histogram(
            "ple_inference_inter_token_seconds",
            "Between two tokens of a sequence",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.lookup_s = Histogram(
            "ple_inference_table_lookup_seconds",
            "Lookups of n-gram rows, waits for the daemon included",
            buckets=_LOOKUP_SECONDS,
            registry=self.registry,
        )

    def watch_sequences(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        for name, count in (("running", running), ("waiting", waiting)):
            gauge = Gauge(
                f"ple_inference_sequences_{name}", f"Sequences that are {name}", registry=self.registry
            )
            gauge.set_function(count)

    def watch_table(self, stats: Callable[[], ClientStats]) -> None:
        self.registry.register(_TableCollector(stats))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _TableCollector(Collector):
    """The table client's own counters, read at each scrape."""

    def __init__(self, stats: Callable[[], ClientStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        counters = {
            "lookups": ("Lookups that returned rows", stats.lookups),
            "lookups_repeated": ("Lookups sent again after the daemon was lost", stats.lookups_repeated),
            "lookups_failed": ("Lookups that ended in an error", stats.lookups_failed),
            "reconnects": ("Connections after the first one", stats.reconnects),
            "prefetches_sent": ("Prompts hinted to the daemon", stats.prefetches_sent),
            "prefetches_dropped": ("Hints that got lost or were refused", stats.prefetches_dropped),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"ple_inference_table_{name}", text, value=value)
        yield GaugeMetricFamily(
            "ple_inference_table_lookups_in_flight", "Lookups that wait now", value=stats.lookups_in_flight
        )
