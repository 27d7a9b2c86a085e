"""The gRPC and HTTP faces of one running daemon."""

import hashlib
import json

import grpc
import numpy as np
import pytest
from conftest import REAL_WIDTH, Daemon, eventually
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ple_daemon.ngram_hash import NgramHash
from ple_daemon.servicer import limits
from ple_daemon.source import read_layout
from ple_rpc.table.v1 import table_pb2
from ple_rpc.table.v1.table_service_pb2 import (
    CancelPrefetchRequest,
    DescribeRequest,
    DescribeResponse,
    LookupRequest,
    LookupStreamRequest,
    PrefetchRequest,
    StatsRequest,
)

TIMEOUT_S = 30.0


def ids_request(ids: object, **fields: object) -> LookupRequest:
    return LookupRequest(row_ids_le64=np.asarray(ids, "<i8").tobytes(), **fields)


def span(tokens: object, context: object = ()) -> table_pb2.TokenSpan:
    return table_pb2.TokenSpan(
        tokens_le32=np.asarray(tokens, "<i4").tobytes(), context_le32=np.asarray(context, "<i4").tobytes()
    )


def describe(daemon: Daemon) -> DescribeResponse:
    return daemon.stub.Describe(DescribeRequest(), timeout=TIMEOUT_S)


def lookup(daemon: Daemon, request: LookupRequest) -> bytes:
    return daemon.stub.Lookup(request, timeout=TIMEOUT_S).rows


def stream(daemon: Daemon, *requests: LookupRequest) -> list:
    numbered = (LookupStreamRequest(lookup_id=7 + i, lookup=r) for i, r in enumerate(requests))
    return list(daemon.stub.LookupStream(numbered, timeout=TIMEOUT_S))


def test_describe(daemon: Daemon) -> None:
    answer = describe(daemon)
    table, constants = answer.table, REAL_WIDTH.constants
    assert answer.protocol_version == 1
    assert (len(answer.fingerprint), len(answer.instance_id)) == (32, 16)
    assert answer.doorbell_path == str(daemon.run_dir / "bell.sock")
    assert answer.limits.max_slots >= 4
    assert (table.row_type, table.row_elements, table.row_bytes) == (table_pb2.ROW_TYPE_BF16, 160, 320)
    assert (table.rows, table.used_rows) == (33024, 32974)
    assert (table.scale_bits, table.scale_bytes) == (0, 0)
    assert (table.hash.ngram_size, table.hash.heads_per_ngram, table.hash.eos_token_id) == (3, 8, 500)
    assert tuple(table.hash.multipliers) == constants.multipliers
    assert tuple(table.hash.head_sizes) == constants.head_sizes
    assert tuple(table.hash.head_offsets) == constants.head_offsets
    assert 0 < answer.limits.max_rows_per_unary_lookup * 320 < 16 * 2**20
    assert answer.limits.stream_chunk_bytes == 2 * 2**20


@pytest.mark.parametrize("count", [0, 1, 16, 65, 5000])
def test_lookup_by_id(daemon: Daemon, shared_rows: np.ndarray, count: int) -> None:
    ids = np.random.default_rng(count).integers(0, len(shared_rows), count)
    assert lookup(daemon, ids_request(ids)) == shared_rows[ids].tobytes()


@pytest.mark.parametrize("context", [[], [3], [3, 500]])
def test_lookup_by_token(daemon: Daemon, shared_rows: np.ndarray, context: list[int]) -> None:
    tokens = [5, 7, 500, 9, -1, 2**31 - 1]
    ids = NgramHash(REAL_WIDTH.constants).row_ids(tokens, context)
    assert lookup(daemon, LookupRequest(span=span(tokens, context))) == shared_rows[ids].tobytes()


def test_the_largest_unary_lookup_fits_in_a_message(daemon: Daemon, shared_rows: np.ndarray) -> None:
    most = describe(daemon).limits.max_rows_per_unary_lookup
    ids = np.arange(most) % len(shared_rows)
    assert hashlib.sha256(lookup(daemon, ids_request(ids))).digest() == (
        hashlib.sha256(shared_rows[ids].tobytes()).digest()
    )


def test_stream_cuts_answers_and_keeps_order(daemon: Daemon, shared_rows: np.ndarray) -> None:
    many = np.random.default_rng(0).integers(0, len(shared_rows), 20_000)
    answers = stream(daemon, ids_request(many), ids_request([]), ids_request([3, 2]))
    assert [a.lookup_id for a in answers] == [7, 7, 7, 7, 8, 9]
    assert [a.last for a in answers] == [False, False, False, True, True, True]
    assert all(len(a.rows) <= 2 * 2**20 for a in answers)
    assert b"".join(a.rows for a in answers) == shared_rows[[*many, 3, 2]].tobytes()


