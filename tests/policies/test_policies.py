"""Policies without a model: scripted, another project's by its file, and servers that answer text alone."""

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from agentrl_cli import Config, ScriptedPolicy, Store
from agentrl_cli.agents.serve.server import open_server
from agentrl_cli.commands import main
from agentrl_cli.errors import BadAnswer, ConfigError, ModelError, NotFound, PolicyError
from agentrl_cli.policies.load import load_policy
from agentrl_cli.policies.protocols import require_trainable
from agentrl_cli.policies.remote.http import Endpoint, pause, retry_after
from agentrl_cli.policies.remote.text import OpenAIPolicy
from agentrl_cli.types import TOP_K, Outcome, Sampling, StopReason
from tests.envs.test_worlds import guess, play
from tests.helpers.chat import BYTES, CHAT
from tests.helpers.processes import free_port
from tests.helpers.remote import server, silent
from tests.helpers.session import what_if
from tests.helpers.train import after_training, episodes_of, trainer_of, write_project
from tests.tui.test_chat import serve

STOP = BYTES.eos_ids[0]
PROMPT = BYTES.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("replies", "how", "said"),
    [
        (["abcdef"], {"max_new_tokens": 3}, "abc"),
        (["a<|im_end|>b"], {}, "a<|im_end|>"),
        (["x" * 50], {}, "xxxxx"),  # the context's length
        (["<tool_call>"], {}, "<tool_call><|im_end|>"),
        (lambda key, ids: f"{key}{len(ids)}", {"stop_ids": (0,)}, f"a{len(PROMPT)}\0"),
        ({"a": ["A"]}, {}, "A<|im_end|>"),
        ({"z": ["A"]}, {}, "<|im_end|>"),
    ],
)
async def test_a_scripted_turn_and_its_limits(replies: Any, how: dict[str, Any], said: str) -> None:
    policy = ScriptedPolicy(replies, BYTES, context_length=len(PROMPT) + 5, logp=-0.5)
    heard: list[int] = []
    found = await policy.generate("a", PROMPT, Sampling(**how), on_token=heard.append)
    assert BYTES.decode(found.ids) == said and heard == found.ids.tolist()
    stopped = found.ids[-1] in (0, STOP)
    assert found.stop_reason is (StopReason.STOP if stopped else StopReason.LENGTH)
    assert found.logp_sampled.tolist() == [-0.5] * len(heard)
    assert found.top_ids.shape == (len(heard), TOP_K)
    with pytest.raises(PolicyError, match="does not fit"):
        await policy.generate("a", [0] * (len(PROMPT) + 5), Sampling())


async def test_scripted_goes_through_its_texts_per_episode() -> None:
    policy = ScriptedPolicy(["one", "two"], BYTES)

    async def said(key: str) -> str:
        return BYTES.decode((await policy.generate(key, PROMPT, Sampling())).ids[:-1])

    assert [await said(key) for key in "abaa"] == ["one", "one", "two", ""]
    await policy.release("a")
    assert await said("a") == "one"


async def test_openai_text_is_for_eval_and_refused_for_training() -> None:
    chat = CHAT
    requests: list[dict[str, Any]] = []
    call: dict[str, Any] = {
        "id": "x",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        requests.append(body)
        if path.endswith("/chat/completions"):
            return 200, {
                "choices": [
                    {
                        "message": {"content": None, "tool_calls": [call]},
                        "finish_reason": "tool_calls",
                    }
                ]
            }
        return 200, {
            "choices": [
                {"text": "hello", "finish_reason": "length" if len(requests) > 1 else "stop"}
            ]
        }

    async with server(handler) as url:
        policy = OpenAIPolicy(url, "m", chat)
        with pytest.raises(ModelError, match="returns text"):
            require_trainable(policy)
        said = await policy.generate("a", PROMPT, Sampling())
        assert BYTES.decode(said.ids) == "hello<|im_end|>" and np.isnan(said.logp_policy).all()
        assert requests[0]["prompt"] == BYTES.decode(PROMPT) and requests[0]["stop"] == [
            "<|im_end|>"
        ]
        cut = await policy.generate("a", PROMPT, Sampling())
        assert (BYTES.decode(cut.ids), cut.stop_reason) == ("hello", StopReason.LENGTH)
        await policy.close()
        talking = OpenAIPolicy(url, "m", chat, mode="chat")
        with pytest.raises(PolicyError, match="observe"):
            await talking.generate("a", PROMPT, Sampling())
        before = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"b": 2}}}],
        }
        talking.observe("a", [{"role": "user", "content": "hi"}, before])
        said = await talking.generate("a", PROMPT, Sampling())
        assert (
            BYTES.decode(said.ids)
            == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
        )
        assert requests[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"b": 2}'
        call["function"]["arguments"] = ""  # as some servers write a call without any
        said = await talking.generate("a", PROMPT, Sampling())
        assert CHAT.parse(said.ids).calls[0].arguments == {}
        await talking.close()


