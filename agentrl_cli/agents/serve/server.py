"""Puts a model server together: policy, adapters, sessions, recorder, routes; and listens.

LoRA adapters are put on the loaded model and taken off between turns. Served sessions become episodes in the store:
turns as they are made, the end with its reward and drift.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from agentrl_cli.agents.gateway.app import Gateway, PrivateRoute
from agentrl_cli.agents.gateway.http import PageGuard, json_body
from agentrl_cli.agents.gateway.request import bad
from agentrl_cli.agents.gateway.sampling import Limits
from agentrl_cli.agents.gateway.session import OnTurn, Session, Trace
from agentrl_cli.agents.gateway.sessions import TRACE, Sessions
from agentrl_cli.agents.serve.models import ServedModel, ServedModels, SharedEngine
from agentrl_cli.chat.render import Chat
from agentrl_cli.config import Config, RolloutConfig
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.errors import ModelError
from agentrl_cli.hooks.waits import interruptible
from agentrl_cli.inference.policy import LocalPolicy
from agentrl_cli.models.adapter import ADAPTER_FILE, drop_adapter, put_adapter, use_adapter
from agentrl_cli.models.load import adapter_base, compare_base, model_folder
from agentrl_cli.policies.load import Loaded, load_policy, make_policy
from agentrl_cli.rollout.recorder import Observer, StoreRecorder, make_observers
from agentrl_cli.rollout.transcript import Transcript
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.checkpoint_names import pin_version, split_checkpoint
from agentrl_cli.store.new_run import new_run
from agentrl_cli.types import Episode, Outcome, RewardPart, Tokens, Turn, new_id

KIND = "serve"
"""Kind of the run and its episodes."""


class SessionRecorder(StoreRecorder):
    """Writes the sessions of a server into its run. A session without an answer leaves no episode."""

    def __init__(
        self, store: Store, run: RunRow, chat: Chat, observers: Sequence[Observer] = ()
    ) -> None:
        super().__init__(store, observers)
        self._run, self._chat = run, chat
        self._transcripts: dict[str, Transcript] = {}

    def turn(self, episode_id: str, turn: Turn, tokens: Tokens) -> None:
        # An answer is stored before its client has it; the messages before it are stored with it.
        self.store.episodes.add_turn(episode_id, turn, tokens, later=turn.role != "assistant")

    def write(self, key: str, seed: int, turn: Turn, tokens: Tokens) -> None:
        """Store a turn of a session."""
        text = self._transcripts.get(key)
        if text is None:
            episode = Episode(
                new_id(), key, run_id=self._run.id, seed=seed, kind=KIND, started=time.time()
            )
            text = self._transcripts[key] = Transcript(episode, self._chat, self)
            text.start("")
        version = text.episode.weights_version or turn.weights_version
        text.episode = text.episode.with_(weights_version=version)
        text.record(turn, tokens)

    def finish(self, episode: Episode) -> None:
        self.store.episodes.finish(episode)
        self.observe(episode)

    def end(self, session: Session, trace: Trace, reward: float | None) -> None:
        """Store the end of a session's episode."""
        text = self._transcripts.pop(session.key, None)
        if text is None:
            return
        text.drifts, text.guard.tools = list(trace.drift), trace.tools
        if reward is None:
            text.finish(Outcome.UNGRADED, "", ())
        else:
            outcome = Outcome.SOLVED if reward >= 1.0 else Outcome.FAILED
            text.finish(outcome, "", (RewardPart("reward", reward, primary=True),))


