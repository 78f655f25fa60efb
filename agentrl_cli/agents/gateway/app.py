"""The gateway over HTTP: every dialect under every address that names an episode.

    /v1/…                                                   the episode is named by key, header or body, or not at all
    /e/{key}/v1/…                                           by the address alone
    /rollout/{id}/attempt/{a}/v1/…                          also for agents that know a rollout and an attempt
    /proxy/rollout/{id}/attempt/{a}/mode/{m}/openai/v1/…    the same, with a mode

Under each: chat/completions, completions, responses, messages, messages/count_tokens, models; `v1` may be left out.
POST {address}/end ends an episode, with `{"reward": 0.5}` or without. A key that this process opened (`Sessions.open`)
lets its client in; everything else needs the token, if there is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentrl_cli.agents.emit import reward_value
from agentrl_cli.agents.gateway.dialects import DIALECTS
from agentrl_cli.agents.gateway.dialects.base import Dialect
from agentrl_cli.agents.gateway.http import (
    CLOSED,
    KEEP_ALIVE,
    Stream,
    aside,
    bearer,
    body_limit,
    first,
    is_token,
    json_body,
    wait_until_left,
)
from agentrl_cli.agents.gateway.messages import merge_messages
from agentrl_cli.agents.gateway.request import TOO_LONG, ModelRequest, Reply, RequestError, bad
from agentrl_cli.agents.gateway.session import Session
from agentrl_cli.agents.gateway.sessions import Sessions
from agentrl_cli.agents.gateway.tree import MessageTree
from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import AgentRLError, MissingDependency, TemplateError, UsageError
from agentrl_cli.policies.protocols import Policy

Handler = Callable[[Request], Awaitable[Any]]
PrivateRoute = tuple[str, Handler, str]
"""Path, handler and method of a route that needs the token, or the key of an episode."""
_LOG = logging.getLogger(__name__)

ADDRESSES = (
    "",
    "/e/{key}",
    "/rollout/{rollout}/attempt/{attempt}",
    "/proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}/openai",
)
NAMED = ("ep-", "agl-")
"""Beginnings of API keys that name an episode even if no one opened it."""
RETRIED = "x-stainless-retry-count"
SESSION_HEADERS = ("x-session-id", "x-agentrl-session")


class Models(Protocol):
    """The models that sample, by the names that clients use."""

    def policy(self, name: str) -> Policy:
        """Return the policy of a model; "" is the default. Raises RequestError (404) for a model that is not served."""

    def cards(self) -> Sequence[Mapping[str, Any]]:
        """Return the served models: `id`, and `parent` for an adapter."""


@dataclass(frozen=True)
class OneModel:
    """A single policy under one name."""

    served: Policy
    name: str

    def policy(self, name: str) -> Policy:
        """Return the policy. Raises RequestError for another name."""
        if name not in ("", self.name):
            raise unknown_model(name, [self.name])
        return self.served

    def cards(self) -> Sequence[Mapping[str, Any]]:
        """Return its card."""
        return [{"id": self.name, "max_model_len": self.served.context_length}]


def unknown_model(name: str, known: Sequence[str]) -> RequestError:
    """Return the answer to a request for a model that is not served."""
    hint = f"Served are: {', '.join(known)}."
    return RequestError(
        f"The model {name!r} is not served.",
        status=404,
        code="model_not_found",
        param="model",
        hint=hint,
    )


class Gateway:
    """The routes over some sessions and models. `app` is the ASGI application."""

    def __init__(
        self,
        sessions: Sessions,
        models: Models,
        chat: Chat,
        *,
        token: str = "",
        routes: Sequence[PrivateRoute] = (),
        keep_alive: float = KEEP_ALIVE,
    ) -> None:
        """Make the routes. `token` empty: no client needs one. `routes`: further ones of the server around this."""
        self.sessions, self.models, self.chat = sessions, models, chat
        self._token, self._keep_alive = token, keep_alive
        guarded = [
            Route(path, partial(self._guard, handler), methods=[method])
            for path, handler, method in (*self._private_routes(), *routes)
        ]
        self.app: ASGIApp = Starlette(
            routes=[Route("/health", self._health), *guarded],
            exception_handlers={HTTPException: _refuse_route, AgentRLError: answer_error},
        )

    def _private_routes(self) -> Iterator[PrivateRoute]:
        for address in ADDRESSES:
            for base in (f"{address}/v1", address) if address else ("/v1",):
                for dialect in DIALECTS.values():
                    yield f"{base}/{dialect.path}", partial(self._call, dialect), "POST"
                yield f"{base}/messages/count_tokens", self._count, "POST"
                yield f"{base}/models", self._models, "GET"
                yield f"{base}/models/{{model:path}}", self._model, "GET"
            if address:
                yield f"{address}/end", self._end, "POST"

    async def _guard(self, handler: Handler, request: Request) -> Any:
        """Answer a request that brings the token, or the key of an episode that was opened here."""
        token, credential = self._token, _credential(request)
        if (
            not token
            or is_token(token, credential)
            or self.sessions.admits(_path_key(request))
            or self.sessions.admits(credential)
        ):
            return await handler(request)
        raise RequestError("The token is missing or wrong.", status=401, code="invalid_api_key")

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _call(self, dialect: Dialect, request: Request) -> Any:
        """Answer a model call. Every error is answered in the dialect's form."""
        left: asyncio.Task[None] | None = None
        try:
            asked = await aside(dialect.parse, await self._body(request))
            session = self._session(request, asked)
            own = self.sessions.admits(
                session.key
            )  # an episode's model, whatever name its agent asks for
            policy = None if own else self.models.policy(asked.model)
            retry = request.headers.get(RETRIED, "0") not in ("", "0")
            work = asyncio.ensure_future(session.complete(asked, retry=retry, policy=policy))
            left = asyncio.ensure_future(wait_until_left(request.receive))
            # A stream waits a little before its head, so that most errors still have their own status.
            if not await first(work, left, self._keep_alive / 3 if asked.stream else None):
                events = partial(self._events, dialect, asked, session)
                stream, left = Stream(work, left, events, self._keep_alive), None
                return stream
            if not work.done():
                return Response(status_code=CLOSED)
            reply = self._remember(asked, work.result(), session)
            if asked.stream:
                return Response(
                    "".join(dialect.events(asked, reply)),
                    media_type="text/event-stream",
                    headers={"cache-control": "no-cache"},
                )
            return JSONResponse(dialect.answer(asked, reply))
        except Exception as error:  # noqa: BLE001 - the boundary: a client gets its dialect's error, never a traceback
            return answer_error(request, error)
        finally:
            if left is not None:
                left.cancel()

    async def _body(self, request: Request) -> Mapping[str, Any]:
        """Return the body of a request for the model, which is no longer than the model's context allows.

        Raises RequestError; the session that the request names knows of it.
        """
        session = self.sessions.get(_path_key(request)) or self.sessions.get(_credential(request))
        if session is not None:
            tokens = session.room()
        else:
            lengths = [int(card.get("max_model_len", 0)) for card in self.models.cards()]
            tokens = max(lengths, default=0)
        try:
            return await json_body(request, body_limit(tokens * self.chat.tokenizer.longest))
        except RequestError as error:
            if error.status != 413:
                raise
            why = f"{error.message} A context of {tokens} tokens takes no more."
            if session is not None:
                session.refuse(TOO_LONG, why)
            raise RequestError(why, status=413, code=TOO_LONG) from None

    def _events(
        self, dialect: Dialect, asked: ModelRequest, session: Session, work: asyncio.Task[Reply]
    ) -> Iterator[str]:
        if (error := work.exception()) is not None:
            status, message, code, param = problem(error)
            yield dialect.late_error(dialect.error(message, status, code, param))
        else:
            yield from dialect.events(asked, self._remember(asked, work.result(), session))

    def _remember(self, asked: ModelRequest, reply: Reply, session: Session) -> Reply:
        if asked.remember:
            self.sessions.remember(reply.id, session.key)
        return reply

    # --- who calls ---------------------------------------------------------------------------------------------------

    def _session(self, request: Request, asked: ModelRequest) -> Session:
        """Return the session of a call: by its address, its key, a header, its body; else by its first messages."""
        if key := _path_key(request):
            return self.sessions.find(key)
        credential = _credential(request)
        if credential and (self.sessions.knows(credential) or credential.startswith(NAMED)):
            return self.sessions.find(credential)
        named = (request.headers.get(name) for name in SESSION_HEADERS)
        key = next((name for name in named if name), "") or asked.session
        return self.sessions.find(key) if key else self.sessions.of(asked)

    # --- the rest ----------------------------------------------------------------------------------------------------

    async def _count(self, request: Request) -> Response:
        body = {"max_tokens": 1, **await self._body(request)}
        asked = await aside(DIALECTS["messages"].parse, body)
        if self.sessions.admits(key := _path_key(request)):
            session = self.sessions.find(key)
            chat, most = session.chat, session.room()
        else:
            chat, most = self.chat, self.models.policy(asked.model).context_length
        tree = MessageTree(chat)
        context = await aside(lambda: tree.find(merge_messages(asked.messages), asked.tools, most))
        return JSONResponse({"input_tokens": len(context.ids)})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        cards = [_card(card) for card in self.models.cards()]
        ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": cards, **ends})

    async def _model(self, request: Request) -> Response:
        name, cards = request.path_params["model"], self.models.cards()
        card = next((card for card in cards if card["id"] == name), None)
        if card is None:
            self.models.policy(name)  # raises, unless the server takes any name for its model
            card = {**cards[0], "id": name}
        return JSONResponse(_card(card))

    async def _end(self, request: Request) -> Response:
        body = await json_body(request, optional=True)
        trace = await self.sessions.end(_path_key(request), reward_of(body))
        return JSONResponse({"turns": len(trace.turns), "calls": trace.calls, "forks": trace.forks})


