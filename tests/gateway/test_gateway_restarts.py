"""The engine dies, loads, hangs, stalls and comes back; the daemon too: nothing is lost that need not be."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from fake_engine import CAPACITY, DONE, Call, FakeEngine, answer, chunk, complete, message, play, wait_for


@pytest.fixture
def mortal() -> Iterator[FakeEngine]:
    """An engine of the test's own, which may die."""
    engine = FakeEngine()
    yield engine
    engine.close()
    assert not engine.faults


def read_all(sock: socket.socket) -> bytes:
    received = b""
    while DONE not in received and (data := sock.recv(65536)):
        received += data
    return received


def state(gateway):
    return gateway.request("GET", "/readyz").json["dependencies"]["engine"]


def wait_state(gateway, wanted):
    wait_for(lambda: state(gateway) == wanted, f"the engine is {wanted}")


def test_streams_are_held_while_the_engine_restarts(start_gateway, mortal):
    gateway = start_gateway(engine=mortal, hold_timeout_s=10, commit_delay_s=0.1, keepalive_interval_s=0.1)
    gateway.wait_ready()
    mortal.close()
    with gateway.open_chat(stream=True) as sock:  # perhaps before anybody noticed
        received = b""
        while received.count(b": keep-alive") < 3:
            received += sock.recv(65536)
        assert received.startswith(b"HTTP/1.1 200 OK")
        wait_state(gateway, "down")
        assert gateway.metric("requests_queued") == 1
        mortal.open()
        rest = read_all(sock)
        assert b'"hello"' in rest
        assert b"error" not in rest
    assert len(mortal.calls) == 1


def test_answers_in_one_piece_are_refused_meanwhile(start_gateway, mortal):
    gateway = start_gateway(engine=mortal)
    gateway.wait_ready()
    mortal.close()
    for _ in range(2):  # by the refused connection, then by the state
        refused = gateway.chat()
        assert (refused.status, refused.error["code"]) == (503, "backend_unavailable")
        assert 15 <= int(refused.headers["retry-after"]) <= 120
        assert refused.headers["x-should-retry"] == "true"


def test_streams_are_not_held_for_ever(start_gateway, mortal):
    gateway = start_gateway(engine=mortal, hold_timeout_s=0.3, commit_delay_s=0.1)
    gateway.wait_ready()
    mortal.close()
    answered = gateway.chat(stream=True)
    assert answered.events[-2]["error"]["code"] == "backend_unavailable"
    assert gateway.metric("rejections_total", reason="unavailable") == 1


def test_g29_what_was_in_flight_gets_an_error_frame_and_is_counted(start_gateway, mortal):
    gateway = start_gateway(engine=mortal)
    gateway.wait_ready()
    mortal.script = play(chunk({"content": "some"}), lambda call: call.wait_closed())
    with gateway.open_chat(stream=True) as sock:
        wait_for(lambda: mortal.calls and mortal.calls[0].events, "the stream has begun")
        mortal.close()
        received = read_all(sock)
    assert b'"error"' in received
    assert b'"finish_reason":"' not in received
    assert gateway.metric("upstream_lost_total") == 1


def test_loading_engine_is_waited_for_then_proven_by_a_first_token(start_gateway, engine):
    engine.health_status = 503
    engine.ready_body = {"state": "starting", "reasons": ["loading"]}
    calls = []
    tokens = threading.Event()

    def script(call: Call) -> None:
        calls.append(call.request)
        if call.request.get("max_tokens") == 1:
            if not tokens.is_set():
                call.answer(500, {"error": {"message": "not yet", "code": 500}})
                return
            call.answer(200, message("H", "length"))
            return
        complete("hello")(call)

    engine.script = script
    gateway = start_gateway(warm_probe=True, hold_timeout_s=10, commit_delay_s=0.1)
    wait_state(gateway, "loading")
    with gateway.open_chat(stream=True) as sock:
        engine.health_status = 200
        engine.ready_body = {"state": "ready", "reasons": []}
        wait_for(lambda: len(calls) > 1, "a first token was asked for, in vain, and again")
        assert state(gateway) == "warming"
        assert "status 500" in gateway.request("GET", "/readyz").json["reasons"][0]
        assert gateway.request("GET", "/readyz").status == 503
        tokens.set()
        assert b'"hello"' in read_all(sock)
    assert state(gateway) == "ready"
    assert calls[0] == {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "temperature": 0,
        "model": "triplex-tiny",
    }