class Adapters:
    """The adapters of one loaded model. Its engine is made again when one is put on or taken off.

    That is because an engine may hold a copy of the model's layers, and an adapter may wrap others than those before.
    """

    def __init__(
        self,
        loaded: Loaded,
        policy: LocalPolicy,
        config: PolicySettings,
        base: Path,
        store: Store | None,
    ) -> None:
        self._model, self._folder, self._name = loaded.model, loaded.folder, loaded.name
        self._decode = loaded.chat.tokenizer.decode
        self._config, self._base, self._store = config, base, store
        self._own = "default" if hasattr(loaded.model, "peft_config") else None
        self._numbers = itertools.count()
        self._policy = policy
        self.engine = SharedEngine(policy, self.activate)

    def activate(self, model: ServedModel) -> None:
        """Compute with a model's weights from here on; no turn may be running."""
        if hasattr(self._model, "peft_config"):
            use_adapter(self._model, model.adapter or self._own)
        self._policy.set_version(model.weights_version)

    async def load(self, spec: str) -> tuple[str, str]:
        """Put the adapter of `RUN@STEP` or a folder on the model; return peft's name for it, and its version.

        Raises ModelError, NotFound.
        """
        if self._config.rollout.cuda_graphs != "off":
            raise ModelError(
                "Adapters are served without CUDA graphs.", hint="--set rollout.cuda_graphs=off"
            )
        folder = model_folder(spec, self._config.model, base=self._base, store=self._store)
        self._check(spec, folder)
        name = f"adapter{next(self._numbers)}"
        self._model = put_adapter(self._model, folder, name)
        await self._renew()
        return name, pin_version(self._store, spec, folder)

    async def unload(self, name: str) -> None:
        """Take an adapter off the model."""
        self._model = drop_adapter(self._model, name)
        await self._renew()

    def _check(self, spec: str, folder: Path) -> None:
        if not (folder / ADAPTER_FILE).is_file():
            raise ModelError(f"{spec} is not an adapter: there is no {ADAPTER_FILE} in {folder}.")
        assert self._folder is not None
        mine = self._folder
        if (mine / ADAPTER_FILE).is_file():
            mine = adapter_base(mine, self._config.model, base=self._base)
        under = adapter_base(folder, self._config.model, base=self._base)
        if under.resolve() != mine.resolve():
            raise ModelError(f"The adapter {spec} was trained on {under}, and {mine} is served.")
        compare_base(folder, under)

    async def _renew(self) -> None:
        await self._policy.close()
        self._policy = self.engine.policy = make_policy(
            self._model, self._config, self._name, self._decode, False
        )


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
        config = config.replace(deterministic=False)
        loaded = interruptible()(load_policy)(spec, config, base=base, store=store)
        recorder, run = None, ""
        if record:
            assert store is not None
            recorder, run = stack.enter_context(_recording(store, config, loaded))
        if isinstance(loaded.policy, LocalPolicy):
            holder = Adapters(loaded, loaded.policy, PolicySettings.of(config), base, store)
            engine = holder.engine
            models = ServedModels(loaded.name, engine, holder.load, holder.unload, aliases)
        else:
            engine = SharedEngine(loaded.policy)
            models = ServedModels(loaded.name, engine, aliases=aliases)

        async def close() -> None:
            await engine.policy.close()  # by then the engine may have another one

        stack.push_async_callback(close)
        for given in adapters:
            name, _, path = given.rpartition("=")
            await models.add(name or path, path)
        maker = _maker(models, engine, loaded, config.rollout, recorder, watch)
        sessions = Sessions(maker, recorder.end if recorder else None)
        stack.push_async_callback(sessions.close)
        routes = list(_routes(models, base, store))
        gateway = Gateway(sessions, models, loaded.chat, token=token, routes=routes)
        yield ModelServer(gateway, models, sessions, run)


@contextlib.contextmanager
def _recording(
    store: Store, config: Config, loaded: Loaded
) -> Iterator[tuple[SessionRecorder, str]]:
    """Yield a run for the served sessions; its status is written at the end.

    Sessions of servers that were killed are ended.
    """
    observers = make_observers(config)
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
            yield SessionRecorder(store, row, loaded.chat, observers), row.name
        finally:
            store.flush()
            store.runs.update(row.id, status="finished", ended=time.time())


def _maker(
    models: ServedModels,
    engine: SharedEngine,
    loaded: Loaded,
    rollout: RolloutConfig,
    recorder: SessionRecorder | None,
    watch: Watch | None,
) -> Any:
    sampling = rollout.sampling()

    def make(key: str) -> Session:
        length = engine.policy.context_length
        named = not key.startswith(TRACE)
        limits = Limits(length, length, choices=1 if named else CHOICES, retries=named)
        seed = secrets.randbits(62)
        writers: list[OnTurn] = [] if recorder is None else [partial(recorder.write, key, seed)]
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
    checkpoint = split_checkpoint(spec)
    if checkpoint is not None and checkpoint[1] != "base":
        if store is None:
            raise bad(
                f"There is no run {checkpoint[0]!r}: this project has no store of runs.", "adapter"
            )
        store.runs.get(checkpoint[0])
        return
    if not (base / spec).resolve().is_relative_to(base.resolve()):
        raise bad(
            f"{spec} is outside the project: adapters are loaded from the project and its runs.",
            "adapter",
        )
    if not (base / spec).is_dir():
        raise bad(f"{spec} is neither a folder of the project nor RUN@STEP.", "adapter")
