"""The store with 100,000 episodes: times of lists, filters and single episodes, and the cost of writing.

    python benchmarks/store.py [--episodes 100000] [--db FILE] [--json]

Prints milliseconds of the best of five; writing is CPU time of this process per episode. The targets: an ordered list
of ids in 100 ms, 50 lines in 5 ms, and store writes at most 2 % of a trainer's CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.store import RunRow, Store
from agentrl_cli.types import (
    TOP_K,
    AgentState,
    Episode,
    Generation,
    Origin,
    Outcome,
    RewardPart,
    StopReason,
    Tokens,
    ToolCall,
    ToolResult,
    TrainSignals,
    Turn,
    new_id,
)

FILTERS = {
    "all, newest first": ("", "-time"),
    "all, by reward": ("", "reward"),
    "reward:<0.5 step:100..120": ("reward:<0.5 step:100..120", "-time"),
    "reward:<0.5": ("reward:<0.5", "-time"),
    "outcome:failed by -reward": ("outcome:failed", "-reward"),
    "flag:LOOP": ("flag:LOOP", "-time"),
    "task:calc/00*": ("task:calc/00*", "-time"),
    "tool:calculator": ("tool:calculator", "-time"),
    "-tag:seen turns:>3": ("-tag:seen turns:>3", "-time"),
    'text:"4,5"': ('text:"4,5"', "-time"),
}


def fill(path: Path, episodes: int, seed: int = 0) -> None:
    """A store with one run of groups of 8; three turns an episode, a few tokens each so that the file stays small."""
    rng = np.random.default_rng(seed)
    with Store.open(path) as store:
        run = store.runs.add(
            RunRow(id="", name="bench", model="tiny", pack="calc-task", total_steps=episodes // 64)
        )
        for start in range(0, episodes, 4096):
            with store.transaction():
                for number in range(start, min(start + 4096, episodes)):
                    store.episodes.finish(_episode(rng, run.id, number, model_tokens=4))


def _episode(
    rng: np.random.Generator, run_id: str, number: int, model_tokens: int = 100
) -> Episode:
    solved = rng.random() < 0.4
    calls = (
        ToolCall(
            f"c{number}", "calculator" if number % 3 else "run_python", {"expr": "12 * 4,5"}, "{…}"
        ),
    )
    sampled, prompt = _sampled(rng, model_tokens), Tokens.from_ids(range(16), [Origin.USER] * 16)
    result = Tokens.from_ids(range(8), [Origin.TOOL] * 8)
    end = 16 + model_tokens
    turns = (
        Turn(0, "user", ({"role": "user", "content": f"What is 12 times {number}?"},), 0, 16),
        Turn(
            1,
            "assistant",
            ({"role": "assistant", "content": ""},),
            16,
            end,
            calls=calls,
            stop_reason=StopReason.STOP,
        ),
        Turn(
            2,
            "tool",
            ({"role": "tool", "content": "54.0"},),
            end,
            end + 8,
            results=(ToolResult("54.0"),),
        ),
    )
    return Episode(
        id=new_id(),
        task_id=f"calc/{number // 8 % 600:04d}",
        pack="calc-task",
        family="multiply",
        run_id=run_id,
        step=number // 64,
        group_id=f"g{number // 8}",
        sample=number % 8,
        kind="train",
        turns=turns,
        tokens=Tokens.concat([prompt, sampled, result]),
        reward_parts=(
            RewardPart("correct", float(solved), 1.0, primary=True),
            RewardPart("format", rng.random(), 0.2),
        ),
        outcome=Outcome.SOLVED if solved else Outcome.FAILED,
        flags=("LOOP",) if rng.random() < 0.05 else (),
        fact="trained",
        advantage=float(rng.normal()),
        started=1.7e9 + number,
        ended=1.7e9 + number + 2.0,
    )


def _sampled(rng: np.random.Generator, n: int) -> Tokens:
    logps = rng.normal(size=n).astype(np.float32)
    return Tokens.from_generation(
        Generation(
            ids=rng.integers(0, 512, n).astype(np.int32),
            logp_sampled=logps,
            logp_policy=logps,
            entropy=logps,
            top_ids=rng.integers(0, 512, (n, TOP_K)).astype(np.int32),
            top_logps=rng.normal(size=(n, TOP_K)).astype(np.float32),
            stop_reason=StopReason.STOP,
            weights_version="step-0",
        )
    )


def read_times(path: Path) -> Iterator[tuple[str, float]]:
    """(what, milliseconds) of reading."""
    with Store.open(path, readonly=True) as store:
        for name, (filter, sort) in FILTERS.items():
            yield f"ids: {name}", _best(partial(store.episodes.ids, filter, sort))
        ids = store.episodes.ids("", "reward")
        rng = np.random.default_rng(1)
        some = [ids[place] for place in rng.integers(0, len(ids), 50)]
        yield "50 lines at random", _best(lambda: store.episodes.rows(some))
        name = store.episodes.rows(some[:1])[0].id
        yield "siblings", _best(lambda: store.episodes.siblings(name))
        yield "one episode", _best(lambda: store.episodes.get(name))
        yield "resolve best", _best(lambda: store.episodes.resolve("best"))
        yield "open", _best(lambda: Store.open(path, readonly=True).close())


def write_cost(path: Path, episodes: int = 256) -> tuple[float, float]:
    """CPU milliseconds for one episode of three turns and 100 sampled tokens, and for its training signals.

    Like a rollout: 64 episodes at once, turn by turn; finished ones are committed together.
    """
    rng = np.random.default_rng(2)
    with Store.open(path) as store:
        run = store.runs.get("bench")
        made = [_episode(rng, run.id, 10**6 + number) for number in range(episodes)]
        begin = time.process_time()
        for first in range(0, episodes, 64):
            batch = made[first : first + 64]
            for episode in batch:
                store.episodes.start(episode)
            for index in range(3):
                for episode in batch:
                    turn = episode.turns[index]
                    store.live.set(episode.id, AgentState.GENERATING, index, "some text")
                    store.episodes.add_turn(
                        episode.id, turn, episode.tokens.slice(turn.start, turn.end), later=True
                    )
                if index == 1:
                    store.flush()  # so that a watcher sees running episodes
            for count, episode in enumerate(batch, 1):
                store.episodes.finish(episode, later=True)
                if count % 8 == 0:
                    store.flush_ended()
        written = time.process_time()
        with store.transaction():
            for episode in made:
                n = len(episode.tokens)
                column = np.where(episode.tokens.trained_mask, 1.0, np.nan).astype(np.float32)
                signals = TrainSignals(column, column, column, np.zeros(n, np.int8), column)
                store.signals.add(episode.id, signals)
            store.marks.set_facts((episode.id, "trained", 0.5) for episode in made)
            store.runs.add_step(run.id, 10**6, {"reward": 0.4})
        end = time.process_time()
        store.episodes.delete(episode.id for episode in made)
    return 1000 * (written - begin) / episodes, 1000 * (end - written) / episodes


def _best(action: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--db", type=Path, help="keep the generated store here and reuse it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.db or Path(folder) / "bench.db"
        if not path.exists():
            fill(path, arguments.episodes)
        times = dict(read_times(path))
        times["write: CPU per episode"], times["write: CPU per episode's signals"] = write_cost(
            path
        )
    if arguments.json:
        print(json.dumps(times, indent=2))
        return
    for name, milliseconds in times.items():
        print(f"{name:36} {milliseconds:9.2f} ms")


if __name__ == "__main__":
    main()
