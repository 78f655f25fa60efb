"""An agent that is trained, and one that is tried again: rerun, sampled from a turn, edited."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.chat_session.whatif import run
from agentrl_cli.config import Config
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Fact, Origin, Outcome
from tests.agents.test_runners import LIMITS, TOOLS, pack_of
from tests.helpers.cli import Cli
from tests.helpers.gateway import call
from tests.helpers.train import episodes_of, trainer_of, write_pack, write_project

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning"
)  # peft's, on transformers 5

AGENT = """\
import httpx2


def agent(task, base_url, api_key, model):
    body = {"model": model, "messages": list(task.prompt)}
    headers = {"authorization": f"Bearer {api_key}"}
    with httpx2.Client(trust_env=False, verify=False, timeout=600) as client:  # without TLS it is cheap to make
        client.post(f"{base_url}/chat/completions", json=body, headers=headers).raise_for_status()
"""
SETTINGS = {"agent": "agent.py:agent"}


async def test_it_samples_what_the_built_in_loop_samples(tmp_path: Path, model: Path) -> None:
    found = []
    for name, task in (("own", {"packs": ["."]}), ("agent", {"packs": ["."], **SETTINGS})):
        (tmp_path / name).mkdir()
        write_pack(tmp_path / name)
        (tmp_path / name / "agent.py").write_text(AGENT)
        async with trainer_of(tmp_path / name, model, task=task, train={"steps": 1}) as trainer:
            run = await trainer.train()
            episodes = episodes_of(trainer.store, run)
            (metrics,) = trainer.store.runs.steps(run.id)
        assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
        order = sorted(episodes, key=lambda e: (e.task_id, e.sample))
        found.append(
            [(e.task_id, e.tokens.ids.tolist(), e.reward, e.fact, e.weights_version) for e in order]
        )
        assert {e.fact for e in episodes} <= {str(Fact.TRAINED), str(Fact.SKIPPED_ZERO_VARIANCE)}
    assert [row[:4] for row in found[0]] == [row[:4] for row in found[1]]


def test_the_command_line_takes_an_agent_and_resumes_with_it(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    project = write_project(tmp_path, model)
    (project / "agent.py").write_text(AGENT)
    given = ("--agent", "agent.py:agent")
    cli("rollout", "-n", "2", *given)
    cli("train", "--steps", "1", *given)
    cli("train", "--resume", "last", "--steps", "2")
    cli("eval", "-k", "1", "--limit", "2", *given)
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = next(row for row in store.runs.all() if row.kind == "train")
        assert (run.status, run.step) == ("finished", 2) and json.loads(json.dumps(run.config))[
            "task"
        ] | SETTINGS
        rows = store.episodes.rows(store.episodes.ids("", "time"))
        assert {row.kind for row in rows} == {"rollout", "train", "eval"}
    assert "Go " in cli("replay", rows[0].id, "--plain")
    assert "0 of " in cli("rescore", "last", "--no-keep") + cli.err
    said = cli("chat", "--model", "scripted", "--plain", "--say", "hi", "--say", "/reward", code=1)
    assert "no task to score by" in said + cli.err
    other = ("--steps", "3", "--agent", "other.py:agent")
    cli("train", "--resume", "last", *other, code=2, said="`task`")


CHAT = Chat(ByteTokenizer())


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
    out, script = io.StringIO(), db.parent / "script.json"
    script.write_text(json.dumps(["3"]))
    more = ["--model", "scripted", "--script", str(script), "--project", str(db.parent)]
    status = asyncio.run(run(["--db", str(db), "--episode", episode, *given, *more], out))
    return status, [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_agent_runs_again_with_the_recorded_answers(tmp_path: Path) -> None:
    db, episode = stored(tmp_path)
    status, events = tried(db, episode, "--rerun")
    assert status == 0 and [event["ev"] for event in events] == [
        "ready",
        "rerun",
        "rewards",
        "done",
    ], events
    assert events[1]["same"] and (events[2]["total_before"], events[2]["total_after"]) == (1.0, 1.0)
    (tmp_path / "agent.py").write_text(
        (tmp_path / "agent.py").read_text().replace('["a"] +', '["a"] + 5 +')
    )
    status, events = tried(db, episode, "--rerun", "--verify")
    assert (status, events[1]["same"], events[1]["after"]) == (0, False, "7")
    status, events = tried(db, episode, "--turn", "3")
    assert status == 2 and "did not come to turn 3 again" in events[-1]["message"], events


def test_a_turn_is_sampled_again_by_the_agent_itself(tmp_path: Path) -> None:
    db, episode = stored(tmp_path)
    status, events = tried(db, episode, "--turn", "3", "--samples", "2")
    children = [event for event in events if event["ev"] == "child"]
    assert status == 0 and [child["reward"] for child in children] == [0.0, 0.0], events
    status, events = tried(db, episode, "--turn", "3", "--edit", "2")
    edited = events[-2]
    assert (status, edited["reward"], edited["outcome"]) == (0, 1.0, "solved"), events
    with Store.open(db, readonly=True) as store:
        first, again, forced = (
            store.episodes.get(id_) for id_ in (episode, children[0]["episode"], edited["episode"])
        )
    assert (again.parent_id, again.parent_turn, again.kind) == (episode, 3, "whatif")
    at = first.turns[3].start
    assert again.tokens.ids[:at].tolist() == first.tokens.ids[:at].tolist()
    assert again.tokens.origin[:at].tolist() == first.tokens.origin[:at].tolist()
    assert set(forced.tokens.origin[at:].tolist()) == {int(Origin.FORCED)}
    status, events = tried(db, episode, "--turn", "2")
    assert status == 2 and "not the model's" in events[-1]["message"]
