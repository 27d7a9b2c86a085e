"""Prometheus metrics of sessions and of the shared-memory plane, read from what the native threads count."""

from collections.abc import Iterator

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ple_daemon.sessions import Sessions
from ple_daemon.shm_board import LATENCY_BUCKETS_NS, Count
from ple_daemon.shm_plane import ShmPlane

_OUTCOMES = {code.value[0]: code.name.lower() for code in grpc.StatusCode}
_KINDS = ("decode", "bulk")
_BOUNDS = [*(str(bound / 1e9) for bound in LATENCY_BUCKETS_NS), "+Inf"]


class ShmCollector(Collector):
    """`kind` is decode or bulk; a ring that is refused at once counts as decode, whatever it asks for."""

    def __init__(self, plane: ShmPlane, sessions: Sessions) -> None:
        self._plane, self._sessions = plane, sessions

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("ple_daemon_sessions", "Attached clients.", value=len(self._sessions))
        yield GaugeMetricFamily(
            "ple_daemon_shm_regions", "Shared-memory regions in use.", value=self._plane.regions
        )
        yield GaugeMetricFamily(
            "ple_daemon_shm_region_bytes", "Clients' memory that is mapped.", value=self._plane.region_bytes
        )
        lookups = CounterMetricFamily(
            "ple_daemon_shm_lookups", "Lookups through shared memory.", labels=["kind", "outcome"]
        )
        seconds = HistogramMetricFamily(
            "ple_daemon_shm_lookup_seconds", "From the ring heard to the answer rung.", labels=["kind"]
        )
        for kind, counts in zip(_KINDS, self._plane.counts.tolist(), strict=True):
            for code, outcome in _OUTCOMES.items():
                if counts[Count.OUTCOMES + code] or code == 0:
                    lookups.add_metric([kind, outcome], counts[Count.OUTCOMES + code])
            seconds.add_metric([kind], _cumulative(counts[Count.BUCKETS :]), counts[Count.LATENCY_NS] / 1e9)
        yield lookups
        yield seconds


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip(_BOUNDS, counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
