"""Errors in OpenAI's shape, whoever raises them."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ple_inference.reference.engine import EngineStoppedError, QueueFullError
from ple_inference.reference.sampling import NoLegalTokenError
from ple_rpc.errors import TableError

_log = logging.getLogger(__name__)
_MAX_MESSAGE = 2000
_RETRY_AFTER_S = 2


class ApiError(Exception):
    """An answer that is an error: status, and the body's four fields."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        self.body = {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return JSONResponse(self.body, self.status, headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str = "overloaded") -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, retry_after_s=_RETRY_AFTER_S)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an engine's error; never more than it should know."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NoLegalTokenError):
        return bad_request(str(error))
    if isinstance(error, QueueFullError | EngineStoppedError):
        return unavailable(str(error))
    if isinstance(error, TableError):
        return unavailable(f"the n-gram table cannot be read: {error}", code="table_unavailable")
    return ApiError(500, "the engine failed on this request", kind="server_error", code="internal_error")


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape."""

    async def on_api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def on_http_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        response = ApiError(error.status_code, str(error.detail), code=code).response()
        response.headers.update(dict(error.headers or {}))
        return response

    async def on_any_error(_: Request, error: Exception) -> JSONResponse:
        _log.error("request failed error=%r", error, exc_info=error)
        return as_api_error(error).response()

    handlers: dict[type[Exception], Any] = {
        ApiError: on_api_error,
        HTTPException: on_http_error,
        Exception: on_any_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
