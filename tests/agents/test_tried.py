"""What-ifs of episodes that an agent made: it runs again, and its model repeats what it said."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.chat_session.whatif import run
from agentrl_cli.config import Config
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job
from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import Origin, Outcome
from tests.agents.test_runners import LIMITS, TOOLS, pack_of
from tests.helpers.gateway import call

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
    """Its calls answer the same and its reward comes back; a changed agent shows as a difference."""
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


def test_a_turn_is_sampled_again_by_the_agent_itself(tmp_path: Path) -> None:
    """Up to it the tokens are the recorded ones; from it on the model, or a person, answers and the agent grades."""
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


def test_an_agent_that_comes_to_another_place_is_reported(tmp_path: Path) -> None:
    db, episode = stored(tmp_path)
    (tmp_path / "agent.py").write_text(
        (tmp_path / "agent.py").read_text().replace('["a"] +', '["a"] + 5 +')
    )
    status, events = tried(db, episode, "--turn", "3")
    assert status == 2 and "did not come to turn 3 again" in events[-1]["message"], events
