"""Policies behind HTTP: a vLLM server (token ids in and out), and any OpenAI-compatible endpoint (text only).

Text is not enough to train on. What comes back as text is encoded again here, so its ids need not be the ones that
were sampled, and log-probabilities belong to other tokens: `OpenAIPolicy` serves eval and chat and is refused for
training, with that reason. `VLLMPolicy` sends and receives ids.

Requests run in threads of their own (urllib), so that no HTTP library is needed.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.base import OnToken, generation
from agentrl_cli.types import TOP_K, Generation, Int32, Message, Sampling, StopReason, ToolSchema

RETRY_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
MAX_BODY = 500
"""Characters of a server's error that a message repeats."""


class Endpoint:
    """JSON over HTTP with retries. One per policy; `close` it."""

    def __init__(
        self, url: str, *, api_key: str = "", concurrency: int = 64, timeout: float = 600.0, retries: int = 3
    ) -> None:
        """`url` ends before the paths of requests (`http://host:8000/v1`). `timeout` in seconds, of one attempt."""
        if not url.startswith(("http://", "https://")):
            raise PolicyError(f"{url!r} is no HTTP address.", hint="Write it as http://127.0.0.1:8000/v1.")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.retries = retries
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="agentrl-remote")

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON answer. Busy and failing servers are tried again; raises PolicyError with what the server said."""
        return await self._request(f"{self.url}{path}", json.dumps(body).encode())

    async def get(self, path: str) -> dict[str, Any]:
        """Like `post`, without a body."""
        return await self._request(f"{self.url}{path}", None)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _request(self, url: str, data: bytes | None) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        for attempt in range(self.retries + 1):
            last = attempt == self.retries
            try:
                text = await loop.run_in_executor(self._threads, self._once, url, data)
            except urllib.error.HTTPError as error:
                with error:
                    said = error.read(MAX_BODY).decode(errors="replace")
                if error.code not in RETRY_STATUS or last:
                    raise PolicyError(f"{url} answered {error.code}: {said}") from error
            except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
                if last:
                    raise PolicyError(
                        f"{url} cannot be reached: {getattr(error, 'reason', error)}.", hint="Is the server running?"
                    ) from error
            else:
                return self._decoded(url, text)
            await asyncio.sleep(min(0.2 * 2**attempt, 10.0))
        raise PolicyError(f"{url} was never tried.")  # only with a negative number of retries

    def _once(self, url: str, data: bytes | None) -> bytes:
        request = urllib.request.Request(url, data, self._headers, method="GET" if data is None else "POST")
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            body: bytes = response.read()
            return body

    @staticmethod
    def _decoded(url: str, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except ValueError as error:
            raise PolicyError(f"{url} answered no JSON: {text[:80]!r}.") from error
        if not isinstance(answer, dict):
            raise PolicyError(f"{url} answered {type(answer).__name__}, not an object.")
        return answer


class VLLMPolicy:
    """A vLLM server: prompt ids in, sampled ids and their log-probabilities out.

    vLLM reports log-probabilities of the raw logits unless it was started with `--logprobs-mode processed_logprobs`;
    say which by `processed`. What cannot be known from its report is NaN, and the trainer computes it.
    """

    name = "vllm"
    trainable = True

    def __init__(
        self,
        url: str,
        model: str,
        *,
        context_length: int = 32768,
        weights_version: str = "",
        processed: bool = False,
        api_key: str = "",
        concurrency: int = 64,
        timeout: float = 600.0,
        retries: int = 3,
    ) -> None:
        self.endpoint = Endpoint(url, api_key=api_key, concurrency=concurrency, timeout=timeout, retries=retries)
        self.model = model
        self.context_length = context_length
        self.weights_version = weights_version or model
        self.processed = processed

    async def generate(
        self,
        key: str,
        ids: Sequence[int] | Int32,
        sampling: Sampling,
        *,
        group: str = "",
        on_token: OnToken | None = None,
    ) -> Generation:
        """One turn. Raises PolicyError where the server fails or sends no token ids."""
        started, version = time.perf_counter(), self.weights_version
        body = {
            "model": self.model,
            "prompt": [int(id_) for id_ in ids],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            **_narrowed(sampling),
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_ids),
            "stop": list(sampling.stop_strings),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "logprobs": TOP_K,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
        }
        choice = _choice(await self.endpoint.post("/completions", body))
        logprobs = choice.get("logprobs") or {}
        out = _token_ids(choice, logprobs)
        logps = np.asarray([np.nan if p is None else p for p in logprobs.get("token_logprobs") or []], np.float32)
        if len(logps) != len(out):
            raise PolicyError(f"The server sent {len(logps)} log-probabilities for {len(out)} tokens.")
        sampled, own = self._meaning(logps, sampling)
        top_ids, top_logps = _alternatives(logprobs.get("top_logprobs") or [], len(out))
        if on_token is not None:
            for id_ in out:
                on_token(id_)
        return Generation(
            ids=np.asarray(out, np.int32),
            logp_sampled=sampled,
            logp_policy=own,
            entropy=np.full(len(out), np.nan, np.float32),
            top_ids=top_ids,
            top_logps=top_logps,
            stop_reason=_stop_reason(choice, out, sampling),
            weights_version=version,
            seconds=time.perf_counter() - started,
        )

    async def load_adapter(self, path: str, version: str) -> None:
        """Serve a new LoRA adapter from now on (`--enable-lora`, VLLM_ALLOW_RUNTIME_LORA_UPDATING=True)."""
        await self.endpoint.post("/load_lora_adapter", {"lora_name": version, "lora_path": path})
        self.model, self.weights_version = version, version

    async def release(self, key: str) -> None:
        """Nothing to forget: the server keeps its own prefix cache."""

    async def close(self) -> None:
        self.endpoint.close()

    def _meaning(
        self, logps: np.ndarray[Any, Any], sampling: Sampling
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(logp_sampled, logp_policy) of what the server reported; NaN where it does not say."""
        unknown = np.full_like(logps, np.nan)
        if self.processed:
            return logps, unknown if sampling.truncated else logps.copy()
        if sampling.temperature != 1.0:
            return unknown, unknown.copy()
        return (unknown, logps) if sampling.truncated else (logps, logps.copy())


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
        api_key: str = "",
        concurrency: int = 16,
        timeout: float = 600.0,
        retries: int = 3,
    ) -> None:
        if mode not in {"completions", "chat"}:
            raise PolicyError(f"Unknown mode {mode!r}.", hint='Use "completions" or "chat".')
        self.endpoint = Endpoint(url, api_key=api_key, concurrency=concurrency, timeout=timeout, retries=retries)
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


