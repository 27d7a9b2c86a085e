"""A client that leaves frees the engine within a second, at every stage, streamed or not."""

import threading

import pytest
from fake_engine import Call, chunk, complete, wait_for


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("stage", ["headers", "first_token", "between_tokens"])
def test_g30_client_leaves(gateway, engine, streamed, stage):
    closed_s = []
    reached = threading.Event()

    def script(call: Call) -> None:
        if stage != "headers":
            call.open_stream()
        if stage == "between_tokens":
            call.event(chunk({"content": "x"}))
        reached.set()
        closed_s.append(call.wait_closed())

    engine.script = script
    sock = gateway.open_chat(stream=streamed)
    assert reached.wait(10)
    sock.close()
    assert wait_for(lambda: closed_s, "the engine's connection is closed")[0] < 1
    wait_for(lambda: gateway.gateway.gate.idle, "the place is free")
    left = ("headers", "first_token", "between_tokens", "answer")
    assert sum(gateway.metric("client_disconnects_total", stage=name) for name in left) == 1


def test_client_that_stops_reading_is_given_up(start_gateway, engine):
    gateway = start_gateway(between_tokens_timeout_s=0.3)

    def script(call: Call) -> None:
        call.open_stream()
        while True:
            call.event(chunk({"content": "x" * 100_000}))

    engine.script = script
    with gateway.open_chat(stream=True):
        wait_for(lambda: engine.calls, "the request is at the engine")
        wait_for(lambda: gateway.gateway.gate.idle, "the place is free")


def test_client_that_waits_in_the_queue_leaves(start_gateway, engine):
    gateway = start_gateway(max_in_flight=1, max_queued=1)
    go_on = threading.Event()

    def script(call: Call) -> None:
        assert go_on.wait(10)
        complete("x")(call)

    engine.script = script
    first = gateway.open_chat()
    wait_for(lambda: engine.calls, "the first is at the engine")
    second = gateway.open_chat(stream=True)
    wait_for(lambda: gateway.metric("requests_queued") == 1, "the second waits")
    full = gateway.chat()
    assert full.status == 503
    assert full.error["code"] == "overloaded"
    assert 1 <= int(full.headers["retry-after"]) <= 120
    second.close()
    wait_for(lambda: gateway.metric("requests_queued") == 0, "the second is forgotten")
    go_on.set()
    assert b"200 OK" in first.recv(65536)
    first.close()
    assert len(engine.calls) == 1


def test_queue_has_a_time_limit(start_gateway, engine):
    gateway = start_gateway(max_in_flight=1, queue_timeout_s=0.2)
    go_on = threading.Event()

    def script(call: Call) -> None:
        assert go_on.wait(10)
        complete("x")(call)

    engine.script = script
    with gateway.open_chat() as first:
        wait_for(lambda: engine.calls, "the first is at the engine")
        waited = gateway.chat()
        assert waited.status == 503
        assert waited.error["code"] == "overloaded"
        go_on.set()
        assert b"200 OK" in first.recv(65536)


def test_places_are_given_in_order_and_all_are_served(start_gateway, engine):
    gateway = start_gateway(max_in_flight=2, max_queued=20)
    engine.script = complete("x")
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(gateway.chat().status)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == [200] * 12
