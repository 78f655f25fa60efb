"""A policy on any OpenAI-compatible endpoint, which sends text alone.

Text is not enough to train on. A text is encoded again here, so its ids need not be the ones that were sampled, and
log-probabilities belong to other tokens: it serves eval and chat and is refused for training, with that reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import BadAnswer, ConfigError, PolicyError, TemplateError
from agentrl_cli.policies.protocols import OnToken, PolicySource, generation
from agentrl_cli.policies.remote.checked import choice_of, excerpt, finish, items, part
from agentrl_cli.policies.remote.http import NO_IMAGES, Endpoint, RemotePolicy, connection
from agentrl_cli.types import Generation, Int32, Message, Sampling, StopReason, ToolSchema
from agentrl_cli.types.plain import check_plain

TEXT_FINISH = {
    **dict.fromkeys(
        ("stop", "tool_calls", "function_call", "content_filter", "eos", "eos_token"),
        StopReason.STOP,
    ),
    **dict.fromkeys(("length", "max_tokens", "abort"), StopReason.LENGTH),
}
"""Finish reasons of OpenAI's own endpoint, and of others that follow it."""
BEYOND = ("top_k", "min_p", "repetition_penalty")
"""Settings that OpenAI's own endpoint does not have. They are sent where they change something."""
STOPS = 4
"""Stop strings that OpenAI's own endpoint takes."""
LOOSELY = 8
"""A text may have this many times the requested tokens: the server counts with its own tokenizer."""


