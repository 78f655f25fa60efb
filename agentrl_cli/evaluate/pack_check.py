"""The conformance check of a pack, for its author, before it is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from agentrl_cli.agents.runners import require_agents
from agentrl_cli.chat.images import Images
from agentrl_cli.chat.media import image_bytes, image_size
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tiny_template import IMAGE_TOKENS, tiny_template
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config
from agentrl_cli.errors import AgentRLError, describe_error
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks import Pack, question
from agentrl_cli.tasks.drawing import PLACEHOLDER
from agentrl_cli.tools import validate_arguments
from agentrl_cli.types import Episode, Message, Outcome, Task, group_pairs
from agentrl_cli.types.content import HASH, digest, is_image

PER_FAMILY = 4
"""Rows per family and split whose solution is run. All rows are read and checked against the schema."""
AT_ONCE = 32
"""Rows whose solution runs at the same time."""
EMPTY = "I do not know."
"""An answer that must not score."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a pack, and where."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


async def check_pack(pack: Pack, sandbox: Sandbox | None, *, every: bool = False) -> list[Problem]:
    """Return all problems of a pack: rows, families, tools, solutions that do not score 1, empty answers that score.

    Every line of the data is read and checked; solutions and empty answers are run on some rows, with `every` on all.
    Without a solver (`Pack.solver`) only the empty answers are run.
    """
    problems: list[Problem] = []
    tasks: list[Task] = []
    splits = pack.splits()
    if "train" not in splits:
        problems.append(Problem("data", "train.jsonl is missing"))
    for split in splits:
        good, bad = pack.read(split)
        tasks += good
        where = pack.source(split).label.removeprefix(f"{pack.dir}/")
        problems += [Problem(f"{where}:{line.number}", line.text) for line in bad]
        if not good and not bad:
            problems.append(Problem(where, f"the split {split} has no rows"))
    problems += _families(pack, tasks)
    problems += _twice(pack, tasks)
    problems += _tools(pack)
    if pack.agent is None:  # what an agent does is not in the pack's messages
        problems += await _solutions(pack, tasks if every else _sample(tasks), sandbox)
        return problems
    try:
        await require_agents([pack])
    except AgentRLError as error:
        problems.append(Problem(pack.agent.text, f"{error.message} {error.hint}".strip()))
    return problems


def _families(pack: Pack, tasks: Sequence[Task]) -> Iterator[Problem]:
    listed = {family for families in pack.families.values() for family in families}
    heldout = set(pack.families.get("heldout", ()))
    for family in sorted({task.family for task in tasks} - listed if listed else ()):
        yield Problem(
            "task.yaml", f"the family {family!r} of the data is not listed under `families`"
        )
    for task in tasks:
        if task.split == "train" and task.family in heldout:
            yield Problem(task.id, f"the held-out family {task.family!r} appears in training")
        if str(task.prompt[-1].get("content")).startswith(PLACEHOLDER):
            yield Problem(task.id, "the row is a placeholder: write a question and its answer")


def _twice(pack: Pack, tasks: Sequence[Task]) -> Iterator[Problem]:
    """Tasks in two splits, which would make an evaluation measure memory, and ids, which would mix attempts up.

    None if the author gave one source to both splits, or an environment makes the rows.
    """
    seen: dict[str, Task] = {}
    ids: dict[str, Task] = {}

    def apart(a: Task, b: Task) -> bool:
        return a.split != b.split and pack.source(a.split) != pack.source(b.split)

    for task in () if pack.rows is not None else tasks:
        first = seen.setdefault(
            question(task.prompt, task.data, getattr(pack.module, "WORLD", ())), task
        )
        named = ids.setdefault(task.id, task)
        if apart(first, task):
            yield Problem(task.id, f"the same task is in {first.split} as {first.id}")
        elif apart(named, task):
            yield Problem(task.id, f"a row of {named.split} has this id, too")


def _tools(pack: Pack) -> Iterator[Problem]:
    for tool in pack.tools:
        for arguments in tool.examples:
            if wrong := validate_arguments(tool.schema, dict(arguments)):
                yield Problem(
                    f"tool {tool.name}", f"its own example does not fit its schema: {wrong}"
                )


def _sample(tasks: Sequence[Task]) -> list[Task]:
    """Return the first PER_FAMILY tasks of every family of every split."""
    groups = group_pairs(((task.split, task.family), task) for task in tasks)
    return [task for group in groups.values() for task in group[:PER_FAMILY]]


