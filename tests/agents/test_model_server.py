"""`agentrl serve`: what is served is what a training would see, adapters come and go, and episodes reach the store.

An agent that is trained, and one that is tried again: rerun, sampled from a turn, edited. The examples run, and agent
frameworks against the gateway fork no history that they keep.
"""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch

from agentrl_cli import ByteTokenizer, Config, Pack, ScriptedPolicy
from agentrl_cli.agents.gateway.request import RequestError
from agentrl_cli.agents.gateway.session import Trace
from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.agents.serve.models import ServedModel, ServedModels, SharedEngine
from agentrl_cli.agents.serve.server import ModelServer, open_server
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.packing import Segment
from agentrl_cli.models.adapter import quiet_peft
from agentrl_cli.models.load import load_model
from agentrl_cli.rollout import Job
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.maintenance import status
from agentrl_cli.types import Episode, Origin, Outcome, Sampling
from tests.agents.test_runners import LIMITS, TOOLS, pack_of
from tests.helpers.chat import CHAT, call
from tests.helpers.cli import Cli
from tests.helpers.session import scripted, what_if
from tests.helpers.train import (
    Started,
    start,
    write_model,
)

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def settings(model: Path) -> Config:
    return Config.model_validate(
        {"model": {"name": str(model), "dtype": "float32"}, "rollout": {"max_new_tokens": 20}}
    )


def write_adapter(folder: Path, model: Path, seed: int) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    given: Any = AutoModelForCausalLM.from_pretrained(model)
    with quiet_peft():
        made: Any = get_peft_model(
            given, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        )
        made.save_pretrained(folder)
    return folder


async def ask(server: ModelServer, path: str, body: Any, method: str = "POST") -> httpx2.Response:
    transport = httpx2.ASGITransport(app=server.app({"test"}))
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://test", timeout=None
    ) as client:
        return await client.request(method, path, json=body)


