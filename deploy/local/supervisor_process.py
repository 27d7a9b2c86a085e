"""supervisord as a child process: started, asked, and stopped with all that it started."""

import contextlib
import shlex
import shutil
import subprocess
import sys
import xmlrpc.client
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from supervisor.xmlrpc import SupervisorTransport

from ple_rpc.rundir import check_socket_path

STOP_TIMEOUT_S = 150.0
SOCKET_NAME = "supervisor.sock"
_LARGEST_PID = 4194304


def check_paths(run_dir: Path, log_dir: Path) -> None:
    """Raise ValueError for folders that supervisord could not use, which it would not tell anybody."""
    # It binds a name with its process id first.
    check_socket_path(run_dir / f"{SOCKET_NAME}.{_LARGEST_PID}")
    for path in (run_dir, log_dir.resolve(), Path(sys.executable)):
        if "%" in str(path):
            raise ValueError(f"{path}: supervisord cannot use a path with a % in it: choose another")


class Supervisor:
    """Runs supervisord for the time of a `with` block.

    It gets a process session of its own, so that Ctrl-C reaches us alone and the services are stopped in
    order, and it is told to end when we die without a word.
    """

    def __init__(self, config: Path, run_dir: Path, log_dir: Path, environment: Mapping[str, str]) -> None:
        self._config = config
        self._log_dir = log_dir
        self._socket = run_dir / SOCKET_NAME
        self._environment = {
            **environment,
            "TRIPLEX_RUN_DIR": str(run_dir),
            "TRIPLEX_LOG_DIR": str(log_dir.resolve()),
            # supervisord splits commands as a shell would.
            "TRIPLEX_PYTHON": shlex.quote(sys.executable),
            "TRIPLEX_LEASH": shlex.join(_leash()),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [*_leash(), sys.executable, "-W", "ignore", "-m", "supervisor.supervisord"]
        self._process = subprocess.Popen(
            [*command, "-c", str(self._config)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()

    def kill(self) -> None:
        """End supervisord and the services at once."""
        if self._process is None or not self.alive():
            return
        # supervisord first, so that it starts nothing again.
        for process in [self._process, *psutil.Process(self._process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def processes(self) -> dict[str, dict[str, Any]]:
        """supervisord's view of each service by name; empty while it does not answer."""
        transport = SupervisorTransport(None, None, serverurl=f"unix://{self._socket}")
        try:
            proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
            answer: Any = proxy.supervisor.getAllProcessInfo()
            return {info["name"]: info for info in answer}
        except (OSError, xmlrpc.client.Error, ValueError):
            return {}
        finally:
            transport.close()

    def last_words(self, service: str) -> str:
        """The last line that a service logged."""
        log = self._log_dir / f"{service}.log"
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        written = [line for line in lines if line.strip()]
        return written[-1] if written else "it said nothing"


def _leash() -> list[str]:
    """A command prefix that has the kernel end a process when its parent dies; empty where there is none."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
