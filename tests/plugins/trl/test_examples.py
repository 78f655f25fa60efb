"""The examples of TRL's GRPO documentation and its grpo_agent.py: TRL's own rewards on the same completions.

TRL itself is asked where it is installed (`pip install trl==1.16.*`); without it the documented values are the test.
"""

import asyncio
import math
import re
import signal
import sqlite3
import threading
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from agentrl_cli import ByteTokenizer, Outcome, Pack, Store, Task, load_pack
from agentrl_cli.errors import ConfigError, EnvError
from agentrl_cli.rewards import Reward, RewardContext, score
from agentrl_cli.rewards.adapt import adapt_reward
from agentrl_cli.tools.configured import load_tools
from tests.helpers import trees
from tests.helpers.chat import call
from tests.helpers.packs import pack, play, row
from tests.helpers.rewards import TASK, context, episode, value

# The documentation's examples 1, 1.1, 2 (for conversations), 3 (for texts), 4 and 5.


def longer(completion_ids: Any, **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def characters(completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def formatted(completions: Any, **kwargs: Any) -> list[float]:
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    matches = [re.match(pattern, completion[0]["content"]) for completion in completions]
    return [1.0 if match else 0.0 for match in matches]


def referenced(completions: Any, ground_truth: Any, **kwargs: Any) -> list[float]:
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in found]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]


def of_task(prompts: Any, completions: Any, task: Any, **kwargs: Any) -> list[float | None]:
    return [
        float(prompt == "What is 2+2?") if t == "math" else None
        for prompt, t in zip(prompts, task, strict=True)
    ]


