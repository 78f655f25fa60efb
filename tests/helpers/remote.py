"""Stand-in servers on loopback: vLLM's and SGLang's wire formats, sampling from a model in this process.

Written after vllm/entrypoints/openai/completion/protocol.py (CompletionRequest) and
https://docs.sglang.io/docs/basic_usage/native_api. Like the servers they refuse what they do not know, and sample as a
model's `generation_config.json` says where a request is silent.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl_cli.config.models import ModelConfig
from agentrl_cli.types import Generation, Sampling, StopReason

# What we send, as each server's request (SGLang: its sampling_params) has it.
KNOWN = {
    "vllm": {
        *(
            "model",
            "prompt",
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "stop_token_ids",
        ),
        *(
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "include_stop_str_in_output",
        ),
        *("skip_special_tokens", "logprobs", "return_tokens_as_token_ids", "return_token_ids"),
    },
    "sglang": {
        *(
            "max_new_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "sampling_seed",
            "stop",
            "stop_token_ids",
        ),
        *(
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "no_stop_trim",
        ),
        "skip_special_tokens",
    },
}
# A `generation_config.json`, Qwen2.5's nearly.
SILENT = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}

Handler = Callable[[str, dict[str, Any]], Awaitable[tuple[Any, ...]]]
"""Of a path and a body: status, answer and further lines of the head."""


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """An HTTP server on loopback that answers JSON; yields its address."""

    running: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())
        try:
            await answered(reader, writer)
        finally:
            running.discard(asyncio.current_task())

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            (
                int(line.split(":")[1])
                for line in head.split("\r\n")
                if line.lower().startswith("content-length")
            ),
            0,
        )
        body = json.loads(await reader.readexactly(length)) if length else {}
        body["_headers"] = head
        try:
            status, answer, *more = await handler(head.split()[1], body)
        except ConnectionResetError:  # a handler that dies
            writer.transport.abort()
            return
        if writer.is_closing():  # the client has disconnected
            return
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        writer.write(
            "\r\n".join(
                [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", "Connection: close", *more]
            ).encode()
            + b"\r\n\r\n"
            + data
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        listening.close()
        await listening.wait_closed()
        await asyncio.gather(*(task for task in running if task is not None))


@asynccontextmanager
async def silent(answers: int = 0) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Event]]:
    """A server that answers so many requests with an empty list of models, then takes them and says nothing.

    Yields its address, and events: a request came, and a client left it.
    """
    asked, left = asyncio.Event(), asyncio.Event()
    spent = iter(range(answers))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        if next(spent, None) is not None:
            head = b"HTTP/1.1 200 X\r\nContent-Length: 11\r\nConnection: close\r\n\r\n"
            writer.write(head + b'{"data":[]}')
            await writer.drain()
        else:
            while await reader.read(4096):
                pass
            left.set()
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1", asked, left
    finally:
        listening.close()
        await listening.wait_closed()


def vllm_answer(
    ids: list[int], logps: list[float], finish: str = "stop", *, new: bool = True
) -> dict[str, Any]:
    """A completion in vLLM's wire format with return_tokens_as_token_ids."""
    tokens = [f"token_id:{id_}" for id_ in ids]
    tops = [
        {f"token_id:{id_}": logp, "token_id:7": logp - 1}
        for id_, logp in zip(ids, logps, strict=True)
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "text": "…",
        "finish_reason": finish,
        "stop_reason": ids[-1] if finish == "stop" else None,
        "logprobs": {
            "tokens": tokens,
            "token_logprobs": logps,
            "top_logprobs": tops,
            "text_offset": [],
        },
    }
    if new:
        choice |= {"token_ids": ids, "prompt_token_ids": [1]}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": {}}


def sglang_answer(said: Generation, version: str) -> dict[str, Any]:
    """An answer of SGLang's /generate with return_logprob."""
    ids, logps = said.ids.tolist(), said.logp_policy.tolist()
    stopped = said.stop_reason is StopReason.STOP
    finish = (
        {"type": "stop", "matched": ids[-1]} if stopped else {"type": "length", "length": len(ids)}
    )
    meta = {
        "id": "0",
        "finish_reason": finish,
        "prompt_tokens": 1,
        "completion_tokens": len(ids),
        "weight_version": version,
        "output_token_logprobs": [[logp, id_, None] for id_, logp in zip(ids, logps, strict=True)],
        "output_top_logprobs": [[[logp, id_, None]] for id_, logp in zip(ids, logps, strict=True)],
    }
    return {"text": "…", "output_ids": ids, "meta_info": meta}


