"""Structured output: schemas are checked before the engine sees them, answers before the client does."""

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import msgspec

from ple_gateway.errors import GatewayError, invalid
from ple_gateway.schema_check import CheckedSchema, check_schema, fault_of_answer, fault_of_text
from ple_gateway.schema_rules import SchemaLimits, refused
from ple_gateway.schema_worker import SchemaJob
from ple_gateway.settings import Settings
from ple_gateway.workers import WorkerCommand, WorkerCrashError, Workers, WorkerTimeoutError

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CACHED_SCHEMAS = 64
_SMALL_BYTES = 8 * 1024  # none so small takes long enough to be felt by other requests
_WORKERS = 2
_WORKER_JOBS = 1000
_HEADER_CHARS = 900
_POINTER_CHARS = 200


class AnswerSchema:
    """What a finished answer has to be; safe to share between requests."""

    def __init__(self, find_fault: Callable[[str], Any], headers: dict[str, str] | None = None) -> None:
        self._find_fault = find_fault
        self.headers = headers or {}

    async def check_answer(self, text: str) -> None:
        """Raise GatewayError 502 `schema_violation` unless `text` is what was asked for."""
        fault = await self._find_fault(text)
        if fault:
            raise GatewayError(
                502,
                f"The engine's answer does not satisfy response_format: {fault}",
                code="schema_violation",
                may_retry=False,
            )


class Schemas:
    """Checks `response_format`; large schemas in worker processes, where none can hold up other requests."""

    def __init__(self, settings: Settings) -> None:
        self._limits = SchemaLimits(
            settings.max_schema_bytes,
            settings.max_schema_depth,
            settings.max_schema_enum_values,
            settings.max_schema_branches,
            settings.max_schema_properties,
            settings.max_schema_string_chars,
            settings.max_schema_pattern_chars,
        )
        timeout_s = settings.schema_timeout_s
        memory_bytes = settings.schema_worker_memory_bytes
        self._timeout_s = timeout_s
        self._workers = Workers(
            WorkerCommand(
                module="ple_gateway.schema_worker",
                arguments=[f"--memory-bytes={memory_bytes}", f"--timeout-s={math.ceil(timeout_s) + 1}"],
                count=_WORKERS,
                jobs=_WORKER_JOBS,
                timeout_s=timeout_s,
            )
        )
        self._checked: OrderedDict[tuple[bytes, bool], CheckedSchema] = OrderedDict()

    async def aclose(self) -> None:
        """End the worker processes."""
        await self._workers.aclose()

    async def prepare(self, request: dict[str, Any]) -> AnswerSchema | None:
        """Check `response_format` and put what the engine can follow in its place.

        Returns the check for the answer; raises GatewayError 400 naming what is wrong.
        """
        response_format = request.get("response_format")
        if response_format is None:
            return None
        if not isinstance(response_format, dict):
            raise invalid("`response_format` must be an object.", param="response_format")
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return AnswerSchema(_fault_of_object)
        if kind != "json_schema":
            raise invalid(
                "`response_format.type` must be text, json_object or json_schema.", param="response_format"
            )
        schema, strict = _schema_of(response_format.get("json_schema"))
        encoded = msgspec.json.encode(schema)
        checked = await self._check(encoded, strict)
        named = {**response_format["json_schema"], "schema": msgspec.json.decode(checked.lowered)}
        request["response_format"] = {**response_format, "json_schema": named}

        async def find_fault(text: str) -> str | None:
            return await self._fault_of(text, encoded)

        return AnswerSchema(find_fault, _headers(checked))

    async def _check(self, encoded: bytes, strict: bool) -> CheckedSchema:
        if len(encoded) > self._limits.bytes:
            raise refused(f"it is larger than {self._limits.bytes} bytes.")
        checked = self._checked.get((encoded, strict))
        if checked is None:
            checked = await self._checked_anew(encoded, strict)
            self._checked[encoded, strict] = checked
            if len(self._checked) > _CACHED_SCHEMAS:
                self._checked.popitem(last=False)
        else:
            self._checked.move_to_end((encoded, strict))
        return checked

    async def _checked_anew(self, encoded: bytes, strict: bool) -> CheckedSchema:
        if len(encoded) <= _SMALL_BYTES:
            return await asyncio.to_thread(check_schema, encoded, strict, self._limits)
        kind, data = await self._ask(SchemaJob(encoded, strict, self._limits))
        if kind == "refused":
            raise invalid(data.decode(), param="response_format", code="invalid_json_schema")
        return msgspec.json.decode(data, type=CheckedSchema)

    async def _fault_of(self, text: str, encoded: bytes) -> str | None:
        if len(encoded) <= _SMALL_BYTES:
            return await asyncio.to_thread(fault_of_answer, text, encoded)
        try:
            _, fault = await self._ask(SchemaJob(encoded, False, self._limits, text))
        except GatewayError:
            return "it takes too long to check."
        return fault.decode() or None

    async def _ask(self, job: SchemaJob) -> tuple[str, bytes]:
        try:
            return await self._workers.ask("", msgspec.json.encode(job))
        except WorkerTimeoutError as exc:
            raise refused(f"it takes longer than {self._timeout_s:g} seconds to check.") from exc
        except WorkerCrashError as exc:
            raise refused("it takes too much memory to check.") from exc


async def _fault_of_object(text: str) -> str | None:
    def find_fault(answer: Any) -> str | None:
        return None if isinstance(answer, dict) else "it is no JSON object."

    return await asyncio.to_thread(fault_of_text, text, find_fault)


def _headers(checked: CheckedSchema) -> dict[str, str]:
    """Name what was lost and what may be slow, within the size that proxies let pass."""
    headers = {}
    if checked.lost:
        headers["x-triplex-schema-lowered"] = _bounded(checked.lost)
    if checked.slow:
        headers["x-triplex-schema-slow"] = _bounded(checked.slow)
    return headers


def _bounded(pointers: tuple[str, ...]) -> str:
    shown: list[str] = []
    left = _HEADER_CHARS
    for pointer in pointers:
        word = quote(pointer[:_POINTER_CHARS], safe="/~$!&()*+,=:@'-._")
        left -= len(word) + 2
        if left < 0:
            return "; ".join([*shown, f"and {len(pointers) - len(shown)} more"])
        shown.append(word)
    return "; ".join(shown)


def _schema_of(json_schema: Any) -> tuple[Any, bool]:
    if not isinstance(json_schema, dict):
        raise invalid(
            "`response_format.json_schema` must be an object with `name` and `schema`.",
            param="response_format",
        )
    name = json_schema.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            "`response_format.json_schema.name` must be 1 to 64 letters, digits, `_` or `-`.",
            param="response_format",
        )
    strict = json_schema.get("strict") or False
    if not isinstance(strict, bool):
        raise invalid("`response_format.json_schema.strict` must be a boolean.", param="response_format")
    schema = json_schema.get("schema")
    if not isinstance(schema, dict):
        raise invalid("`response_format.json_schema.schema` must be an object.", param="response_format")
    return schema, strict
