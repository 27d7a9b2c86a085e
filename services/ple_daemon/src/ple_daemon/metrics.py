"""Prometheus metrics: histograms where the work happens, everything else read when somebody asks."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ple_daemon.drive_tail import DriveTail
from ple_daemon.memory import anonymous_bytes, major_faults, page_table_bytes
from ple_daemon.prefetch import Prefetcher
from ple_daemon.residency import ResidentSample
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
_PREFETCH_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


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


class BackgroundMetrics:
    """What the daemon does beside lookups: prompts read ahead and probe reads of the drive."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.prefetch_seconds = Histogram(
            "ple_daemon_prefetch_seconds", "From a hint's arrival to its last page.",
            buckets=_PREFETCH_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.drive_seconds = Histogram(
            "ple_daemon_drive_read_seconds", "Probe reads of 4 KiB past the page cache.",
            buckets=_LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip


class TableCollector(Collector):
    """Counters of a table, its prefetcher and the process."""

    def __init__(self, table: Table, prefetcher: Prefetcher) -> None:
        self._table = table
        self._prefetcher = prefetcher

    def collect(self) -> Iterator[Metric]:
        table, hints, marks = self._table.counters, self._prefetcher.counters, self._table.marks
        for name, text, value in (
            ("rows", "Rows copied out.", table.rows.value),
            ("rows_advised", "Row ranges advised ahead of a copy.", table.rows_advised.value),
            ("read_errors", "Lookups that ended in a read error.", table.read_errors.value),
            ("prefetches_accepted", "Prefetch hints queued.", hints.accepted.value),
            ("prefetches_dropped", "Prefetch hints dropped under pressure.", hints.dropped.value),
            ("prefetches_cancelled", "Prefetch hints cancelled.", hints.cancelled.value),
            ("prefetches_parked", "Prefetch hints given up, nobody used them.", hints.parked.value),
            ("prefetch_failures", "Prefetches that ended in an error.", hints.failures.value),
            ("rows_prefetched", "Rows of prompts read ahead.", hints.rows.value),
            ("pages_prefetched", "Pages read ahead and mapped.", hints.pages.value),
            (
                "prefetched_rows_checked",
                "Prefetched rows looked at when used, a sample.",
                marks.checked.value,
            ),
            ("prefetched_rows_cold", "Of those, rows that were cold again.", marks.cold.value),
            ("major_faults", "Page reads that the process waited for.", major_faults()),
        ):
            yield CounterMetricFamily(f"ple_daemon_{name}", text, value=value)
        for name, text, gauge in (
            ("prefetch_queue", "Requests that wait for prefetch.", self._prefetcher.queued),
            ("prefetch_active", "Requests that are being read ahead.", self._prefetcher.active),
            ("prefetch_window_rows", "Rows read ahead at a time.", self._prefetcher.pace.rows),
            ("anonymous_bytes", "Resident anonymous memory.", anonymous_bytes()),
            ("page_table_bytes", "Page tables of the process.", page_table_bytes()),
        ):
            yield GaugeMetricFamily(f"ple_daemon_{name}", text, value=gauge)
        yield InfoMetricFamily(
            "ple_daemon", "The table and how it is read.",
            value={
                "advice": self._table.advisor.name,
                "row_type": self._table.layout.row_type.value,
                "fingerprint": self._table.fingerprint.hex(),
            },
        )  # fmt: skip


class DriveCollector(Collector):
    """What is known of the drive and of the page cache. A figure that cannot be had is NaN."""

    def __init__(self, tail: DriveTail, sample: ResidentSample) -> None:
        self._tail = tail
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "ple_daemon_drive_stalls", "Probe reads above 100 ms.", value=self._tail.stalls.value
        )
        yield GaugeMetricFamily(
            "ple_daemon_drive_read_max_seconds", "Slowest probe read of the last 5 minutes.",
            value=self._tail.worst_s,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "ple_daemon_resident_share", "Share of the table in the page cache, from 4,096 sampled pages.",
            value=self._sample.share,
        )  # fmt: skip
        yield InfoMetricFamily(
            "ple_daemon_drive", 'Why a figure of the drive is unknown, or "known".',
            value={
                "probe": self._tail.refusal or "known",
                "resident_share": "known" if self._sample.is_known else "files belong to another user",
            },
        )  # fmt: skip
