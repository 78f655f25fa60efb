"""What workers cost, where the one writer's limit is, and that they learn the same.

    PYTHONPATH=. python benchmarks/workers.py [scaling|wire|writer|equality|asynchronous]

scaling: episodes of a scripted model whose tool waits 100 ms, by 1, 2, 4 and 8 workers of each kind that is installed,
         one episode at a time in each, so that a worker's rate is that of its waits. Three rounds.
wire:    CPU of packing, pickling and unpacking an episode, and its bytes, against sampling it with the bundled model.
equality: final weights of a deterministic training by 1 and 4 workers of each kind, against one process without any.
asynchronous: the same with rollout.async_staleness 2: the age of each trained turn, by kind.
writer:  episodes a second that one process takes from 1,000 scripted workers and commits.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.plugins.ray.pool import WorkerPool
from agentrl_cli.plugins.ray.remote import RemoteWorker
from agentrl_cli.plugins.ray.service import Delivery, Message, Relay, Setup
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.recorder import StoreRecorder
from agentrl_cli.runtime import open_runtime
from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Task
from tests.plugins.ray.links import ScriptedLink, copy_of

TASK_YAML = "name: waits\ndescription: A world that waits.\nsandbox: false\nrewards:\n  one: {primary: true}\n"
TASK_PY = """
import asyncio
from agentrl_cli import Env
from agentrl_cli.envs.tool_env import Step

class Waits(Env):
    async def reset(self, task):
        self.turns = 0
        return list(task.prompt)

    async def step(self, turn):
        await asyncio.sleep(0.1)
        self.turns += 1
        return Step() if self.turns == 5 else Step(messages=[{"role": "user", "content": "Go on."}], terminated=False)

def make_env(task):
    return Waits()

REWARDS = {"one": lambda episode, ctx: 1.0}
"""
EACH = 20
"""Episodes of each worker in a round."""


def kinds() -> list[str]:
    """Those of workers that are installed."""
    return ["processes", *(["ray"] if find_spec("ray") else [])]


async def rate(folder: Path, kind: str, workers: int) -> float:
    """Episodes a second of so many workers."""
    given = {
        "model": {"name": "scripted"},
        "rollout": {"concurrency": 1, "max_turns": 8},
        "cluster": {
            "kind": kind,
            "workers": workers,
            "address": "local",
            "resources": {"CPU": 0.25},
        },
    }
    config = Config.model_validate(given)
    async with open_runtime(config, base=folder, db=folder / "runs" / "agentrl.db") as runtime:
        parts = (runtime.loaded.policy, runtime.loaded.chat, runtime.packs, config)
        rollout = Rollout(*parts, store=runtime.store).with_(workers=runtime.workers)
        task = runtime.packs["waits"].tasks("train")[0]
        await rollout.run([Job(task, n) for n in range(workers)])
        started = time.perf_counter()
        await rollout.run([Job(task, n) for n in range(EACH * workers)])
        return EACH * workers / (time.perf_counter() - started)


async def scaling(rounds: int = 3) -> None:
    """Rates of 1 to 8 workers, interleaved."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "data").mkdir()
        (folder / "task.yaml").write_text(TASK_YAML)
        (folder / "task.py").write_text(TASK_PY)
        (folder / "data" / "train.jsonl").write_text(
            '{"id": "a", "family": "f", "prompt": "Go."}\n'
        )
        for kind in kinds():
            found: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
            for _ in range(rounds):
                for count, rates in found.items():
                    rates.append(await rate(folder, kind, count))
            for count, rates in found.items():
                shares = " ".join(
                    f"{one / (count * first):.0%}"
                    for one, first in zip(rates, found[1], strict=True)
                )
                text = f"{min(rates):.2f} to {max(rates):.2f} episodes/s, of linear {shares}"
                print(f"{count} workers ({kind}): {text}", flush=True)


async def sampled(count: int) -> tuple[list[Episode], float]:
    """Episodes of the bundled model on the bundled code-task, and the CPU seconds of one."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = Config.model_validate(
            {"task": {"packs": ["calc-task"]}, "sandbox": {"min_level": "bare"}}
        )
        async with open_runtime(config, base=folder, db=folder / "s.db") as runtime:
            tasks = [task for pack in runtime.packs.values() for task in pack.tasks("train")][
                :count
            ]
            parts = (runtime.loaded.policy, runtime.loaded.chat, runtime.packs, config)
            rollout = Rollout(*parts, sandbox=runtime.sandbox)
            await rollout.run([Job(tasks[0], 0)])
            started = time.process_time()
            found = await rollout.run([Job(task, n) for n, task in enumerate(tasks)])
            return found, (time.process_time() - started) / len(found)


async def wire() -> None:
    """CPU and bytes of an episode's way."""
    episodes, sampling = await sampled(32)
    messages: list[Message] = []
    sizes = []
    rounds = 20
    started = time.process_time()
    for _ in range(rounds):
        for episode in episodes:
            messages.clear()
            copy_of(episode)(job_of(episode), Relay(0, messages.append))
            data = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
            sizes.append(len(data))
            delivery = Delivery(None)
            for _, name, values in pickle.loads(data):
                delivery.take(name, *values)
    cost = (time.process_time() - started) / rounds / len(episodes)
    tokens = sum(len(episode.tokens) for episode in episodes) / len(episodes)
    print(f"an episode of {tokens:.0f} tokens: {sum(sizes) / len(sizes):,.0f} bytes")
    print(
        f"sampling it {sampling * 1e3:.2f} ms of CPU, its way {cost * 1e3:.3f} ms: {cost / sampling:.2%}"
    )


