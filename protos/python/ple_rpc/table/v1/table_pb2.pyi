from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_TYPE_UNSPECIFIED: _ClassVar[RowType]
    ROW_TYPE_BF16: _ClassVar[RowType]
    ROW_TYPE_FP8_E4M3: _ClassVar[RowType]
    ROW_TYPE_F32: _ClassVar[RowType]
ROW_TYPE_UNSPECIFIED: RowType
ROW_TYPE_BF16: RowType
ROW_TYPE_FP8_E4M3: RowType
ROW_TYPE_F32: RowType

class TableDescription(_message.Message):
    __slots__ = ("row_type", "row_elements", "row_bytes", "rows", "used_rows", "scale_bits", "scale_bytes", "hash")
    ROW_TYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    USED_ROWS_FIELD_NUMBER: _ClassVar[int]
    SCALE_BITS_FIELD_NUMBER: _ClassVar[int]
    SCALE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    row_type: RowType
    row_elements: int
    row_bytes: int
    rows: int
    used_rows: int
    scale_bits: int
    scale_bytes: int
    hash: HashConstants
    def __init__(self, row_type: _Optional[_Union[RowType, str]] = ..., row_elements: _Optional[int] = ..., row_bytes: _Optional[int] = ..., rows: _Optional[int] = ..., used_rows: _Optional[int] = ..., scale_bits: _Optional[int] = ..., scale_bytes: _Optional[int] = ..., hash: _Optional[_Union[HashConstants, _Mapping]] = ...) -> None: ...

class HashConstants(_message.Message):
    __slots__ = ("ngram_size", "heads_per_ngram", "eos_token_id", "multipliers", "head_sizes", "head_offsets")
    NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEADS_PER_NGRAM_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MULTIPLIERS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZES_FIELD_NUMBER: _ClassVar[int]
    HEAD_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ngram_size: int
    heads_per_ngram: int
    eos_token_id: int
    multipliers: _containers.RepeatedScalarFieldContainer[int]
    head_sizes: _containers.RepeatedScalarFieldContainer[int]
    head_offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ngram_size: _Optional[int] = ..., heads_per_ngram: _Optional[int] = ..., eos_token_id: _Optional[int] = ..., multipliers: _Optional[_Iterable[int]] = ..., head_sizes: _Optional[_Iterable[int]] = ..., head_offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_rows_per_unary_lookup", "max_rows_per_stream_lookup", "stream_chunk_bytes", "max_tokens_per_prefetch", "max_queued_prefetches", "max_slots", "max_rows_per_slot", "max_region_bytes")
    MAX_ROWS_PER_UNARY_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_PER_STREAM_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    STREAM_CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_PREFETCH_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_PREFETCHES_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_PER_SLOT_FIELD_NUMBER: _ClassVar[int]
    MAX_REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_rows_per_unary_lookup: int
    max_rows_per_stream_lookup: int
    stream_chunk_bytes: int
    max_tokens_per_prefetch: int
    max_queued_prefetches: int
    max_slots: int
    max_rows_per_slot: int
    max_region_bytes: int
    def __init__(self, max_rows_per_unary_lookup: _Optional[int] = ..., max_rows_per_stream_lookup: _Optional[int] = ..., stream_chunk_bytes: _Optional[int] = ..., max_tokens_per_prefetch: _Optional[int] = ..., max_queued_prefetches: _Optional[int] = ..., max_slots: _Optional[int] = ..., max_rows_per_slot: _Optional[int] = ..., max_region_bytes: _Optional[int] = ...) -> None: ...

class TokenSpan(_message.Message):
    __slots__ = ("tokens_le32", "context_le32")
    TOKENS_LE32_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LE32_FIELD_NUMBER: _ClassVar[int]
    tokens_le32: bytes
    context_le32: bytes
    def __init__(self, tokens_le32: _Optional[bytes] = ..., context_le32: _Optional[bytes] = ...) -> None: ...
