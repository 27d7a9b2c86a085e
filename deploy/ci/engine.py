"""A private container engine for the time of one command: `make test-containers` runs its tests in it.

    sudo python3 deploy/ci/engine.py COMMAND [ARGUMENT...]
    sudo python3 deploy/ci/engine.py --prepare           only what takes long: packages, compose, base image

For Debian 12, as root, with a Debian mirror and no image registry. Packages stay installed. The engine, its
containers, networks, mounts and control groups end with the command. --keep-images keeps what was built for
the next run.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from host import BASE_PATH, BASE_TAG, HostError, install_compose, install_packages, make_base_image, run

FOLDER = Path("/var/lib/triplex-ci")
# Short: a socket's path has 107 bytes at most.
RUN = Path("/run/triplex-ci")
LOCK = Path("/run/triplex-ci.lock")
CGROUP = "triplex-ci"
START_S, STOP_S = 30.0, 30.0
# dockerd makes these whatever it is told.
LEFTOVERS = (
    Path("/etc/docker/key.json"),
    Path("/etc/docker"),
    Path("/run/docker/plugins"),
    Path("/run/docker"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"what is kept between runs ({FOLDER})")
    parser.add_argument("--keep-images", action="store_true", help="keep images and their layers, too")
    parser.add_argument("--prepare", action="store_true", help="fetch what is missing and start nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command and not options.prepare:
        parser.error("name a command to run")
    if os.getuid() != 0:
        print("engine: containers are tested as root: sudo make test-containers", file=sys.stderr)
        return 77
    # Unwind on SIGTERM as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        options.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with locked(options.folder / "lock"):
            prepare(options.folder)
        if options.prepare:
            return 0
        # Whatever their folders, engines have one place for sockets, and one control group.
        with locked(LOCK), engine(options.folder, keep_images=options.keep_images) as environment:
            say(f"running {' '.join(options.command)}")
            return subprocess.run(options.command, env=environment, check=False).returncode
    except HostError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def say(text: str, started_s: float = time.monotonic()) -> None:
    print(f"[{time.monotonic() - started_s:5.1f} s] {text}", flush=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep a second run away. Raises HostError."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HostError(f"another run holds {path}: wait for it") from error
        yield


def prepare(folder: Path) -> None:
    """Install and make what is missing. Raises HostError."""
    say("packages, compose, base image")
    install_packages()
    install_compose(folder / "docker-config", folder)
    make_base_image(folder / "base.tar")


@contextlib.contextmanager
def engine(folder: Path, *, keep_images: bool) -> Iterator[dict[str, str]]:
    """A running engine; the environment that makes docker and compose talk to it. Raises HostError."""
    environment = {
        **os.environ,
        "DOCKER_CONFIG": str(folder / "docker-config"),
        "DOCKER_HOST": f"unix://{RUN}/docker.sock",
    }
    leftovers = [path for path in LEFTOVERS if not path.exists()]
    RUN.mkdir(exist_ok=True)
    process = start(folder, environment)
    try:
        wait_until_up(process, folder, environment)
        import_base(folder / "base.tar", environment)
        yield environment
    finally:
        stop(process, environment)
        clear(folder, leftovers, keep_images=keep_images)
        say("engine stopped")


def import_base(tarball: Path, environment: dict[str, str]) -> None:
    """Give this engine its base image, unless it kept one: with a new one everything would be built anew."""
    kept = subprocess.run(
        ["docker", "image", "inspect", BASE_TAG], check=False, env=environment, capture_output=True
    )
    if kept.returncode:
        run("docker", "import", "-c", f"ENV {BASE_PATH}", tarball, BASE_TAG, env=environment)


def start(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """dockerd with everything of its own, without the bridge and firewall rules that would stay behind."""
    (RUN / "daemon.json").write_text("{}")
    places = {
        "config-file": RUN / "daemon.json",
        "data-root": folder / "data",
        "exec-root": RUN / "exec",
        "pidfile": RUN / "dockerd.pid",
        "host": environment["DOCKER_HOST"],
        "cgroup-parent": CGROUP,
        "bridge": "none",
    }
    off = [f"--{name}=false" for name in ("iptables", "ip6tables", "ip-forward", "ip-masq")]
    with (folder / "dockerd.log").open("wb") as log:
        return subprocess.Popen(
            ["dockerd", *(f"--{name}={value}" for name, value in places.items()), *off],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for us: the engine is needed for taking its containers down.
            start_new_session=True,
        )


def wait_until_up(process: subprocess.Popen[bytes], folder: Path, environment: dict[str, str]) -> None:
    deadline_s = time.monotonic() + START_S
    while subprocess.run(["docker", "version"], check=False, env=environment, capture_output=True).returncode:
        if process.poll() is not None or time.monotonic() > deadline_s:
            last = (folder / "dockerd.log").read_text().strip().splitlines()[-1:]
            raise HostError(f"dockerd does not answer: {' '.join(last) or 'it says nothing'}")
        time.sleep(0.2)


def stop(process: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
    """Remove every container and network of this engine, then end it."""

    def docker(*words: str) -> list[str]:
        done = subprocess.run(
            ["docker", *words], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout.split()

    if process.poll() is None:
        containers, volumes = docker("ps", "-aq"), docker("volume", "ls", "-q")
        if containers:
            docker("rm", "-fv", *containers)
        docker("network", "prune", "-f")
        # Volumes may have been unmounted by now; those that are not would stay mounted.
        volumes = docker("volume", "ls", "-q") if volumes else []
        if volumes:
            docker("volume", "rm", *volumes)
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def clear(folder: Path, leftovers: list[Path], *, keep_images: bool) -> None:
    """Unmount and remove what the engine left."""
    for mount in mounts_below(RUN, folder):
        subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
    shutil.rmtree(RUN, ignore_errors=True)
    if not keep_images:
        shutil.rmtree(folder / "data", ignore_errors=True)
    for group in (*Path("/sys/fs/cgroup").glob(f"*/{CGROUP}"), Path("/sys/fs/cgroup") / CGROUP):
        for path in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            remove_folder(path)
        remove_folder(group)
    for path in leftovers:
        if path.is_file():
            path.unlink()
        remove_folder(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder; one that is in use stays."""
    with contextlib.suppress(OSError):
        path.rmdir()


def mounts_below(*folders: Path) -> list[str]:
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((p for p in points if any(Path(p).is_relative_to(f) for f in folders)), reverse=True)


if __name__ == "__main__":
    sys.exit(main())
