"""Policies behind HTTP: a vLLM server (token ids in and out), and any OpenAI-compatible endpoint (text only).

Text is not enough to train on. What comes back as text is encoded again here, so its ids need not be the ones that
were sampled, and log-probabilities belong to other tokens: `OpenAIPolicy` serves eval and chat and is refused for
training, with that reason. `VLLMPolicy` sends and receives ids.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.protocols import OnToken, generation
from agentrl_cli.policies.remote.http import MAX_BODY, Endpoint, ServerError
from agentrl_cli.policies.remote.token_ids import Answer, IdServer, narrowed
from agentrl_cli.types import TOP_K, Generation, Int32, Message, Sampling, StopReason, ToolSchema

VLLM = "0.32"
"""The release of vLLM that this client is tested with; the extra `vllm` brings it."""


class VLLMPolicy(IdServer):
    """A vLLM server: prompt ids in, sampled ids and their log-probabilities out.

    vLLM reports log-probabilities of the raw logits unless it was started with `--logprobs-mode processed_logprobs`;
    say which by `processed`. What cannot be known from its report is NaN, and the trainer computes it.

    Adapters need `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, whole weights VLLM_SERVER_DEV_MODE=1
    (`/collective_rpc`, whose `reload_weights` knows a path from vLLM 0.14 on). The server must read the folder.
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
        try:
            answer = await self.endpoint.post("/completions", {"model": self.model, **body})
        except ServerError as error:
            if error.status != 404 or self.model == self._base:
                raise
            await self._mend()  # it was restarted, between two requests, and knows nothing of the adapter
            answer = await self.endpoint.post("/completions", {"model": self.model, **body})
        choice = _choice(answer)
        logprobs = choice.get("logprobs") or {}
        out = _token_ids(choice, logprobs)
        logps = np.asarray([np.nan if p is None else p for p in logprobs.get("token_logprobs") or []], np.float32)
        if len(logps) != len(out):
            raise PolicyError(f"The server sent {len(logps)} log-probabilities for {len(out)} tokens.")
        tops = [_named(top or {}) for top in logprobs.get("top_logprobs") or []]
        return out, logps, tops, _stop_reason(choice, out, sampling)

    async def load_adapter(self, path: str, version: str) -> None:
        """Serve a new LoRA adapter from now on."""
        self.lora = True
        await self.publish(path, version)

    async def _take(self, folder: Path, version: str, old: str) -> None:
        root, url = self.endpoint.root, self.endpoint.url
        if self.lora:
            # Answers are plain text here.
            await self._load_adapter(f"{url}/load_lora_adapter", folder, version)
            if old:
                await self.endpoint.command(f"{url}/unload_lora_adapter", {"lora_name": old})
            return
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.endpoint.command(f"{root}/collective_rpc", body)
        await self.endpoint.command(f"{root}/reset_prefix_cache", {})


class OpenAIPolicy:
    """Any OpenAI-compatible endpoint. Text only: for eval and chat, refused for training.

    `mode` "completions" sends the prompt's exact text; "chat" sends messages (`observe` them before each turn) and lets
    the server render them with its own template.
    """

    name = "openai"
    trainable = False
    untrainable = (
        "an OpenAI-compatible endpoint returns text; the ids of what was sampled and their log-probabilities are "
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

    def observe(self, key: str, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> None:
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
    ) -> Generation:
        """One turn, encoded here; log-probabilities are NaN. Raises PolicyError where the server fails."""
        started = time.perf_counter()
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        if self.mode == "chat":
            choice = await self._chat(key, body)
            message = {"role": "assistant", "content": "", **choice.get("message", {})}
            out = self.chat.assistant_ids({k: v for k, v in message.items() if v is not None})
        else:
            stops = [self.chat.tokenizer.token_text(id_) for id_ in self.chat.stop_ids[:4]]
            body |= {"prompt": self.chat.decode(ids), "stop": stops}
            choice = _choice(await self.endpoint.post("/completions", body))
            out = self.chat.assistant_ids(str(choice.get("text") or ""))
        cut = choice.get("finish_reason") == "length"
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

    async def close(self) -> None:
        self.endpoint.close()

    async def _chat(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        if key not in self._seen:
            raise PolicyError('In "chat" mode the messages have to be given first, by observe().')
        messages, tools = self._seen[key]
        body = {**body, "messages": [_wire(message) for message in messages]}
        if tools:
            body["tools"] = tools
        return _choice(await self.endpoint.post("/chat/completions", body))


def _wire(message: Message) -> Message:
    """A message as OpenAI writes it: call arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise PolicyError(f"The server's answer has no choices: {json.dumps(answer)[:MAX_BODY]}")
    return choices[0]


def _token_ids(choice: Mapping[str, Any], logprobs: Mapping[str, Any]) -> list[int]:
    """Sampled ids: `token_ids` of newer servers, else `token_id:N` texts. Raises PolicyError where there are none."""
    if choice.get("token_ids") is not None:
        return [int(id_) for id_ in choice["token_ids"]]
    texts = logprobs.get("tokens") or []
    if not all(isinstance(text, str) and text.startswith("token_id:") for text in texts) or "tokens" not in logprobs:
        raise PolicyError(
            "The server does not send token ids, so what it samples cannot be trained.",
            hint="Use a vLLM that knows return_tokens_as_token_ids, or the text-only policy for eval and chat.",
        )
    return [int(text.removeprefix("token_id:")) for text in texts]


def _named(top: Mapping[str, float]) -> list[tuple[int, float]]:
    """(id, log-probability) of alternatives that are called `token_id:N`; -1 for another name."""
    return [
        (int(text.removeprefix("token_id:")) if text.startswith("token_id:") else -1, logp)
        for text, logp in top.items()
    ]


def _stop_reason(choice: Mapping[str, Any], ids: Sequence[int], sampling: Sampling) -> StopReason:
    if choice.get("finish_reason") == "length":
        return StopReason.LENGTH
    if choice.get("finish_reason") == "abort":
        return StopReason.CANCELLED
    own = bool(ids) and (ids[-1] in sampling.stop_ids or not sampling.stop_strings)
    return StopReason.STOP if own else StopReason.STOP_STRING
