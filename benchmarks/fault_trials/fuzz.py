"""Mutated tool calls: every parser reads them without an exception, and the agent loop ends every episode."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.chat.parse import parse_text
from agentrl_cli.chat.parsers import PARSERS
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.registry import resolve
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store import RunRow, Store
from agentrl_cli.tasks import Pack
from tests.chat.test_parsers import BAD, GOOD, SEVERAL
from tests.helpers.parsers import TOOLS

NOISE = [
    *"{}[]()<>\"'\\,:=|/\n\t 019",
    "null",
    "NaN",
    "1e999",
    "\x00",
    "\ud800",
    "\u202e",
    "日本",
    "é",
    "<think>",
    "</think>",
    "</tool_call>",
    "<tool_call>",
    "<|im_end|>",
    "[" * 200,
    "{" * 200,
    '"' * 50,
    "A" * 2000,
]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--outputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)


def trial(args: argparse.Namespace, work: Path) -> tuple[dict[str, Any], bool]:
    """How many outputs were read, with how many calls and errors; and the outcomes of a tenth of them as episodes."""
    rng = random.Random(args.seed)
    seeds = {name: [GOOD[name], SEVERAL[name]] for name in GOOD}
    for name, text, _ in BAD:
        seeds[name] += [text] if len(text) < 5000 else []
    table: dict[str, Any] = {"outputs": 0, "calls": 0, "malformed": 0, "wrong": []}
    for name in sorted(PARSERS):
        parser = resolve("parsers", PARSERS, name)
        for _ in range(args.outputs // len(PARSERS)):
            text = mutated(rng, rng.choice(seeds[name]))
            table["outputs"] += 1
            try:
                calls = parse_text(text, parser, TOOLS).calls
            except Exception as error:  # noqa: BLE001  (the trial is that there is none)
                table["wrong"].append(f"{name}: {type(error).__name__} on {text[:200]!r}")
                continue
            table["calls"] += len(calls)
            table["malformed"] += sum(bool(call.error) for call in calls)
    replies = [mutated(rng, rng.choice(seeds["hermes"])) for _ in range(max(1, args.outputs // 10))]
    outcomes = asyncio.run(_episodes(replies, work / "fuzz.db"))
    table["episodes"] = dict(sorted(outcomes.items()))
    if sum(outcomes.values()) != len(replies) or outcomes["None"]:
        table["wrong"].append("an episode has no outcome")
    return table, not table["wrong"]


def mutated(rng: random.Random, text: str) -> str:
    """A few seeded edits: noise put in, pieces taken out, doubled or swapped."""
    for _ in range(rng.randint(1, 6)):
        a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        b = min(b, a + 40)
        edit = rng.randrange(5)
        text = (
            text[:a] + rng.choice(NOISE) + text[a:] if edit == 0
            else text[:a] + text[b:] if edit == 1
            else text[:b] + text[a:b] * rng.randint(1, 3) + text[b:] if edit == 2
            else text[:a] + chr(rng.choice((rng.randrange(128), rng.randrange(0xD000)))) + text[a + 1 :] if edit == 3
            else text[b:] + text[:a]
        )  # fmt: skip
    return text


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def _in_turn(texts: list[str]) -> Callable[[str, Sequence[int]], str]:
    """Each text once, in the order in which turns ask; then bare stop tokens."""
    left = iter(texts)
    return lambda key, ids: next(left, "")


async def _episodes(replies: list[str], db: Path) -> Counter[str]:
    tokenizer = ByteTokenizer()
    pack = Pack.of(
        "fuzz", [{"prompt": "1 + 2?"}], [Reward("zero", lambda episode, ctx: 0.0)], tools=[add]
    )
    task = pack.tasks("train")[0]
    limits = {"max_tokens": 20_000, "max_new_tokens": 6_000, "max_turns": 2}
    config = Config.model_validate({"rollout": limits})
    outcomes: Counter[str] = Counter()
    with Store.open(db) as store:
        run = store.runs.add(RunRow(id="", name="fuzz"))
        store.tasks.add([task])
        for start in range(0, len(replies), 200):
            batch = replies[start : start + 200]
            policy = ScriptedPolicy(_in_turn(batch), tokenizer)
            rollout = Rollout(policy, Chat(tokenizer), {pack.name: pack}, config, store=store)
            group: dict[str, Any] = {"run_id": run.id, "group_id": f"g{start}", "kind": "train"}
            jobs = [Job(task, seed=n, sample=n, **group) for n in range(len(batch))]
            outcomes.update(str(episode.outcome) for episode in await rollout.run(jobs))
    return outcomes