def job_of(episode: Episode) -> Job:
    """Return the job of an episode like this one."""
    return Job(Task(episode.task_id, episode.pack, "", "train", ()), episode.seed)


async def writer(count: int = 1000, each: int = 10) -> None:
    """Episodes a second from scripted workers into one store, over pickled messages."""
    episodes, _ = await sampled(1)
    chat = Chat(ByteTokenizer())
    config = Config.model_validate(
        {"cluster": {"kind": "processes", "workers": count}, "rollout": {"concurrency": 4}}
    )
    setup = Setup(config, Path(), "scripted", False)
    with tempfile.TemporaryDirectory() as made, Store.open(Path(made) / "s.db") as store:
        through = lambda found: pickle.loads(pickle.dumps(found, pickle.HIGHEST_PROTOCOL))  # noqa: E731
        links = [
            lambda: ScriptedLink(copy_of(episodes[0]), delay=0.01, pack=through)
            for _ in range(count)
        ]
        recorder, discard = StoreRecorder(store), store.episodes.discard
        workers = [RemoteWorker(n, link, setup, recorder, discard) for n, link in enumerate(links)]
        pool = WorkerPool(workers, config, store)
        await pool.open("v0")
        task = Task("t", "p", "", "train", ({"role": "user", "content": "Go."},))
        context = Rollout(ScriptedPolicy([], chat.tokenizer), chat, {}, config, store=store).context
        started, cpu = time.perf_counter(), time.process_time()
        slots = asyncio.Semaphore(4 * count)  # as a Rollout holds back

        async def one(number: int) -> None:
            async with slots:
                await pool.attempt(Job(task, number), context)

        await asyncio.gather(*(one(number) for number in range(count * each)))
        store.flush()
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        stored = len(store.episodes.ids())
        size = Path(store.path).stat().st_size
        print(
            f"{count} workers, {stored} episodes of {len(episodes[0].tokens)} tokens in {wall:.1f} s"
        )
        print(f"{stored / cpu:,.0f} episodes per CPU second, {stored / wall:,.0f} a second here")
        print(f"{size / stored:,.0f} bytes each")
        await pool.close()


async def learned(
    folder: Path, model: Path, kind: str, workers: int, **rollout: object
) -> tuple[dict[str, Any], list[int]]:
    """The final weights of a small training, and the age of each sampled turn."""
    import torch

    from agentrl_cli.runtime import new_training
    from agentrl_cli.trainer import build_trainer
    from agentrl_cli.trainer.prefetch import ages
    from tests.helpers.train import episodes_of, settings, write_pack

    torch.set_num_threads(1)
    sections = {
        "deterministic": not rollout,
        "rollout": {"concurrency": 4, **rollout},
        "train": {"steps": 5, "lr": 1e-2},
        "algo": {"skip": {"zero_variance": False}},
        "cluster": {
            "kind": kind,
            "workers": workers,
            "address": "local",
            "resources": {"CPU": 0.25},
        },
    }
    config = Config.model_validate(settings(model, **sections))
    write_pack(folder)
    async with open_runtime(
        config, base=folder, db=folder / "runs" / "agentrl.db", trainable=True
    ) as opened:
        trainer = build_trainer(config, new_training(opened), opened.loaded, opened.rollout())
        run = await trainer.train()
        found = [
            age
            for e in episodes_of(opened.store, run)
            for age in ages(e, run.name, (e.step or 0) - 1)
        ]
        return {
            name: one.detach().clone() for name, one in opened.loaded.model.named_parameters()
        }, found


async def equality(**rollout: object) -> None:
    """1 and 4 workers of each kind that is installed, against none."""
    from tests.helpers.train import write_model

    with tempfile.TemporaryDirectory() as made:
        model = write_model(Path(made) / "model")
        here, _ = await learned(Path(made) / "here", model, "here", 1, **rollout)
        for kind in kinds():
            for count in (1, 4):
                there, found = await learned(
                    Path(made) / f"{kind}-{count}", model, kind, count, **rollout
                )
                gap = max(float((here[name] - there[name]).abs().max()) for name in here)
                shares = {age: found.count(age) for age in sorted(set(found))}
                print(
                    f"{kind} {count}: final weights differ by at most {gap:.1e}; turns by age {shares}",
                    flush=True,
                )


async def asynchronous() -> None:
    """Workers sample while the run trains."""
    await equality(async_staleness=2)


if __name__ == "__main__":
    COMMANDS = {one.__name__: one for one in (scaling, wire, writer, equality, asynchronous)}
    for name in sys.argv[1:] or COMMANDS:
        asyncio.run(COMMANDS[name]())
