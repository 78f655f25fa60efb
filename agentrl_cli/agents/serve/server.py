"""Puts a model server together: policy, adapters, sessions, recorder, routes; and listens."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from agentrl_cli.agents.gateway.app import Gateway, PrivateRoute
from agentrl_cli.agents.gateway.guard import PageGuard
from agentrl_cli.agents.gateway.http import json_body
from agentrl_cli.agents.gateway.request import bad
from agentrl_cli.agents.gateway.sampling import Limits
from agentrl_cli.agents.gateway.session import OnTurn, Session
from agentrl_cli.agents.gateway.sessions import TRACE, Sessions
from agentrl_cli.agents.serve.adapters import Adapters
from agentrl_cli.agents.serve.models import ServedModels, SharedEngine
from agentrl_cli.agents.serve.recorder import KIND, Recorder
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.policies.load import load_policy
from agentrl_cli.store import Store
from agentrl_cli.store.new_run import new_run
from agentrl_cli.types import Tokens, Turn

if TYPE_CHECKING:
    from agentrl_cli.config import Config
    from agentrl_cli.policies.load import Loaded

Watch = Callable[[str], OnTurn]

SWEEP = 5.0
"""Seconds between looks for idle sessions."""
CHOICES = 16
"""Answers to one request outside an episode."""


@dataclass
class ModelServer:
    """Everything open at once."""

    gateway: Gateway
    models: ServedModels
    sessions: Sessions
    run: str
    """Name of the run that records; empty if nothing is recorded."""

    def app(self, names: Collection[str]) -> ASGIApp:
        """Return the ASGI application. `names`: those that a request's Host may have, besides addresses."""
        return PageGuard(
            self.gateway.app, names, hint="`agentrl serve --allow-host NAME` adds a name."
        )

    async def sweep(self, idle: float) -> None:
        """End sessions that were idle for so long, again and again."""
        while True:
            await asyncio.sleep(min(SWEEP, idle))
            await self.sessions.sweep(idle)


@contextlib.asynccontextmanager
async def open_server(
    config: Config,
    *,
    base: Path,
    db: Path,
    spec: str | None = None,
    adapters: Sequence[str] = (),
    aliases: Sequence[str] = (),
    record: bool = False,
    token: str = "",
    watch: Watch | None = None,
) -> AsyncIterator[ModelServer]:
    """Load the model and its adapters (`NAME=SPEC` or `SPEC`) and open what records. Raises AgentRLErrors.

    `aliases` are further names of the model itself. `watch` makes, for a session's key, a callback for its turns.
    """
    async with contextlib.AsyncExitStack() as stack:
        store = None
        if record or db.is_file():
            db.parent.mkdir(parents=True, exist_ok=True)
            store = stack.enter_context(Store.open(db, readonly=not record))
        # Fixed slots belong to a training: a session that is idle would keep one.
        config = config.model_copy(update={"deterministic": False})
        loaded = load_policy(spec, config, base=base, store=store)
        recorder, run = None, ""
        if record:
            assert store is not None
            recorder, run = stack.enter_context(_recording(store, config, loaded))
        local = loaded.policy if isinstance(loaded.policy, LocalPolicy) else None
        holder = Adapters(loaded, local, config, base, store) if local is not None else None
        engine = holder.engine if holder is not None else SharedEngine(loaded.policy)
        stack.push_async_callback(engine.close)
        load, unload = (holder.load, holder.unload) if holder else (None, None)
        models = ServedModels(loaded.name, engine, load, unload, aliases)
        for given in adapters:
            name, _, path = given.rpartition("=")
            await models.add(name or path, path)
        maker = _maker(models, engine, loaded, config, recorder, watch)
        sessions = Sessions(maker, recorder.end if recorder else None)
        stack.push_async_callback(sessions.close)
        routes = list(_routes(models, base, store))
        gateway = Gateway(sessions, models, loaded.chat, token=token, routes=routes)
        yield ModelServer(gateway, models, sessions, run)


@contextlib.contextmanager
def _recording(store: Store, config: Config, loaded: Loaded) -> Iterator[tuple[Recorder, str]]:
    """Yield a run for the served sessions; its status is written at the end.

    Sessions of servers that were killed are ended.
    """
    for dead in store.runs.all():
        if dead.kind == KIND and dead.state == "interrupted":
            store.episodes.cancel(dead.id)
    tokenizer = loaded.chat.tokenizer
    store.tokenizers.add(
        tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", tokenizer.specials
    )
    row = new_run(
        config, store, kind=KIND, packs=["traces"], tokenizer=tokenizer.hash, model=loaded.name
    )
    with store.claims.hold(row.id, KIND):
        try:
            yield Recorder(store, row, tokenizer.hash), row.name
        finally:
            store.flush()
            store.runs.update(row.id, status="finished", ended=time.time())


def _maker(
    models: ServedModels,
    engine: SharedEngine,
    loaded: Loaded,
    config: Config,
    recorder: Recorder | None,
    watch: Watch | None,
) -> Any:
    """Opens a session for a key that a client brought."""
    sampling = config.rollout.sampling()

    def make(key: str) -> Session:
        length = engine.policy.context_length
        named = not key.startswith(TRACE)
        limits = Limits(length, length, choices=1 if named else CHOICES, retries=named)
        seed = secrets.randbits(62)
        writers = [recorder.writer(key, seed)] if recorder is not None else []
        writers += [watch(key)] if watch is not None else []

        def write(turn: Turn, tokens: Tokens) -> None:
            for writer in writers:
                writer(turn, tokens)

        return Session(
            key, loaded.chat, models.policy(""), replace(sampling, seed=seed), limits, write
        )

    return make


def _routes(models: ServedModels, base: Path, store: Store | None) -> Iterator[PrivateRoute]:
    """Yield the routes that add and remove adapters: AgentRL's own, and vLLM's names for them."""

    async def add(request: Request) -> Response:
        body = await json_body(request)
        name, spec = (
            body.get("id", body.get("lora_name")),
            body.get("adapter", body.get("lora_path")),
        )
        if not isinstance(name, str) or not name or not isinstance(spec, str) or not spec:
            raise bad(
                "An adapter needs `id`, the name to serve it under, and `adapter`, RUN@STEP or a folder."
            )
        _require_own(spec, base, store)
        model = await models.add(name, spec)
        return JSONResponse(
            {"id": name, "object": "model", "weights_version": model.weights_version}
        )

    async def remove(request: Request) -> Response:
        name = request.path_params.get("model") or (await json_body(request)).get("lora_name")
        await models.remove(str(name))
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    yield "/v1/models", add, "POST"
    yield "/v1/models/{model:path}", remove, "DELETE"
    yield "/v1/load_lora_adapter", add, "POST"
    yield "/v1/unload_lora_adapter", remove, "POST"


def _require_own(spec: str, base: Path, store: Store | None) -> None:
    """Raise RequestError unless a client's adapter is a checkpoint of the project's runs, or a folder inside it.

    A client over HTTP may not be the user who started the server: no other folder is opened, no hub is asked.
    """
    run, at, which = spec.rpartition("@")
    if at and "/" not in spec and which != "base":
        if store is None:
            raise bad(f"There is no run {run!r}: this project has no store of runs.", "adapter")
        store.runs.get(run)
        return
    if not (base / spec).resolve().is_relative_to(base.resolve()):
        raise bad(
            f"{spec} is outside the project: adapters are loaded from the project and its runs.",
            "adapter",
        )
    if not (base / spec).is_dir():
        raise bad(f"{spec} is neither a folder of the project nor RUN@STEP.", "adapter")
