"""What can go wrong between a client and the PLE daemon, and the gRPC status of each.

`EXCEPTION_OF_CODE` is the only place where codes and exceptions meet: the client raises by it, and the
daemon answers by its inverse, `code_of`.
"""

import grpc


class TableError(Exception):
    """Root of every error of the table. Its text is one line, fit for an operator."""


class TableUnavailable(TableError):
    """The daemon is starting, draining, gone, or does not answer. The only error worth a retry."""

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        """Whether the request had reached a daemon, so that a retry is a repetition."""


class TableChanged(TableError):
    """The table is not the one that the caller expects, or it changed under the daemon."""


class RowsLost(TableError):
    """The rows could not be read: a read error or a truncated file."""


class BadRow(TableError):
    """A row id outside the table."""


class BadRequest(TableError):
    """A malformed request."""


class QuotaExceeded(TableError):
    """More than a limit of Describe or a quota of the session allows."""


class NotPermitted(TableError):
    """This peer may not call."""


class NotOffered(TableError):
    """This daemon does not offer the call."""


class LookupCancelled(TableError):
    """The caller gave the lookup up. Never crosses the wire."""


EXCEPTION_OF_CODE: dict[grpc.StatusCode, type[TableError]] = {
    grpc.StatusCode.UNAVAILABLE: TableUnavailable,
    grpc.StatusCode.FAILED_PRECONDITION: TableChanged,
    grpc.StatusCode.DATA_LOSS: RowsLost,
    grpc.StatusCode.OUT_OF_RANGE: BadRow,
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QuotaExceeded,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
    grpc.StatusCode.UNIMPLEMENTED: NotOffered,
}

_CODE_OF_EXCEPTION = {exception: code for code, exception in EXCEPTION_OF_CODE.items()}


def code_of(error: TableError) -> grpc.StatusCode:
    """The status that carries `error`; UNKNOWN for one that never crosses the wire."""
    return _CODE_OF_EXCEPTION.get(type(error), grpc.StatusCode.UNKNOWN)


def from_rpc_error(error: grpc.RpcError) -> TableError:
    """The exception that a failed call stands for.

    A deadline that passed is a peer that does not answer, and a connection that broke in the middle of an
    answer can show as CANCELLED, INTERNAL or UNKNOWN: all of them are TableUnavailable. Lookups are
    idempotent, so that repeating one that did run is harmless.
    """
    code, details = error.code(), error.details() or "no details"
    exception = EXCEPTION_OF_CODE.get(code, TableUnavailable)
    if exception is TableUnavailable:
        # gRPC says in words alone whether a call failed before it left.
        sent = not details.startswith("failed to connect")
        return TableUnavailable(f"{code.name.lower()}: {details}", sent=sent)
    return exception(details)
