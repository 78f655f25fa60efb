"""The packs that ship: their data is what their generators make, and every row has what its pack declares."""

from collections.abc import Sequence

import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.paths import pack_names
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.tasks import load_pack
from agentrl_cli.types.content import content_text

FIELDS = {
    "calc-task": ("expression", "answer"),
    "code-task": ("kind", "answer"),
    "echo-task": ("answer",),
    "file-task": ("setup", "path", "wrong", "right", "tests"),
    "guess-task": ("low", "high", "secret"),
    "math-task": ("answer",),
    "parallel-task": ("first", "second", "prices", "stocks", "answer"),
    "search-task": ("search", "answer"),
    "shapes-task": ("scene", "answer"),
    "sql-task": ("database", "query", "answer"),
}


@pytest.mark.parametrize("name", pack_names())
def test_data_is_what_the_generator_makes(name: str) -> None:
    pack = load_pack(name)
    built = {split: rows for split, rows in pack.module.build().items() if rows}
    assert {"train", "test"} <= set(built)
    for split, rows in built.items():
        assert [task.data["id"] for task in pack.tasks(split)] == [row["id"] for row in rows]
        asked = [
            row.get("prompt") or row["conversations"][1]["content"] for row in rows
        ]  # conversations
        assert [content_text(task.prompt[-1]["content"]) for task in pack.tasks(split)] == asked


def test_fields_are_declared() -> None:
    assert {name: load_pack(name).row for name in pack_names() if name in FIELDS} == FIELDS


async def test_packs_mix_in_one_run_with_results_per_pack() -> None:
    names = ("sql-task", "parallel-task", "guess-task")
    packs = {name: load_pack(name) for name in names}
    chat = Chat(ByteTokenizer())
    config = Config()
    config.rollout.max_tokens, config.rollout.max_turns = 20_000, 10
    tasks = [task for pack in packs.values() for task in pack.tasks("test", limit=3)]
    prompts = {task.prompt[-1]["content"]: task for task in tasks}
    turns: dict[str, int] = {}

    def reply(key: str, ids: Sequence[int]) -> str:
        task = next(task for text, task in prompts.items() if text in chat.decode(list(ids)))
        said = [m for m in packs[task.pack].solution(task) if m["role"] == "assistant"]
        turns[key] = turns.get(key, -1) + 1
        if task.pack == "guess-task":
            return "no number"
        return chat.assistant_text(said[turns[key]], packs[task.pack].schemas)

    rollout = Rollout(ScriptedPolicy(reply, chat.tokenizer), chat, packs, config)
    done = await rollout.run([Job(task, 1) for task in tasks])
    by_pack = {
        name: [episode.primary for episode in done if episode.pack == name] for name in names
    }
    assert by_pack == {"sql-task": [1.0] * 3, "parallel-task": [1.0] * 3, "guess-task": [0.0] * 3}
