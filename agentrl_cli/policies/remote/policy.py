"""Policies behind HTTP: a vLLM server (token ids in and out), and any OpenAI-compatible endpoint (text only).

Text is not enough to train on. A text is encoded again here, so its ids need not be the ones that were sampled, and
log-probabilities belong to other tokens: `OpenAIPolicy` serves eval and chat and is refused for training, with that
reason. `VLLMPolicy` sends and receives ids.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import BadAnswer, PolicyError, TemplateError
from agentrl_cli.policies.protocols import OnToken, PolicySource, generation
from agentrl_cli.policies.remote.base import RemotePolicy, connection
from agentrl_cli.policies.remote.checked import (
    alternatives,
    choice_of,
    finish,
    items,
    log_probabilities,
    part,
    shown,
    token_ids,
)
from agentrl_cli.policies.remote.http import Endpoint, ServerError
from agentrl_cli.policies.remote.token_ids import NO_IMAGES, Answer, IdServer, narrowed
from agentrl_cli.types import TOP_K, Generation, Int32, Message, Sampling, StopReason, ToolSchema
from agentrl_cli.types.plain import check_plain

ID = "token_id:"
FINISH = {"stop": "stop", "length": "length", "abort": "abort"}
"""vLLM's finish reasons."""
TEXT_FINISH = {
    **{
        name: "stop"
        for name in ("stop", "tool_calls", "function_call", "content_filter", "eos", "eos_token")
    },
    **{name: "length" for name in ("length", "max_tokens", "abort")},
}
"""Those of OpenAI's own endpoint, and of others that follow it."""
LOOSELY = 8
"""A text may have this many times the requested tokens: the server counts with its own tokenizer."""
VLLM = "0.32"
"""The release of vLLM that this client is tested with; the extra `vllm` brings it."""


