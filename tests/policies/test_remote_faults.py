"""A server that samples goes wrong in the middle of it: a message and an exit code, never a traceback or a hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main
from agentrl_cli.errors import PolicyError
from agentrl_cli.policies.remote.policy import HttpPolicy
from agentrl_cli.policies.remote.wires import VLLM
from agentrl_cli.types import Sampling
from tests.helpers.remote import StandIn, server
from tests.helpers.train import write_project


class Faulty(StandIn):
    """A stand-in that goes wrong from its fourth generation on: `fault` says how."""

    def __init__(self, kind: str, folder: Path, fault: str) -> None:
        super().__init__(kind, folder)
        self.fault = fault

    async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        ask = path in ("/v1/completions", "/generate")
        if not ask or self.generated < 3 or self.fault == "wrong model":
            return await super().handle(path, body)
        if self.fault == "dies":
            raise ConnectionResetError
        if self.fault == "hangs":
            await asyncio.sleep(1)
        if self.fault == "500":
            return 500, {
                "error": {
                    "message": "CUDA out of memory",
                    "type": "InternalServerError",
                    "code": 500,
                }
            }
        if self.fault == "no JSON":
            return 200, b"<html>proxy</html>"
        status, answer = await super().handle(path, body)
        for choice in answer.get(
            "choices", ()
        ):  # an endpoint that knows nothing of vLLM's own fields
            del choice["token_ids"]
            choice["logprobs"]["tokens"] = ["A"] * len(choice["logprobs"]["tokens"])
        answer.get("meta_info", {}).pop("output_token_logprobs", None)
        return status, answer


FAULTS = {
    "dies": ("cannot be reached", "Is the server running?"),
    "500": ("answered 500: CUDA out of memory", "remote.request.retries is 0"),
    "hangs": ("did not answer within 0.5 s", "Raise remote.request.timeout"),
    "no JSON": ("answered no JSON: b'<html>proxy", ""),
    "no ids": ("token ids", ""),
    "wrong model": ("answered 404: The model `absent` does not exist.", "remote.model is the name"),
}


@pytest.mark.parametrize(
    ("kind", "fault", "command"),
    [("vllm", fault, "train") for fault in FAULTS]
    + [("sglang", "no ids", "train"), ("vllm", "500", "rollout"), ("vllm", "no JSON", "rollout")],
)
async def test_a_fault_in_the_middle_is_a_message(
    tmp_path: Path,
    model: Path,
    kind: str,
    fault: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")
    stand_in = Faulty(kind, model, fault)
    async with server(stand_in.handle) as url:
        address = url if kind == "vllm" else url.removesuffix("/v1")
        remote: dict[str, Any] = {"backend": kind, "url": address, "api_key_env": "SERVER_KEY"}
        remote |= {"model": "absent" if fault == "wrong model" else "base"}
        remote |= {"timeout": 0.5 if fault == "hangs" else 600, "retries": 0, "patience": 0}
        adapter = {"enabled": False}
        write_project(
            tmp_path,
            model,
            remote=remote,
            adapter=adapter,
            rollout={"concurrency": 2},
            train={"steps": 4},
        )
        more = ["-n", "8"] if command == "rollout" else []
        code = await asyncio.to_thread(main, [command, "--project", str(tmp_path), *more])
    await stand_in.close()
    said = capsys.readouterr().err
    what, hint = FAULTS[fault]
    masked = fault in (
        "no JSON",
        "no ids",
    )  # of single episodes: a rollout has others, a training stops with the words
    assert code == (0 if masked and command == "rollout" else 1)
    assert (
        what in said.replace("\n", " ")
        and hint in said.replace("\n", " ")
        and "Traceback" not in said
    )
    assert "cannot be reached" not in said or fault == "dies"


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Event]]:
    """A server that takes a request and says nothing; its address, and when a request came and when it was left."""
    asked, left = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
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


async def test_an_episode_that_is_cut_off_is_cut_off_at_the_server_too() -> None:
    """vLLM and SGLang stop sampling for a client that has disconnected; and no thread waits for the answer."""
    async with silent() as (url, asked, left):
        policy = HttpPolicy(VLLM, url, "m")
        cut_off = asyncio.create_task(policy.generate("a", [1, 2], Sampling()))
        await asked.wait()
        cut_off.cancel()
        await left.wait()
        asked.clear()
        left.clear()
        running = asyncio.create_task(policy.generate("b", [1, 2], Sampling()))
        await asked.wait()
        await policy.close()  # the run is over: an interpreter that ends waits for its threads
        with pytest.raises(PolicyError, match="cannot be reached"):
            await running
        await left.wait()


async def test_a_request_says_everything_that_decides_what_is_drawn() -> None:
    """What a request does not say, a server takes from the model's generation_config.json."""
    seen: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        seen.append(body)
        return 400, {"error": {"message": "enough", "type": "BadRequestError", "code": 400}}

    async with server(handler) as url:
        policy = HttpPolicy(VLLM, url, "m")
        with pytest.raises(PolicyError, match="answered 400: enough"):
            await policy.generate("a", [1], Sampling(seed=2**63 - 1))
        await policy.close()
    wanted = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 2**63 - 1}
    assert wanted.items() <= seen[0].items()
