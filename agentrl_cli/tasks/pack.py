"""Packs: folders with a description, tools, rows, rewards and defaults.

`task.yaml` describes the pack, `task.py` holds the code: `REWARDS` (name → function), `TOOLS` (besides the built-in
ones), `solve(row)` (messages of a full solution), `demonstrate(row, rng, tool_rate)`, `generate(seed)`.
Rows are JSON lines in `data/<split>.jsonl`: `id`, `family`, `prompt` (a text or messages), optionally `tools` (some of
the pack's, by name) and `tool_choice`, and the pack's own fields: `row: [names]` in task.yaml lists the required ones.
`sandbox:` in task.yaml is false if no code runs, or the pack's own limits and packages: `{wall: 10, imports: [numpy]}`.
Other forms of rows are in forms.py, other sources in sources.py; spec.py reads task.yaml.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from agentrl_cli.chat.media import missing_file
from agentrl_cli.envs.user_simulator import Interaction, Maker, kwargs_of
from agentrl_cli.errors import ConfigError, DataError, NotFound, nearest
from agentrl_cli.rewards import Reward
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks.agent import AgentSpec
from agentrl_cli.tasks.forms import CHOICES, list_declared, named_function, normal
from agentrl_cli.tasks.sources import Source, default_source, default_splits
from agentrl_cli.tools import Tool, as_tool
from agentrl_cli.types import Message, Task, ToolSchema

SPLITS = ("train", "validation", "test", "heldout")
AGENT_PART = "agent"
"""Name of the reward part that an agent gives itself."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line of a data file."""

    number: int
    """Counted from 1."""
    text: str


def apply_template(messages: list[Message], template: str, old: str = "{prompt}") -> list[Message]:
    """Messages whose last one of the user, if it is a text, is written into a template; before it was in `old`."""
    if (
        template != old
        and messages[-1]["role"] == "user"
        and isinstance(messages[-1].get("content"), str)
    ):
        before, _, after = old.partition("{prompt}")
        text = messages[-1]["content"].removeprefix(before).removesuffix(after)
        return [*messages[:-1], {**messages[-1], "content": template.replace("{prompt}", text)}]
    return messages


