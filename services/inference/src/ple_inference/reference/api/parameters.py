"""Request bodies, and the engine's parameters that they stand for."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ple_inference.reference.api.errors import ApiError, bad_request
from ple_inference.reference.sampling import SamplingParams

_Token = Annotated[int, Field(ge=0)]
_StopText = Annotated[str, Field(min_length=1, max_length=1000)]
# A surrogate that is escaped in JSON: half of a pair, or a lone one.
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _Body(BaseModel):
    """Unknown fields are ignored, and null means the default: both as OpenAI does it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(_Body):
    include_usage: bool = False


class GenerationBody(_Body):
    """What chat and text completions have in common."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    presence_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    stop: Annotated[list[_StopText], BeforeValidator(_listed), Field(max_length=4)] = []
    stop_token_ids: list[_Token] = Field([], max_length=64)
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] = {"type": "text"}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[_Token] | list[str] | list[list[_Token]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] = {"type": "text"}

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or messages as of a chat."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}


_AnyBody = TypeVar("_AnyBody", bound=_Body)


def parse_body(raw: bytes, kind: type[_AnyBody]) -> _AnyBody:
    """JSON bytes to a body. Raises ApiError that names the field."""
    try:
        values = json.loads(raw, parse_constant=_refuse_constant)
        if _HALF_OF_A_PAIR.search(raw):
            # Strings that are no text, which nothing further on could encode.
            text = json.dumps(values, ensure_ascii=False)
            values = json.loads(_SURROGATE.sub("\ufffd", text))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise bad_request("the body must be a JSON object")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _field_error(error) from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _field_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    param = str(first["loc"][0]) if first["loc"] else None
    return bad_request(f"{path}: {first['msg']}" if path else first["msg"], param)


def sampling_params(
    body: GenerationBody, defaults: dict[str, Any], *, vocab_size: int, room: int, default_max_tokens: int
) -> SamplingParams:
    """What the engine is asked for.

    `defaults` is the checkpoint's generation_config; `room` is what the prompt leaves of the window.
    """
    for param, ids in (("logit_bias", body.logit_bias), ("stop_token_ids", body.stop_token_ids)):
        if any(not 0 <= token < vocab_size for token in ids):
            raise bad_request(f"a token id outside the vocabulary of {vocab_size}", param)

    def choose(value: Any, name: str, default: Any) -> Any:
        return value if value is not None else defaults.get(name, default)

    max_tokens = min(body.wanted_tokens() or default_max_tokens, room)
    return SamplingParams(
        temperature=choose(body.temperature, "temperature", 1.0),
        top_p=choose(body.top_p, "top_p", 1.0),
        top_k=max(0, choose(body.top_k, "top_k", 0)),
        min_p=choose(body.min_p, "min_p", 0.0),
        repetition_penalty=choose(body.repetition_penalty, "repetition_penalty", 1.0),
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=min(body.min_tokens, max_tokens),
        stop=tuple(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        logprobs=body.wanted_logprobs(),
    )
