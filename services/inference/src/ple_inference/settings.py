"""Everything that can be configured: fields here, PLE_INFERENCE_* in the environment, flags of `serve`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ple_rpc.rundir import TABLE_SOCKET_NAME, run_directory

PREFIX = "PLE_INFERENCE_"
# Orchestrators inject such names for every service that they know.
_INJECTED = re.compile(r"_PORT$|_PORT_|_SERVICE_")
# vLLM has its own ways to say these; its arguments come after a --.
_REFERENCE_ONLY = frozenset(
    {
        "max_queued",
        "default_max_tokens",
        "prefill_chunk_tokens",
        "num_threads",
        "max_images",
        "max_image_px",
        "max_body_bytes",
        "grammar_deadline_s",
    }
)
_VLLM_ONLY = frozenset({"profile", "pipeline_stages"})


class SettingsError(Exception):
    """A setting that cannot be used; one line."""


class Settings(BaseSettings):
    """What one `ple-inference serve` runs with."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    engine: Literal["reference", "vllm"] = "reference"
    profile: str = ""
    """Engine vllm: a kind of machine; `ple-inference plan --help` lists the names."""
    pipeline_stages: int = Field(0, ge=0, le=64)
    """Engine vllm: GPUs, one stage on each; 0: as the profile says."""
    model: Path
    """Folder of the checkpoint."""
    served_model_name: str = ""
    """How clients call the model; empty: the folder's name."""
    table_address: str = Field(min_length=1)
    """gRPC address of the daemon, such as unix:/run/triplex/table.sock."""
    http_address: str = "127.0.0.1:8100"
    """host:port; port 0 takes a free one."""
    max_num_seqs: int = Field(4, ge=1, le=64)
    """Sequences that decode at once."""
    max_queued: int = Field(32, ge=0, le=4096)
    """Sequences that may wait for a place."""
    max_model_len: int = Field(0, ge=0)
    """Prompt and answer together, in tokens; 0: what the checkpoint allows."""
    default_max_tokens: int = Field(512, ge=1)
    """Length of an answer whose request names none."""
    prefill_chunk_tokens: int = Field(256, ge=64, le=8192)
    """Text prompts are computed in pieces, so that other sequences decode in between."""
    num_threads: int = Field(1, ge=1, le=256)
    """torch's threads."""
    max_images: int = Field(4, ge=0, le=64)
    """Images of one request."""
    max_image_px: int = Field(33_177_600, ge=1024)
    """Width times height of an image before it is scaled."""
    max_body_bytes: int = Field(64 * 2**20, ge=1024)
    """Body of one request."""
    lookup_deadline_s: float = Field(60.0, gt=1)
    """How long a lookup survives a daemon that is gone."""
    table_wait_deadline_s: float = Field(600.0, gt=0)
    """How long to wait for the daemon at start."""
    grammar_deadline_s: float = Field(10.0, gt=0)
    """Compiling one response_format."""
    drain_deadline_s: float = Field(30.0, ge=0)
    """How long running answers may go on after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("http_address")
    @classmethod
    def _has_host_and_port(cls, value: str) -> str:
        split_address(value)
        return value

    @model_validator(mode="after")
    def _fits_the_engine(self) -> Self:
        foreign = self.model_fields_set & (_REFERENCE_ONLY if self.engine == "vllm" else _VLLM_ONLY)
        if foreign:
            raise ValueError(f"{min(foreign)} is no setting of engine {self.engine}")
        return self

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.name


def load_settings(environ: Mapping[str, str], flags: Mapping[str, Any], anchor: Path) -> Settings:
    """Settings from the process's environment, overridden by flags that are not None. Raises SettingsError.

    `environ` is that environment; `anchor` is the checkout whose run directory holds the daemon's socket
    when no address is given.
    """
    _refuse_unknown(environ)
    given = {name: value for name, value in flags.items() if value is not None}
    if "table_address" not in given and f"{PREFIX}TABLE_ADDRESS" not in environ:
        given["table_address"] = f"unix:{run_directory(environ, anchor) / TABLE_SOCKET_NAME}"
    if "model" not in given and f"{PREFIX}MODEL" not in environ:
        raise SettingsError(f"no model; give --model or {PREFIX}MODEL")
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise SettingsError(first["msg"].removeprefix("Value error, ")) from error
        name = "_".join(str(part) for part in first["loc"])
        raise SettingsError(f"{PREFIX}{name.upper()} is {first['input']!r}: {first['msg']}") from error


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """pydantic-settings overlooks misspelt variables of the process."""
    for variable in environ:
        name = variable.removeprefix(PREFIX)
        if name == variable or name.lower() in Settings.model_fields or _INJECTED.search(variable):
            continue
        raise SettingsError(f"unknown setting {variable}; `ple-inference serve --help` lists those there are")


def split_address(address: str) -> tuple[str, int]:
    """host:port, with brackets around an IPv6 host. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("an address is host:port")
    return host.strip("[]"), int(port)
