"""The typed client against real sockets: every error, every kind of lost daemon."""

import threading
import time

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_for

from ple_rpc import errors
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.connection import open_connection
from ple_rpc.lookup_stream import LookupStream
from ple_rpc.table.v1 import table_service_pb2

FAST = ClientOptions(lookup_deadline_s=20.0, hang_check_s=0.3, call_deadline_s=0.5, backoff_max_s=0.05)


def expected_rows(ids) -> bytes:
    return b"".join((i * 7919 + 1).to_bytes(8, "little", signed=True) for i in ids)


class Lookup(threading.Thread):
    """A lookup in a thread of its own, with its result or error."""

    def __init__(self, client: TableClient, ids: list[int], cancelled=None) -> None:
        super().__init__(daemon=True)
        self.client, self.ids, self.cancelled = client, ids, cancelled
        self.rows: bytes | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.rows = self.client.lookup(self.ids, cancelled=self.cancelled)
        except Exception as error:
            self.error = error

    def result(self) -> bytes:
        self.join(30)
        assert not self.is_alive(), "the lookup hangs"
        if self.error is not None:
            raise self.error
        assert self.rows is not None
        return self.rows


def test_rows_by_id(daemon):
    with TableClient(daemon.address, FAST) as client:
        assert client.lookup([5, 0, 9999, 5]) == expected_rows([5, 0, 9999, 5])
        assert client.lookup([]) == b""
        assert client.stats.lookups == 2
        assert client.stats.lookups_in_flight == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=60),
    context=st.lists(st.integers(0, 2**31 - 1), max_size=2),
    rows_per_request=st.sampled_from([2, 3, 7, 16, 1000]),
)
def test_a_split_request_sends_every_token_with_its_own_context(daemon, tokens, context, rows_per_request):
    """However a long lookup is cut into requests, the rows equal those of one uncut request."""
    with TableClient(daemon.address, FAST) as whole, TableClient(daemon.address, FAST) as split:
        daemon.table.max_rows_per_stream_lookup = 1_000
        expected = whole.lookup_tokens(tokens, context)
        daemon.table.max_rows_per_stream_lookup = rows_per_request
        assert split.lookup_tokens(tokens, context) == expected
    assert len(expected) == len(tokens) * 16


def test_a_large_lookup_comes_in_chunks_and_in_order(daemon):
    ids = list(range(2_500))
    with TableClient(daemon.address, FAST) as client:
        assert client.lookup(ids) == expected_rows(ids)
    assert daemon.table.lookups_seen == 3


@pytest.mark.parametrize(
    ("code", "exception"),
    [
        (grpc.StatusCode.OUT_OF_RANGE, errors.BadRow),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.BadRequest),
        (grpc.StatusCode.DATA_LOSS, errors.RowsLost),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.TableChanged),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.QuotaExceeded),
        (grpc.StatusCode.PERMISSION_DENIED, errors.NotPermitted),
        (grpc.StatusCode.UNIMPLEMENTED, errors.NotOffered),
    ],
)
def test_a_final_error_is_raised_once_and_never_repeated(daemon, code, exception):
    daemon.table.refusals = [code]
    with TableClient(daemon.address, FAST) as client:
        with pytest.raises(exception, match=f"scripted {code.name}"):
            client.lookup([1])
        assert daemon.table.lookups_seen == 1
        assert client.stats.lookups_repeated == 0
        assert client.stats.lookups_failed == 1
        assert client.lookup([1]) == expected_rows([1])


def test_codes_and_exceptions_are_one_to_one():
    assert len(set(errors.EXCEPTION_OF_CODE.values())) == len(errors.EXCEPTION_OF_CODE)
    for code, exception in errors.EXCEPTION_OF_CODE.items():
        assert errors.code_of(exception("x")) is code


def test_unavailable_is_repeated_until_it_works(daemon):
    daemon.table.refusals = [grpc.StatusCode.UNAVAILABLE] * 3
    with TableClient(daemon.address, FAST) as client:
        assert client.lookup([3]) == expected_rows([3])
        assert client.stats.lookups_repeated == 3


