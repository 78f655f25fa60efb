"""What the bundled model can be taught: functions and generated tools that it has never seen, and the packs.

    python benchmarks/bundled.py base MODEL [--rows 24] [--samples 4]      before any training, English and Chinese
    python benchmarks/bundled.py generated MODEL                           forty generated tools, before any training
    python benchmarks/bundled.py orders MODEL [--rows 8] [--samples 4]     twelve functions, every order of arguments
    python benchmarks/bundled.py packs MODEL [--packs calc-task echo-task] the packs' validation splits, before training
    python benchmarks/bundled.py train MODEL --only weekday price [--seeds 0] [--steps 60] [--lr 3e-4]
    python benchmarks/bundled.py train-generated MODEL [--count 8] [--seeds 0]
        a seeded sample of the generated tools, or --only NAME
    python benchmarks/bundled.py train-orders MODEL [--only body_mass …]   each of the twelve, all orders mixed

The trainings are 60 GRPO steps of 8 x 8 episodes at 3e-4 on 200 rows of that one function, with the project's own
trainer; solved is the mean of the last ten steps, CPU seconds are those of the process; `reached` is the first step
with a mean of 0.95 over ten. `train-generated` attempts the tool's five tasks of `generated`, which are none of its
200 rows, eight times before and after; `train-orders` attempts eighty other rows of each order eight times. Prints
Markdown; adds what it measured to benchmarks/results/bundled.json.
--keep DIR keeps the projects, for `agentrl replay`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentrl_cli import Config, Pack, Reward, load_pack, train  # noqa: E402
from agentrl_cli.types import Episode  # noqa: E402
from benchmarks.bundled_generated import Generated, generated  # noqa: E402
from benchmarks.bundled_orders import ORDERED  # noqa: E402
from benchmarks.bundled_subjects import SUBJECTS, Subject  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "bundled.json"
SYSTEM = "Solve the task. Use the tools."
CHINESE_SYSTEM = "请使用工具回答问题。"
RATE, WANTED = 3e-4, 0.95
TRAININGS = ("train", "train-generated", "train-orders")
HELD = 80
"""Rows of each order that are attempted before and after a training, and at most so many tasks of a generated tool.

Attempts at one row are alike: a share of 0.9 has a standard error of 0.03 from eighty rows, of 0.07 from twenty.
"""
LIMITS = {
    "max_turns": 5,
    "max_new_tokens": 96,
    "max_tokens": 640,
    "group_size": 8,
    "prompts_per_step": 8,
}

Result = dict[str, Any]


def exact(episode: Any, ctx: Any) -> float:
    """1 if the last `Answer: …` line is the function's result."""
    said = [line[8:].strip() for line in ctx.final_text.splitlines() if line.startswith("Answer: ")]
    return float(bool(said) and said[-1] == ctx.task.data["answer"])


def pack_of(subject: Subject, seed: int, count: int, language: Any = "english") -> Pack:
    """A function as a task."""
    system = SYSTEM if language == "english" else CHINESE_SYSTEM
    return _pack(subject, subject.rows(seed, count, language), system)


def held_out(subject: Subject, trained: Collection[str]) -> Pack:
    """HELD different rows, or all that there are, whose prompts were not trained on."""
    rows = {row["prompt"]: row for row in subject.rows(1, 10 * HELD, "english")}
    fresh = [row for prompt, row in rows.items() if prompt not in trained]
    return _pack(subject, fresh[:HELD], SYSTEM)


def _pack(subject: Subject, rows: Sequence[dict[str, Any]], system: str) -> Pack:
    exactly = [Reward("exact", exact)]
    return Pack.of(subject.name, rows, exactly, tools=subject.tools, system=system)


def generated_pack(tool: Generated, rows: Sequence[dict[str, str]]) -> Pack:
    """A generated tool as a task."""
    return Pack.of(tool.name, rows, [Reward("exact", exact)], tools=[tool.function], system=SYSTEM)


def config_of(model: str, **changes: Any) -> Config:
    """The settings of every measurement."""
    return Config.model_validate(
        {"model": {"name": model, "dtype": "float32"}, "rollout": LIMITS, **changes}
    )


async def sample(
    model: str, packs: Sequence[Pack], split: str, rows: int, samples: int
) -> list[Episode]:
    """Attempts at temperature 1 at the first rows of each pack."""
    from agentrl_cli.policies.load import load_policy
    from agentrl_cli.rollout import Job, Rollout, seed_of
    from agentrl_cli.sandbox import Sandbox

    config = config_of(model)
    loaded = load_policy(None, config, base=Path.cwd())
    sandbox = await Sandbox.open(config.sandbox) if any(pack.sandbox for pack in packs) else None
    named = {pack.name: pack for pack in packs}
    tasks = [task for pack in packs for task in pack.tasks(split, limit=rows)]
    jobs = [
        Job(task, seed_of("bundled", task.pack, task.id, n), n)
        for task in tasks
        for n in range(samples)
    ]
    try:
        return await Rollout(loaded.policy, loaded.chat, named, config, sandbox=sandbox).run(jobs)
    finally:
        await loaded.policy.close()
        if sandbox is not None:
            await sandbox.close()


