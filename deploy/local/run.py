"""Run the three services of this checkout until Ctrl-C: `make run` does it with the tiny model.

examples:
  .venv/bin/python deploy/local/run.py --model var/models/triplex-tiny
  .venv/bin/python deploy/local/run.py --model DIR --table TABLE.ple --gateway-address 127.0.0.1:9000

Settings of the services travel in the environment as usual (PLE_DAEMON_*, PLE_INFERENCE_*, PLE_GATEWAY_*);
the options here only name what ties the three together.
"""

import argparse
import fcntl
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

from console import Console
from supervisor_process import Supervisor, check_paths
from watch import ServiceFailed, Watch

from ple_rpc.rundir import TABLE_SOCKET_NAME, run_directory
from services import ADDRESSES, Service

# Ctrl-C should not take half a minute; running answers get this long, unless the environment says otherwise.
DRAIN_S = {"PLE_GATEWAY_DRAIN_TIMEOUT_S": 5, "PLE_INFERENCE_DRAIN_DEADLINE_S": 5}
CHECKOUT = Path(__file__).resolve().parents[2]


class RunError(Exception):
    """Something that the user must mend; its text is one line."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=CHECKOUT / "var/models/triplex-tiny", help="checkpoint to serve"
    )
    parser.add_argument("--table", type=Path, help="flat table file; default: the table inside --model")
    parser.add_argument("--gateway-address", default=ADDRESSES["gateway"], metavar="HOST:PORT")
    parser.add_argument("--inference-address", default=ADDRESSES["inference"], metavar="HOST:PORT")
    parser.add_argument("--daemon-address", default=ADDRESSES["daemon"], metavar="HOST:PORT")
    parser.add_argument("--run-dir", type=Path, help="folder of the sockets; default: one per checkout")
    parser.add_argument("--log-dir", type=Path, default=CHECKOUT / "var/log")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = Console()
    try:
        run_dir = arguments.run_dir or run_directory(os.environ, CHECKOUT)
        prepare_folders(run_dir, arguments.log_dir)
        with take_lock(run_dir):
            return supervise(arguments, run_dir, console)
    except (RunError, ServiceFailed, ValueError, OSError) as error:
        console.error(str(error))
        return 1


def prepare_folders(run_dir: Path, log_dir: Path) -> None:
    check_paths(run_dir, log_dir)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if run_dir.stat().st_uid != os.getuid():
        raise RunError(f"{run_dir} belongs to another user: choose another with --run-dir")
    run_dir.chmod(0o700)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
    except OSError as error:
        raise RunError(
            f"log folder {log_dir}: {error.strerror}: choose one that you can write to with --log-dir"
        ) from error


def take_lock(run_dir: Path) -> IO[str]:
    """Hold the run directory for this process; the kernel lets go of it however the process ends."""
    lock = (run_dir / "run.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise RunError(
            f"Triplex already runs from this checkout ({run_dir} is locked): stop it first"
        ) from error
    return lock


def supervise(arguments: argparse.Namespace, run_dir: Path, console: Console) -> int:
    model = arguments.model.resolve()
    if not (model / "config.json").is_file():
        raise RunError(f"no checkpoint at {arguments.model}: there is no config.json in it")
    if arguments.table is not None and not arguments.table.exists():
        raise RunError(f"no table at {arguments.table}: make one with `ple-daemon build`, or leave it out")
    services = {
        "daemon": Service("daemon", arguments.daemon_address),
        "inference": Service("inference", arguments.inference_address),
        "gateway": Service("gateway", arguments.gateway_address),
    }
    for service in services.values():
        service.check_address()
    if len({service.address for service in services.values()}) < len(services):
        raise RunError(f"two services have the same address: {[s.address for s in services.values()]}")
    environment = {name: str(seconds) for name, seconds in DRAIN_S.items()} | os.environ
    environment |= {
        "PLE_DAEMON_TABLE": str((arguments.table or model).resolve()),
        "PLE_DAEMON_RUN_DIR": str(run_dir),
        "PLE_DAEMON_HTTP_ADDRESS": arguments.daemon_address,
        "PLE_INFERENCE_MODEL": str(model),
        "PLE_INFERENCE_TABLE_ADDRESS": f"unix:{run_dir / TABLE_SOCKET_NAME}",
        "PLE_INFERENCE_HTTP_ADDRESS": arguments.inference_address,
        "PLE_GATEWAY_HTTP_ADDRESS": arguments.gateway_address,
        "PLE_GATEWAY_ENGINE_URL": f"http://{arguments.inference_address}",
        "PLE_GATEWAY_DAEMON_URL": f"http://{arguments.daemon_address}",
    }
    config = Path(__file__).with_name("supervisord.conf")
    with Supervisor(config, run_dir, arguments.log_dir, environment) as supervisor:
        console.line(f"starting three services; logs in {shown(arguments.log_dir)}")
        try:
            watch = Watch(supervisor, list(services.values()), console)
            if watch.until_ready():
                welcome(console, services["gateway"].url, model.name)
                watch.until_stopped()
        except ServiceFailed as error:
            console.line(f"{error}; stopping the others")
            raise
        console.line("stopping: running answers get a few seconds (Ctrl-C again ends all at once)")
    console.line("stopped; nothing is left running")
    return 0


def welcome(console: Console, url: str, model: str) -> None:
    request = (
        f'{{"model": "{model}", "max_tokens": 40, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    )
    console.block(
        f"Triplex answers at {url}/v1   (Ctrl-C stops it)",
        "",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"    -d '{request}'",
    )


def shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