class StandIn:
    """A server whose answers come from a model folder, until it is given other weights. `restart` forgets those."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.paths: list[str] = []
        # Numbers of generations at which it is restarted instead.
        self.dies_at: set[int] = set()
        # Numbers of generations before which it is restarted between two requests.
        self.forgets_at: set[int] = set()
        self.generated = 0
        # Whether it drops every connection.
        self.down = False
        self.restart()

    def restart(self) -> None:
        self.policies = {"base": self._policy(self.folder)}
        self.version = "default"
        self.epoch = getattr(self, "epoch", 0) + 1

    async def close(self) -> None:
        for policy in self.policies.values():
            await policy.close()

    def _policy(self, folder: Path) -> Any:
        from agentrl_cli.inference.policy import LocalPolicy
        from agentrl_cli.models.load import load_model

        return LocalPolicy(
            load_model(folder, ModelConfig(device="cpu", dtype="float32"), base=folder),
            context_length=256,
        )

    async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if self.down:
            raise ConnectionResetError
        self.paths.append(path)
        if "Authorization: Bearer k" not in body["_headers"]:
            return 401, {"error": "Unauthorized"}
        if path in ("/v1/completions", "/generate"):
            return await self._generate(body)
        name = str(body.get("lora_name"))
        vllm = self.kind == "vllm"
        if (
            path.removeprefix("/v1") == "/load_lora_adapter"
            and (path != "/load_lora_adapter") == vllm
        ):
            if name in self.policies:
                text = f"The lora adapter '{name}' has already been loaded."
                return (
                    (400, {"error": {"message": text}})
                    if vllm
                    else (400, {"success": False, "error_message": text})
                )
            self.policies[name] = self._policy(Path(body["lora_path"]))
            return (
                200,
                f"Success: LoRA adapter '{name}' added successfully.".encode()
                if vllm
                else {"success": True},
            )
        if (
            path.removeprefix("/v1") == "/unload_lora_adapter"
            and (path != "/unload_lora_adapter") == vllm
        ):
            if name not in self.policies:
                return 404, {"error": {"message": f"The lora adapter '{name}' cannot be found."}}
            await self.policies.pop(name).close()
            return 200, b"Success" if vllm else {"success": True}
        if (path == "/collective_rpc" and vllm) or (
            path == "/update_weights_from_disk" and not vllm
        ):
            folder = body["kwargs"]["weights_path"] if vllm else body["model_path"]
            assert not vllm or body["method"] == "reload_weights"
            self.policies["base"] = self._policy(Path(folder))
            self.version = str(body.get("weight_version"))
            return 200, {"results": [None]} if vllm else {
                "success": True,
                "message": "",
                "num_paused_requests": 0,
            }
        if path == "/reset_prefix_cache" and vllm:
            return 200, b""
        return 404, {"error": "Not Found"}

    async def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.generated += 1
        if self.generated in self.dies_at:
            self.restart()
            self.down = True
            asyncio.get_running_loop().call_later(0.1, setattr, self, "down", False)
            raise ConnectionResetError
        if self.generated in self.forgets_at:
            self.restart()
        vllm = self.kind == "vllm"
        params = body if vllm else body["sampling_params"]
        name = (body["model"] if vllm else body.get("lora_path")) or "base"
        if name not in self.policies:
            return 404, {
                "error": {
                    "message": f"The model `{name}` does not exist.",
                    "type": "NotFoundError",
                    "code": 404,
                }
            }
        odd = set(params) - KNOWN[self.kind] - {"_headers"}
        if odd:
            return 400, {
                "error": {
                    "message": f"Unexpected {sorted(odd)}",
                    "type": "BadRequestError",
                    "code": 400,
                }
            }
        drawn = {name: params.get(name, silent) for name, silent in SILENT.items()}
        sampling = Sampling(
            **{**drawn, "top_k": max(0, drawn["top_k"])},
            max_new_tokens=params["max_tokens" if vllm else "max_new_tokens"],
            stop_ids=tuple(params["stop_token_ids"]),
            seed=params["seed" if vllm else "sampling_seed"],
        )
        ids = body["prompt" if vllm else "input_ids"]
        epoch = self.epoch
        said: Generation = await self.policies[name].generate(str(self.generated), ids, sampling)
        if epoch != self.epoch:  # what was running dies with the server
            raise ConnectionResetError
        if not vllm:
            return 200, sglang_answer(said, self.version)
        finish = "stop" if said.stop_reason is StopReason.STOP else "length"
        return 200, vllm_answer(said.ids.tolist(), said.logp_policy.tolist(), finish)


@asynccontextmanager
async def serve_all(*stands: StandIn) -> AsyncIterator[list[str]]:
    """Serve stand-ins, each at an address of its own, and close them in the end."""
    async with AsyncExitStack() as stack:
        for one in stands:
            stack.push_async_callback(one.close)
        yield [await stack.enter_async_context(server(one.handle)) for one in stands]