def summary(episodes: Sequence[Episode]) -> Result:
    """Shares of the attempts: solved, with a call, with a call that returned; and the standard error of `solved`."""
    count = max(1, len(episodes))
    called = [any(turn.calls for turn in one.turns) for one in episodes]
    returned = [
        any(r.error is None for turn in one.turns for r in turn.results) for one in episodes
    ]
    solved = sum(str(one.outcome) == "solved" for one in episodes)
    shares = {
        "solved": solved / count,
        "called": sum(called) / count,
        "returned": sum(returned) / count,
    }
    by_row: dict[str, list[bool]] = {}
    for one in episodes:
        by_row.setdefault(one.task_id, []).append(str(one.outcome) == "solved")
    if len(by_row) > 1:  # attempts at the same row are alike
        shares["error"] = stdev(sum(row) / len(row) for row in by_row.values()) / len(by_row) ** 0.5
    return {**{key: round(value, 3) for key, value in shares.items()}, "attempts": len(episodes)}


def measure_base(model: str, rows: int, samples: int, only: Sequence[str]) -> Result:
    """Every function in both languages."""
    found: Result = {}
    for language in ("english", "chinese"):
        packs = [
            pack_of(one, 1, rows, language) for one in SUBJECTS if not only or one.name in only
        ]
        episodes = asyncio.run(sample(model, packs, "train", rows, samples))
        for pack in packs:
            found.setdefault(pack.name, {})[language] = summary(
                [one for one in episodes if one.pack == pack.name]
            )
    return found


def measure_orders(model: str, rows: int, samples: int, only: Sequence[str]) -> Result:
    """Every order of the arguments of every function, in both languages."""
    found: Result = {}
    for one in (one for one in ORDERED if not only or one.name in only):
        for language in ("english", "chinese"):
            packs = [pack_of(each, 1, rows, language) for each in one.subjects()]
            episodes = asyncio.run(sample(model, packs, "train", rows, samples))
            orders = {
                pack.name: summary([each for each in episodes if each.pack == pack.name])
                for pack in packs
            }
            found.setdefault(one.name, {})[language] = {**summary(episodes), "orders": orders}
        print(one.name, found[one.name], flush=True)
    return found


def measure_generated(model: str, samples: int) -> Result:
    """The forty generated tools."""
    packs = [generated_pack(one, one.rows) for one in generated()]
    episodes = asyncio.run(sample(model, packs, "train", 5, samples))
    by_tool = {
        pack.name: summary([one for one in episodes if one.pack == pack.name]) for pack in packs
    }
    return {"all": summary(episodes), "tools": by_tool}


def measure_packs(model: str, names: Sequence[str], rows: int, samples: int) -> Result:
    """The packs' validation splits."""
    found: Result = {}
    for name in names:
        episodes = asyncio.run(sample(model, [load_pack(name)], "validation", rows, samples))
        families = sorted({one.family for one in episodes})
        by_family = {one: summary([e for e in episodes if e.family == one]) for one in families}
        found[name] = {"all": summary(episodes), "families": by_family}
    return found


def measure_training(
    pack: Pack, seed: int, held: Sequence[Pack], options: argparse.Namespace
) -> Result:
    """GRPO on one function; solved by step, and on `held` before and after. Raises RuntimeError if it ended early."""
    model, steps, keep = options.model, options.steps, options.keep
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(keep, f"{pack.name}-{seed}") if keep else Path(temporary)
        cpu = time.process_time()
        run = train(
            config_of(
                model,
                train={
                    "steps": steps,
                    "lr": options.lr,
                    "eval": 0,
                    "token_budget": 2048,
                    "save": 1000,
                },
                seed=seed,
            ),
            packs=[pack],
            project=folder,
            narrate=lambda text: None,
        )
        cpu = time.process_time() - cpu
        if run.step != steps:
            raise RuntimeError(
                f"{pack.name} stopped at step {run.step} of {steps}: {run.error or run.status}"
            )
        store = sqlite3.connect(f"file:{folder}/runs/agentrl.db?mode=ro", uri=True)
        rows = store.execute(
            "SELECT avg(outcome = 'solved') FROM episodes WHERE run_id = ? AND kind = 'train'"
            " GROUP BY step ORDER BY step",
            (run.id,),
        ).fetchall()
        spent = store.execute(
            "SELECT metrics FROM steps WHERE run_id = ? ORDER BY step", (run.id,)
        ).fetchall()
        trained = store.execute(
            "SELECT path FROM checkpoints WHERE run_id = ? AND kind = 'last'", (run.id,)
        ).fetchone()
        store.close()
        curve = [round(row[0], 3) for row in rows]
        means = {end: sum(curve[end - 10 : end]) / 10 for end in range(10, steps + 1)}
        found = {"first": curve[0], "last": round(means[steps], 3), "cpu_seconds": round(cpu, 1)}
        if reached := [end for end, mean in means.items() if mean >= WANTED]:
            found["reached_step"] = reached[0]
            found["reached_cpu_seconds"] = round(
                sum(json.loads(row[0])["time/cpu"] for row in spent[: reached[0]]), 1
            )
        models = {"before": model, "after": str(folder / "runs" / trained[0])} if held else {}
        for when, one in models.items():
            episodes = asyncio.run(sample(one, held, "train", HELD, 8))
            found[when] = summary(episodes)
            if len(held) > 1:
                found[when]["orders"] = {
                    each.name: summary([e for e in episodes if e.pack == each.name])["solved"]
                    for each in held
                }
        return {**found, "curve": curve}