ROWS = REAL_WIDTH.rows
BAD_LOOKUPS = {
    "row beyond the end": (ids_request([0, ROWS]), grpc.StatusCode.OUT_OF_RANGE, f"row {ROWS} is outside"),
    "negative row": (ids_request([-1]), grpc.StatusCode.OUT_OF_RANGE, "row -1 is outside"),
    "no query": (LookupRequest(), grpc.StatusCode.INVALID_ARGUMENT, "needs row ids or tokens"),
    "ragged ids": (LookupRequest(row_ids_le64=b"123"), grpc.StatusCode.INVALID_ARGUMENT, "3 bytes"),
    "ragged tokens": (
        LookupRequest(span=table_pb2.TokenSpan(tokens_le32=b"12345")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "5 bytes",
    ),
    "long context": (
        LookupRequest(span=span([1], [1, 2, 3])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "holds 3 ids, at most 2",
    ),
    "other fingerprint": (
        ids_request([0], expected_fingerprint=b"x" * 32),
        grpc.StatusCode.FAILED_PRECONDITION,
        "the caller expects 7878",
    ),
    "too many tokens": (
        LookupRequest(span=span(np.zeros(300_000))),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "4800000 rows in one lookup",
    ),
    "too many ids": (ids_request(np.zeros(262_145)), grpc.StatusCode.RESOURCE_EXHAUSTED, "262145 rows"),
}


@pytest.mark.parametrize("call", [lookup, stream], ids=["unary", "stream"])
@pytest.mark.parametrize(("request_", "code", "words"), BAD_LOOKUPS.values(), ids=BAD_LOOKUPS)
def test_bad_lookups(
    daemon: Daemon, call: object, request_: LookupRequest, code: grpc.StatusCode, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        call(daemon, request_)
    assert failure.value.code() is code
    assert words in failure.value.details()
    assert lookup(daemon, ids_request([1]))


def test_right_fingerprint_is_accepted(daemon: Daemon) -> None:
    assert lookup(daemon, ids_request([0], expected_fingerprint=describe(daemon).fingerprint))


def test_prefetch_and_stats(daemon: Daemon) -> None:
    before = daemon.stub.Stats(StatsRequest(), timeout=TIMEOUT_S)
    request = PrefetchRequest(request_id="a", span=span(range(50), [1, 2]))
    answer = daemon.stub.Prefetch(request, timeout=TIMEOUT_S)
    assert (answer.accepted, answer.queued_rows) == (True, 800)

    def stats() -> object:
        now = daemon.stub.Stats(StatsRequest(), timeout=TIMEOUT_S)
        return now if now.rows_prefetched == before.rows_prefetched + 800 else None

    now = eventually(stats, "prefetch counted")
    assert now.prefetches_accepted == before.prefetches_accepted + 1
    assert now.advice == "process_madvise"
    assert now.uptime_s > before.uptime_s
    cancel = CancelPrefetchRequest(request_id="a")
    assert daemon.stub.CancelPrefetch(cancel, timeout=TIMEOUT_S).cancelled is False


def test_stats_count_lookups(daemon: Daemon) -> None:
    before = daemon.stub.Stats(StatsRequest(), timeout=TIMEOUT_S)
    lookup(daemon, ids_request([1, 2, 3]))
    after = daemon.stub.Stats(StatsRequest(), timeout=TIMEOUT_S)
    assert (after.lookups - before.lookups, after.rows_served - before.rows_served) == (1, 3)
    assert after.rows_advised - before.rows_advised == 3


@pytest.mark.parametrize(
    "request_", [PrefetchRequest(session_token=b"x"), CancelPrefetchRequest(session_token=b"x")]
)
def test_unknown_sessions_are_refused(daemon: Daemon, request_: object) -> None:
    call = daemon.stub.Prefetch if isinstance(request_, PrefetchRequest) else daemon.stub.CancelPrefetch
    with pytest.raises(grpc.RpcError) as failure:
        call(request_, timeout=TIMEOUT_S)
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "unknown session" in failure.value.details()


def test_prefetch_has_a_limit(daemon: Daemon) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        daemon.stub.Prefetch(PrefetchRequest(span=span(np.zeros(2**18 + 1))), timeout=TIMEOUT_S)
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("service", ["", "ple_rpc.table.v1.TableService"])
def test_grpc_health(daemon: Daemon, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(daemon.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_names_the_service(daemon: Daemon) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(daemon.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S)))
    names = {s["name"] for s in MessageToDict(answer)["listServicesResponse"]["service"]}
    assert {"ple_rpc.table.v1.TableService", "grpc.health.v1.Health"} <= names


def test_http_health(daemon: Daemon) -> None:
    status, body = daemon.health()
    described = describe(daemon)
    assert status == 200
    assert (body["state"], body["reasons"]) == ("ready", [])
    assert body["fingerprint"] == described.fingerprint.hex()
    assert body["instance_id"] == described.instance_id.hex()
    assert (body["rows"], body["row_type"], body["advice"]) == (ROWS, "bf16", "process_madvise")
    status, text = daemon.get("/livez")
    assert (status, json.loads(text)["state"]) == (200, "ready")
    assert daemon.get("/elsewhere")[0] == 404


def test_metrics(daemon: Daemon) -> None:
    lookup(daemon, ids_request([1]))
    stream(daemon, ids_request(np.zeros(100)))
    with pytest.raises(grpc.RpcError):
        lookup(daemon, ids_request([-1]))
    assert daemon.metric('ple_daemon_lookups_total{kind="decode",outcome="ok"}') >= 1
    assert daemon.metric('ple_daemon_lookups_total{kind="bulk",outcome="ok"}') >= 1
    assert daemon.metric('ple_daemon_lookups_total{kind="decode",outcome="out_of_range"}') >= 1
    assert daemon.metric('ple_daemon_lookup_seconds_count{kind="decode"}') >= 1
    assert daemon.metric("ple_daemon_rows_total") >= 101
    assert daemon.metric("ple_daemon_prefetch_queue") == 0
    assert 10e6 < daemon.metric("ple_daemon_anonymous_bytes") < 300e6


def test_limits_leave_room_for_narrow_and_wide_rows(shared_checkpoint: object) -> None:
    layout = read_layout(shared_checkpoint)
    assert limits(layout, 9).max_queued_prefetches == 9
    assert limits(layout, 9).max_rows_per_unary_lookup == (16 * 2**20 - 4096) // 320