def test_engine_that_works_already_needs_no_proof(start_gateway, engine):
    engine.metrics = {"vllm:num_requests_running": 3.0}
    gateway = start_gateway(warm_probe=True)
    gateway.wait_ready()
    assert not engine.calls


def test_first_token_that_does_not_come_keeps_the_engine_warming(start_gateway, engine):
    engine.script = lambda call: call.wait_closed()
    gateway = start_gateway(warm_probe=True, warm_probe_timeout_s=0.1)
    wait_for(lambda: len(engine.calls) > 1, "it is asked again")
    assert "gave no first token within 0.1 s" in gateway.request("GET", "/readyz").json["reasons"][0]


def test_reference_engine_that_loads_is_held_for_too(start_gateway, engine):
    """It answers POSTs while it loads, perhaps before its health is looked at again."""
    refusals = []

    def script(call: Call) -> None:
        if len(refusals) < 1:
            refusals.append(call)
            call.answer(503, {"error": {"message": "the service is starting", "code": "not_ready"}})
        else:
            complete("hello")(call)

    engine.script = script
    gateway = start_gateway()
    gateway.wait_ready()
    assert gateway.chat(stream=True).text == "hello"
    refusals.clear()
    gateway.wait_ready()
    assert gateway.chat().status == 503


def test_table_daemon_that_restarts_pauses_admission(start_gateway, engine):
    gateway = start_gateway(hold_timeout_s=10, commit_delay_s=0.1)
    gateway.wait_ready()
    go_on = threading.Event()
    engine.script = play(chunk({"content": "a"}), lambda _: go_on.wait(10), chunk({}, "stop"), DONE)
    with ExitStack() as stack:
        running = stack.enter_context(gateway.open_chat(stream=True))
        wait_for(lambda: engine.calls, "the first runs")
        engine.ready_body = {"state": "degraded", "reasons": ["waiting_for_table"]}
        wait_state(gateway, "degraded")
        assert gateway.request("GET", "/readyz").status == 200, "for as long as streams are held"
        refused = gateway.chat()
        assert (refused.status, refused.headers["retry-after"]) == (503, "15")
        held = stack.enter_context(gateway.open_chat(stream=True))
        wait_for(lambda: gateway.metric("requests_queued") == 1, "the second is held")
        go_on.set()
        assert b"error" not in read_all(running), "what runs goes on"
        assert len(engine.calls) == 1
        engine.ready_body = {"state": "ready", "reasons": []}
        assert b"error" not in read_all(held)


def test_table_daemon_that_stays_away_ends_readiness(start_gateway, engine):
    gateway = start_gateway(hold_timeout_s=0.3)
    gateway.wait_ready()
    engine.ready_body = {"state": "degraded", "reasons": ["waiting_for_table"]}
    wait_for(lambda: gateway.request("GET", "/readyz").status == 503, "nobody is held any more")
    engine.ready_body = {"state": "ready", "reasons": []}
    gateway.wait_ready()


def test_daemon_is_asked_where_its_address_is_known(start_gateway, engine, mortal):
    gateway = start_gateway(daemon_url=mortal.url, hold_timeout_s=10)
    gateway.wait_ready()
    mortal.close()
    wait_for(
        lambda: gateway.request("GET", "/readyz").json["dependencies"]["table"] == "down", "its end is seen"
    )
    assert state(gateway) == "ready", "the engine does not know it yet"
    assert gateway.chat().status == 503
    mortal.ready_body = {"state": "degraded", "reasons": ["slow_drive"]}
    mortal.open()
    wait_for(lambda: gateway.chat().status == 200, "it is back")
    assert gateway.request("GET", "/readyz").json["reasons"] == ["table: slow_drive"]


