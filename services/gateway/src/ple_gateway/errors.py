"""One exception for everything a client is told, and how it looks in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

MAX_RETRY_AFTER_S = 120  # openai-python gives up at once when it is told to wait longer
RESTART_RETRY_AFTER_S = 30  # an engine that loads takes minutes, the SDKs try three times
MAX_MESSAGE_CHARS = 4000

_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TYPES = {401: "invalid_request_error", 403: "permission_error", 429: "rate_limit_error"}


class GatewayError(Exception):
    """What went wrong with one request, in the words the client reads.

    `retry_after_s` says that a retry may help; `may_retry=False` tells SDKs to leave it, since it would
    repeat a long prefill.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        may_retry: bool | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:MAX_MESSAGE_CHARS] or "The request failed."
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.may_retry = may_retry
        self._headers = headers or {}

    @property
    def type(self) -> str:
        """OpenAI's error type for this status."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the answer or of the error frame."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the same in Anthropic's shape, which has no place for `param`: the message names it."""
        message = self.message
        if self.code == "context_length_exceeded":
            message = (
                f"prompt is too long: {message}"  # clients look for these words to shorten their history
            )
        elif self.param and self.param not in message:
            message = f"{self.param}: {message}"
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": message}}

    def headers(self) -> dict[str, str]:
        """Headers beside the content type."""
        headers = dict(self._headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(min(MAX_RETRY_AFTER_S, self.retry_after_s))))
        if self.may_retry is not None:
            headers["x-should-retry"] = "true" if self.may_retry else "false"
        return headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with this error (an ASGI application), in the shape of the path's API."""
        anthropic = scope["path"].startswith(_ANTHROPIC_PATH)
        content = msgspec.json.encode(self.anthropic_body() if anthropic else self.body())
        response = Response(content, self.status, self.headers(), media_type="application/json")
        await response(scope, receive, send)


class UnreachableError(GatewayError):
    """The engine took nothing of the request: it may be sent again, to the same engine when it is back."""


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> GatewayError:
    """Return the 400 for a request that can never work as it is."""
    return GatewayError(400, message, param=param, code=code)


def model_not_found(model: str) -> GatewayError:
    """Return the 404 for a model that the engine does not serve."""
    shown = model[:200]
    return GatewayError(
        404,
        f"The model `{shown}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def backend_unavailable(message: str, *, retry_after_s: float = 5) -> GatewayError:
    """Return the 503 for an engine that cannot be reached: nothing of the request was accepted."""
    return GatewayError(503, message, code="backend_unavailable", retry_after_s=retry_after_s, may_retry=True)


def backend_lost(message: str) -> GatewayError:
    """Return the 502 for an engine that accepted the request and then failed it."""
    return GatewayError(502, message, code="backend_unavailable", retry_after_s=5, may_retry=False)


def overloaded(message: str, *, retry_after_s: float = 5) -> GatewayError:
    """Return the 503 for a full queue."""
    return GatewayError(503, message, code="overloaded", retry_after_s=retry_after_s)


def key_busy(message: str, *, retry_after_s: float) -> GatewayError:
    """Return the 429 for one key that has too many requests."""
    return GatewayError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def unreachable(message: str) -> UnreachableError:
    """Return the 503 for an engine that refused the connection, or says that it is still loading."""
    return UnreachableError(
        503, message, code="backend_unavailable", retry_after_s=RESTART_RETRY_AFTER_S, may_retry=True
    )


def timed_out(message: str) -> GatewayError:
    """Return the 504 for a stage that took too long."""
    return GatewayError(504, message, code="timeout", may_retry=False)