@dataclass(frozen=True)
class Pack:
    """A loaded pack."""

    name: str
    dir: Path
    description: str
    system: str
    tools: tuple[Tool, ...]
    rewards: tuple[Reward, ...]
    families: Mapping[str, Sequence[str]]
    defaults: Mapping[str, Any]
    module: Any = field(repr=False)
    sandbox: bool = True
    """False if neither tools nor rewards run code, so that no sandbox is needed."""
    rows: tuple[Mapping[str, Any], ...] | None = field(default=None, repr=False)
    """Rows of a pack made in a script; None: they are in `data/`."""
    row: tuple[str, ...] = ()
    """Fields that every row must have, besides `id` and `prompt`."""
    session: Mapping[str, Any] = field(default_factory=dict)
    """Options of the pack's sandbox sessions that override the configuration: limits (`wall`…), `imports`, `seed`."""
    sources: Mapping[str, Source] = field(default_factory=dict)
    """Maps splits to the sources of their rows; other splits are files in `data/`."""
    variants: Mapping[str, Source] = field(default_factory=dict)
    """Maps names to other forms of the rows, or to benchmarks; read as splits, and not checked with them."""
    interactions: Mapping[str, Maker] = field(default_factory=dict)
    """Maps names to makers of simulated users; a row picks one by name, unless there is only one."""
    template: str = "{prompt}"
    """What each task's last message of the user is written into (`task.prompt` among the pack's texts)."""
    agent: AgentSpec | None = None
    """The program that makes its episodes; None: the built-in loop does."""

    @property
    def schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in self.tools]

    @property
    def code(self) -> str:
        """Hash of `task.*` and of the Python files beside it; empty for a pack made in a script."""
        if self.dir == Path():
            return ""
        files = sorted({*self.dir.glob("task.*"), *self.dir.glob("*.py")})
        data = (path.name.encode() + b"\0" + path.read_bytes() for path in files if path.is_file())
        return hashlib.blake2b(b"\0".join(data), digest_size=8).hexdigest()

    @property
    def primary(self) -> str:
        """Name of the primary reward part; that of the agent's reward if the pack has none of its own."""
        return next((reward.name for reward in self.rewards if reward.primary), AGENT_PART)

    @classmethod
    def of(
        cls,
        name: str,
        rows: Sequence[Mapping[str, Any]],
        rewards: Sequence[Reward],
        *,
        tools: Sequence[Any] = (),
        system: str = "",
        sandbox: bool = False,
    ) -> Pack:
        """Return a pack made in a script: rows with `prompt` (and fields for the rewards), tools as functions or names.

        The same rows serve training and evaluation. A single reward is primary.
        Raises ConfigError unless exactly one reward is primary.
        """
        kept = tuple(replace(r, primary=r.primary or len(rewards) == 1) for r in rewards)
        if sum(reward.primary for reward in kept) != 1:
            raise ConfigError(
                f"The pack {name} needs exactly one primary reward.", hint="Reward(…, primary=True)"
            )
        numbered = tuple({"id": f"{n:04d}", "family": name, **row} for n, row in enumerate(rows))
        return cls(
            name,
            Path(),
            "",
            system,
            tuple(map(as_tool, tools)),
            kept,
            {},
            {},
            None,
            sandbox,
            numbered,
        )

    def tasks(
        self, split: str, *, families: Sequence[str] | None = None, limit: int | None = None
    ) -> list[Task]:
        """Return the rows of a split as tasks, in the order of the file.

        Raises NotFound for an unknown split or family, DataError for an invalid row (with file and line).
        """
        tasks, bad = self.read(split)
        if bad:
            own = f"the pack {self.name}, row "
            where = f"{self.source(split).label}:" if self.rows is None else own
            many = f"{len(bad)} rows are invalid; `agentrl check` lists those of a folder."
            raise DataError(
                f"{where}{bad[0].number}: {bad[0].text}", hint=many if len(bad) > 1 else ""
            )
        if families is not None:
            known = sorted({task.family for task in tasks})
            for family in families:
                if family not in known:
                    raise NotFound.of(f"family in {split} of {self.name}", family, known)
            tasks = [task for task in tasks if task.family in families]
        return tasks[:limit]

    def read(self, split: str) -> tuple[list[Task], list[BadLine]]:
        """Return the valid rows of a split as tasks, and the invalid ones. Raises NotFound for an unknown split."""
        if self.rows is None and split not in (known := [*self.splits(), *self.variants]):
            raise NotFound.of(f"split of {self.name}", split, known)
        tools = [tool.name for tool in self.tools]
        tasks: list[Task] = []
        bad: list[BadLine] = []
        seen: dict[str, int] = {}
        own_ids = False
        source = self.source(split) if self.rows is None else None
        numbered = source.rows() if source else enumerate(self.rows or (), 1)
        for number, given in numbered:
            row = _normal(given, source.form if source else "auto")
            if isinstance(row, Mapping) and isinstance(given, Mapping):
                if row.get("prompt") is None and any(tool.opens for tool in self.tools):
                    row = {
                        **row,
                        "prompt": [{"role": "user", "content": ""}],
                    }  # a tool's text is the task
                # Rows without ids, as in other projects, are numbered; a file with ids must have one in every row.
                own_ids = own_ids or given.get("id") is not None
                if row.get("id") is None and not own_ids:
                    row = {**row, "id": f"{split}-{number:05d}"}
            wrong = (
                row
                if isinstance(row, str)
                else _wrong(row, self.row, [*tools, *list_declared(row, tools)], seen)
                or next(filter(None, (tool.wrong(row) for tool in self.tools)), "")
                or _missing(row["prompt"], self.dir)
            )
            if wrong or isinstance(row, str):
                bad.append(BadLine(number, wrong))
            else:
                seen[row["id"]] = number
                tasks.append(self.task(row, split))
        return tasks, bad

    def splits(self) -> list[str]:
        """Return the names of the splits that have a source."""
        found = {*self.sources, *(default_splits(self.dir) if self.rows is None else SPLITS)}
        return [split for split in SPLITS if split in found] + sorted(found - set(SPLITS))

    def source(self, split: str) -> Source:
        """Return the source of a split's rows."""
        return (
            self.sources.get(split) or self.variants.get(split) or default_source(self.dir, split)
        )

    def interaction_of(self, task: Task) -> Interaction | None:
        """Return a new simulated user for an episode: the one named by the row, or the pack's only one.

        Raises NotFound if the row names an unknown one.
        """
        name = str(kwargs_of(task).get("name") or task.data.get("interaction") or "")
        if name and name not in self.interactions:
            raise NotFound.of(f"interaction of {self.name}", name, self.interactions)
        if not name and len(self.interactions) == 1:
            name = next(iter(self.interactions))
        return self.interactions[name]() if name else None

    def task(self, row: Mapping[str, Any], split: str) -> Task:
        """Return a row as a task: the pack's system message, then the prompt."""
        prompt = row["prompt"]
        messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        if self.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        messages = apply_template(messages, self.template)
        left_out = ("tools",) if isinstance(prompt, str) else ("prompt", "tools")
        # Rows of a variant may be those of a split, in another form.
        of = f"{split}/" if split in self.variants else ""
        return Task(
            id=f"{self.name}/{of}{row['id']}",
            pack=self.name,
            family=str(row.get("family", "")),
            split=split,
            prompt=tuple(messages),
            data={key: value for key, value in row.items() if key not in left_out},
            tools=tuple(row["tools"]) if row.get("tools") is not None else None,
        )

    def tools_of(self, task: Task) -> tuple[Tool, ...]:
        """Return the tools that a task may use."""
        shown = [one for tool in self.tools for one in tool.offer(task)]
        known = [tool.name for tool in (*self.tools, *shown)]
        for name in task.tools or ():
            if name not in known:
                raise NotFound.of(f"tool in {self.name}", name, known)
        return tuple(tool for tool in shown if task.tools is None or tool.name in task.tools)

    def reweight(self, weights: Mapping[str, float]) -> tuple[Reward, ...]:
        """Return the rewards with some weights replaced; unknown names belong to other packs or to tools."""
        return tuple(
            replace(r, weight=weights[r.name]) if r.name in weights else r for r in self.rewards
        )

    @property
    def imports(self) -> tuple[str, ...]:
        """Packages that its sandbox sessions, or its tools in them, need besides the standard library."""
        named = {name for tool in self.tools for name in tool.imports}
        return tuple(sorted({*self.session.get("imports", ()), *named}))

    def open_session(
        self, sandbox: Sandbox | None, seed: int | None = None, **more: Any
    ) -> Callable[..., Any] | None:
        """Return a factory for an episode's sandbox session with this seed and the pack's options; None without a
        sandbox.
        """
        if sandbox is None:
            return None
        given = {"episode_seed": seed, **self.session, "imports": self.imports}
        return partial(sandbox.session, **given, **more)

    @property
    def solver(self) -> bool:
        """Whether the pack can solve its own tasks: `solve(row)` in its task.py."""
        return getattr(self.module, "solve", None) is not None

    def solution(self, task: Task) -> list[Message]:
        """Messages of the pack's own solution. Raises ConfigError if the pack has no solver."""
        solve = getattr(self.module, "solve", None)
        if solve is None:
            raise ConfigError(f"The pack {self.name} has no `solve(row)` in its task.py.")
        return cast(list[Message], solve(task.data))