def test_a_lookup_in_flight_survives_a_killed_daemon(daemon):
    daemon.table.hold = threading.Event()
    with TableClient(daemon.address, FAST) as client:
        client.wait_ready(5)
        lookup = Lookup(client, [1, 2, 3])
        wait_for(lambda: daemon.table.lookups_seen == 1, "lookup at the daemon")
        daemon.stop()
        daemon.table.hold.set()
        daemon.table.hold = None
        daemon.start()
        assert lookup.result() == expected_rows([1, 2, 3])
        assert client.stats.lookups_repeated >= 1
        assert client.stats.waiting_since is None


def test_an_idle_connection_that_broke_is_replaced(daemon):
    with TableClient(daemon.address, FAST) as client:
        client.lookup([1])
        for _ in range(3):
            daemon.stop()
            daemon.start()
            assert client.lookup([7]) == expected_rows([7])
        assert client.stats.lookups_failed == 0


def test_a_peer_that_hangs_without_closing_is_left(daemon, mute_socket):
    """A stopped process accepts connections and answers nothing: the client must notice by itself."""
    options = ClientOptions(lookup_deadline_s=1.5, hang_check_s=0.2, call_deadline_s=0.2)
    with TableClient(mute_socket, options) as client:
        started = time.monotonic()
        with pytest.raises(errors.TableUnavailable):
            client.wait_ready(0.5)
        with pytest.raises(errors.TableUnavailable):
            client.lookup([1])
        assert time.monotonic() - started < 15


def test_a_slow_daemon_is_waited_for_and_not_taken_for_hung(daemon):
    daemon.table.hold = threading.Event()
    with TableClient(daemon.address, FAST) as client:
        client.wait_ready(5)
        lookup = Lookup(client, [4])
        wait_for(lambda: daemon.table.lookups_seen >= 3, "third try")
        daemon.table.hold.set()
        assert lookup.result() == expected_rows([4])
        assert client.stats.reconnects == 0


def test_another_table_after_a_restart_is_refused(daemon):
    with TableClient(daemon.address, FAST) as client:
        client.lookup([1])
        daemon.stop()
        daemon.table.fingerprint = b"\x01" * 32
        daemon.start()
        with pytest.raises(errors.TableChanged):
            client.lookup([1])


def test_a_cancelled_lookup_ends_between_two_tries(daemon):
    stop = threading.Event()
    with TableClient(daemon.address, FAST) as client:
        client.wait_ready(5)
        daemon.stop()
        lookup = Lookup(client, [1], cancelled=stop.is_set)
        wait_for(lambda: client.stats.waiting_since is not None, "wait")
        stop.set()
        with pytest.raises(errors.LookupCancelled):
            lookup.result()


def test_close_ends_a_lookup_that_waits(daemon):
    client = TableClient(daemon.address, FAST)
    client.wait_ready(5)
    daemon.stop()
    lookup = Lookup(client, [1])
    wait_for(lambda: client.stats.waiting_since is not None, "wait")
    client.close()
    with pytest.raises(errors.TableUnavailable):
        lookup.result()


def test_streams_in_use_when_the_connection_closes_are_closed_too(daemon):
    """One that ends its lookup a moment later must not be kept by a connection that nobody closes again."""
    connection, _ = open_connection(daemon.address, None, 5)
    request = table_service_pb2.LookupRequest(row_ids_le64=bytes(8))
    lookup = LookupStream.lookup

    def lookup_and_close(stream, *arguments):
        rows = lookup(stream, *arguments)
        connection.close()
        return rows

    def client_threads():  # the daemon is played in this process, and its pool grows when it likes
        return sum(not thread.name.startswith("played-daemon") for thread in threading.enumerate())

    before = client_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LookupStream, "lookup", lookup_and_close)
        assert connection.lookup([request], 5)
    wait_for(lambda: client_threads() <= before, "end of the stream's threads")