def trainings(options: argparse.Namespace) -> Iterator[tuple[str, Pack, Sequence[Pack], int]]:
    """Yield every training: name, pack, the packs of rows held out of it, seed."""
    if options.what == "train-orders":
        for one in (one for one in ORDERED if not options.only or one.name in options.only):
            for seed in options.seeds:
                rows = one.subject().rows(1000 + seed, 200, "english")
                trained = {row["prompt"] for row in rows}
                held = [held_out(each, trained) for each in one.subjects()]
                yield one.name, _pack(one.subject(), rows, SYSTEM), held, seed
        return
    if options.what == "train":
        for subject in (one for one in SUBJECTS if one.name in options.only):
            yield from (
                (subject.name, pack_of(subject, 1000 + seed, 200), [], seed)
                for seed in options.seeds
            )
        return
    tools = generated()
    drawn = random.Random("sample of the generated tools").sample(tools, len(tools))
    for tool in (
        [one for one in drawn if one.name in options.only]
        if options.only
        else drawn[: options.count]
    ):
        for seed in options.seeds:
            yield (
                tool.name,
                generated_pack(tool, tool.more(200, seed)),
                [generated_pack(tool, tool.rows)],
                seed,
            )


def table(found: Result) -> str:
    """Markdown: a line for each function, with what was measured of it."""
    lines = [
        "| function | base, English | base, Chinese | calls | trained | CPU s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found.get("base", {}).items():
        runs = found.get("train", {}).get(name, {})
        trained = ", ".join(f"{run['last']:.2f}" for run in runs.values()) or "-"
        cpu = ", ".join(f"{run['cpu_seconds']:.0f}" for run in runs.values()) or "-"
        english, chinese = one["english"], one["chinese"]
        solved = f"{english['solved']:.2f} | {chinese['solved']:.2f} | {english['called']:.2f}"
        lines.append(f"| {name} | {solved} | {trained} | {cpu} |")
    return "\n".join(lines)


def interval(values: Sequence[float], draws: int = 10_000) -> str:
    """The mean of so many tools, with a 95 % interval from a bootstrap over the tools."""
    rng = random.Random(0)
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(draws))
    low, high = means[draws // 40], means[-draws // 40]
    return f"{sum(values) / len(values):.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("base", "generated", "orders", "packs", *TRAININGS))
    parser.add_argument("model")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--packs", nargs="*", default=["calc-task", "echo-task", "code-task"])
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=RATE)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--keep")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    options = parser.parse_args()
    name = Path(options.model).name
    if options.what == "base":
        _keep(
            name, {"base": measure_base(options.model, options.rows, options.samples, options.only)}
        )
    elif options.what == "generated":
        _keep(name, {"generated": measure_generated(options.model, options.samples)})
    elif options.what == "orders":
        _keep(
            name,
            {"orders": measure_orders(options.model, options.rows, options.samples, options.only)},
        )
    elif options.what == "packs":
        _keep(
            name,
            {"packs": measure_packs(options.model, options.packs, options.rows, options.samples)},
        )
    else:
        for trained, pack, held, seed in trainings(options):
            result = measure_training(pack, seed, held, options)
            run = str(seed) if options.lr == RATE else f"{seed}, lr {options.lr:g}"
            _keep(name, {options.what: {trained: {run: result}}})
            print(
                trained,
                seed,
                {key: value for key, value in result.items() if key != "curve"},
                flush=True,
            )
    found = _kept()[name]
    print(table(found))
    print(json.dumps({key: one["all"] for key, one in found.get("packs", {}).items()}))
    print(json.dumps(found.get("generated", {}).get("all", {})))
    if tools := [runs for runs in found.get("train-generated", {}).values() if "0" in runs]:
        for when in ("before", "after"):
            print(
                f"{len(tools)} generated tools {when}: {interval([one['0'][when]['solved'] for one in tools])}"
            )


def _kept() -> Result:
    read: Result = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return read


def _keep(model: str, found: Result) -> None:
    """Add what was measured to the file, which another measurement may have written to meanwhile."""
    kept = _kept()
    _merge(kept.setdefault(model, {}), found)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _merge(into: Result, more: Result) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


if __name__ == "__main__":
    main()
