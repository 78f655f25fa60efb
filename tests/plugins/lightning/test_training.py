"""Scripts written for Agent-Lightning train here, and its names, signatures and behaviour are those of the package."""

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest

import agentrl_cli.plugins.lightning as agl
from agentrl_cli.registry import load_file
from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Fact, Origin, Outcome
from tests.helpers.processes import ROOT


def ask(llm: agl.LLM, text: str) -> Any:
    """One chat completion, as a client of the user's own would make it, with vLLM's field for token ids."""
    body = {
        "model": llm.model,
        "messages": [{"role": "user", "content": text}],
        "return_token_ids": True,
    }
    with httpx2.Client(trust_env=False, verify=False, timeout=600) as client:
        answer = client.post(
            f"{llm.endpoint}/chat/completions", json=body, headers={"authorization": "Bearer dummy"}
        )
    return answer.raise_for_status().json()


@agl.rollout
def bandit(task: dict[str, Any], llm: agl.LLM) -> float:
    """The share of sampled tokens with even ids."""
    ids = ask(llm, task["question"])["choices"][0]["token_ids"]
    return float(np.mean([id_ % 2 == 0 for id_ in ids]))


def verl(model: Path, **trainer: Any) -> dict[str, Any]:
    """A dictionary as scripts write it."""
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 4, "max_prompt_length": 64, "max_response_length": 4},
        "actor_rollout_ref": {
            "rollout": {
                "n": 8,
                "name": "vllm",
                "gpu_memory_utilization": 0.6,
                "multi_turn": {"format": "hermes"},
            },
            "actor": {
                "ppo_mini_batch_size": 4,
                "optim": {"lr": 4e-2, "lr_warmup_steps": 0},
                "use_kl_loss": False,
            },
            "model": {"path": str(model), "use_remove_padding": True},
        },
        "trainer": {
            "n_gpus_per_node": 1,
            "logger": ["console"],
            "experiment_name": "bandit",
            **trainer,
        },
    }


NAMES = ("calc_x", "minimal", "spider")
TASKS = [{"question": f"Go {number}."} for number in range(6)]


def trained(folder: Path) -> list[Episode]:
    """The episodes of a folder's trainings."""
    with Store.open(folder / "runs" / "agentrl.db", readonly=True) as store:
        rows = store.episodes.rows(store.episodes.ids("kind:train", "time"))
        return [store.episodes.get(row.id) for row in rows]


def test_a_model_learns_and_the_store_has_its_tokens(tmp_path: Path, model: Path) -> None:
    store = agl.SqliteLightningStore(tmp_path / "runs" / "agentrl.db")
    algorithm = agl.VERL(verl(model, total_training_steps=7, test_freq=7))
    trainer = agl.Trainer(algorithm=algorithm, n_runners=16, store=store, project=tmp_path)
    trainer.fit(bandit, TASKS, val_dataset=TASKS[:2])
    assert algorithm.last is not None and algorithm.last.status == "finished"
    assert {"trainer.n_gpus_per_node", "actor_rollout_ref.rollout.gpu_memory_utilization"} <= {
        *algorithm.ignored
    }
    episodes = trained(tmp_path)
    assert len(episodes) == 7 * 4 * 8
    rewards = [
        float(np.mean([e.graded_reward for e in episodes if e.step == step]))
        for step in range(1, 8)
    ]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards

    async def look() -> tuple[Any, Any]:
        tried = await store.query_rollouts()
        assert [rollout.mode for rollout in tried].count(
            "val"
        ) == 2 * 2 * 2  # of the base and of the last step
        rollouts = [rollout for rollout in tried if rollout.mode == "train"]
        spans = [await store.query_spans(rollout.rollout_id, "latest") for rollout in rollouts]
        await store.close()
        return rollouts, spans

    rollouts, spans = asyncio.run(look())
    assert len(rollouts) == len(episodes) and {rollout.status for rollout in rollouts} == {
        "succeeded"
    }
    assert {rollout.input["question"] for rollout in rollouts} <= {
        task["question"] for task in TASKS
    }
    kept = sorted((e.tokens.ids[: e.turns[1].end].tolist(), e.reward) for e in episodes)
    found = []
    for each in spans:
        assert [span.sequence_id for span in each] == [1, 2]
        [triplet] = agl.TracerTraceToTriplet().adapt(each)
        [other] = agl.LlmProxyTraceToTriplet().adapt(each)
        assert (
            triplet.response["token_ids"] == other.response["token_ids"]
            and triplet.reward == other.reward
        )
        assert len(triplet.response["logprobs"]) == len(triplet.response["token_ids"])
        found.append(triplet.prompt["token_ids"] + triplet.response["token_ids"])
    assert all(any(whole[: len(ids)] == ids for whole, _ in kept) for ids in found)


