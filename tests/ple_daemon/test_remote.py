"""A table on another host: who gets in over TCP, and what a start refuses."""

import datetime as dt
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from conftest import Daemon, eventually
from tcp_proxy import TcpProxy

from ple_daemon.errors import EndpointError
from ple_daemon.remote_endpoint import remote_endpoint
from ple_rpc.client import ClientOptions, TableClient
from ple_rpc.errors import TableUnavailable
from ple_rpc.tls import client_credentials

LISTEN = "tcp://127.0.0.1:0"


class Keys:
    """PEM files of one authority."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        folder.mkdir()
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, **options: object) -> tuple[Path, Path]:
        """Certificate and key for `name`."""
        made = self._authority.issue_cert(name, **options)
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        made.private_key_pem.write_to_path(str(key))
        certificate.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        return certificate, key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("tls") / "right")


@pytest.fixture
def remote(start: Callable[..., Daemon], shared_checkpoint: Path, keys: Keys) -> str:
    """host:port of a daemon that wants client certificates of `keys`."""
    certificate, key = keys.issue("127.0.0.1")
    daemon = start(
        shared_checkpoint, "--listen", LISTEN, "--tls-cert", str(certificate), "--tls-key", str(key),
        "--tls-client-ca", str(keys.ca),
    ).wait_ready()  # fmt: skip
    return address(daemon)


def address(daemon: Daemon) -> str:
    found = re.search(r"listening address=tcp://\S+ port=(\d+) mutual_tls=(\w+)", daemon.log)
    assert found, daemon.log
    return f"127.0.0.1:{found[1]}"


def refused(client: TableClient) -> str:
    with client, pytest.raises(TableUnavailable) as caught:
        client.wait_ready(0.7)
    return str(caught.value)


def test_who_gets_in(remote: str, keys: Keys, tmp_path: Path, shared_rows: np.ndarray) -> None:
    right = client_credentials(*keys.issue("engine"), keys.ca)
    for name in (remote, f"tls://{remote}"):
        with TableClient(name, credentials=right) as client:
            ids = np.random.default_rng(0).integers(0, len(shared_rows), 9000)
            assert client.lookup(ids.tolist()) == shared_rows[ids].tobytes()
            client.prefetch("a", range(100))
    others = Keys(tmp_path / "others")
    yesterday = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    expired = keys.issue("expired", not_before=yesterday - dt.timedelta(days=9), not_after=yesterday)
    options = ClientOptions(call_deadline_s=0.6)
    foreign = client_credentials(*others.issue("engine"), keys.ca)
    anonymous = grpc.ssl_channel_credentials(keys.ca.read_bytes())
    misled = client_credentials(*keys.issue("misled"), others.ca)
    for credentials in (foreign, anonymous, misled, client_credentials(*expired, keys.ca), None):
        assert "no answer from" in refused(TableClient(remote, options, credentials=credentials))
    # None of them did any harm.
    with TableClient(remote, credentials=right) as client:
        assert client.lookup([7]) == shared_rows[7].tobytes()


def test_a_certificate_for_another_name_is_refused(
    start: Callable[..., Daemon], shared_checkpoint: Path, keys: Keys
) -> None:
    certificate, key = keys.issue("table.example")
    daemon = start(
        shared_checkpoint, "--listen", LISTEN, "--tls-cert", str(certificate), "--tls-key", str(key),
        "--tls-client-ca", str(keys.ca),
    ).wait_ready()  # fmt: skip
    credentials = client_credentials(*keys.issue("engine"), keys.ca)
    refused(TableClient(address(daemon), ClientOptions(call_deadline_s=0.6), credentials=credentials))


def test_plaintext_on_loopback(
    start: Callable[..., Daemon], shared_checkpoint: Path, shared_rows: np.ndarray
) -> None:
    daemon = start(shared_checkpoint, "--listen", LISTEN).wait_ready()
    with TableClient(address(daemon)) as client:
        assert client.lookup([3, 1]) == shared_rows[[3, 1]].tobytes()
    with TableClient(f"unix:{daemon.socket}") as client:
        assert client.lookup([3, 1]) == shared_rows[[3, 1]].tobytes()


def test_a_taken_port_ends_the_start(
    start: Callable[..., Daemon], shared_checkpoint: Path, command: Callable
) -> None:
    taken = f"tcp://{address(start(shared_checkpoint, '--listen', LISTEN).wait_ready())}"
    with tempfile.TemporaryDirectory(prefix="ple-") as other:
        done = command(
            "serve", shared_checkpoint, "--run-dir", other, "--http-address", "127.0.0.1:0", "--listen", taken
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ple-daemon: --listen {taken}: cannot be bound")


def test_what_a_start_refuses(keys: Keys, tmp_path: Path) -> None:
    certificate, key = keys.issue("127.0.0.1")
    other_key = keys.issue("engine")[1]
    none, garbage = tmp_path / "none.pem", tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    everywhere = "tcp://0.0.0.0:8300"
    for files, listen, reason in (
        (
            (None, None, None),
            everywhere,
            r"0\.0\.0\.0 can be reached from other hosts; give --tls-cert, --tls-key",
        ),
        ((None, None, None), "tcp://[::]:8300", "can be reached from other hosts"),
        ((None, None, None), "tcp://table.example:8300", "can be reached from other hosts"),
        ((None, None, None), "tcp://127.0.0.1:99999", "there is no port 99999"),
        ((certificate, None, None), LISTEN, "also needs --tls-key and --tls-client-ca"),
        ((certificate, key, None), everywhere, "also needs --tls-client-ca"),
        ((certificate, none, keys.ca), everywhere, "cannot be read: No such file"),
        (
            (certificate, other_key, keys.ca),
            everywhere,
            r"--tls-cert with --tls-key .*not usable: KEY_VALUES_MISMATCH",
        ),
        ((garbage, key, keys.ca), everywhere, "--tls-cert with --tls-key .*not usable"),
        ((certificate, key, garbage), everywhere, "--tls-client-ca .*not usable"),
    ):
        with pytest.raises(EndpointError, match=reason):
            remote_endpoint(listen, *files)
    for host in ("127.0.0.1", "127.8.0.1", "[::1]", "localhost"):
        assert remote_endpoint(f"tcp://{host}:0", None, None, None).credentials is None


def test_the_command_refuses_in_one_line(command: Callable, shared_checkpoint: Path, run_dir: Path) -> None:
    for arguments, words in (
        (("--listen", "tcp://0.0.0.0:0"), "--listen tcp://0.0.0.0:0: 0.0.0.0 can be reached"),
        (("--tls-cert", "none.pem"), "--tls-cert none.pem: is of no use without --listen"),
    ):
        done = command("serve", shared_checkpoint, "--run-dir", run_dir, *arguments)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"ple-daemon: {words}")
        assert "Traceback" not in done.stderr


def test_an_address_that_cannot_work_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="needs credentials"):
        TableClient("tls://127.0.0.1:1")
    for path in ("/run/t.sock", "./t.sock", "../t.sock", "~/t.sock"):
        with pytest.raises(ValueError, match=f"{path} looks like a path: a socket's address is unix:{path}"):
            TableClient(path)


def test_a_client_whose_network_is_gone_loses_its_session(
    start: Callable[..., Daemon], shared_checkpoint: Path, shared_rows: np.ndarray
) -> None:
    """Nobody closes a connection: HTTP/2 pings tell, also long after the last data on it."""
    silence_s = 1.0
    daemon = start(shared_checkpoint, "--listen", LISTEN, "--client-silence-s", str(silence_s)).wait_ready()
    proxy = TcpProxy(int(address(daemon).rpartition(":")[2]))
    try:
        with TableClient(f"127.0.0.1:{proxy.port}", ClientOptions(call_deadline_s=0.5)) as client:
            assert client.lookup([3]) == shared_rows[3].tobytes()
            # Alive and idle for many pings: the session stays.
            idle_until_s = time.monotonic() + 3 * silence_s
            eventually(lambda: sessions(daemon) != 1 or time.monotonic() > idle_until_s, "idle time")
            assert sessions(daemon) == 1
            proxy.freeze()
            # Well below the minute that gRPC takes by default.
            eventually(lambda: sessions(daemon) == 0, "session gone", 20 * silence_s)
    finally:
        proxy.close()


def sessions(daemon: Daemon) -> float:
    return daemon.metric("ple_daemon_sessions")