async def later(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
    return [1.0 if completion else 0.0 for completion in completions]


def of_columns(task: Any, ground_truth: Any, **kwargs: Any) -> list[float]:
    return [float(len(a) + len(b)) for a, b in zip(task, ground_truth, strict=True)]


def of_state(trainer_state: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("step", trainer_state.global_step)
    return [float(len(kwargs["completions"][0]))]


TEXT = {"prompt": "What is 2+2?", "ground_truth": "4", "task": "math"}
CHAT = {**TEXT, "prompt": [{"role": "user", "content": "What is 2+2?"}]}
ANSWER = r" The solution is \boxed{4}."
THOUGHT = "<think>Two and two.</think><answer>4</answer>"
# What the documentation's functions give; the number of tokens is the tokenizer's.
CASES: list[tuple[Any, dict[str, Any], str, float | None]] = [
    (longer, TEXT, ANSWER, len(ByteTokenizer().encode(ANSWER)) + 1.0),  # and the end of the turn
    (characters, TEXT, ANSWER, 27.0),
    (formatted, CHAT, THOUGHT, 1.0),
    (referenced, TEXT, ANSWER, 1.0),
    (referenced, TEXT, r"\boxed{5}", 0.0),
    (of_task, TEXT, ANSWER, 1.0),
    (of_task, {**TEXT, "task": "code"}, ANSWER, None),
    (later, TEXT, ANSWER, 1.0),
    (later, CHAT, ANSWER, 1.0),
    (of_columns, TEXT, ANSWER, 5.0),
    (of_state, CHAT, ANSWER, 1.0),
    (characters, CHAT, ANSWER, 1.0),
]


def by_trl(function: Any, row: dict[str, Any], given: dict[str, Any]) -> float | None:
    """The reward that GRPOTrainer computes for a prompt and a completion; None if it computes none."""
    from trl import GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    loop = asyncio.new_event_loop()
    same = SimpleNamespace(device="cpu", gather=lambda tensor: tensor, is_main_process=False)
    trainer = SimpleNamespace(
        accelerator=same, reward_funcs=[function], reward_processing_classes=[None], reward_func_names=["r"],
        state=SimpleNamespace(global_step=0), args=SimpleNamespace(report_to=[]), environments=None, async_loop=loop,
        _log_completion_extra=lambda name, values: None, _log_metric=lambda name, value: None,
    )  # fmt: skip
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        tensor = GRPOTrainer._calculate_rewards(
            trainer, [row], given["prompts"], given["completions"], given["completion_ids"]
        )
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    found = float(tensor[0, 0])
    return None if math.isnan(found) else found


@pytest.mark.parametrize(("function", "given", "reply", "known"), CASES)
async def test_the_documentations_examples_give_trls_rewards(
    function: Any, given: dict[str, Any], reply: str, known: float | None
) -> None:
    seen: list[dict[str, Any]] = []

    def keep(**kwargs: Any) -> list[float]:
        seen.append(kwargs)
        return [0.0]

    pack = Pack.of("p", [given], [Reward("keep", keep), Reward("r", function, primary=True)])
    done = await play(pack, [reply])
    assert done.outcome is not Outcome.ENV_ERROR, done.error
    assert {part.name: part.value for part in done.reward_parts}.get("r") == known
    if find_spec("trl") is not None:
        assert await asyncio.to_thread(by_trl, function, given, seen[0]) == known


# --- grpo_agent.py ---------------------------------------------------------------------------------------------------


def query_reward(completions: Any, answer: Any, **kwargs: Any) -> list[float]:
    """The evidence part of the script's reward: lists are hits, texts are not."""
    rewards = []
    for completion, wanted in zip(completions, answer, strict=False):
        calls = [c for t in completion for c in t.get("tool_calls") or ()]
        queries = [c["function"]["arguments"]["sql_command"].lower() for c in calls]
        results = [t["content"] for t in completion if t.get("role") == "tool"]
        hits = [hit for found in results if isinstance(found, list) for hit in found]
        where = sum(" where " in query for query in queries) * 0.4
        rewards.append(where + (2.0 if bool(hits) == (wanted == "yes") else -1.5))
    return rewards


@contextmanager
def limit(seconds: int) -> Any:
    def expired(number: int, frame: Any) -> None:
        raise RuntimeError(f"Operation timed out after {seconds} seconds")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


async def test_grpo_agents_tool_uses_signals_and_its_lists_stay_lists(tmp_path: Path) -> None:
    database = tmp_path / "biogrid.db"
    with closing(sqlite3.connect(database)) as made, made:
        made.execute("CREATE TABLE interactions AS SELECT 'JNKK' AS gene, 9606 AS taxon")

    def query_biogrid(sql_command: str) -> list[tuple[Any, ...]]:
        """Execute a read-only SQL command on the BioGRID database.

        Args:
            sql_command: The SQL command to execute.
        """
        with limit(5), closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as found:
            return found.execute(sql_command).fetchall()

    row = {"prompt": [{"role": "user", "content": "Does the gene JNKK interact?"}], "answer": "yes"}
    pack = Pack.of("p", [row], [Reward("q", query_reward)], tools=[query_biogrid])
    asked = call("query_biogrid", sql_command="SELECT * FROM interactions WHERE gene = 'JNKK'")
    with Store.open(tmp_path / "s.db") as store:
        done = await play(pack, [asked, "*yes*"], store=store)
        assert [r.text for t in done.turns for r in t.results] == ['[["JNKK", 9606]]']
        assert done.reward_parts[0].value == pytest.approx(2.4)
        (again,) = store.episodes.get(done.id).turns[2].results
        assert again.value == [["JNKK", 9606]], "a rescore reads the same list"


# --- environments ----------------------------------------------------------------------------------------------------

OWNER = '''
class Guess:
    """Owns its data: reset() gives the prompt."""

    def reset(self, **kwargs) -> str:
        self.tries = 0
        return "Guess a number from 1 to 3."

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: From 1 to 3.
        """
        self.tries += 1
        self.right = number == 2
        return "right" if self.right else "wrong"

    def get_reward(self) -> float:
        return float(self.right) / self.tries


class Echo:
    def reset(self, prompt=None) -> None:
        self.said = ""

    def guess(self, text: str) -> str:
        """Say a text.

        Args:
            text: Which.
        """
        self.said = text
        return text
'''


def project(folder: Path, spec: dict[str, Any], rows: str = "") -> Pack:
    (folder / "task.py").write_text(OWNER)
    (folder / "task.yaml").write_text(yaml.safe_dump({"name": "p", "sandbox": False, **spec}))
    if rows:
        (folder / "data").mkdir()
        (folder / "data" / "train.jsonl").write_text(rows)
    return load_pack(folder)


async def test_an_environment_owns_its_data_and_its_reward(tmp_path: Path) -> None:
    pack = project(tmp_path, {"tools": [{"environment": "task.py:Guess"}]})
    assert len(pack.tasks("train")) == 64
    done = await play(pack, [call("guess", number=1), call("guess", number=2), "Two."])
    assert done.turns[0].messages[-1]["content"] == "Guess a number from 1 to 3."
    parts = {part.name: part.value for part in done.reward_parts}
    assert parts == {"environment": 0.5, "tool:guess": 0.5}


async def test_a_row_is_shown_the_tools_of_its_environment_alone(tmp_path: Path) -> None:
    spec = {"tools": [{"environment": {"guess": "task.py:Guess", "echo": "task.py:Echo"}}]}
    pack = project(tmp_path, spec, '{"environment": "echo"}\n{"environment": "guess"}\n')
    schemas = [tool.schema for task in pack.tasks("train") for tool in pack.tools_of(task)]
    names = [[*schema["function"]["parameters"]["properties"]] for schema in schemas]
    assert names == [["text"], ["number"]]
    done = await play(pack, [call("guess", text="a"), "x"])
    assert done.turns[2].results[0].text == "a" and done.outcome is Outcome.UNGRADED
    (tmp_path / "data" / "train.jsonl").write_text('{"environment": "other"}\n')
    (bad,) = pack.read("train")[1]
    assert bad.text == "`environment` is 'other', which is not one of echo, guess."


TRL = '''
class Counter:
    """Written against https://huggingface.co/docs/trl/grpo_trainer (environment_factory)."""

    def reset(self, **kwargs) -> str | None:
        self.count = int(kwargs.get("start", 0))
        self.asked = kwargs["prompt"]
        return f"The counter is at {self.count}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: The amount to add.

        Returns:
            The new value.
        """
        self.count += step
        return self.count

    async def read(self) -> str:
        """Read the counter."""
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == 5)

    def close(self):
        CLOSED.append(self.count)

CLOSED = []
'''


async def test_trl_environments(tmp_path: Path) -> None:
    spec = {
        "tools": [{"environment": "task.py:Counter"}],
        "rewards": {"world": {"primary": True, "function": "environment"}},
    }
    made = pack(tmp_path, spec, [row(start=3)], task=TRL)
    assert [tool.name for tool in made.tools] == ["increment", "read"]
    done = await play(made, [call("increment", step=2) + call("read"), "done"])
    assert str(done.turns[0].messages[-1]["content"]) == "2 + 3?\n\nThe counter is at 3."
    assert [result.text for turn in done.turns for result in turn.results] == ["5", "now 5"]
    assert done.outcome is Outcome.SOLVED
    parts = {part.name: part.value for part in done.reward_parts}
    assert parts == {"world": 1.0, "tool:increment": 1.0}
    with pytest.raises(ConfigError, match="needs reset"):
        load_tools([{"environment": "pathlib:Path"}], tmp_path)
    assert made.module.CLOSED == [5]  # once, though two tools share it


async def test_trls_reward_functions() -> None:
    def accuracy(completions: Any, solution: list[str], **kwargs: Any) -> list[float]:
        seen = {name: kwargs[name] for name in ("prompts", "completion_ids", "ground_truth")}
        ids = [[1, 2, 3, 4, 5, 6]]
        assert seen == {"prompts": [[*TASK.prompt]], "completion_ids": ids, "ground_truth": ["5"]}
        assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
        kwargs["log_metric"]("step", kwargs["trainer_state"].global_step)
        return [float(solution[0] in completions[0][-1]["content"])]

    async def slow(completions: Any) -> list[float | None]:
        return [None]

    assert await value(accuracy) == (1.0, "step 4")
    assert await score(episode(), [Reward("r", slow)], context()) == ()  # not applicable: no part
    with pytest.raises(EnvError, match="a list of one number"):
        await value(lambda completions: [1.0, 2.0])


async def test_the_conversation_is_the_one_that_the_agent_ended_with() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, completion_ids: Any, **rest: Any) -> list[float]:
        seen.append([m["content"] for m in (*prompts[0], *completions[0])])
        seen.append(completion_ids)
        return [1.0]

    one = trees.episode(trees.fork())
    await adapt_reward(reward)(one, RewardContext(Task("t", "p", "f", "train", ()), ""))
    assert one.main.turns == (0, 1, 4, 5)
    # Tool results included, as TRL has it.
    assert seen == [["turn 0", "turn 1", "turn 4", "turn 5"], [[20, 21, 31, 32, 25]]]