class Seen(agl.Hook):
    """The seed's form of a hook: sync, with two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.rewards: list[Any] = []

    def on_rollout_end(self, rollout: agl.Rollout, task: Any) -> None:  # type: ignore[override]
        self.rewards.append((task["question"], rollout.reward))


class Chatty(agl.LitAgent[Any]):
    """A class with coroutines: training and validation differ, resources are read by name."""

    async def training_rollout_async(
        self, task: Any, resources: Any, rollout: agl.Rollout
    ) -> float:
        reply = await asyncio.to_thread(
            ask, resources["main_llm"], task["question"] + resources["prompt"].template
        )
        assert rollout.mode == "train" and self.trainer.n_runners == 4 and self.tracer is not None
        if task["question"] == "Go 1.":
            raise LookupError("agents may fail")
        return float(np.mean([id_ % 2 == 0 for id_ in reply["choices"][0]["token_ids"]]))


def test_a_loaded_model_is_trained_in_place_and_hooks_of_two_arguments_are_called(
    tmp_path: Path, model: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
    )
    before = {name: weight.clone() for name, weight in loaded.state_dict().items()}
    config = {
        "rollout": {"max_new_tokens": 4, "max_tokens": 96},
        "algo": {"drop_zero_variance": False},
    }
    algorithm = agl.MiniGRPO(
        loaded, tokenizer, steps=2, lr=1e-2, group_size=3, prompts_per_step=3, config=config
    )
    seen, store = Seen(), agl.InMemoryLightningStore()
    prompt: agl.NamedResources = {"prompt": agl.PromptTemplate(template="!", engine="f-string")}
    trainer = agl.Trainer(
        algorithm=algorithm,
        agent=Chatty(),
        hooks=[seen, agl.LoggingHook()],
        store=store,
        n_runners=4,
        initial_resources=prompt,
        project=tmp_path,
    )
    trainer.fit(TASKS[:3])
    assert len(seen.rewards) == 2 * 3 * 3
    assert all((reward is None) == (question == "Go 1.") for question, reward in seen.rewards)
    outcomes = {(episode.task_id, str(episode.outcome)) for episode in trained(tmp_path)}
    assert {outcome for task, outcome in outcomes if task.endswith("1")} == {"agent_error"}, (
        outcomes
    )
    changed = [
        name
        for name, weight in loaded.state_dict().items()
        if not np.array_equal(weight, before[name])
    ]
    assert changed
    statuses = [rollout.status for rollout in asyncio.run(store.query_rollouts())]
    assert statuses.count("failed") == 6 and statuses.count("succeeded") == 12


def test_verl_settings_are_ours_and_the_rest_is_named(model: Path) -> None:
    given = verl(model, total_epochs=2, save_freq=-1, test_freq=3, val_before_train=True)
    given["actor_rollout_ref"]["actor"] |= {
        "clip_ratio_high": 0.3,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
    }
    given["actor_rollout_ref"]["model"]["lora_rank"] = 8
    given["agentlightning"] = {
        "trace_aggregator": {"level": "trajectory", "trajectory_max_prompt_length": 100}
    }
    given["agentlightning"]["trace_aggregator"]["trajectory_max_response_length"] = 28
    algorithm = agl.VERL(given, trainer_cls=object)
    config = algorithm.settings(10)
    assert (config.train.steps, config.train.eval.every, config.rollout.max_tokens) == (5, 3, 128)
    assert (config.algo.kl.coef, config.algo.kl.estimate) == (0.01, "k3")
    assert config.algo.loss.clip_high == 0.3  # type: ignore[attr-defined]
    assert (config.adapter.enabled, config.adapter.r, config.model.chat.parser) == (
        True,
        8,
        "hermes",
    )
    assert algorithm.ignored == [
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.name",
        "trainer.n_gpus_per_node",
        "trainer.val_before_train",
        "trainer_cls",
    ]


def test_a_logger_that_is_not_installed_is_a_line(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every published config has `logger: [console, wandb]`. An empty entry of sys.modules is a missing package."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    given = verl(model, logger=["console", "wandb", "swanlab", "jsonl"])
    assert agl.VERL(given).settings(10).loggers == ["jsonl"]
    [line] = [record.getMessage() for record in caplog.records if "wandb" in record.getMessage()]
    assert (
        line.endswith("The run goes on without it; pip install 'agentrl-cli[wandb]'")
        and "\n" not in line
    )
    assert "VERL: No logger named 'swanlab'." in caplog.text


async def test_scripts_after_the_published_ones_run(tmp_path: Path, model: Path) -> None:
    calc, minimal, spider = (
        load_file(ROOT / "examples" / "lightning" / f"{n}.py")
        for n in ("calc_x", "minimal", "spider")
    )
    trainer = await asyncio.to_thread(calc.main, str(model), 1, str(tmp_path))
    assert trainer.algorithm.last.status == "finished"
    spans = await minimal.write_traces()
    assert [span.name for span in spans] == [
        "grpc-span-2",
        "grpc-span-1",
        "grpc-span-3",
        "agentlightning.annotation",
    ]
    assert (
        spans[0].parent_id == spans[1].span_id
        and spans[-1].attributes["agentlightning.reward.0.value"] == 1.0
    )
    [span] = await minimal.serve_llm_proxy(str(model))
    assert (
        span.attributes["gen_ai.request.model"] == "served"
        and len(span.attributes["response_token_ids"]) <= 8
    )
    [made] = agl.LlmProxyTraceToTriplet().adapt([span])
    assert made.prompt["token_ids"]
    store = agl.SqliteLightningStore(tmp_path / "queue.db")
    proxy = agl.LLMProxy(
        model_list=[{"model_name": "", "litellm_params": {"model": str(model)}}], store=store
    )
    await proxy.start()
    try:
        with pytest.warns(DeprecationWarning, match="n_workers"):
            tried = await asyncio.to_thread(spider.main, proxy.as_resource().endpoint, store=store)
    finally:
        await proxy.stop()
    rollouts = await tried.store.query_rollouts()
    assert [rollout.status for rollout in rollouts] == ["succeeded"] * 2
    assert {
        agl.find_final_reward(list(await store.query_spans(r.rollout_id))) for r in rollouts
    } <= {0.0, None}
    await store.close()


def even(completion_ids: Any, question: Any, **_: Any) -> list[float]:
    """A reward function with TRL's parameters, and a column of the row."""
    assert question[0].startswith("Go ")
    return [float(np.mean([id_ % 2 == 0 for id_ in ids])) for ids in completion_ids]