async def test_openai_text_obeys_every_setting_or_refuses_it() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        said = "one</a> two</b>"
        whole = {"message": {"content": said}} if "chat" in path else {"text": said}
        return 200, {"choices": [{**whole, "finish_reason": "stop"}]}

    more: dict[str, Any] = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
    async with server(handler) as url:
        for mode in ("completions", "chat"):
            policy = OpenAIPolicy(url, "m", CHAT, mode=mode)
            policy.observe("a", [{"role": "user", "content": "hi"}], [{"type": "function"}])
            marker: Any = BYTES.id_of("<tool_call>")
            await policy.generate("a", PROMPT, Sampling(bad_ids=(marker,)))
            assert bodies[-1].get("tool_choice") == (None if mode == "completions" else "none")
            assert bodies[-1].get("stop", [])[:1] == ["<tool_call>"] * (mode == "completions")
            await policy.generate("a", PROMPT, Sampling())
            assert not {*more, "tool_choice"} & set(bodies[-1]), (
                "OpenAI's own endpoint refuses what it lacks"
            )
            asked = Sampling(stop_strings=("</b>", "</a>"), **more)
            said = await policy.generate("a", PROMPT, asked)
            assert (BYTES.decode(said.ids), said.stop_reason) == ("one</a>", StopReason.STOP_STRING)
            assert {name: bodies[-1][name] for name in more} == more
            with pytest.raises(PolicyError, match="Forced tokens"):
                await policy.generate("a", PROMPT, Sampling(allow=lambda ids: [1]))
            await policy.close()


OUTSIDER = """
import time

import numpy as np
import torch

from agentrl_cli.policies.protocols import generation
from agentrl_cli.types import StopReason


class Simple:
    name = "simple"
    untrainable = ""
    separate_weights = False

    def __init__(self, source):
        self.model = source.model()
        self.context_length = source.context_length
        self.weights_version = source.name
        self.sampled = 0

    async def generate(self, key, ids, sampling, *, group="", on_token=None, images=()):
        started, context = time.perf_counter(), list(ids)
        draw = torch.Generator().manual_seed(sampling.seed % 2**63)
        out, logps, reason = [], [], StopReason.LENGTH
        while len(out) < sampling.max_new_tokens:
            with torch.no_grad():
                logits = self.model(torch.tensor([context + out])).logits[0, -1].float()
            known = torch.log_softmax(logits / sampling.temperature, -1)
            id_ = int(torch.multinomial(known.exp(), 1, generator=draw))
            out.append(id_)
            logps.append(float(known[id_]))
            if on_token is not None:
                on_token(id_)
            if id_ in sampling.stop_ids:
                reason = StopReason.STOP
                break
        self.sampled += len(out)
        seconds = time.perf_counter() - started
        return generation(out, reason, weights_version=self.weights_version, logps=logps, seconds=seconds)

    async def release(self, key):
        pass

    async def close(self):
        pass

    async def rest(self):
        pass

    async def publish(self, version):
        self.weights_version = version

    def take_metrics(self):
        found, self.sampled = {"simple/tokens": float(self.sampled)}, 0
        return found

    def describe(self):
        return "one token at a time"


def unfinished(source):
    policy = Simple(source)
    policy.untrainable = "it has not been tried"
    return policy
"""


async def test_an_outsiders_policy_trains(tmp_path: Path, model: Path) -> None:
    (tmp_path / "simple.py").write_text(OUTSIDER)
    remote = {"backend": "simple.py:Simple"}
    async with trainer_of(tmp_path, model, remote=remote) as trainer:
        before = {
            name: weights.clone() for name, weights in trainer.loaded.model.state_dict().items()
        }
        run = await trainer.train()
        metrics = {row["step"]: row for row in trainer.store.runs.steps(run.id)}
        episodes = episodes_of(trainer.store, run)
        lines = [row["text"] for row in trainer.store.journal.logs(run.id)]
        after = trainer.loaded.model.state_dict()
    assert (run.status, run.step) == ("finished", 2) and "engine one token at a time" in lines
    assert any(not torch.equal(before[name], after[name]) for name in before)
    sampled = {step: sum(e.trained_tokens for e in episodes if e.step == step) for step in (1, 2)}
    assert {step: row["simple/tokens"] for step, row in metrics.items()} == sampled
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in metrics.values()), (
        "the trained weights"
    )
    versions = {
        (e.step, turn.weights_version)
        for e in episodes
        for turn in e.turns
        if turn.role == "assistant"
    }
    assert versions == {(1, str(model)), (2, f"{run.name}@1")}


