"""The engine's models, remembered while it is down."""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ple_gateway.engine import Engine
from ple_gateway.errors import backend_unavailable, invalid, model_not_found
from ple_gateway.upstream import UpstreamError

_FRESH_S = 10.0


class ModelCatalogue:
    """The list of models as the engine gave it last; asked for again when older than ten seconds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listing: dict[str, Any] | None = None
        self._fetched_s = 0.0

    async def refresh(self) -> None:
        """Fetch the list; on any failure the old one stays."""
        try:
            reply = await self._engine.get("/v1/models")
            listing = msgspec.json.decode(reply.body) if reply.status == 200 else None
        except (UpstreamError, msgspec.DecodeError, RecursionError):
            return
        models = listing.get("data") if isinstance(listing, dict) else None
        if isinstance(models, list) and models and all(map(_is_model, models)):
            self._listing = listing
            self._fetched_s = time.monotonic()

    @property
    def default(self) -> str | None:
        """The model of requests that name none; None while the engine has not told its models."""
        return self._listing["data"][0].get("id") if self._listing else None

    async def listing(self) -> dict[str, Any]:
        """Return the list; raises 503 when the engine has never been seen."""
        if time.monotonic() - self._fetched_s > _FRESH_S:
            await self.refresh()
        if self._listing is None:
            raise backend_unavailable("The engine has not told its models yet; it may be starting.")
        return self._listing

    async def choose(self, request: dict[str, Any]) -> None:
        """Put the engine's model into a request that names none; raises 404 for one it does not serve."""
        name = request.get("model")
        if name is not None and not isinstance(name, str):
            raise invalid("`model` must be a string.", param="model")
        if self._listing is None or (name and not self._serves(name)):
            await self.refresh()
        if self._listing is None:
            return  # the engine decides
        if not name:
            request["model"] = self._listing["data"][0]["id"]
        elif not self._serves(name):
            raise model_not_found(name)

    def window_of(self, name: Any) -> int | None:
        """Tokens that prompt and answer of a model may have together; None when the engine does not tell."""
        for model in (self._listing or {"data": []})["data"]:
            if model.get("id") == name and isinstance(model.get("max_model_len"), int):
                return int(model["max_model_len"])
        return None

    def _serves(self, name: str) -> bool:
        return any(model.get("id") == name for model in (self._listing or {"data": []})["data"])

    async def list_models(self, _request: Request) -> Response:
        """GET /v1/models."""
        return _json(await self.listing())

    async def get_model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        wanted = request.path_params["model"]
        for model in (await self.listing())["data"]:
            if model.get("id") == wanted:
                return _json(model)
        raise model_not_found(wanted)


def _is_model(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str)


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