def test_an_answer_at_the_deadline_leaves_no_stream_that_fails_at_once(daemon):
    """Answers come as the deadline passes: either may win, and no later lookup hears of it."""
    connection, _ = open_connection(daemon.address, None, 5)
    request = table_service_pb2.LookupRequest(row_ids_le64=bytes(8))
    late = 0
    for number in range(300):
        connection.lookup([request], 20)
        try:
            connection.lookup([request], 0.0003 * (1 + number % 8))
        except errors.TableUnavailable as error:
            assert "no rows within 0.00" in str(error)  # noqa: PT017 - there may be none
            late += 1
    connection.close()
    assert late


def test_few_idle_streams_are_kept(daemon):
    with TableClient(daemon.address, FAST) as client:
        client.wait_ready(5)
        daemon.table.hold = threading.Event()
        lookups = [Lookup(client, [i]) for i in range(6)]
        wait_for(lambda: daemon.table.lookups_seen >= 6, "lookups")
        daemon.table.hold.set()
        for lookup in lookups:
            lookup.result()
        is_guard = lambda thread: thread.name == "ple-lookup-deadline"  # noqa: E731
        wait_for(lambda: sum(map(is_guard, threading.enumerate())) == 2, "all but two closed")


def test_close_ends_a_wait_for_the_daemon(tmp_path):
    client = TableClient(f"unix:{tmp_path}/none.sock", FAST)
    heard: list[str] = []
    started = time.monotonic()

    def close_after_three(reason: str) -> None:
        heard.append(reason)
        if len(heard) == 3:
            client.close()

    with pytest.raises(errors.TableUnavailable, match="closed"):
        client.wait_ready(30, on_wait=close_after_three)
    assert len(heard) == 3
    assert time.monotonic() - started < 15


def test_wait_ready_says_what_it_waits_for_and_gives_up(tmp_path):
    heard: list[str] = []
    with (
        TableClient(f"unix:{tmp_path}/none.sock", FAST) as client,
        pytest.raises(errors.TableUnavailable, match="no answer from unix:"),
    ):
        client.wait_ready(0.4, on_wait=heard.append)
    assert heard


def test_another_protocol_version_is_refused(daemon, monkeypatch):
    monkeypatch.setattr("ple_rpc.connection.PROTOCOL_VERSION", 2)
    with pytest.raises(errors.BadRequest, match="same release"):
        open_connection(daemon.address, None, 5)


def test_prefetch_reaches_the_daemon_and_never_blocks(daemon):
    with TableClient(daemon.address, FAST) as client:
        client.wait_ready(5)
        client.prefetch("a", [1, 2, 3], [9])
        wait_for(lambda: client.stats.prefetches_sent == 1, "hint")
        client.cancel_prefetch("a")
        wait_for(lambda: len(daemon.table.hints) == 2, "cancellation")
        daemon.stop()
        for i in range(200):
            client.prefetch(f"r{i}", range(1000))
        wait_for(lambda: client.stats.prefetches_dropped >= 150, "dropped hints")


def test_a_hint_that_was_not_sent_is_withdrawn(daemon):
    with TableClient(daemon.address, FAST) as client:  # not connected: hints have nowhere to go
        client.prefetch("a", [1])
        client.cancel_prefetch("a")
        client.wait_ready(5)
        client.prefetch("b", [1])
        with daemon.table.arrived:
            daemon.table.arrived.wait_for(lambda: daemon.table.hints, 10)
        assert [hint.request_id for hint in daemon.table.hints] == ["b"]


def test_many_threads_share_a_client_across_restarts(daemon):
    with TableClient(daemon.address, FAST) as client:
        client.wait_ready(5)
        finished = threading.Event()
        wrong: list[int] = []

        def work(seed: int) -> None:
            i = seed
            while not finished.is_set():
                i = (i * 31 + 7) % 10_000
                if client.lookup([i, 0]) != expected_rows([i, 0]):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            before = client.stats.lookups
            wait_for(lambda before=before: client.stats.lookups > before + 20, "lookups")
            daemon.stop()
            daemon.start()
        finished.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert wrong == []
        assert client.stats.lookups_failed == 0


@pytest.mark.parametrize("values", [{"hang_check_s": 0}, {"hang_check_s": 61}, {"backoff_min_s": 2}])
def test_options_that_cannot_work_are_refused(values):
    with pytest.raises(ValueError, match="must"):
        ClientOptions(**values)