async def test_an_outsiders_policy_is_served(tmp_path: Path, model: Path) -> None:
    (tmp_path / "simple.py").write_text(OUTSIDER)
    given = {"model": {"name": str(model)}, "remote": {"backend": "simple.py:Simple"}}
    async with open_server(
        Config.model_validate(given), base=tmp_path, db=tmp_path / "a.db"
    ) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "seed": 1}
        transport = httpx2.ASGITransport(app=server.app({"test"}))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://test", timeout=None
        ) as client:
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3, (
                answer.text
            )
            (tmp_path / "one").mkdir()
            refused = await client.post("/v1/models", json={"id": "one", "adapter": "one"})
            assert refused.status_code == 400 and "takes no adapters" in refused.text


def test_backends_are_looked_up_by_name(tmp_path: Path, model: Path) -> None:
    (tmp_path / "simple.py").write_text(OUTSIDER)

    def load(backend: str, trainable: bool = True) -> str:
        settings = {"model": {"name": str(model)}, "remote": {"backend": backend}}
        return load_policy(
            None, Config.model_validate(settings), base=tmp_path, trainable=trainable
        ).policy.name

    assert (
        load("simple.py:Simple") == "simple"
        and load("simple.py:unfinished", trainable=False) == "simple"
    )
    with pytest.raises(ModelError, match="Policy simple cannot be trained: it has not been tried"):
        load("simple.py:unfinished")
    with pytest.raises(NotFound, match="vlm") as unknown:
        load("vlm")
    assert "agentrl.policies" in unknown.value.hint
    with pytest.raises(ConfigError, match=r"remote\.backend needs remote\.url"):
        load("openai")
    settings = {
        "model": {"name": str(model)},
        "remote": {"backend": "openai", "url": "http://127.0.0.1:9/v1"},
        "rollout": {"truncation": {"bad_tokens": ["x"]}},
    }
    with pytest.raises(ConfigError, match="bad_tokens"):
        load_policy(None, Config.model_validate(settings), base=tmp_path)


def test_eval_with_a_text_only_server(tmp_path: Path, model: Path) -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append({"path": path, **body})
        return 200, {
            "choices": [
                {"message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
            ]
        }

    async def run() -> int:
        async with server(handler) as url:
            remote = {"backend": "openai", "url": url, "model": "gpt", "mode": "chat"}
            write_project(tmp_path, model, remote=remote, eval={"k": 1, "limit": 2})
            return await asyncio.to_thread(main, ["eval", "--project", str(tmp_path)])

    assert asyncio.run(run()) == 0
    assert bodies.pop(0)["path"] == "/v1/models", "it is asked before anything runs"
    assert len(bodies) == 2 and all(body["path"] == "/v1/chat/completions" for body in bodies)
    assert bodies[0]["messages"][-1]["content"].startswith("Go ") and bodies[0]["model"] == "gpt"


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"message": "hello"},
        {"message": {"content": 5}},
        {"message": {"tool_calls": [{"function": {"name": 3}}]}},
        {"message": {"content": "hello"}},
        {"message": {"content": "hello " * 500}, "finish_reason": "stop"},
        {"message": {"content": "a\ud800"}, "finish_reason": "stop"},
        {"message": {"content": [5]}, "finish_reason": "stop"},
        {"message": {"content": [{"type": "text"}]}, "finish_reason": "stop"},
        {
            "message": {"tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]},
            "finish_reason": "stop",
        },
        *(
            {"text": text, "finish_reason": "stop"}
            for text in ("a\ud800", {"role": "assistant"}, None)
        ),
    ],
)
async def test_a_text_only_server_is_checked(bad: dict[str, Any]) -> None:
    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"choices": [bad]}

    async with server(handler) as url:
        mode = "completions" if "text" in bad else "chat"
        policy = OpenAIPolicy(
            url.replace("//", "//joe:hunter2@"), "gpt", CHAT, mode=mode, retries=0
        )
        policy.observe("a", [{"role": "user", "content": "Hello?"}])
        with pytest.raises(BadAnswer, match=r"^http://\[masked:url-password\]@.* sent"):
            await policy.generate("a", [1], Sampling(max_new_tokens=12))
        await policy.close()


async def test_a_busy_server_is_left_alone_as_long_as_it_asks() -> None:
    times: list[float] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[Any, ...]:
        times.append(time.monotonic())
        if len(times) > 2:
            return 200, {"choices": [{"text": "x", "finish_reason": "stop"}]}
        date = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
        return (
            (429, {}, "Retry-After: 1") if len(times) == 1 else (503, b"", f"Retry-After: {date}")
        )

    async with server(handler) as url:
        policy = OpenAIPolicy(url, "m", CHAT)
        await policy.generate("a", PROMPT, Sampling())
        await policy.close()
    first, second, third = times
    assert second - first >= 1 and third - second >= 1
    assert [retry_after(text) for text in ("", "soon", "-5", "nan", "1e9")] == [0.0] * 5
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") < 0
    hour = retry_after("3600")
    assert pause(0, hour, left=120.0) == 120.0  # the patience, or the longest pause without it
    assert pause(0, hour, left=-5.0) == pause(9, 0.0, left=120.0) == 10.0
    assert pause(0, -9.0, left=120.0) == 0.2


