"""`LLMProxy`: serves a model to runners that are not in a training, and keeps their calls as spans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.agents.gateway.app import OneModel
from agentrl_cli.agents.gateway.http import is_loopback, listening
from agentrl_cli.agents.gateway.session import OnTurn
from agentrl_cli.config import load_config
from agentrl_cli.paths import default_db
from agentrl_cli.plugins.lightning.spans import Span, SpanCoreFields, call_spans
from agentrl_cli.plugins.lightning.store import LightningStore, token_for
from agentrl_cli.plugins.lightning.types import LLM, ProxyLLM
from agentrl_cli.types import Tokens, Turn

BACKENDS = {"hosted_vllm": "vllm", "openai": "openai"}
"""LiteLLM's prefix of a model that a server samples for → `remote.backend`."""
_LOG = logging.getLogger(__name__)


class LLMProxy:
    """The model server of this package under Agent-Lightning's addresses, `/rollout/{id}/attempt/{id}/v1`."""

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[Mapping[str, Any]] | None = None,
        store: LightningStore | None = None,
        host: str | None = None,
        litellm_config: Mapping[str, Any] | None = None,
        num_retries: int = 0,
        num_workers: int = 1,
        launch_mode: str = "mp",
        launcher_args: Any = None,
        middlewares: Sequence[Any] | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> None:
        """Serves one model: `model_name`, which clients use, and `litellm_params` whose `model` is a name or folder.

        LiteLLM's own arguments have no effect; those that are given are named in the log. Off the loopback clients must
        bring AGENTRL_TOKEN as their API key. Raises ValueError without one.
        """
        self.store, self.model_list = store, list(model_list or ())
        self._host, self._port = host or "127.0.0.1", port or 0
        self._token = "" if is_loopback(self._host) else token_for(self._host)
        given = {
            "litellm_config": litellm_config,
            "num_retries": num_retries,
            "num_workers": num_workers != 1,
            "launch_mode": launch_mode != "mp",
            "launcher_args": launcher_args,
            "middlewares": middlewares,
            "callbacks": callbacks,
        }
        if ignored := [name for name, value in given.items() if value]:
            _LOG.warning("LLMProxy: these arguments have no effect here: %s", ", ".join(ignored))
        self._exit: contextlib.AsyncExitStack | None = None
        self._address = ""
        self._writing: set[asyncio.Future[None]] = set()

    def get_store(self) -> LightningStore | None:
        """Return where the spans go."""
        return self.store

    def set_store(self, store: LightningStore) -> None:
        """Send the spans there."""
        self.store = store

    def update_model_list(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Other models, from the next start on."""
        self.model_list = list(model_list)

    def is_running(self) -> bool:
        """Whether it serves."""
        return self._exit is not None

    async def start(self) -> None:
        """Load the model and listen. Raises ValueError without a store or a single model, AgentRLErrors."""
        if self.store is None:
            raise ValueError("Store is not set. Please set the store before starting the LLMProxy.")
        if len(self.model_list) != 1:
            raise ValueError(
                f"One model is served here, and the model_list has {len(self.model_list)}."
            )
        from agentrl_cli.agents.serve.server import open_server

        base, name = Path.cwd(), self.model_list[0]["model_name"]
        config = load_config((), (), None, self._flags())[0]
        async with contextlib.AsyncExitStack() as stack:
            opening = open_server(
                config, base=base, db=default_db(base), watch=self._watch, token=self._token
            )
            server = await stack.enter_async_context(opening)
            server.gateway.models = OneModel(server.models.policy(""), name)
            serving = listening(server.app({self._host}), self._host, self._port)
            self._address = await stack.enter_async_context(serving)
            self._exit = stack.pop_all()

    async def stop(self) -> None:
        """End it; running calls are cut off."""
        stack, self._exit = self._exit, None
        if stack is not None:
            await stack.aclose()

    async def restart(self, *, _port: int | None = None) -> None:
        """Stop and start."""
        await self.stop()
        self._port = self._port if _port is None else _port
        await self.start()

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: dict[str, Any] | None = None,
    ) -> LLM:
        """Return the model as a resource: for one attempt, or for whichever asks. Raises ValueError."""
        names = {entry["model_name"] for entry in self.model_list}
        if model is None and len(names) != 1:
            raise ValueError(
                f"There are {len(names)} models in model_list. Please specify the model."
            )
        proxy = ProxyLLM(
            endpoint=f"{self._address}/v1",
            model=model or next(iter(names)),
            api_key=self._token or None,
            sampling_parameters=dict(sampling_parameters or {}),
        )
        if rollout_id is None and attempt_id is None:
            return proxy
        url = proxy.get_base_url(rollout_id, attempt_id)
        return LLM(**{**dict(proxy), "resource_type": "llm", "endpoint": url})

    def _flags(self) -> dict[str, Any]:
        """Settings for the model that `litellm_params` mean; `api_base` is a server that samples for it."""
        given = self.model_list[0]["litellm_params"]
        if ignored := [name for name in given if name not in ("model", "api_base")]:
            _LOG.warning("litellm_params: these have no effect here: %s", ", ".join(ignored))
        provider, _, rest = str(given["model"]).partition("/")
        if provider not in BACKENDS:
            return {"model.name": given["model"]}
        flags = {"model.name": rest, "remote.backend": BACKENDS[provider], "remote.model": rest}
        return (
            flags if given.get("api_base") is None else {**flags, "remote.url": given["api_base"]}
        )

    def _watch(self, key: str) -> OnTurn:
        """Adds a span for each answer of the session of an attempt, whose key is `rollout/attempt`."""
        rollout_id, _, attempt_id = key.partition("/")
        turns: list[Turn] = []
        tokens: list[Tokens] = []

        async def add(core: SpanCoreFields, store: LightningStore) -> None:
            number = await store.get_next_span_sequence_id(rollout_id, attempt_id)
            where = {"rollout_id": rollout_id, "attempt_id": attempt_id}
            await store.add_span(Span.from_core_fields(core, **where, sequence_id=number))

        def write(turn: Turn, new: Tokens) -> None:
            turns.append(turn)
            tokens.append(new)
            if self.store is None or not attempt_id:
                return
            for core in call_spans(
                turns, Tokens.concat(tokens), self.model_list[0]["model_name"], len(turns) - 1
            ):
                writing = asyncio.ensure_future(add(core, self.store))
                self._writing.add(writing)
                writing.add_done_callback(self._end_write)

        return write

    def _end_write(self, task: asyncio.Future[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("a span was not kept: %s", error)