class VLLMPolicy(IdServer):
    """A vLLM server: prompt ids in, sampled ids and their log-probabilities out.

    vLLM reports log-probabilities of the raw logits unless it was started with `--logprobs-mode processed_logprobs`,
    which `processed` states. What its report does not determine is NaN, and the trainer computes it.

    Adapters need `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, whole weights VLLM_SERVER_DEV_MODE=1
    (`/collective_rpc`, whose `reload_weights` takes a path since vLLM 0.14). The server must read the folder.
    """

    name = "vllm"
    start = f"`pip install 'agentrl-cli[vllm]'` brings vLLM {VLLM}; then `vllm serve MODEL` (docs/rollout.md)."

    async def _ask(self, ids: list[int], sampling: Sampling) -> Answer:
        body = {
            "prompt": ids,
            "max_tokens": sampling.max_new_tokens,
            **narrowed(sampling),
            "seed": sampling.seed,
            "include_stop_str_in_output": True,
            "logprobs": TOP_K,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        seen = self.endpoint.recoveries
        try:
            return await self.endpoint.ask(
                "/completions", {"model": self.model, **body}, partial(self._read, sampling)
            )
        except ServerError as error:
            if error.status != 404 or self.model == self._base:
                raise
            self.endpoint.forgot(seen)  # it was restarted between two requests, and has no adapter
            return await self.endpoint.ask(
                "/completions", {"model": self.model, **body}, partial(self._read, sampling)
            )

    def _read(self, sampling: Sampling, answer: dict[str, Any]) -> Answer:
        """Return an answer of `/completions`. Raises BadAnswer."""
        choice = choice_of(answer)
        logprobs = part(choice, "logprobs")
        out = token_ids(_sampled(choice, logprobs), sampling, self.vocabulary)
        logps = log_probabilities(items(logprobs.get("token_logprobs"), "token_logprobs"), len(out))
        tops = items(logprobs.get("top_logprobs"), "top_logprobs")
        found = alternatives(tops, len(out), _named, self.vocabulary)
        return (
            out,
            logps,
            found,
            _stop_reason(finish(choice.get("finish_reason"), FINISH), out, sampling),
        )

    async def _take(self, folder: Path, version: str, label: str, old: str) -> None:
        root, url = self.endpoint.root, self.endpoint.url
        if self.lora:
            await self._load_adapter(f"{url}/load_lora_adapter", folder, label)
            if old:
                await self._unload_adapter(f"{url}/unload_lora_adapter", old)
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.endpoint.command(f"{root}/collective_rpc", body)
        await self.endpoint.command(f"{root}/reset_prefix_cache", {})


class OpenAIPolicy(RemotePolicy):
    """Any OpenAI-compatible endpoint. Text only: for eval and chat, refused for training.

    `mode` "completions" sends the prompt's exact text; "chat" sends messages (`observe` them before each turn) and lets
    the server render them with its own template.
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
        """`connection`: see Endpoint."""
        if mode not in {"completions", "chat"}:
            raise PolicyError(f"Unknown mode {mode!r}.", hint='Use "completions" or "chat".')
        self.endpoint = Endpoint(url, **connection)
        self.model = self.weights_version = model
        self.chat, self.mode, self.context_length = chat, mode, context_length
        self._seen: dict[str, tuple[list[Message], list[ToolSchema]]] = {}

    @classmethod
    def of(cls, source: PolicySource) -> OpenAIPolicy:
        """As the configuration describes the endpoint. Raises ConfigError, or PolicyError for a bad address."""
        remote = source.config.remote
        model, arguments = remote.model or source.config.model.name, connection(source.config)
        length = source.context_length
        return cls(
            model=model, chat=source.chat, mode=remote.mode, context_length=length, **arguments
        )

    def observe(
        self, key: str, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> None:
        """The conversation so far, for "chat" mode: call it before `generate`."""
        self._seen[key] = (list(messages), list(tools))

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
        """One turn, encoded here; log-probabilities are NaN. Raises PolicyError if the server fails."""
        if images:
            raise PolicyError(NO_IMAGES)
        started = time.perf_counter()
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if self.mode == "chat":
            out, reason = await self._chat(key, body, sampling)
        else:
            stops = [self.chat.tokenizer.token_text(id_) for id_ in self.chat.stop_ids[:4]]
            body |= {"prompt": self.chat.decode(ids), "stop": stops}
            out, reason = await self.endpoint.ask(
                "/completions", body, partial(self._read, sampling)
            )
        cut = reason == "length"
        if cut and out and out[-1] in self.chat.stop_ids:
            out = out[:-1]
        if on_token is not None:
            for id_ in out:
                on_token(id_)
        return generation(
            out,
            StopReason.LENGTH if cut else StopReason.STOP,
            weights_version=self.weights_version,
            logps=[float("nan")] * len(out),
            seconds=time.perf_counter() - started,
        )

    async def release(self, key: str) -> None:
        self._seen.pop(key, None)

    async def _chat(
        self, key: str, body: dict[str, Any], sampling: Sampling
    ) -> tuple[list[int], str]:
        if key not in self._seen:
            raise PolicyError('In "chat" mode `observe` must be called with the messages first.')
        messages, tools = self._seen[key]
        body = {**body, "messages": [_wire(message) for message in messages]}
        if tools:
            body["tools"] = tools
        return await self.endpoint.ask("/chat/completions", body, partial(self._read, sampling))

    def _read(self, sampling: Sampling, answer: dict[str, Any]) -> tuple[list[int], str]:
        """Return the answer's text, encoded here, and why the server stopped. Raises BadAnswer."""
        choice = choice_of(answer)
        said = _message(choice) if self.mode == "chat" else choice.get("text")
        if not isinstance(said, str if self.mode == "completions" else dict):
            raise BadAnswer(f"sent the text {shown(said)}")
        try:
            check_plain(said)
            out = self.chat.assistant_ids(said)
        except (ValueError, RecursionError, TemplateError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadAnswer(
                f"sent {shown(said)}, which cannot be made into tokens: {why}"
            ) from error
        if (
            len(out) > LOOSELY * sampling.max_new_tokens + LOOSELY
        ):  # its tokenizer is another, but not so different
            raise BadAnswer(
                f"sent a text of {len(out)} tokens where {sampling.max_new_tokens} were asked for"
            )
        return out, finish(choice.get("finish_reason"), TEXT_FINISH)


def _wire(message: Message) -> Message:
    """Return a message as OpenAI writes it: call arguments as JSON text."""
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
        raise BadAnswer(f"sent the message {shown(choice.get('message'))}")
    for call in calls:
        function = part(call, "function") if isinstance(call, dict) else {}
        if not isinstance(function.get("name"), str) or not isinstance(
            function.get("arguments"), (str, dict)
        ):
            raise BadAnswer(f"sent the tool call {shown(call)}, which has no name and arguments")
    return {"content": content, **message, "role": "assistant"}


def _sampled(choice: dict[str, Any], logprobs: dict[str, Any]) -> list[Any]:
    """Sampled ids, unchecked: `token_ids` of newer servers, else `token_id:N` texts. Raises BadAnswer without any."""
    if choice.get("token_ids") is not None:
        return items(choice["token_ids"], "token_ids")
    texts = items(logprobs.get("tokens"), "tokens")
    if not texts or not all(isinstance(text, str) and text.startswith(ID) for text in texts):
        raise BadAnswer(
            "does not send token ids, so what it samples cannot be trained",
            hint="Use a vLLM that knows return_tokens_as_token_ids, or the text-only policy for eval and chat.",
        )
    return [_id_of(text) for text in texts]


def _named(top: Any) -> list[tuple[Any, Any]]:
    """(id, log-probability) of alternatives named `token_id:N`; -1 for another name."""
    if not isinstance(top, dict):
        raise BadAnswer(f"sent {shown(top)} in place of the likeliest tokens")
    return [(_id_of(text) if text.startswith(ID) else -1, logp) for text, logp in top.items()]


def _id_of(text: str) -> int | str:
    """N of `token_id:N`; the text itself, which the check of ids refuses, for anything else."""
    number = text.removeprefix(ID)
    return int(number) if number.isascii() and number.isdigit() and len(number) < 12 else text


def _stop_reason(reason: str, ids: Sequence[int], sampling: Sampling) -> StopReason:
    if reason == "length":
        return StopReason.LENGTH
    if reason == "abort":
        return StopReason.CANCELLED
    own = bool(ids) and (ids[-1] in sampling.stop_ids or not sampling.stop_strings)
    return StopReason.STOP if own else StopReason.STOP_STRING
