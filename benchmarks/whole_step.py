"""A whole training step of three-turn tool episodes, rollout included: AgentRL and TRL's GRPOTrainer.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install -r benchmarks/peers.txt sqlite-utils
    python benchmarks/whole_step.py --trl /tmp/peers/bin/python [--model 3M|60M] [--episodes 64] [--rounds 3]
                                    [--settings "NAME" ...] [--out FILE]

The same model under LoRA r=8, threads (1) and dtype (float32). Replies are scripted token by token on both sides, as in
rollout_tools.py: two turns with a call of `add`, one that answers; forwards, caches, tools, templates and parsing are
real. TRL's step is from `on_step_begin` to `on_step_end` of `trainer.train()`: generation, tools, scoring, update.
It is trained with each of SETTINGS, its defaults and what makes a step cheaper on a CPU; its best one counts. AgentRL's
step, with its defaults, runs after each of TRL's: `Rollout` with log-probabilities, drift check and store,
`Learner.update`, per-token numbers into the store, new weights for the sampler. Each side has a process and a model of
its own, so that nothing that one does to either reaches the other. CPU seconds of the process; the first step of each
warms up. Writes results/whole_step.json, with the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli.chat.render import Chat  # noqa: E402
from agentrl_cli.chat.tokenizer import Tokenizer  # noqa: E402
from agentrl_cli.config import Config  # noqa: E402
from agentrl_cli.learning.update import Learner  # noqa: E402  # works without an installation
from agentrl_cli.paths import bundled_model  # noqa: E402
from agentrl_cli.rewards import Reward  # noqa: E402
from agentrl_cli.rollout import Job, Rollout  # noqa: E402
from agentrl_cli.store import RunRow, Store  # noqa: E402
from agentrl_cli.tasks import Pack  # noqa: E402
from benchmarks.machine import machine_and_load  # noqa: E402
from benchmarks.rollout_tools import LIKELY, MOST, SYSTEM, Scripted, add, script  # noqa: E402
from benchmarks.train_step import GROUP, LR, SHAPES, make_model  # noqa: E402
from benchmarks.worker import Worker, serve  # noqa: E402

Turns = list[list[list[int]]]

SETTINGS: dict[str, dict[str, Any]] = {
    "default: micro-batch 8, checkpointing on": {},
    "micro-batch 8, checkpointing off": {"gradient_checkpointing": False},
    "micro-batch 4, checkpointing off": {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
    },
    "micro-batch 16, checkpointing off": {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
    },
}
"""Settings of TRL beside its defaults. A liger kernel, paged generation and vLLM need a GPU."""


class Ours:
    """AgentRL's steps over one store."""

    def __init__(
        self, model: Any, chat: Chat, prompts: Sequence[str], turns: Turns, folder: Path
    ) -> None:
        limits = {
            "max_tokens": 1024,
            "max_new_tokens": 400,
            "max_turns": 3,
            "concurrency": len(prompts),
        }
        settings = {
            "rollout": limits | {"timeout": 3600},
            "train": {"lr": LR, "schedule": {"warmup_steps": 0}},
        }
        self.config = Config.model_validate(settings)
        rows = [{"prompt": text, "answer": "5"} for text in prompts[::GROUP]]
        rewards = [Reward("half", lambda episode, ctx: float(episode.sample % 2))]
        self.pack = Pack.of("sums", rows, rewards, tools=[add], system=SYSTEM)
        self.chat, self.turns = chat, turns
        self.learner = Learner(model, self.config)
        self.policy = Scripted(model, turns, context_length=4096, rows=len(prompts))
        self.store = Store.open(folder / "bench.db")
        self.run = self.store.runs.add(
            RunRow(id="", name="bench", model="random", pack="sums", total_steps=1)
        )
        self.steps = 0
        self.groups: list[list[Any]] = []
        self.parts: list[dict[str, float]] = []

    def step(self) -> float:
        """CPU seconds of one step."""
        started = time.process_time()
        self.policy.said.clear()
        asyncio.run(self._sample())
        sampled = time.process_time()
        update = self.learner.update(self.groups, self.steps)
        with self.store.transaction():
            for name, signals in update.signals.items():
                self.store.signals.add(name, signals)
            self.store.runs.add_step(self.run.id, self.steps + 1, update.metrics)
        self.steps += 1
        self.policy.set_version(f"bench@{self.steps}")
        ended = time.process_time()
        self.parts.append(
            {"rollout": round(sampled - started, 3), "update": round(ended - sampled, 3)}
        )
        return ended - started

    async def _sample(self) -> None:
        """Sample the groups. They are not returned: asyncio.run makes a text of that."""
        rollout = Rollout(
            self.policy, self.chat, {"sums": self.pack}, self.config, store=self.store
        )
        tasks = self.pack.tasks("train")
        jobs = [
            Job(
                tasks[n // GROUP],
                seed=n,
                sample=n % GROUP,
                group_id=f"{self.steps}-{n // GROUP}",
                run_id=self.run.id,
                slot=n,
            )
            for n in range(len(self.turns))
        ]
        groups: dict[str, list[Any]] = {}
        for episode in await rollout.run(jobs):
            assert sum(turn.role == "assistant" for turn in episode.turns) == 3, episode.error
            groups.setdefault(str(episode.group_id), []).append(episode)
        self.groups = list(groups.values())


def serve_theirs(
    model: Any, prompts: Sequence[str], turns: Turns, rounds: int, settings: dict[str, Any]
) -> None:
    """Train with TRL; each step waits for a line, and its CPU seconds are one."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LogitsProcessorList, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    from benchmarks.rollout_trl import Script
    from benchmarks.rollout_trl import add as their_add

    load: Any = AutoTokenizer
    tokenizer = load.from_pretrained(bundled_model())
    tokenizer.response_template = qwen3_template
    calls, plain = [0], model.generate

    def generate(**options: Any) -> Any:
        said = [episode[calls[0] % 3] for episode in turns]
        calls[0] += 1
        width = options["input_ids"].shape[1]
        return plain(
            **options,
            logits_processor=LogitsProcessorList(
                [Script(said, width, tokenizer.eos_token_id, LIKELY)]
            ),
        )

    model.generate = generate

    class Timer(TrainerCallback):
        steps = 0

        def on_step_begin(self, *args: Any, **more: Any) -> None:
            sys.stdin.readline()
            self.started = time.process_time()

        def on_step_end(self, *args: Any, **more: Any) -> None:
            seconds = time.process_time() - self.started
            self.steps += 1
            assert calls[0] == 3 * self.steps, calls
            print(json.dumps({"cpu": seconds}), flush=True)

    texts = [
        {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]}
        for text in prompts[::GROUP]
    ]
    batch = settings.get("per_device_train_batch_size", 8)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), gradient_accumulation_steps=len(prompts) // batch,
        num_generations=GROUP, max_completion_length=MOST, max_tool_calling_iterations=2, learning_rate=LR,
        max_steps=rounds + 1, use_cpu=True, bf16=False, report_to="none", logging_strategy="no", save_strategy="no",
        disable_tqdm=True, shuffle_dataset=False, **{"per_device_train_batch_size": batch, **settings},
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_list(texts), processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(n % 2) for n in range(len(completions))],
        tools=[their_add], callbacks=[Timer()],
    )  # fmt: skip
    trainer.train()
    found = {name: version(name) for name in ("torch", "transformers", "peft", "trl")}
    print(json.dumps({"versions": found}), flush=True)


def serve_side(given: argparse.Namespace) -> None:
    """Measure one side in this process, one step for each line that is read; no other side shares its model."""
    tokenizer = Tokenizer.load(bundled_model())
    turns = script(tokenizer, given.episodes)
    prompts = [
        f"Task {n // GROUP}: add {n // GROUP + 11} and 7, then add 5."
        for n in range(given.episodes)
    ]
    model = make_model(given.model, True)
    if given.side != "agentrl":
        return serve_theirs(model, prompts, turns, given.rounds, SETTINGS[given.side])
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(model, Chat(tokenizer), prompts, turns, Path(folder))
        said = sum(len(turn) for episode in turns for turn in episode)
        serve(lambda: {"cpu": ours.step(), **ours.parts[-1]}, lambda: {"said_tokens": said})
        ours.store.close()


def compared(given: argparse.Namespace) -> dict[str, Any]:
    """Interleaved steps of both, for each of TRL's settings; the first of each process warms up."""
    theirs: dict[str, list[float]] = {}
    mine: dict[str, list[dict[str, float]]] = {}
    ends: dict[str, Any] = {}
    common = [
        "--model",
        given.model,
        "--episodes",
        str(given.episodes),
        "--rounds",
        str(given.rounds),
        "--side",
    ]
    here = str(Path(__file__).resolve())
    for name in given.settings:
        ours, peer = (
            Worker([sys.executable, here, *common, "agentrl"]),
            Worker([given.trl, here, *common, name]),
        )
        steps = [(peer.measure(), ours.measure()) for _ in range(given.rounds + 1)][1:]
        theirs[name], mine[name] = [one["cpu"] for one, _ in steps], [one for _, one in steps]
        ends |= {**ours.close(), **peer.close()}
        print(f"{name}: TRL {rounded(theirs[name])}, ours {mine[name]}", flush=True)
    best = min(theirs, key=lambda name: min(theirs[name]))
    cpu = {name: [step["cpu"] for step in steps] for name, steps in mine.items()}
    ratios = {
        name: [round(a / b, 2) for a, b in zip(theirs[name], cpu[name], strict=True)]
        for name in theirs
    }
    parts = [
        {part: step[part] for part in ("rollout", "update")}
        for steps in mine.values()
        for step in steps
    ]
    return {
        "model": given.model, "episodes": given.episodes, "adapter": "LoRA r=8", "turns": 3, **ends,
        "ours": {name: rounded(found) for name, found in cpu.items()}, "parts": parts,
        "trl": {name: rounded(found) for name, found in theirs.items()}, "best_of_trl": best,
        "ratio": round(min(theirs[best]) / min(map(min, cpu.values())), 2), "ratio_by_round": ratios,
        "clock": "CPU seconds of a process and a model of each side's own, 1 thread, float32", **machine_and_load(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(SHAPES), default="3M")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument(
        "--trl",
        default=sys.executable,
        help="python of the environment with TRL; default: this one",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "whole_step.json"
    )
    parser.add_argument("--side", choices=["agentrl", *SETTINGS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        return serve_side(given)
    row = compared(given)
    kept = json.loads(given.out.read_text()) if given.out.is_file() else []
    kept = [old for old in kept if any(old[key] != row[key] for key in ("model", "episodes"))]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([*kept, row], indent=1) + "\n")
    best = row["best_of_trl"]
    print(
        f"{given.model}: TRL's best is {best!r}; {row['ratio']} times, by round {row['ratio_by_round'][best]}"
    )


def rounded(times: Sequence[float]) -> list[float]:
    return [round(seconds, 3) for seconds in times]


if __name__ == "__main__":
    main()