def test_trl_makes_the_updates_with_a_reward_function_of_its_form(
    tmp_path: Path, model: Path
) -> None:
    pytest.importorskip("trl", reason="pip install 'agentrl-cli[trl]'")
    config = {
        "rollout": {"max_new_tokens": 4, "max_tokens": 96},
        "algo": {"drop_zero_variance": False},
    }
    sizes: dict[str, Any] = {"steps": 1, "group_size": 4, "prompts_per_step": 2, "config": config}
    algorithm = agl.TRLTrainer(str(model), reward_function=even, **sizes)
    agl.Trainer(algorithm=algorithm, agent=bandit, n_runners=4, project=tmp_path).fit(TASKS)
    assert algorithm.last is not None and algorithm.last.status == "finished"
    with Store.open(tmp_path / "runs" / "agentrl.db", readonly=True) as held:
        (row,) = held.runs.steps(algorithm.last.id)
    assert row["grad_norm"] > 0 and 0 < row["rewards/reward/mean"] < 1


# --- the published examples ---


NEEDS = {
    "calc_x": "autogen_agentchat, autogen_ext.tools.mcp, mcp_server_calculator, sympy, datasets",
    "spider": "langchain_community, langgraph, langchain_openai, nltk, sqlparse, termcolor, pandas",
}
CALC = """
import agentrl_cli.plugins.lightning.alias, sys
import train_calc_agent as script
sys.argv = ["train", "--model", "tiny-tools", "--ci-fast", "--n-runners", "4",
            "--train-file", "rows.parquet", "--val-file", "rows.parquet"]
own = script.verl_default_config
def small():
    config = own()
    config["data"] |= {"train_batch_size": 2, "max_prompt_length": 3000, "max_response_length": 24}
    config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 2
    return config
script.verl_default_config = small
script.main()
"""
SPIDER = """
import agentrl_cli.plugins.lightning.alias
import train_sql_agent as script
config = script.config_train_fast()
config["data"] |= {"train_files": "rows.parquet", "val_files": "rows.parquet", "train_batch_size": 2,
                   "max_prompt_length": 3000, "max_response_length": 24}
config["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 2
config["actor_rollout_ref"]["model"]["path"] = "tiny-tools"
script.train(config, None)
"""


