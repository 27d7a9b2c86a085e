"""Prometheus metrics. Every label has a small fixed set of values."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class Metrics:
    """All of the gateway's metrics in a registry of their own, so that two gateways fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = self._counter("requests", "Finished requests.", "route", "outcome")
        self.in_flight = self._gauge("requests_in_flight", "Requests that the engine may be working on.")
        self.queued = self._gauge("requests_queued", "Requests that wait for a place.", "lane")
        self.queue_wait = self._histogram("queue_wait_seconds", "Time spent waiting for a place.", "lane")
        self.reserved_blocks = self._gauge("reserved_blocks", "K/V blocks set aside for running requests.")
        self.budget_blocks = self._gauge("budget_blocks", "K/V blocks that may be set aside; 0: not known.")
        self.rejections = self._counter("rejections", "Requests refused before the engine.", "reason")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From acceptance to the first data."
        )
        self.between_tokens = Histogram(
            "ple_gateway_inter_token_seconds",
            "Between data events of a stream.",
            registry=self.registry,
            buckets=_TOKEN_SECONDS,
        )
        self.tokens = self._counter("tokens", "Tokens by the engine's own count.", "kind")
        self.engine_up = self._gauge("engine_up", "Whether the engine's health answers 200.")
        self.engine_state = self._gauge("engine_state", "1 for the state that the engine is in.", "state")
        self.engine_errors = self._counter("engine_errors", "Requests that the engine failed.", "stage")
        self.upstream_lost = self._counter("upstream_lost", "Accepted requests whose engine went away.")
        self.disconnects = self._counter("client_disconnects", "Clients that left early.", "stage")
        self.comments = self._counter("keepalive_comments", "Comment lines sent to waiting clients.")
        self.image_seconds = self._histogram("image_seconds", "Preparing one picture, queue included.")
        self.images = self._counter("images", "Pictures by what became of them.", "outcome")
        self.schemas_refused = self._counter("schemas_refused", "Schemas that were refused.")
        self.answers_rejected = self._counter("answers_rejected", "Finished answers not passed on.", "reason")
        self.answer_repairs = self._counter("answer_repairs", "Oddities of answers by kind.", "kind")
        self.semantic_retries = self._counter("semantic_retries", "Answers asked for a second time.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ple_gateway_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"ple_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"ple_gateway_{name}", text, labels, registry=self.registry, buckets=_SECONDS)