class OpenAIPolicy(RemotePolicy):
    """Any OpenAI-compatible endpoint. Text only: for eval and chat, refused for training.

    `mode` "completions" sends the prompt's exact text; "chat" sends messages (`observe` them before each turn) and lets
    the server render them with its own template. A stop string ends the text here: servers leave out the one they met.
    """

    name = "openai"
    untrainable = (
        "an OpenAI-compatible endpoint returns text; the sampled ids and their log-probabilities are "
        "unknown, and encoding the text again would train on other tokens. Use a local model or a vLLM server"
    )

    def __init__(
        self,
        url: str,
        model: str,
        chat: Chat,
        *,
        mode: str = "completions",
        context_length: int = 32768,
        **connection: Any,
    ) -> None:
        """Connect to `url`; `connection`: see Endpoint."""
        if mode not in {"completions", "chat"}:
            raise PolicyError(f"Unknown mode {mode!r}.", hint='Use "completions" or "chat".')
        self.endpoint = Endpoint(url, **connection)
        self.model = self.weights_version = model
        self.chat, self.mode, self.context_length = chat, mode, context_length
        self._seen: dict[str, tuple[list[Message], list[ToolSchema], Any]] = {}

    @classmethod
    def of(cls, source: PolicySource) -> OpenAIPolicy:
        """Return the policy that the configuration describes. Raises ConfigError, or PolicyError for a bad address."""
        remote = source.config.remote
        if source.config.rollout.truncation.bad_tokens:
            raise ConfigError(
                "rollout.truncation.bad_tokens are of this model's tokenizer, which an OpenAI-compatible"
                " endpoint need not have.",
                hint="Leave them out, or sample here or on a vLLM or SGLang server.",
            )
        return cls(
            model=remote.model or source.config.model.name,
            chat=source.chat,
            mode=remote.backend.mode,
            context_length=source.context_length,
            **connection(source.config),
        )

    def observe(
        self,
        key: str,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        choice: Any = "auto",
    ) -> bool:
        """Take the conversation so far, which "chat" mode sends with the choice: call it before `generate`."""
        if isinstance(choice, Mapping):
            choice = {"type": "function", **choice}
        self._seen[key] = (list(messages), list(tools), choice)
        return self.mode == "chat"

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Return one turn, encoded here; log-probabilities are NaN.

        Raises PolicyError if the server fails, and for images or forced tokens.
        """
        if images or sampling.allow is not None:
            raise PolicyError(NO_IMAGES if images else "Forced tokens need a local policy.")
        started = time.perf_counter()
        path, body = self._request(key, ids, sampling)
        out, reason = await self.endpoint.ask(path, body, partial(self._read, sampling))
        if reason is StopReason.LENGTH and out and out[-1] in self.chat.stop_ids:
            out = out[:-1]
        for id_ in out if on_token is not None else ():
            on_token(id_)  # type: ignore[misc]  # the loop is empty if it is None
        return generation(
            out,
            reason,
            weights_version=self.weights_version,
            logps=[float("nan")] * len(out),
            seconds=time.perf_counter() - started,
        )

    async def release(self, key: str) -> None:
        self._seen.pop(key, None)

    def _request(
        self, key: str, ids: Sequence[int] | Int32, sampling: Sampling
    ) -> tuple[str, dict[str, Any]]:
        """Return the path and the body that ask for a turn. Raises PolicyError without messages."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            **{
                name: getattr(sampling, name)
                for name in BEYOND
                if getattr(sampling, name) != getattr(Sampling(), name)
            },
        }
        if self.mode == "chat":
            if key not in self._seen:
                raise PolicyError(
                    'In "chat" mode `observe` must be called with the messages first.'
                )
            messages, tools, choice = self._seen[key]
            body["messages"] = [_wire(message) for message in messages]
            body |= {"tools": tools} if tools else {}
            # What is forbidden are calls: `of` refuses other tokens.
            choice = "none" if sampling.bad_ids else choice
            body |= {"tool_choice": choice} if tools and choice != "auto" else {}
            return "/chat/completions", body
        # The server's tokens may be others, so a text that is forbidden ends the answer.
        ending = (*sampling.bad_ids, *self.chat.stop_ids)[:STOPS]
        stops = [self.chat.tokenizer.token_text(id_) for id_ in ending]
        return "/completions", body | {"prompt": self.chat.decode(ids), "stop": stops}

    def _read(self, sampling: Sampling, answer: dict[str, Any]) -> tuple[list[int], StopReason]:
        """Return the answer's text, encoded here, and why the server stopped. Raises BadAnswer."""
        choice = choice_of(answer)
        said = _message(choice) if self.mode == "chat" else choice.get("text")
        if not isinstance(said, str if self.mode == "completions" else dict):
            raise BadAnswer(f"sent the text {excerpt(said)}")
        try:
            check_plain(said)
            out = self.chat.assistant_ids(said)
        except (ValueError, RecursionError, TemplateError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadAnswer(
                f"sent {excerpt(said)}, which cannot be made into tokens: {why}"
            ) from error
        if (
            len(out) > LOOSELY * sampling.max_new_tokens + LOOSELY
        ):  # its tokenizer is another, but not so different
            raise BadAnswer(
                f"sent a text of {len(out)} tokens where {sampling.max_new_tokens} were asked for"
            )
        text = self.chat.decode(out)
        ends = [text.find(stop) + len(stop) for stop in sampling.stop_strings if stop in text]
        if ends:
            return self.chat.tokenizer.encode(text[: min(ends)]), StopReason.STOP_STRING
        return out, finish(choice.get("finish_reason"), TEXT_FINISH)


def _wire(message: Message) -> Message:
    # OpenAI writes the arguments of calls as JSON text.
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _message(choice: dict[str, Any]) -> Message:
    """Return the assistant's message of a chat completion, without null fields."""
    message = {name: value for name, value in part(choice, "message").items() if value is not None}
    calls = items(message.get("tool_calls"), "tool_calls")
    content = message.get("content", "")
    parts = content if isinstance(content, list) else []
    if (
        not message
        or not isinstance(content, (str, list))
        or not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in parts)
    ):
        raise BadAnswer(f"sent the message {excerpt(choice.get('message'))}")
    for call in calls:
        function = part(call, "function") if isinstance(call, dict) else {}
        if not isinstance(function.get("name"), str) or not isinstance(
            function.get("arguments"), (str, dict)
        ):
            raise BadAnswer(f"sent the tool call {excerpt(call)}, which has no name and arguments")
    return {"content": content, **message, "role": "assistant"}
