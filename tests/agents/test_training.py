"""Training, evaluation and the command line with an agent in place of the built-in loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agentrl_cli.store import Store
from agentrl_cli.types import Fact, Outcome
from tests.helpers.train import episodes_of, spawn, trainer_of, write_pack, write_project

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


async def test_a_model_learns_through_the_gateway(tmp_path: Path, model: Path) -> None:
    """The bandit by an HTTP client: rewards rise, and what was sampled has the trainer's own log-probabilities."""
    write_pack(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    train = {"steps": 12, "lr": 2e-2}
    rollout = {"group_size": 8, "prompts_per_step": 4}
    seen: list[dict[str, float]] = []
    async with trainer_of(
        tmp_path, model, task={"packs": ["."], **SETTINGS}, train=train, rollout=rollout
    ) as trainer:
        trainer.on_step = lambda step, metrics: seen.append(metrics)
        run = await trainer.train()
        episodes = episodes_of(trainer.store, run)
    assert run.status == "finished" and len(episodes) == 12 * 32
    assert all(
        e.outcome in (Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED_TOKENS) for e in episodes
    )
    assert all(
        [turn.role for turn in e.turns] == ["user", "assistant"] and e.trained_tokens
        for e in episodes
    )
    assert max(metrics["sampling/sampling_logp_difference/max"] for metrics in seen) < 1e-4
    rewards = [metrics["rewards/even/mean"] for metrics in seen]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards


async def test_it_samples_what_the_built_in_loop_samples(tmp_path: Path, model: Path) -> None:
    """The same tasks and seeds give the same tokens, log-probabilities and facts, by both ways."""
    found = []
    for name, task in (("own", {"packs": ["."]}), ("agent", {"packs": ["."], **SETTINGS})):
        (tmp_path / name).mkdir()
        write_pack(tmp_path / name)
        (tmp_path / name / "agent.py").write_text(AGENT)
        async with trainer_of(tmp_path / name, model, task=task, train={"steps": 1}) as trainer:
            run = await trainer.train()
            episodes = episodes_of(trainer.store, run)
        order = sorted(episodes, key=lambda e: (e.task_id, e.sample))
        found.append(
            [(e.task_id, e.tokens.ids.tolist(), e.reward, e.fact, e.weights_version) for e in order]
        )
        assert {e.fact for e in episodes} <= {str(Fact.TRAINED), str(Fact.SKIPPED_ZERO_VARIANCE)}
    assert [row[:4] for row in found[0]] == [row[:4] for row in found[1]]


def test_the_command_line_takes_an_agent_and_resumes_with_it(tmp_path: Path, model: Path) -> None:
    """rollout, train, --resume, eval and replay of one project, with `--agent` alone."""
    project = write_project(tmp_path, model)
    (project / "agent.py").write_text(AGENT)
    given = ("--agent", "agent.py:agent")
    code, text = spawn(project, "rollout", "-n", "2", *given)
    assert code == 0, text
    code, text = spawn(project, "train", "--steps", "1", *given)
    assert code == 0, text
    code, text = spawn(project, "train", "--resume", "last", "--steps", "2")
    assert code == 0, text
    code, text = spawn(project, "eval", "-k", "1", "--limit", "2", *given, "--json")
    assert code == 0, text
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        run = next(row for row in store.runs.all() if row.kind == "train")
        assert (run.status, run.step) == ("finished", 2) and json.loads(json.dumps(run.config))[
            "task"
        ] | SETTINGS
        rows = store.episodes.rows(store.episodes.ids("", "time"))
        assert {row.kind for row in rows} == {"rollout", "train", "eval"}
    code, text = spawn(project, "replay", rows[0].id, "--plain")
    assert code == 0 and "Go " in text, text
    code, text = spawn(project, "rescore", "last", "--no-keep")
    assert code == 0 and "0 of " in text, text
    code, text = spawn(
        project, "chat", "--model", "scripted", "--plain", "--say", "hi", "--say", "/reward"
    )
    assert code == 1 and "no task to score by" in text, text
    code, text = spawn(
        project, "train", "--resume", "last", "--steps", "3", "--agent", "other.py:agent"
    )
    assert code == 2 and "`task`" in text, text
