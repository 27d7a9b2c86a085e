"""Prometheus metrics: histograms where the work happens, everything else read when somebody asks."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ple_daemon.memory import anonymous_bytes, major_faults
from ple_daemon.prefetch import Prefetcher
from ple_daemon.table import Table

_LATENCY_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
    5.0,
    30.0,
)


class LookupMetrics:
    """What the servicer records of each lookup. `kind` is decode or bulk, `outcome` ok or a status name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lookups = Counter(
            "ple_daemon_lookups", "Lookups by kind and outcome.", ["kind", "outcome"], registry=registry
        )
        self.seconds = Histogram(
            "ple_daemon_lookup_seconds", "Time in the table, transport excluded.", ["kind"],
            buckets=_LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip


class TableCollector(Collector):
    """Counters of a table, its prefetcher and the process."""

    def __init__(self, table: Table, prefetcher: Prefetcher) -> None:
        self._table = table
        self._prefetcher = prefetcher

    def collect(self) -> Iterator[Metric]:
        table, hints = self._table.counters, self._prefetcher.counters
        for name, text, value in (
            ("rows", "Rows copied out.", table.rows.value),
            ("rows_advised", "Row ranges advised ahead of a copy.", table.rows_advised.value),
            ("read_errors", "Lookups that ended in a read error.", table.read_errors.value),
            ("prefetches_accepted", "Prefetch hints queued.", hints.accepted.value),
            ("prefetches_dropped", "Prefetch hints dropped under pressure.", hints.dropped.value),
            ("prefetches_cancelled", "Prefetch hints cancelled.", hints.cancelled.value),
            ("prefetch_failures", "Prefetches that ended in an error.", hints.failures.value),
            ("rows_prefetched", "Rows of prompts read ahead.", hints.rows.value),
            ("pages_prefetched", "Pages read ahead and mapped.", hints.pages.value),
            ("major_faults", "Page reads that the process waited for.", major_faults()),
        ):
            yield CounterMetricFamily(f"ple_daemon_{name}", text, value=value)
        yield GaugeMetricFamily(
            "ple_daemon_prefetch_queue", "Requests that wait for prefetch.", value=self._prefetcher.queued
        )
        yield GaugeMetricFamily(
            "ple_daemon_anonymous_bytes", "Resident anonymous memory.", value=anonymous_bytes()
        )
        yield InfoMetricFamily(
            "ple_daemon", "The table and how it is read.",
            value={
                "advice": self._table.advisor.name,
                "row_type": self._table.layout.row_type.value,
                "fingerprint": self._table.fingerprint.hex(),
            },
        )  # fmt: skip
