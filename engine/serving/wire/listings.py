"""Routes of Tinker's call set that only read: configuration, models, runs and saved weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.bookkeeping.entry import RequestRefusedError
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.wire.directory import KIND, RUN, SAMPLER, Directory
from engine.serving.wire.fields import BodyFields
from engine.serving.wire.routes import CLIENT_CONFIG, Handler, ReadBody, json_reply
from engine.serving.wire.served_model import ServedModel

_PAGE, _LONGEST_PAGE = 20, 1000


class ListingRoutes:
    """Handlers of the HTTP routes that list sessions, training runs and saved weights, or remove weights."""

    def __init__(self, model: ServedModel, ledger: Ledger, directory: Directory, read_body: ReadBody) -> None:
        self._model, self._ledger, self._directory, self._read_body = model, ledger, directory, read_body

    def posts(self) -> Mapping[str, Handler]:
        """Returns the handlers of POST requests by path."""
        return {
            "client/config": self._client_config, "client/dynamic_config": self._dynamic_config,
            "get_info": self._get_info, "weights_info": self._weights_info, "telemetry": self._telemetry,
        }  # fmt: skip

    def gets(self) -> Mapping[str, Handler]:
        """Returns the handlers of GET requests by path."""
        return {
            "healthz": self._health, "get_server_capabilities": self._capabilities,
            "samplers/{sampler:path}": self._sampler, "training_runs": self._runs,
            "training_runs/{run}/checkpoints": self._run_checkpoints, "training_runs/{run}": self._run,
            "checkpoints": self._checkpoints, "sessions": self._sessions, "sessions/{session}": self._session,
        }  # fmt: skip

    async def delete_checkpoint(self, request: Request) -> Response:
        """Removes the saved weights that the path of ``request`` names."""
        path = f"tinker://{request.path_params['run']}/{request.path_params['checkpoint']}"
        self._directory.weights(path)
        self._directory.remove_weights(path)
        return json_reply({})

    async def _client_config(self, request: Request) -> Response:
        await self._read_body(request)
        return json_reply(CLIENT_CONFIG)

    async def _dynamic_config(self, request: Request) -> Response:
        await self._read_body(request)
        return json_reply({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def _telemetry(self, request: Request) -> Response:
        await self._read_body(request)
        return json_reply({"status": "accepted"})

    async def _get_info(self, request: Request) -> Response:
        name = BodyFields.parsed(await self._read_body(request)).text("model_id")
        run = self._directory.run(name)
        if name not in self._ledger.lines:
            raise RequestRefusedError(f"model {name[:80]!r} was unloaded; create a model, or load saved weights.", 404)
        data = {"arch": self._model.architecture, "model_name": run["base_model"]}
        values = {"model_name": run["base_model"], "is_lora": run["is_lora"], "lora_rank": run["lora_rank"]}
        optimizer = {"type": "adamw"}
        return json_reply(
            {"type": "get_info", "model_id": name, "model_data": data, "optimizer_config": optimizer, **values}
        )

    async def _weights_info(self, request: Request) -> Response:
        note = self._directory.weights(BodyFields.parsed(await self._read_body(request)).text("tinker_path", most=1024))
        return json_reply({name: note[name] for name in KIND} | {"optimizer_config": {"type": "adamw"}})

    async def _health(self, request: Request) -> Response:
        journal = self._ledger.journal
        if journal is not None and journal.problem is not None:
            raise RequestRefusedError("the service cannot write its journal; start it again.", 503)
        return json_reply({"status": "ok"})

    async def _capabilities(self, request: Request) -> Response:
        facts = {"max_context_length": self._model.context, "trainable": True, "sampleable": True}
        return json_reply({"supported_models": [{"model_name": name, **facts} for name in self._model.names]})

    async def _sampler(self, request: Request) -> Response:
        name = request.path_params["sampler"]
        note = self._directory.sampler(name)
        return json_reply({"sampler_id": name, "base_model": note["base_model"], "model_path": note.get("model_path")})

    async def _sessions(self, request: Request) -> Response:
        return _page(request, "sessions", self._directory.sessions())

    async def _session(self, request: Request) -> Response:
        name = request.path_params["session"]
        note, notes = self._directory.session(name), self._directory.notes
        runs, samplers = ([one for one in notes(kind) if one.startswith(f"{name}:")] for kind in (RUN, SAMPLER))
        about = {field: note.get(field) for field in ("display_name", "user_metadata")}
        return json_reply({"training_run_ids": runs, "sampler_ids": samplers, **about})

    async def _run(self, request: Request) -> Response:
        return json_reply(self._directory.training_run(request.path_params["run"]))

    async def _runs(self, request: Request) -> Response:
        found = [self._directory.training_run(name) for name in reversed(self._directory.notes(RUN))]
        return _page(request, "training_runs", found)

    async def _run_checkpoints(self, request: Request) -> Response:
        self._directory.run(request.path_params["run"])
        return json_reply({"checkpoints": self._directory.checkpoints(request.path_params["run"])})

    async def _checkpoints(self, request: Request) -> Response:
        return _page(request, "checkpoints", self._directory.checkpoints())


def _page(request: Request, name: str, entries: Sequence[Any]) -> Response:
    """Returns a part of a list, by the query's limit and offset."""
    limit, offset = min(_LONGEST_PAGE, _number(request, "limit", _PAGE)), _number(request, "offset", 0)
    cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
    return json_reply({name: entries[offset : offset + limit], "cursor": cursor})


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (
        text.isascii()
        and text.isdecimal()
        and len(text) < 10
        and int(text) <= (_LONGEST_PAGE if name == "limit" else 10**9)
    ):
        raise RequestRefusedError(f"{name} is {text[:40]!r}; give a number of at most {_LONGEST_PAGE}.", 422)
    return int(text)
