"""What a Debian 12 machine lacks for containers: the engine's packages, compose v2, a base image.

All of it comes from Debian's mirrors; nobody asks an image registry. Whatever was made is kept in one folder
and found again by the next run.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

APT = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
PACKAGES = ("docker.io", "mmdebstrap", "iptables")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# bookworm's own docker-compose is version 1, which does not know our files; this binary wants only a libc.
COMPOSE_SUITE = "trixie"
COMPOSE_BINARY = "usr/libexec/docker/cli-plugins/docker-compose"
BASE_SUITE = "bookworm"
# Stands in for python:3.11-slim-bookworm: Debian's Python 3.11, and what the true image has around it.
BASE_TAG = "python:3.11-slim-bookworm"
BASE_PACKAGES = (
    *("python3", "python3-venv", "libstdc++6", "zlib1g", "dash", "bash", "coreutils", "grep", "sed"),
    *("base-files", "base-passwd", "libc-bin", "netbase", "ca-certificates"),
)
# mmdebstrap only unpacks: these do what the packages' own scripts would have done.
BASE_HOOKS = (
    'install -m644 "$1"/usr/share/base-passwd/passwd.master "$1"/etc/passwd',
    'install -m644 "$1"/usr/share/base-passwd/group.master "$1"/etc/group',
    'ln -sf dash "$1"/bin/sh && chroot "$1" ldconfig',
    'cat "$1"/usr/share/ca-certificates/mozilla/*.crt > "$1"/etc/ssl/certs/ca-certificates.crt',
    'rm -rf "$1"/usr/share/doc "$1"/usr/share/man "$1"/usr/share/locale',
)
BASE_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class HostError(Exception):
    """This machine cannot run the container tests; one line that says why."""


def run(*command: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run to the end in silence. Raises HostError with the last lines of output."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        said = " | ".join((done.stdout + done.stderr).strip().splitlines()[-4:])
        raise HostError(f"{words[0]} ended with {done.returncode}: {said}")


def install_packages() -> None:
    """Install the engine. Without systemd, or with a policy against it, Debian's package starts nothing."""
    if shutil.which("dockerd") and shutil.which("mmdebstrap"):
        return
    run("apt-get", "-qq", "update", env=APT)
    run("apt-get", "-qq", "install", "-y", "--no-install-recommends", *PACKAGES, env=APT)


def mirror() -> str:
    """The Debian mirror of this machine. Raises HostError."""
    places = [*sorted(Path("/etc/apt/sources.list.d").glob("*.sources")), Path("/etc/apt/sources.list")]
    for place in filter(Path.is_file, places):
        for line in place.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] in {"URIs:", "deb"} and "debian" in line:
                return next(word for word in words[1:] if "://" in word)
    raise HostError("no Debian mirror is configured in /etc/apt")


def install_compose(docker_config: Path, folder: Path) -> None:
    """Unpack compose v2 into the private `docker_config`, through lists of packages of its own."""
    plugin = docker_config / "cli-plugins/docker-compose"
    if plugin.exists():
        return
    work = folder / "compose"
    shutil.rmtree(work, ignore_errors=True)
    for part in ("lists/partial", "cache/archives/partial"):
        (work / part).mkdir(parents=True)
    (work / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror()} {COMPOSE_SUITE} main\n")
    options = {
        "Dir::Etc::sourcelist": work / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    run(*apt, "update", env=APT)
    run(*apt, "download", "docker-compose", env=APT, cwd=work)
    (package,) = work.glob("docker-compose_*.deb")
    run("dpkg-deb", "-x", package, work / "unpacked")
    plugin.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(work / "unpacked" / COMPOSE_BINARY, plugin)
    shutil.rmtree(work)


def make_base_image(tarball: Path) -> None:
    """Write the root of the stand-in for the base image to `tarball`, once."""
    if tarball.exists():
        return
    part = tarball.with_suffix(".part")
    hooks = [f"--customize-hook={hook}" for hook in BASE_HOOKS]
    run(
        *("mmdebstrap", "--quiet", "--variant=extract", "--mode=root", "--format=tar", *hooks),
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
        f"--include={','.join(BASE_PACKAGES)}",
        *(BASE_SUITE, part, mirror()),
    )
    part.rename(tarball)
