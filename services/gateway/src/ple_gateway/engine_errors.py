"""Read the many error shapes of engines and proxies; give them back in OpenAI's."""

import re
from typing import Any

import msgspec

from ple_gateway.errors import GatewayError, backend_lost, unreachable

_OVERFLOW = re.compile(
    r"maximum (?:context|model|input) length|context length|max_model_len|context window",
    re.IGNORECASE,
)
_OVERFLOW_PARAMS = {"input_tokens", "input_text"}  # what vLLM names for a prompt that is too long
_MARKUP = re.compile(r"<[^>]{0,500}>")


def from_engine(status: int, body: bytes, *, retry_after: str | None = None) -> GatewayError:
    """Turn an engine's answer with an error status into ours.

    Knows OpenAI's shape with integer codes (vLLM), a bare string under `error`, FastAPI's `detail`, a flat
    object with `message`, HTML pages and plain text.
    """
    if status < 400:
        return backend_lost(f"The engine answered with status {status}, which is no answer.")
    error = _error_object(body)
    message = _message(error, body) or f"The engine answered with status {status}."
    param = error.get("param") if isinstance(error.get("param"), str) else None
    code = error.get("code") if isinstance(error.get("code"), str) else None
    if status in {401, 403}:
        # The client's key was good here: the engine refuses the gateway.
        return GatewayError(502, "The engine refuses the gateway's credentials.", code="backend_unavailable")
    if status < 500:
        return _refusal(status, message, param, code, retry_after)
    return _failure(status, message, code, retry_after)


def from_engine_frame(error: Any) -> GatewayError:
    """Turn the `error` of an event in the middle of a stream into ours."""
    fields = error if isinstance(error, dict) else {"message": str(error)}
    status = fields.get("code")
    known = status if isinstance(status, int) and 400 <= status < 600 else 500
    return from_engine(known, msgspec.json.encode({"error": fields}))


def _refusal(
    status: int, message: str, param: str | None, code: str | None, retry: str | None
) -> GatewayError:
    if param in _OVERFLOW_PARAMS or _OVERFLOW.search(message):
        return GatewayError(400, message, code="context_length_exceeded", param="messages")
    if status == 404 and (param == "model" or "model" in message.lower()):
        return GatewayError(404, message, code="model_not_found", param="model")
    if status == 404:
        return backend_lost("The engine does not know this endpoint.")
    if status == 413:
        return GatewayError(413, message, code="request_too_large")
    if status == 429:
        return GatewayError(429, message, code=code or "rate_limit_exceeded", retry_after_s=_seconds(retry))
    return GatewayError(400, message, code=code, param=param)


def _failure(status: int, message: str, code: str | None, retry: str | None) -> GatewayError:
    if status == 501:
        return GatewayError(400, message, code=code)
    if status == 503 and code == "not_ready":  # our reference engine while it loads: nothing was accepted
        return unreachable(message)
    if status == 503:
        return GatewayError(503, message, code="overloaded", retry_after_s=_seconds(retry))
    if status == 504:
        return GatewayError(504, message, code="timeout", may_retry=False)
    if status == 502:
        return backend_lost(message)
    return GatewayError(500, message, code=code, may_retry=False)


def _error_object(body: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return {}
    if not isinstance(decoded, dict):
        return {}
    error = decoded.get("error", decoded)
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}


def _message(error: dict[str, Any], body: bytes) -> str:
    message = error.get("message") or error.get("detail")
    if isinstance(message, str):
        return message.strip()
    if message:
        return _detail_lines(message)
    if error:
        return ""
    text = _MARKUP.sub(" ", body[:4000].decode("utf-8", "replace"))
    return " ".join(text.split())[:500]


def _detail_lines(detail: Any) -> str:
    """Join FastAPI's list of validation errors: `body.messages: field required; ...`."""
    entries = detail if isinstance(detail, list) else [detail]
    lines = []
    for entry in entries[:10]:
        if isinstance(entry, dict):
            where = ".".join(str(part) for part in entry.get("loc", ()) if part != "body")
            lines.append(
                f"{where}: {entry.get('msg', 'invalid')}" if where else str(entry.get("msg", "invalid"))
            )
        else:
            lines.append(str(entry))
    return "; ".join(lines)


def _seconds(retry_after: str | None) -> float:
    return float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else 5.0