@pytest.mark.parametrize("word", ["starting", "stopping"])
def test_what_daemon_and_engine_say_of_themselves_is_shown(start_gateway, engine, mortal, word):
    gateway = start_gateway(daemon_url=mortal.url)
    gateway.wait_ready()
    mortal.probe = answer(503, {"state": word, "reasons": ["advice is posix_fadvise"]})

    def shown() -> dict:
        return gateway.request("GET", "/readyz").json

    wait_for(lambda: shown()["dependencies"]["table"] == word, "the daemon's word")
    assert shown()["reasons"] == [f"table: {word}", "table: advice is posix_fadvise"]
    engine.health_status, engine.ready_body = 503, {"state": word, "reasons": ["draining"]}
    wait_for(lambda: "engine: draining" in shown()["reasons"], "the engine's reason")
    assert shown()["dependencies"]["engine"] == {"starting": "loading", "stopping": "stopping"}[word]
    assert gateway.request("GET", "/readyz").status == 503


def test_g55_requests_without_progress_are_a_stall(start_gateway, engine):
    gateway = start_gateway(stall_timeout_s=0.5, max_in_flight=1, commit_delay_s=0.1)
    gateway.wait_ready()
    go_on = threading.Event()
    engine.script = lambda call: go_on.wait(10) and complete("x")(call)
    with ExitStack() as stack:
        stuck = stack.enter_context(gateway.open_chat(stream=True))
        wait_for(lambda: engine.calls, "one is at the engine, which makes no token")
        queued = stack.enter_context(gateway.open_chat(stream=True))
        assert b"makes no progress" in read_all(queued)
        wait_state(gateway, "stalled")
        assert gateway.request("GET", "/readyz").status == 503
        assert gateway.chat(stream=True).status == 503, "nobody is held for a stalled engine"
        assert gateway.metric("rejections_total", reason="stalled") == 1
        go_on.set()
        assert b"error" not in read_all(stuck)
    gateway.wait_ready()
    assert gateway.chat().status == 200


def test_progress_that_is_no_token_is_no_stall(start_gateway, engine):
    engine.metrics = {"vllm:num_requests_running": 1.0}
    gateway = start_gateway(stall_timeout_s=0.3)
    gateway.wait_ready()
    end_s = time.monotonic() + 0.8
    while time.monotonic() < end_s:  # a long prompt fills blocks
        engine.metrics["vllm:kv_cache_usage_perc"] = time.monotonic()
        assert state(gateway) == "ready"
    wait_state(gateway, "stalled")
    engine.ready_body = {"state": "degraded", "reasons": ["waiting_for_table"]}
    wait_state(gateway, "degraded")


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [("engine_stalled: 2 requests and no step for 90 s", "stalled"), ("engine_dead", "down")],
)
def test_g55_verdicts_of_our_engine_are_believed(start_gateway, engine, reason, wanted):
    gateway = start_gateway()
    gateway.wait_ready()
    engine.health_status, engine.ready_body = 503, {"state": "degraded", "reasons": [reason]}
    wait_state(gateway, wanted)
    assert gateway.request("GET", "/readyz").json["reasons"] == [f"engine: {reason}"]


def test_g56_engine_that_hangs_is_a_stall_and_hangs_nothing_here(start_gateway, engine, monkeypatch):
    monkeypatch.setattr("ple_gateway.engine._PROBE_TIMEOUT_S", 0.1)
    gateway = start_gateway()
    gateway.wait_ready()
    engine.probe = lambda call: call.wait_closed()
    wait_state(gateway, "stalled")
    assert gateway.chat(stream=True).status == 503
    assert gateway.request("GET", "/livez").status == 200
    engine.probe = None
    gateway.wait_ready()


def test_queue_is_told_when_the_gateway_stops(start_gateway, engine):
    gateway = start_gateway(max_in_flight=1, commit_delay_s=0.1, drain_timeout_s=0.3)
    gateway.wait_ready()
    engine.script = lambda call: call.wait_closed()
    with gateway.open_chat(stream=True) as running, gateway.open_chat(stream=True) as queued:
        wait_for(lambda: gateway.metric("requests_queued") == 1, "one waits")
        gateway.server.handle_exit(signal.SIGTERM, None)
        assert b"shutting_down" in read_all(running)
        assert b"shutting_down" in read_all(queued)