def setting(name: str) -> tuple[Path, str]:
    """The examples' folder and the interpreter that runs one of them."""
    folder, python = (
        os.environ.get("AGENTLIGHTNING_EXAMPLES", ""),
        os.environ.get("EXAMPLES_PYTHON", ""),
    )
    if not (folder and python):
        pytest.skip(
            "AGENTLIGHTNING_EXAMPLES and EXAMPLES_PYTHON name the published examples and their interpreter"
        )
    return Path(folder) / name, python


def run(name: str, script: str, folder: Path, rows: list[dict[str, Any]]) -> list[Episode]:
    example, python = setting(name)
    asked = [python, "-c", f"import agentrl_cli, torch, {NEEDS[name]}"]
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if (
        missing := subprocess.run(asked, check=False, capture_output=True, text=True, env=given)
    ).returncode:
        pytest.skip(f"{python}: {missing.stderr.strip().splitlines()[-1]}")
    shutil.copytree(example, folder / "run")
    (folder / "run" / "rows.json").write_text(json.dumps(rows))
    made = "import json, pandas; pandas.DataFrame(json.load(open('rows.json'))).to_parquet('rows.parquet')"
    subprocess.run([python, "-c", made], check=True, cwd=folder / "run")
    (folder / "bin").mkdir()
    (folder / "bin" / "uvx").write_text(f'#!/bin/sh\nexec "{python}" -m mcp_server_calculator\n')
    (folder / "bin" / "uvx").chmod(0o755)
    given["PATH"] = f"{folder / 'bin'}{os.pathsep}{given['PATH']}"
    done = subprocess.run(
        [python, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder / "run",
        env=given,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return trained(folder / "run")


def check(episodes: list[Episode]) -> None:
    assert len(episodes) == 8
    for episode in episodes:
        assert episode.outcome in (Outcome.SOLVED, Outcome.FAILED, Outcome.TRUNCATED_TOKENS), (
            episode.error
        )
        assert episode.graded and episode.fact in (Fact.TRAINED, Fact.SKIPPED_ZERO_VARIANCE)
        assert set(episode.tokens.origin[episode.tokens.trained_mask]) == {int(Origin.MODEL)}


def test_the_published_calc_x_trains(tmp_path: Path) -> None:
    given = {"chain": "", "source": ""}
    rows = [
        {"id": str(n), "question": f"What is {n} + 2?", "result": str(n + 2), **given}
        for n in (1, 2)
    ]
    check(run("calc_x", CALC, tmp_path, rows))


def test_the_published_spider_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting("spider")
    for place in ("database", "test_database"):
        folder = tmp_path / "data" / place / "singers"
        folder.mkdir(parents=True)
        schema = "CREATE TABLE singer (name TEXT, age INTEGER);"
        (folder / "schema.sql").write_text(schema)
        with closing(sqlite3.connect(folder / "singers.sqlite")) as db, db:
            db.executescript(f"{schema} INSERT INTO singer VALUES ('Ann', 30), ('Bo', 41);")
    monkeypatch.setenv("VERL_SPIDER_DATA_DIR", str(tmp_path / "data"))
    rows = [
        {
            "question": "How many singers are there?",
            "db_id": "singers",
            "query": "SELECT count(*) FROM singer",
        }
    ] * 2
    check(run("spider", SPIDER, tmp_path, rows))


# --- prompts found by APO ---


WORDS = ("alpha", "beta", "gamma")
SEARCHED = [{"word": word} for word in WORDS]


class Reviewer:
    """An AsyncOpenAI client whose models are a function: each edit adds a word, and the first loses the placeholder."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, str]] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(
        self, *, model: str, messages: list[dict[str, str]], temperature: float
    ) -> Any:
        prompt = messages[0]["content"]
        self.asked.append((model, temperature, prompt))
        text = "- name one more word"
        if model == "editor":
            old = prompt.split("```")[1].strip()
            first = sum(name == "editor" for name, *_ in self.asked) == 1
            text = (
                "no braces"
                if first
                else f"{old} {next((word for word in WORDS if word not in old), '!')}"
            )
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))])


@agl.rollout
def agent(task: dict[str, str], prompt_template: agl.PromptTemplate) -> float:
    """Solves a task whose word stands in its prompt; one of them breaks until "gamma" does."""
    prompt = prompt_template.format(task=task["word"].upper())
    if task["word"] == "gamma" and "gamma" not in prompt:
        raise LookupError("no gamma")
    return float(task["word"] in prompt)


def apo(client: Any, **more: Any) -> agl.APO[Any]:
    size: dict[str, Any] = {
        "gradient_batch_size": 2,
        "val_batch_size": 2,
        "beam_width": 2,
        "branch_factor": 2,
        "beam_rounds": 4,
    }
    return agl.APO(
        client,
        gradient_model="critic",
        apply_edit_model="editor",
        diversity_temperature=0.7,
        **size,
        **more,
    )


def test_the_best_prompt_of_a_search_over_the_queue() -> None:
    client, store = Reviewer(), agl.InMemoryLightningStore()
    algorithm = apo(client)
    with pytest.raises(ValueError, match="No best prompt"):
        algorithm.get_best_prompt()
    seed = agl.PromptTemplate(template="Answer {task}.", engine="f-string")
    resources: agl.NamedResources = {"text": seed}
    trainer = agl.Trainer(
        algorithm=algorithm, store=store, n_runners=4, initial_resources=resources
    )
    with pytest.raises(ValueError, match="val_dataset"):
        trainer.fit(agent, SEARCHED)
    trainer.fit(agent, SEARCHED, val_dataset=SEARCHED)
    best = algorithm.get_best_prompt()
    assert (
        all(word in best.template for word in WORDS)
        and "{task}" in best.template
        and best.engine == "f-string"
    )
    assert {model: temperature for model, temperature, _ in client.asked} == {
        "critic": 0.7,
        "editor": 0.7,
    }
    critiques = "".join(prompt for model, _, prompt in client.asked if model == "critic")
    assert (
        '{"word": "alpha"}' in critiques
        and "final reward 0" in critiques
        and "agent_error" in critiques
    )


def test_a_search_needs_a_template() -> None:
    given: list[agl.NamedResources | None] = [
        None,
        {"main_llm": agl.LLM(endpoint="http://127.0.0.1/v1", model="m")},
    ]
    for resources in given:
        trainer = agl.Trainer(algorithm=apo(Reviewer()), initial_resources=resources, n_runners=2)
        with pytest.raises(ValueError, match="initial_resources"):
            trainer.fit(agent, SEARCHED, val_dataset=SEARCHED)


# --- the names of Agent-Lightning 0.x: signatures and behaviour are compared with those of the real package ---


class Slow(agl.InMemoryLightningStore):
    """As a store over HTTP is; `fails`: or as one that answers no more."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.asked = fails, asyncio.Event()

    async def add_many_spans(self, spans: Any) -> Any:
        self.asked.set()
        await asyncio.sleep(0.1)
        if self.fails:
            raise ConnectionError("no store answers")
        return await super().add_many_spans(spans)


async def trace_that_ends_during_a_write(store: Slow) -> int:
    """Return how many spans of one are in the store."""
    begun = await store.start_rollout({})
    where = {"rollout_id": begun.rollout_id, "attempt_id": begun.attempt.attempt_id}
    async with agl.OtelTracer().trace_context("t", store=store, **where):
        agl.emit_message("one")
        await store.asked.wait()
    return len(await store.query_spans(begun.rollout_id))


async def test_a_trace_that_ends_during_a_write_loses_no_span_or_is_an_error() -> None:
    assert await trace_that_ends_during_a_write(Slow(fails=False)) == 1
    with pytest.raises(ConnectionError):
        await trace_that_ends_during_a_write(Slow(fails=True))