STATE = {"GET", "DELETE"}
"""Methods that ask for something that was stored."""


def _refuse_route(request: Request, error: Exception) -> Response:
    """Refuse a route or a method that is not served, by its name; in the form of the dialect that it belongs to."""
    assert isinstance(error, HTTPException)
    path, method, headers = request.url.path, request.method, error.headers or {}
    served = ", ".join(dialect.path for dialect in DIALECTS.values())
    if error.status_code == 405:
        message = f"{method} is not served at {path}; {headers.get('Allow', 'POST')} is."
    elif method in STATE and "/responses/" in path:
        message = f"{method} {path} is not served: a response is continued by its previous_response_id, not looked up."
    else:
        message = f"{method} {path} is not served. Served are, under /v1: {served}, models."
    body = _dialect(request).error(message, error.status_code, "unsupported_route", "")
    return JSONResponse(body, error.status_code, headers={**headers, "x-should-retry": "false"})


def reward_of(body: Mapping[str, Any]) -> float | None:
    """Return the reward of a body, None if absent. Raises RequestError for anything but a finite number."""
    value = body.get("reward")
    if isinstance(value, bool):
        raise bad("reward must be a finite number, not a truth value.", "reward")
    try:
        return None if value is None else reward_value(value)
    except ValueError as error:
        raise bad(f"reward: {error}.", "reward") from None