async def _solutions(pack: Pack, tasks: Sequence[Task], sandbox: Sandbox | None) -> list[Problem]:
    """Run reference solutions and empty answers through the real loop."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(task: Task) -> list[Problem]:
        async with room:
            return await _solution(pack, task, sandbox)

    found = await asyncio.gather(*map(one, tasks))
    return [problem for problems in found for problem in problems]


async def _solution(pack: Pack, task: Task, sandbox: Sandbox | None) -> list[Problem]:
    chat = byte_chat(task)
    try:
        messages = pack.solution(task) if pack.solver else []
        texts = [chat.assistant_text(m, pack.schemas) for m in messages if m["role"] == "assistant"]
    except Exception as error:  # noqa: BLE001 - any exception of the pack's solver is a problem to report
        return [Problem(task.id, f"solve(row) raised {describe_error(error)}")]
    if not texts:
        return await _blank(pack, task, chat, sandbox)
    problems = []
    solved = await play_texts(pack, task, chat, texts, sandbox)
    if solved.outcome is not Outcome.SOLVED:
        graded = (
            f"{p.name} gave {p.value:g}: {p.detail}" for p in solved.reward_parts if p.primary
        )
        why = solved.error or "; ".join(graded).rstrip(": ")
        problems.append(Problem(task.id, f"the reference solution ends as {solved.outcome}: {why}"))
    problems += _observations(task, messages, solved.messages)
    return problems + await _blank(pack, task, chat, sandbox)


async def _blank(pack: Pack, task: Task, chat: Chat, sandbox: Sandbox | None) -> list[Problem]:
    empty = await play_texts(pack, task, chat, [EMPTY], sandbox)
    if empty.primary == 0:
        return []
    return [
        Problem(task.id, f"an empty answer scores {empty.primary}: {empty.error or 'expected 0'}")
    ]


def _observations(task: Task, said: Sequence[Message], got: Sequence[Message]) -> list[Problem]:
    """Compare the solver's tool results with the real ones: demonstrations must be true."""
    claimed = [_strip_images(m["content"]) for m in said if m["role"] == "tool"]
    real = [_strip_images(m["content"]) for m in got if m["role"] == "tool"]
    return [
        Problem(task.id, f"the solver has the tool answer {a!r}; it answers {b!r}")
        for a, b in zip(claimed, real, strict=False)
        if a != b
    ]


def byte_chat(task: Task) -> Chat:
    """Return a chat whose tokens are bytes, and an image one token if the task has any."""
    return _make_chat(any(isinstance(message.get("content"), list) for message in task.prompt))


@cache
def _make_chat(images: bool) -> Chat:
    """Return the one chat of all tasks, whose tokens are bytes: a template takes longer to compile than an attempt."""
    if not images:
        return Chat(ByteTokenizer())
    tokenizer = ByteTokenizer(
        tiny_template(images=True), control=(*ByteTokenizer.CONTROL, *IMAGE_TOKENS)
    )
    token = tokenizer.id_of(IMAGE_TOKENS[2])
    assert token is not None
    return Chat(tokenizer, images=Images(token, lambda data: (*image_size(data), 1, ())))


def _strip_images(content: Any) -> Any:
    """Return a tool's answer without what depends on a model: its texts, and its images by hash."""
    if not isinstance(content, list):
        return content
    images = [
        p["image"] if is_image(p) else HASH + digest(image_bytes(p))
        for p in content
        if p["type"] == "image"
    ]
    return [*images, *(part["text"] for part in content if part["type"] == "text" and part["text"])]


async def play_texts(
    pack: Pack, task: Task, chat: Chat, texts: Sequence[str], sandbox: Sandbox | None
) -> Episode:
    """Play one attempt of a scripted policy, with limits that fit any solution."""
    limits = {"max_tokens": 1_000_000, "max_new_tokens": 100_000, "max_turns": len(texts) + 1}
    # A token is a byte here: the answers of tools that a training shows whole would be cut.
    config = Config().replace(rollout={**limits, "observation": {"tokens": 100_000}})
    policy = ScriptedPolicy(list(texts), chat.tokenizer)
    rollout = Rollout(policy, chat, {pack.name: pack}, config, sandbox=sandbox)
    return await rollout.episode(Job(task, 0))
