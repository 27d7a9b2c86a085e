from ple_rpc.table.v1 import table_pb2 as _table_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "fingerprint", "table", "instance_id", "limits", "doorbell_path")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DOORBELL_PATH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    fingerprint: bytes
    table: _table_pb2.TableDescription
    instance_id: bytes
    limits: _table_pb2.Limits
    doorbell_path: str
    def __init__(self, protocol_version: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., table: _Optional[_Union[_table_pb2.TableDescription, _Mapping]] = ..., instance_id: _Optional[bytes] = ..., limits: _Optional[_Union[_table_pb2.Limits, _Mapping]] = ..., doorbell_path: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("client_name", "expected_fingerprint")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    expected_fingerprint: bytes
    def __init__(self, client_name: _Optional[str] = ..., expected_fingerprint: _Optional[bytes] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("opened", "draining", "degraded")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    draining: Draining
    degraded: Degraded
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., degraded: _Optional[_Union[Degraded, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session_token", "quotas")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    quotas: _table_pb2.Limits
    def __init__(self, session_token: _Optional[bytes] = ..., quotas: _Optional[_Union[_table_pb2.Limits, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Degraded(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "epoch", "span")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: str
    epoch: int
    span: _table_pb2.TokenSpan
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., span: _Optional[_Union[_table_pb2.TokenSpan, _Mapping]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("accepted", "queued_rows")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROWS_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    queued_rows: int
    def __init__(self, accepted: bool = ..., queued_rows: _Optional[int] = ...) -> None: ...

class CancelPrefetchRequest(_message.Message):
    __slots__ = ("session_token", "request_id", "epoch")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    request_id: str
    epoch: int
    def __init__(self, session_token: _Optional[bytes] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class CancelPrefetchResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: bool = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("row_ids_le64", "span", "expected_fingerprint")
    ROW_IDS_LE64_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    row_ids_le64: bytes
    span: _table_pb2.TokenSpan
    expected_fingerprint: bytes
    def __init__(self, row_ids_le64: _Optional[bytes] = ..., span: _Optional[_Union[_table_pb2.TokenSpan, _Mapping]] = ..., expected_fingerprint: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    def __init__(self, rows: _Optional[bytes] = ...) -> None: ...

class LookupStreamRequest(_message.Message):
    __slots__ = ("lookup_id", "lookup")
    LOOKUP_ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    lookup_id: int
    lookup: LookupRequest
    def __init__(self, lookup_id: _Optional[int] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ...) -> None: ...

class LookupStreamResponse(_message.Message):
    __slots__ = ("lookup_id", "rows", "last")
    LOOKUP_ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    lookup_id: int
    rows: bytes
    last: bool
    def __init__(self, lookup_id: _Optional[int] = ..., rows: _Optional[bytes] = ..., last: bool = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("uptime_s", "lookups", "rows_served", "rows_advised", "prefetches_accepted", "prefetches_dropped", "prefetches_cancelled", "rows_prefetched", "queued_prefetches", "major_faults", "advice")
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_SERVED_FIELD_NUMBER: _ClassVar[int]
    ROWS_ADVISED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHES_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHES_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    ROWS_PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    MAJOR_FAULTS_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    uptime_s: float
    lookups: int
    rows_served: int
    rows_advised: int
    prefetches_accepted: int
    prefetches_dropped: int
    prefetches_cancelled: int
    rows_prefetched: int
    queued_prefetches: int
    major_faults: int
    advice: str
    def __init__(self, uptime_s: _Optional[float] = ..., lookups: _Optional[int] = ..., rows_served: _Optional[int] = ..., rows_advised: _Optional[int] = ..., prefetches_accepted: _Optional[int] = ..., prefetches_dropped: _Optional[int] = ..., prefetches_cancelled: _Optional[int] = ..., rows_prefetched: _Optional[int] = ..., queued_prefetches: _Optional[int] = ..., major_faults: _Optional[int] = ..., advice: _Optional[str] = ...) -> None: ...