def _normal(row: Mapping[str, Any] | str, form: str) -> Mapping[str, Any] | str:
    """Return the converted row, or the text of its error."""
    if isinstance(row, str):
        return row
    try:
        return normal(row, form)
    except DataError as error:
        return error.message


def _wrong(
    row: Mapping[str, Any], fields: Sequence[str], tools: Collection[str], seen: Mapping[str, int]
) -> str:
    """Return the error in a row, as a text for its author; empty if valid. `seen`: line numbers of earlier ids."""
    missing = [name for name in ("id", "prompt", *fields) if row.get(name) is None]
    if missing:
        other = f" It has {', '.join(list(row)[:6])}; docs/tasks.md lists the forms of rows." * (
            "prompt" in missing
        )
        return f"the row lacks {', '.join(missing)}.{other}"
    if not isinstance(row["id"], str) or not row["id"]:
        return "`id` must be a text."
    if row["id"] in seen:
        return f"the id {row['id']!r} is also in line {seen[row['id']]}."
    if not isinstance(row.get("family", ""), str):
        return f"`family` must be a text, not {row['family']!r}."
    return (
        _wrong_prompt(row["prompt"])
        or _wrong_tools(row.get("tools"), tools)
        or _wrong_choice(row, tools)
    )


def _wrong_prompt(prompt: Any) -> str:
    if isinstance(prompt, str) and prompt:
        return ""
    if not isinstance(prompt, list) or not prompt:
        return "`prompt` must be a text or a list of messages with role and content."
    for place, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return f"`prompt`, message {place}: a message has role and content."
        if message["role"] not in ROLES:
            return f"`prompt`, message {place}: the role {message['role']!r} is not one of {', '.join(ROLES)}."
        if not isinstance(content := message["content"], str | list):
            return f"`prompt`, message {place}: `content` must be a text, not {type(content).__name__}."
        if wrong := next(
            filter(None, map(_wrong_part, content if isinstance(content, list) else ())), ""
        ):
            return f"`prompt`, message {place}: {wrong}"
    return ""