async def test_a_stored_bad_episode_is_skipped_and_never_blocks_a_resume(
    tmp_path: Path, model: Path
) -> None:
    """As a version stored it that believed every server: the update died of it, at every resume again."""
    more: dict[str, Any] = {"train": {"steps": 1}, "algo": {"drop_zero_variance": False}}
    async with trainer_of(tmp_path, model, **more) as trainer:
        run = trainer.run
        for episode in await trainer.rollout.run(trainer.collector.jobs(0)):
            if episode.sample < 2:
                spoil(trainer.store, episode, ("ids", "logp_policy")[episode.sample])
        db = Path(trainer.store.path)
    with Store.open(db) as store:
        row = store.runs.get(run.id)
    async with after_training(tmp_path, model, run=row, **more) as (trainer, done):
        found = episodes_of(trainer.store, row)
        step = trainer.store.runs.steps(row.id)[0]
        alerts = {alert["name"] for alert in trainer.store.journal.folded_alerts(row.id)}
    assert done.status == "finished" and len(found) == 8 and "bad_tokens" in alerts
    assert {e.fact for e in found if e.sample < 2} == {"skipped:bad_tokens"}
    assert {e.fact for e in found if e.sample > 1} == {"trained"} and np.isfinite(step["loss"])


def spoil(store: Any, episode: Any, field: str) -> None:
    """Put a value that no model can have sampled into the last turn of a stored episode."""
    turn = episode.turns[-1]
    tokens = episode.tokens.slice(turn.start, turn.end)
    values = getattr(tokens, field).copy()
    values[0] = 5_000_000 if field == "ids" else 3.0
    store.episodes.add_turn(episode.id, turn, replace(tokens, **{field: values}))
    store.flush()


# --- servers that are not there, or fall silent ---


def remote(url: str) -> list[str]:
    said = ("remote.backend=openai", f"remote.url={url}", "remote.model=m")
    return [word for text in said for word in ("--set", text)]


async def chat(url: str, db: Path) -> list[dict[str, Any]]:
    _, events = await serve(
        [{"op": "user", "text": "hi"}], "--pack", "calc-task", "--db", str(db), *remote(url)
    )
    return events


async def test_a_server_that_is_not_there_or_never_answers(tmp_path: Path) -> None:
    async with silent() as (mute, *_):
        for url, why, hints in (
            (
                f"http://127.0.0.1:{free_port()}/v1",
                "Connection refused.",
                ("remote.url", "--model tiny"),
            ),
            (mute, "no answer for 4 s.", ("loading its model",)),
        ):
            (event,) = await chat(url, tmp_path / "c.db")
            assert event["ev"] == "fatal" and event["message"] == f"{url} cannot be reached: {why}"
            assert all(hint in event["hint"] for hint in hints)


async def test_it_falls_silent_while_the_model_is_to_answer(tmp_path: Path) -> None:
    async with silent(1) as (url, *_):
        events = await chat(url, tmp_path / "c.db")
    (event,) = [event for event in events if event["ev"] == "error"]
    assert "no answer for 4 s" in event["message"] and events[-1]["ev"] == "idle"
    asked, over = asyncio.Event(), asyncio.Event()

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if not path.endswith("/models"):
            asked.set()
            await over.wait()
        return 200, {}

    async with server(handler) as url:  # a busy one is there
        endpoint = Endpoint(url, concurrency=1)
        answer = asyncio.ensure_future(endpoint.post("/completions", {}))
        await asked.wait()
        await endpoint.reach()
        over.set()
        assert await answer == {}
        await endpoint.close()


async def test_a_what_if_with_a_server_that_is_not_there(tmp_path: Path) -> None:
    db, (pack, task) = tmp_path / "a.db", guess()
    episode = await play(db, pack, task, ["10", "12"], {})
    config = {"remote": {"backend": "openai", "url": f"http://127.0.0.1:{free_port()}/v1"}}
    (tmp_path / "agentrl.yaml").write_text(json.dumps(config))
    code, events = await what_if(db, episode, "--turn", "2", "--project", str(tmp_path))
    assert code and events[-1]["ev"] == "fatal" and "Connection refused" in events[-1]["message"]
    with Store.open(db, readonly=True) as store:
        assert (
            len(store.episodes.ids()) == 1 and store.episodes.get(episode).outcome is Outcome.SOLVED
        )
