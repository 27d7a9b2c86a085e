"""`make run` says what changes, and not each count of one trouble."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

LOCAL = Path(__file__).resolve().parents[2] / "deploy/local"
STALLS = "drive_tail: {} of 500 reads in the last 5 minutes took over 100 ms, the worst {} ms"


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(self.server.health).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A watch over one service that answers what `say` is told; time stands still but for `wait`."""
    monkeypatch.syspath_prepend(LOCAL)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    import watch

    import services

    now_s, lines = [100.0], list[str]()
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    supervisor: Any = SimpleNamespace(alive=lambda: True, processes=dict)
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = Thread(target=server.serve_forever)
    thread.start()
    service = services.Service("daemon", f"127.0.0.1:{server.server_port}")
    looking = watch.Watch(supervisor, [service], SimpleNamespace(line=lines.append))

    def say(state: str, *reasons: str, after_s: float = 1.0) -> list[str]:
        """What is printed on a look at this health."""
        server.health = {"state": state, "reasons": reasons}
        now_s[0] += after_s
        lines.clear()
        looking._look()
        return list(lines)

    yield SimpleNamespace(say=say)
    server.shutdown()
    thread.join()
    server.server_close()
    for name in ("services", "watch", "console", "supervisor_process"):
        sys.modules.pop(name, None)


def test_counters_of_one_trouble_are_said_every_ten_seconds(watched: SimpleNamespace) -> None:
    assert watched.say("ready") == ["daemon: ready"]
    first = watched.say("degraded", STALLS.format(1, 150.5))
    assert first == [f"daemon: degraded ({STALLS.format(1, 150.5)})"]
    for second in range(1, 10):
        assert watched.say("degraded", STALLS.format(1 + second, 150 + second)) == []
    later = STALLS.format(11, 160)
    assert watched.say("degraded", later) == [f"daemon: degraded ({later})"]
    assert watched.say("degraded", later, after_s=60) == []


def test_another_kind_of_reason_is_said_at_once(watched: SimpleNamespace) -> None:
    watched.say("ready")
    watched.say("degraded", STALLS.format(1, 150))
    both = (STALLS.format(2, 151), "table: 3 files changed")
    assert watched.say("degraded", *both, after_s=0.25) == [f"daemon: degraded ({'; '.join(both)})"]
    assert watched.say("ready", after_s=0.25) == ["daemon: ready"]
    assert watched.say("degraded", STALLS.format(2, 151), after_s=0.25) != []