def _wrong_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "image", "video") or part.get(kind) in (None, "", []):
        return f"a part of a content is a text, an image or a video, not {str(part)[:60]!r}."
    return ""


def _missing(prompt: Any, folder: Path) -> str:
    """Return why an image of a prompt cannot be read; empty if all can."""
    for message in prompt if isinstance(prompt, list) else ():
        for part in message["content"] if isinstance(message["content"], list) else ():
            found = part.get(part["type"]) if part["type"] != "text" else None
            for link in found if isinstance(found, list) else [found]:
                if isinstance(link, str) and (wrong := missing_file(link, folder)):
                    return wrong
    return ""


def _wrong_tools(names: Any, known: Collection[str]) -> str:
    if names is None:
        return ""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "`tools` must be a list of names."
    unknown = [name for name in names if name not in known]
    if not unknown:
        return ""
    near = nearest(unknown[0], known) or list(known)
    return f"the pack has no tool {unknown[0]!r}" + (
        f"; it has {' and '.join(near)}." if near else ", nor any other."
    )


def _wrong_choice(row: Mapping[str, Any], known: Collection[str]) -> str:
    """Return the error of a `tool_choice` that is none, or that cannot be satisfied; empty if valid."""
    choice = row.get("tool_choice")
    usable = row.get("tools") if row.get("tools") is not None else known
    name = named_function(choice)
    if choice in (None, "none", "auto"):
        return ""
    if name is None and choice not in CHOICES:
        return f"`tool_choice` must be {', '.join(CHOICES)} or name a function, not {choice!r}."
    if not usable:
        return f"`tool_choice` is {choice!r}, but the task has no tools."
    if name is not None and name not in usable:
        return f"`tool_choice` names {name!r}; the tools are {', '.join(usable)}."
    return ""
