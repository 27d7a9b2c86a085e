"""Every setting of the daemon. An environment variable is the field's name in capitals after PLE_DAEMON_."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from ple_daemon.errors import DaemonError
from ple_rpc.rundir import run_directory

PREFIX = "PLE_DAEMON_"
# Kubernetes and compose links inject such names for any service that is called ple-daemon.
_INJECTED = ("_PORT", "_PORT_", "_SERVICE_")


class SettingsError(DaemonError):
    """A setting that is unknown, missing or malformed."""


class Settings(BaseSettings):
    """Immutable; printed once at start."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    table: Path
    """A checkpoint folder, or a file that `ple-daemon build` made."""
    run_dir: Path = Field(default_factory=lambda: run_directory(os.environ, Path.cwd()))
    """Where table.sock and the lock live; mode 0700."""
    http_address: Annotated[str, Field(pattern=r"^[^\s]+:\d{1,5}$")] = "127.0.0.1:8200"
    """host:port of /livez, /readyz and /metrics."""
    listen: Annotated[str, Field(pattern=r"^tcp://[^\s/]+:\d{1,5}$")] | None = None
    """tcp://host:port for clients on other hosts; refused without the three files unless it is loopback."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """PEM files of mutual TLS: the daemon's certificate and key, and the authority of its clients."""
    advice: Literal["auto", "process_madvise", "posix_fadvise", "none"] = "auto"
    cache_dir: Path | None = None
    """Where compiled kernels are kept; by default beside the code, or a private temporary folder."""
    drain_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """How long running calls may take to finish after SIGTERM."""
    watch_interval_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """How often the table's files are compared with what was opened."""
    max_concurrent_calls: Annotated[int, Field(ge=4, le=1024)] = 64
    """Calls at once, open streams included; one more is refused with RESOURCE_EXHAUSTED."""
    client_gid: Annotated[int, Field(ge=0)] | None = None
    """Group whose members may share memory, beside root and the daemon's own user."""
    client_silence_s: Annotated[float, Field(ge=0.1, le=3600)] = 50.0
    """A client whose host answers no HTTP/2 ping for so long has left, and its session ends."""
    max_queued_prefetches: Annotated[int, Field(ge=1, le=4096)] = 64
    max_prefetches_per_session: Annotated[int, Field(ge=1, le=4096)] = 32
    """Prompts of one session that may wait."""
    drive_probe_interval_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Between two reads of the drive-tail probe; 0 switches it off."""
    resident_interval_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Between two estimates of the table's resident share."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def load(overrides: Mapping[str, Any]) -> Settings:
    """Settings from the environment; `overrides` (the command line) win. Raises SettingsError."""
    _refuse_unknown(os.environ)
    try:
        return Settings(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"][:1])
        option = "TABLE" if name == "table" else "--" + name.replace("_", "-")
        raise SettingsError(f"{option} or {PREFIX}{name.upper()}: {first['msg'].lower()}") from error


def cache_dir() -> Path | None:
    """The kernel cache that the environment asks for, for commands that need no other setting."""
    value = os.environ.get(f"{PREFIX}CACHE_DIR") or os.environ.get("NUMBA_CACHE_DIR")
    return Path(value) if value else None


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known:
            continue
        if name.endswith(_INJECTED[0]) or any(part in name for part in _INJECTED[1:]):
            continue
        raise SettingsError(f"{name}: unknown setting; known are {', '.join(sorted(known))}")