def test_unknown_state_at_the_start_is_waited_for(start_gateway, engine):
    seen = threading.Event()

    def probe(call: Call) -> None:
        seen.wait(5)
        engine._answer_get(call)

    engine.probe = probe
    gateway = start_gateway()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(gateway.chat().status))
    asking.start()
    seen.set()
    asking.join(10)
    assert answers == [200]


def test_metrics_name_the_states_and_no_more(start_gateway, engine):
    gateway = start_gateway(api_keys="secret-key")
    gateway.wait_ready()
    page = gateway.request("GET", "/metrics").body.decode()
    states = [line for line in page.splitlines() if line.startswith("ple_gateway_engine_state{")]
    assert len(states) == 8
    assert 'ple_gateway_engine_state{state="ready"} 1.0' in states
    assert "secret" not in page
    assert json.dumps(CAPACITY["num_blocks"] - 2) in page.replace(".0", "")


def _metrics_without_sense(call):
    call.answer(200, b"vllm:num_requests_running 1.2.3\nvllm:num_requests_running +-\n", "text/plain")


@pytest.mark.parametrize(
    "probe",
    [
        answer(200, b"[" * 5000),
        answer(200, b'"well"'),
        answer(200, {"data": [5], "reasons": {"a": 1}}),
        answer(200, {"data": [{"id": ["x"]}]}),
        _metrics_without_sense,
    ],
    ids=["deep JSON", "a string", "no models", "nameless models", "metrics"],
)
def test_whatever_an_engine_tells_it_is_looked_at_again(start_gateway, engine, probe):
    gateway = start_gateway(stall_timeout_s=0.9)
    gateway.wait_ready()
    engine.health_status = 503
    wait_for(lambda: gateway.gateway.health.engine.state == "loading", "the engine loads")
    engine.health_status = 200
    engine.probe = probe
    asked = len(engine.probes)
    wait_for(lambda: len(engine.probes) > asked + 8, "it was asked for all that it tells")
    assert gateway.chat().status in {200, 503}
    engine.probe = None
    engine.health_status = 503
    wait_for(lambda: gateway.gateway.health.engine.state == "loading", "the next outage is seen")
    engine.health_status = 200
    gateway.wait_ready()
    assert gateway.chat().status == 200


def test_look_that_fails_is_not_the_last(start_gateway, engine, monkeypatch, caplog):
    gateway = start_gateway()
    gateway.wait_ready()

    def fail(*_):
        raise AttributeError("of this test")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.gateway.models, "refresh", fail)
        engine.health_status = 503
        wait_for(lambda: gateway.gateway.health.engine.state == "loading", "the engine loads")
        engine.health_status = 200
        wait_for(lambda: "a look failed" in caplog.text, "the look fails")
    gateway.wait_ready()


def test_capacity_that_cannot_be_told_for_once_stays(start_gateway, engine):
    gateway = start_gateway()
    wait_for(lambda: gateway.gateway.gate.capacity, "the pool is known")
    engine.capacity = {"num_blocks": "many"}
    asked = engine.probes.count("/v1/triplex/capacity")
    wait_for(lambda: engine.probes.count("/v1/triplex/capacity") > asked + 2, "it was asked again")
    assert gateway.gateway.gate.capacity.num_blocks == CAPACITY["num_blocks"]
    engine.capacity = None
    wait_for(lambda: gateway.gateway.gate.capacity is None, "an engine without that route is noticed")


def test_daemon_that_misses_one_look_is_not_down(start_gateway, engine, mortal, monkeypatch):
    monkeypatch.setattr("ple_gateway.daemon_watch._TIMEOUT_S", 0.2)
    gateway = start_gateway(daemon_url=mortal.url)
    daemon = gateway.gateway.health.daemon
    wait_for(lambda: daemon.state == "ready", "the daemon is ready")
    missed = []

    def miss_one(call):
        if not missed:
            missed.append(call.path)
            return call.wait_closed()
        return answer(200, {"state": "ready", "reasons": []})(call)

    mortal.probe = miss_one
    states = set()
    wait_for(lambda: states.add(daemon.state) or (missed and daemon._silent_looks == 0), "it is seen again")
    assert states == {"ready"}
    mortal.probe = Call.wait_closed
    wait_for(lambda: daemon.state == "down", "it is down after three")