def answer_error(request: Request, error: Exception) -> Response:
    """Answer an error in the form of the dialect that the route belongs to."""
    status, message, code, param = problem(error)
    dialect, retry = _dialect(request), status in (429, 500, 503)
    headers = {"x-should-retry": str(retry).lower()} | ({"retry-after": "1"} if retry else {})
    return JSONResponse(dialect.error(message, status, code, param), status, headers=headers)


def _dialect(request: Request) -> Dialect:
    return DIALECTS["messages" if "/messages" in request.url.path else "chat"]


def problem(error: BaseException) -> tuple[int, str, str, str]:
    """Return (status, message, code, param) of an error; an unexpected one is logged."""
    match error:
        case RequestError():
            return error.status, f"{error.message} {error.hint}".rstrip(), error.code, error.param
        case TemplateError():
            return (
                400,
                f"The chat template refuses these messages: {error.message}",
                "template",
                "messages",
            )
        case UsageError():
            return 400, f"{error.message} {error.hint}".rstrip(), "", ""
        case MissingDependency():
            return 501, f"{error.message} {error.hint}", "missing_dependency", ""
        case AgentRLError():
            return 500, f"{error.message} {error.hint}".rstrip(), type(error).__name__, ""
    _LOG.exception("a model call failed", exc_info=error)
    return 500, f"The server failed: {type(error).__name__}.", "internal_error", ""


def _path_key(request: Request) -> str:
    path = request.path_params
    if "rollout" in path:
        return f"{path['rollout']}/{path['attempt']}"
    return str(path.get("key", ""))


def _credential(request: Request) -> str:
    """Return the API key of a request, in OpenAI's or Anthropic's header."""
    return bearer(request.headers.get("authorization", "")) or request.headers.get("x-api-key", "")


def _card(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in OpenAI's and Anthropic's form at once."""
    return {
        "object": "model",
        "created": 0,
        "owned_by": "agentrl",
        "type": "model",
        "display_name": card["id"],
        "created_at": "1970-01-01T00:00:00Z",
        **card,
    }