def _narrowed(sampling: Sampling) -> dict[str, float]:
    """vLLM's own parameters, where they are not at rest."""
    given = {"min_p": (sampling.min_p, 0.0), "repetition_penalty": (sampling.repetition_penalty, 1.0)}
    return {name: value for name, (value, rest) in given.items() if value != rest}


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


def _alternatives(tops: Sequence[Mapping[str, float] | None], n: int) -> tuple[Int32, np.ndarray[Any, Any]]:
    """[n, TOP_K] ids (-1 where there is none) and log-probabilities (NaN), best first."""
    ids = np.full((n, TOP_K), -1, np.int32)
    logps = np.full((n, TOP_K), np.nan, np.float32)
    for row, top in enumerate(tops[:n]):
        ranked = sorted((top or {}).items(), key=lambda pair: -pair[1])[:TOP_K]
        for column, (text, logp) in enumerate(ranked):
            ids[row, column] = int(text.removeprefix("token_id:")) if text.startswith("token_id:") else -1
            logps[row, column] = logp
    return ids, logps


def _stop_reason(choice: Mapping[str, Any], ids: Sequence[int], sampling: Sampling) -> StopReason:
    if choice.get("finish_reason") == "length":
        return StopReason.LENGTH
    if choice.get("finish_reason") == "abort":
        return StopReason.CANCELLED
    own = bool(ids) and (ids[-1] in sampling.stop_ids or not sampling.stop_strings)
    return StopReason.STOP if own else StopReason.STOP_STRING