async def talk(server: ModelServer, key: str, turns: int, **more: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": f"Go {key}."}]
    for number in range(turns):
        body = {"messages": messages, "max_tokens": 12, **more}
        found = (await ask(server, f"/e/{key}/v1/chat/completions", body)).json()
        messages += [found["choices"][0]["message"], {"role": "user", "content": f"And {number}?"}]


def differences(model: Any, trace: Trace, temperature: float) -> float:
    """Most that a recorded log-probability differs from the trainer's, over all branches."""
    worst, compared = 0.0, set[int]()
    episode = Episode("e", "t", turns=trace.turns, tokens=trace.tokens)
    for branch in episode.sequences:
        _, found = trained_logprobs(model, [[Segment.of(episode, branch)]], temperature=temperature)
        said = trace.tokens.logp_policy[branch.positions[branch.trained]]
        worst = max(worst, float(np.abs(found.logp.numpy() - said).max()))
        compared.update(branch.positions[branch.trained].tolist())
    assert compared == set(np.flatnonzero(trace.tokens.trained_mask).tolist())
    return worst


async def test_what_is_served_has_the_trainers_log_probabilities(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", layers=2)
    async with open_server(settings(model), base=tmp_path, db=tmp_path / "a.db") as server:
        await asyncio.gather(
            *(talk(server, f"k{n}", 3, temperature=0.7, top_p=0.9) for n in range(2))
        )
        await talk(server, "k0", 2, temperature=0.7)  # the same first message: the tree forks
        refused = await ask(server, "/v1/models", {"id": "x", "adapter": "nothing@3"})
        assert refused.status_code == 400 and "no store of runs" in refused.text
        weights = load_model(model, settings(model).model, base=tmp_path)
        for n in range(2):
            trace = await server.sessions.end(f"k{n}")
            assert trace.calls == (5 if n == 0 else 3) and trace.forks == (n == 0)
            with torch.no_grad():
                assert differences(weights, trace, 0.7) < 1e-4


async def test_adapters_of_folders_and_runs_are_loaded_used_in_turn_and_unloaded(
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", layers=2)
    for name, seed in (("one", 1), ("two", 2), ("me@home/one", 1)):
        write_adapter(tmp_path / name, model, seed)
    write_adapter(tmp_path / "foreign", write_model(tmp_path / "other"), 1)
    with Store.open(tmp_path / "a.db") as store:
        store.runs.add(RunRow("r", "sums", status="finished"))
        folder = write_adapter(tmp_path / "runs" / "sums" / "3", model, 1)
        store.runs.add_checkpoint("r", 3, folder, {}, "last")
    base = {
        "messages": [{"role": "user", "content": "Go."}],
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
    }

    async def logprobs(server: ModelServer, name: str) -> list[float]:
        found = (await ask(server, "/v1/chat/completions", {**base, "model": name})).json()
        return [token["logprob"] for token in found["choices"][0]["logprobs"]["content"]]

    async with open_server(
        settings(model), base=tmp_path, db=tmp_path / "a.db", adapters=["first=one"]
    ) as server:
        added = await ask(server, "/v1/models", {"id": "second", "adapter": "two"})
        assert added.json()["weights_version"] == "two", added.text
        listed = (await ask(server, "/v1/models", None, "GET")).json()["data"]
        assert [card["id"] for card in listed] == [str(model), "first", "second"]
        assert [card["parent"] for card in listed] == [None, str(model), str(model)]
        alone = {name: await logprobs(server, name) for name in (str(model), "first", "second")}
        assert len({tuple(values) for values in alone.values()}) == 3
        mixed = await asyncio.gather(*(logprobs(server, name) for name in [*alone, *alone] * 3))
        for name, values in zip([*alone, *alone] * 3, mixed, strict=True):
            assert values == pytest.approx(alone[name], abs=1e-4)
        # New weights under a served name: later turns have its version.
        await ask(server, "/v1/models", {"id": "first", "adapter": "two"})
        assert await logprobs(server, "first") == pytest.approx(alone["second"], abs=1e-4)
        await talk(server, "k", 1, model="first")
        assert (await server.sessions.end("k")).turns[-1].weights_version == "two"
        assert (await ask(server, "/v1/models/second", None, "DELETE")).json()["deleted"] is True
        missing = await ask(server, "/v1/chat/completions", {**base, "model": "second"})
        await ask(server, "/v1/unload_lora_adapter", {"lora_name": "first"})
        assert missing.status_code == 404 and await logprobs(server, str(model)) == pytest.approx(
            alone[str(model)], abs=1e-4
        )
        added = await ask(server, "/v1/models", {"id": "x", "adapter": "sums@last"})
        assert (added.status_code, added.json()["weights_version"]) == (200, "sums@3"), added.text
        added = await ask(server, "/v1/models", {"id": "z", "adapter": "me@home/one"})
        assert added.json()["weights_version"] == "me@home/one", added.text
        for body, text in (
            *(({"id": "y", "adapter": spec}, "") for spec in ("sums@base", "sums@9", "other@last")),
            ({"id": "x"}, "`adapter`"),
            ({"id": "x", "adapter": "../x"}, "outside the project"),
            ({"id": "x", "adapter": f"{tmp_path.parent}@x/y"}, "outside the project"),
            ({"id": "x", "adapter": "~/@x/y"}, "neither a folder"),
            ({"id": "x", "adapter": "some-org/some-adapter"}, "neither a folder"),
            ({"id": "x", "adapter": "tiny"}, "neither a folder"),
            ({"id": "x", "adapter": "nothing@3"}, "No run named 'nothing'"),
            ({"id": "x", "adapter": "model"}, "is not an adapter"),
            ({"id": "x", "adapter": "foreign"}, "was trained on"),
            ({"id": str(model), "adapter": "one"}, "name of its own"),
        ):
            refused = await ask(server, "/v1/models", body)
            assert refused.status_code == 400 and text in refused.json()["error"]["message"]


async def test_requests_for_one_model_are_batched_and_none_starves() -> None:
    order: list[str] = []
    policy = ScriptedPolicy([], ByteTokenizer())
    engine = SharedEngine(policy, lambda model: order.append(f"use {model.name}"))
    a, b = (ServedModel(name, name, name, engine) for name in "ab")

    async def turn(model: ServedModel, seconds: float) -> None:
        async with engine.turn(model):
            order.append(model.name)
            await asyncio.sleep(seconds)

    await asyncio.gather(*(turn(model, 0.01) for model in (a, a, b, a, b)))
    assert " ".join(order) in ("use a a a a use b b b", "use a a a use b b b use a a")
    waiting = asyncio.create_task(turn(a, 0))
    leaving = asyncio.create_task(turn(b, 0.02))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([waiting, leaving])
    assert engine._running == 0


def test_an_observe_of_three_arguments_is_called_with_those_where_tools_are_free() -> None:
    seen: list[str] = []

    class Observer(ScriptedPolicy):
        def observe(self, key: str, messages: Any, tools: Any = ()) -> None:
            seen.append(key)

    model = ServedModel("m", None, "m", SharedEngine(Observer([], ByteTokenizer())))
    assert not model.observe("k", [], []) and seen == ["m/k"]


async def test_an_adapter_that_changes_meanwhile_leaves_no_other_behind_and_no_turn_on_it() -> None:
    on: set[str] = set()
    used: list[str | None] = []

    async def load(spec: str) -> tuple[str, str]:
        await asyncio.sleep(0)
        on.add(spec)
        return spec, spec

    async def unload(name: str) -> None:
        on.remove(name)

    policy = ScriptedPolicy(["Hi."] * 3, ByteTokenizer())
    engine = SharedEngine(policy, lambda model: used.append(model.adapter))
    models = ServedModels("m", engine, load, unload)
    await asyncio.gather(models.add("x", "one"), models.add("x", "two"))
    assert len(on) == 1
    base, x = ServedModel("m", None, "m", engine), models.policy("x")
    for change in (lambda: models.add("x", "three"), lambda: models.remove("x")):
        async with engine.turn(base):
            waiting = asyncio.gather(
                x.generate("k", [1], Sampling()), change(), return_exceptions=True
            )
            await asyncio.sleep(0)
        answer = (await waiting)[0]
    assert used == [None, "three", None] and not on
    assert isinstance(answer, RequestError) and answer.status == 404


async def test_sessions_are_recorded_as_episodes(tmp_path: Path, model: Path) -> None:
    async with open_server(
        settings(model), base=tmp_path, db=tmp_path / "a.db", record=True
    ) as server:
        await talk(server, "k", 2, tools=[TOOL])
        await ask(server, "/e/k/end", {"reward": 1.0})
        await talk(server, "open", 1)
    with Store.open(tmp_path / "a.db", readonly=True) as store:
        run = store.runs.get(server.run)
        assert (run.kind, run.status, run.model) == ("serve", "finished", str(model))
        rows = {row.task_id: row for row in store.episodes.rows(store.episodes.ids())}
        ends = {key: (row.outcome, row.reward) for key, row in rows.items()}
        assert ends == {"k": (Outcome.SOLVED, 1.0), "open": (Outcome.UNGRADED, None)}
        episode = store.episodes.get(rows["k"].id)
        assert [turn.role for turn in episode.turns] == ["user", "assistant", "user", "assistant"]
        assert episode.weights_version == str(model) and rows["k"].kind == "serve"
        assert not np.isnan(episode.tokens.logp_policy[episode.tokens.trained_mask]).any()


def recording(folder: Path) -> tuple[Started, str]:
    words = ("--model", "scripted", "--port", "0", "--record", "--db", "a.db")
    server = start(folder, "serve", *words)
    return server, server.line("http://127.0.0.1:").removesuffix("/v1")


def test_what_was_answered_is_stored_whenever_the_server_is_killed(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    db = tmp_path / "a.db"
    server, base = recording(tmp_path)
    try:
        for key in ("open", "over"):
            answer = httpx2.post(f"{base}/e/{key}/v1/chat/completions", json=body, timeout=None)
            assert answer.json()["choices"][0]["message"]["content"] == "Hello."
        cases: Sequence[tuple[dict[str, Any], int]] = (
            ({"headers": {"Host": "evil.example"}, "json": body}, 403),
            ({"headers": {"Origin": "http://evil.example"}, "json": body}, 403),
            ({"headers": {"Content-Type": "text/plain"}, "content": json.dumps(body)}, 415),
        )
        for more, code in cases:
            refused = httpx2.post(f"{base}/v1/chat/completions", timeout=None, **more)
            assert refused.status_code == code
        assert status(db).running == 2
        assert (
            httpx2.post(f"{base}/e/over/end", json={"reward": 1.0}, timeout=None).status_code == 200
        )
    finally:
        server.process.kill()
        server.end()
    assert (status(db).running, status(db).interrupted) == (0, 1)
    with Store.open(db, readonly=True) as store:
        rows = {row.task_id: row for row in store.episodes.rows(store.episodes.ids())}
    found = {key: (row.outcome, row.reward, row.n_turns) for key, row in rows.items()}
    assert found == {"open": (None, None, 2), "over": (Outcome.SOLVED, 1.0, 2)}
    server, _ = recording(tmp_path)
    os.kill(server.process.pid, signal.SIGINT)
    code, output = server.end()
    assert code == 0 and "Traceback" not in output, output
    assert (status(db).running, status(db).interrupted, status(db).rows["live"]) == (0, 0, 0)
    with Store.open(db, readonly=True) as store:
        assert store.episodes.get(rows["open"].id).outcome is Outcome.CANCELLED


def test_other_machines_need_a_token(cli: Cli) -> None:
    cli("serve", "--model", "scripted", "--host", "0.0.0.0", code=2, said="a token is needed")


async def test_an_answer_follows_its_schema(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("llguidance", reason="the extra `constrained` is not installed")
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["kind", "age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}
    body = {
        "messages": [{"role": "user", "content": "Go."}],
        "max_tokens": 60,
        "response_format": wanted,
    }
    async with open_server(settings(model), base=tmp_path, db=tmp_path / "a.db") as server:
        for n in range(3):
            found = (await ask(server, f"/e/k{n}/v1/chat/completions", body)).json()
            value = json.loads(found["choices"][0]["message"]["content"])
            assert value["kind"] in ("cat", "dog") and 0 <= value["age"] <= 99
            assert found["choices"][0]["finish_reason"] == "stop"
        trace = await server.sessions.end("k0")
        assert (
            int(Origin.FORCED) in trace.tokens.origin
        )  # what the grammar left no choice about is not trained
        free = {"type": "json_object"}
        found = await ask(
            server, "/v1/chat/completions", {**body, "response_format": free, "max_tokens": 6}
        )
        assert found.json()["choices"][0]["message"]["content"].startswith("{")
        both = (await ask(server, "/v1/chat/completions", {**body, "tools": [TOOL]})).json()[
            "choices"
        ][0]["message"]
        assert both.get("tool_calls") or both["content"][:1] in "{<"
        for bad, text in (
            ({"type": "xml"}, "xml"),
            ({"type": "json_schema"}, "needs a schema"),
            (
                {
                    "type": "json_schema",
                    "json_schema": {
                        "schema": {"type": "object", "patternProperties": {"(?=a)": {}}}
                    },
                },
                "not served",
            ),
        ):
            refused = await ask(server, "/v1/chat/completions", {**body, "response_format": bad})
            assert refused.status_code == 400 and text in refused.json()["error"]["message"], (
                refused.text
            )


# --- an agent that is trained, and one that is tried again ---


def stored(folder: Path, code: str = TOOLS) -> tuple[Path, str]:
    """A store with a run of one episode: a call, its answer, and the right end; (file, episode)."""
    pack, db, tokenizer = pack_of(folder, code), folder / "store.db", CHAT.tokenizer
    (folder / "agentrl.yaml").write_text("task: {packs: [.]}\n")
    settings = {"rollout": LIMITS, "task": {"agent": "agent.py:agent"}}
    with Store.open(db) as store:
        store.tokenizers.add(
            tokenizer.hash, tokenizer.json, tokenizer.chat_template or "", dict(tokenizer.specials)
        )
        row = store.runs.add(
            RunRow("r1", "made", status="finished", tokenizer=tokenizer.hash, config=settings)
        )
        policy = ScriptedPolicy([call("add", a=0, b=2), "2"], tokenizer)
        rollout = AgentRollout(policy, CHAT, {pack.name: pack}, Config(), store=store, run=row)
        job = Job(pack.tasks("train")[0], 7, run_id=row.id, group_id="g")
        (episode,) = asyncio.run(rollout.run([job]))
        assert episode.outcome is Outcome.SOLVED, episode.error
    return db, episode.id


def tried(db: Path, episode: str, *given: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and events of a what-if; the model says `3` from where it is free."""
    more = (*scripted(db.parent, "3"), "--project", str(db.parent))
    return asyncio.run(what_if(db, episode, *given, *more))


def test_an_agent_runs_again_with_the_recorded_answers_and_samples_a_turn_itself(
    tmp_path: Path,
) -> None:
    db, episode = stored(tmp_path)
    status, events = tried(db, episode, "--turn", "3", "--samples", "2")
    children = [event for event in events if event["ev"] == "child"]
    assert status == 0 and [child["reward"] for child in children] == [0.0, 0.0], events
    status, events = tried(db, episode, "--turn", "3", "--edit", "2")
    edited = events[-2]
    assert (status, edited["reward"], edited["outcome"]) == (0, 1.0, "solved"), events
    with Store.open(db, readonly=True) as store:
        ids = (episode, children[0]["episode"], edited["episode"])
        first, again, forced = (store.episodes.get(id_) for id_ in ids)
    assert (again.parent_id, again.parent_turn, again.kind) == (episode, 3, "whatif")
    at = first.turns[3].start
    for name in ("ids", "origin"):
        was, now = (getattr(one.tokens, name)[:at] for one in (first, again))
        assert now.tolist() == was.tolist()
    assert set(forced.tokens.origin[at:].tolist()) == {int(Origin.FORCED)}
    status, events = tried(db, episode, "--turn", "2")
    assert status == 2 and "not the model's" in events[-1]["message"]
    status, events = tried(db, episode, "--rerun")
    assert [event["ev"] for event in events] == ["ready", "rerun", "rewards", "done"], events
    totals = (events[2]["total_before"], events[2]["total_after"])
    assert (status, events[1]["same"], totals) == (0, True, (1.0, 1.0))
    code = tmp_path / "agent.py"
    code.write_text(code.read_text().replace('["a"] +', '["a"] + 5 +'))
    status, events = tried(db, episode, "--rerun", "--verify")
    assert (status, events[1]["same"], events[1]["after"]) == (0, False, "7")
    status, events = tried(db, episode, "--turn", "3")
    assert status == 2 and "did not come to turn 3 again" in events[-1]["message"], events
    code.write_text("def agent():\n raise RuntimeError('e')\n")
    status, events = tried(db, episode, "--rerun")
    assert (status, events[-2]["total_after"], events[-2]["after"]) == (0, None, []), "not graded"


# --- games of several players: a conversation, a reward and an advantage for each ---


# --- the examples ---


async def first(pack: Pack, replies: list[str]) -> Episode:
    config = Config.model_validate({"rollout": {"max_tokens": 16000, "max_new_tokens": 200}})
    rollout = AgentRollout(ScriptedPolicy(replies, CHAT.tokenizer), CHAT, {pack.name: pack}, config)
    return await rollout.episode(Job(pack.tasks("train")[0], 0))
