"""Everything an operator can set, from `PLE_GATEWAY_*` variables and the command line."""

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ple_gateway.keys import ApiKey, parse_keys

PREFIX = "PLE_GATEWAY_"
MIB = 2**20

# Names that Docker links and Kubernetes put into every container; none of our settings is named so.
_INJECTED = re.compile(r"_PORT$|_PORT_|_SERVICE_")

_ORIGIN = re.compile(r"https?://[a-zA-Z0-9.:\[\]-]+")


class SettingsError(Exception):
    """A setting is unknown or has a value that cannot work; the text is one clear line."""


class Settings(BaseSettings):
    """The gateway's settings. Immutable; bytes, seconds and pixels are in the names."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    http_address: str = "127.0.0.1:8000"
    engine_url: str = "http://127.0.0.1:8100"
    daemon_url: str | None = None
    engine_api_key: SecretStr | None = None
    api_keys: SecretStr | None = None
    api_keys_file: Path | None = None
    cors_origins: str = ""
    metrics_key: Literal["auto", "always", "never"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    max_body_bytes: int = Field(64 * MIB, gt=0)
    max_bodies_bytes: int = Field(512 * MIB, gt=0)
    max_json_depth: int = Field(256, gt=0)
    max_json_values: int = Field(1_000_000, gt=0, description="commas and brackets of a body")
    max_items: int = Field(10_000, gt=0)
    max_in_flight: int = Field(128, gt=0)
    max_queued: int = Field(32, ge=0)
    max_in_flight_per_key: int = Field(4, gt=0)
    max_queued_per_key: int = Field(16, ge=0)
    lane_ageing_s: float = Field(60, gt=0)
    reserved_answer_tokens: int = Field(16_384, gt=0)
    max_answer_bytes: int = Field(64 * MIB, gt=0)
    max_event_bytes: int = Field(64 * MIB, gt=0)
    max_choices: int = Field(128, gt=0)

    head_timeout_s: float = Field(10, gt=0)
    max_connections: int = Field(1024, gt=0)
    body_read_timeout_s: float = Field(30, gt=0)
    queue_timeout_s: float = Field(600, gt=0)
    hold_timeout_s: float = Field(120, ge=0, description="0 holds nothing")
    connect_timeout_s: float = Field(3, gt=0)
    headers_timeout_s: float = Field(60, gt=0)
    first_token_timeout_s: float = Field(60, gt=0)
    between_tokens_timeout_s: float = Field(120, gt=0)
    total_timeout_s: float = Field(3600, gt=0)
    commit_delay_s: float = Field(0.8, gt=0)
    keepalive_interval_s: float = Field(5, ge=0, description="0 sends no comments")
    probe_interval_s: float = Field(2, gt=0)
    warm_probe: bool = True
    warm_probe_timeout_s: float = Field(60, gt=0)
    stall_timeout_s: float = Field(90, gt=0)
    drain_timeout_s: float = Field(30, ge=0)

    max_images: int = Field(4, ge=0)
    images_kept_of_too_many: int = Field(2, ge=0, description="so that the next ones fit without a change")
    image_urls: Literal["off", "https"] = "off"
    image_url_max_bytes: int = Field(10 * MIB, gt=0)
    image_url_timeout_s: float = Field(5, gt=0)
    max_image_bytes: int = Field(20 * MIB, gt=0)
    max_images_bytes: int = Field(40 * MIB, gt=0)
    image_max_source_px: int = Field(64_000_000, gt=0)
    image_max_side_px: int = Field(30_000, gt=0)
    image_max_px: int = Field(2_097_152, ge=1024)
    image_workers: int = Field(2, gt=0)
    image_worker_jobs: int = Field(200, gt=0, description="pictures after which a worker is replaced")
    image_worker_memory_bytes: int = Field(2048 * MIB, gt=0)
    image_timeout_s: float = Field(10, gt=0)
    image_cache_bytes: int = Field(256 * MIB, ge=0)
    tool_markup: Literal["repair", "report"] = "repair"

    image_errors: Literal["strict", "degrade_history"] = "degrade_history"

    max_schema_bytes: int = Field(512 * 1024, gt=0)
    max_schema_depth: int = Field(64, gt=0)
    max_schema_enum_values: int = Field(20_000, gt=0)
    max_schema_branches: int = Field(10_000, gt=0)
    max_schema_properties: int = Field(500, gt=0, description="of one object")
    max_schema_string_chars: int = Field(10_000, gt=0, description="one string in enum or const")
    max_schema_pattern_chars: int = Field(1_000, gt=0, description="repetitions written out")
    schema_timeout_s: float = Field(5, gt=0)
    schema_worker_memory_bytes: int = Field(1024 * MIB, gt=0)

    @field_validator("http_address")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("engine_url", "daemon_url")
    @classmethod
    def _http_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{value!r} is no http(s) URL such as http://127.0.0.1:8100")
        if parts.username or parts.password:
            raise ValueError("put no credentials into the URL, which is logged; use engine_api_key")
        _ = parts.port  # urlsplit checks the port's range only when it is asked for
        return value.rstrip("/")

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        for origin in filter(None, (part.strip() for part in value.split(","))):
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin such as https://chat.example.org (or *)")
        return value

    @model_validator(mode="after")
    def _keys_where_strangers_can_reach(self) -> "Settings":
        if not self.keys() and not self.is_loopback:
            raise ValueError(
                f"{self.http_address} can be reached from other machines and no API key is set; "
                f"set {PREFIX}API_KEYS or {PREFIX}API_KEYS_FILE, or listen on 127.0.0.1"
            )
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach `http_address`."""
        host, _ = split_address(self.http_address)
        if host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def keys(self) -> tuple[ApiKey, ...]:
        """API keys that clients may use: the list's and the file's."""
        text = self.api_keys.get_secret_value() if self.api_keys else ""
        if self.api_keys_file:
            try:
                text += "\n" + self.api_keys_file.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as exc:
                raise ValueError(f"api_keys_file {self.api_keys_file} cannot be read: {exc}") from exc
        keys = parse_keys(text)
        if not keys and (self.api_keys or self.api_keys_file):
            where = f"api_keys_file {self.api_keys_file}" if self.api_keys_file else "api_keys"
            raise ValueError(f"{where} holds no key; put one in (`ple-gateway key` makes one) or unset it")
        return keys

    def origins(self) -> tuple[str, ...]:
        """Origins whose pages may use the API from a browser."""
        return tuple(origin.strip() for origin in self.cors_origins.split(",") if origin.strip())

    def metrics_need_key(self) -> bool:
        """Whether `/metrics` asks for an API key."""
        return self.metrics_key == "always" or (self.metrics_key == "auto" and not self.is_loopback)


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port"; ValueError with one clear sentence."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is no address such as 127.0.0.1:8000")
    return host, int(port)


def load_settings(environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Settings:
    """Read the settings; `overrides` (from the command line) win. Raises SettingsError."""
    _refuse_unknown(environ)
    try:
        return Settings(**overrides)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        variable = f" (set by {PREFIX}{name.upper()} or its flag)" if name else ""
        raise SettingsError(f"{name + ': ' if name else ''}{message}{variable}") from exc


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    for name in sorted(environ):
        if (
            name.upper().startswith(PREFIX)
            and name.upper() not in known
            and not _INJECTED.search(name.upper())
        ):
            raise SettingsError(f"unknown setting {name}; known are {', '.join(sorted(known))}")
