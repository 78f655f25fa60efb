"""Packs: a folder with a description, tools, rows, rewards and defaults; and the check of one.

`task.yaml` says what there is, `task.py` holds the code: `REWARDS` (name → function), `TOOLS` (more tools than the
built-in ones), `solve(row)` (messages of a full solution), `demonstrate(row, rng, tool_rate)`, `generate(seed)`.
Rows are JSON lines in `data/<split>.jsonl`: `id`, `family`, `prompt` (a text or messages), perhaps `tools` (some of
the pack's, by name), and what the pack needs: `row: [names]` in task.yaml lists the fields that every row must have.
`sandbox:` there is false where no code runs, or limits of the pack's own and packages: `{wall: 10, imports: [numpy]}`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from agentrl_cli.errors import ConfigError, DataError, NotFound, nearest
from agentrl_cli.paths import pack_names, pack_path
from agentrl_cli.registry import load_file, resolve
from agentrl_cli.rewards import Reward
from agentrl_cli.tools import TOOLS, Tool, as_tool
from agentrl_cli.types import Message, Task, ToolSchema

if TYPE_CHECKING:
    from agentrl_cli.sandbox import Sandbox

SPLITS = ("train", "test", "heldout")
KEYS = {"name", "description", "system", "tools", "rewards", "row", "families", "defaults", "sandbox"}
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line of a data file that is no row."""

    number: int
    """Counted from 1."""
    text: str


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
    """False where neither tools nor rewards run code, so that no sandbox is needed."""
    rows: tuple[Mapping[str, Any], ...] | None = field(default=None, repr=False)
    """Rows of a pack made in a script; None: they are in `data/`."""
    row: tuple[str, ...] = ()
    """Fields that every row must have, besides `id` and `prompt`."""
    session: Mapping[str, Any] = field(default_factory=dict)
    """What the pack's sandbox sessions have instead of the configuration's: limits (`wall`…), and `imports`."""

    @property
    def schemas(self) -> list[ToolSchema]:
        return [tool.schema for tool in self.tools]

    @property
    def primary(self) -> str:
        """Name of the primary reward part."""
        return next(reward.name for reward in self.rewards if reward.primary)

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
        """A pack made in a script: rows with `prompt` (and what the rewards need), tools as functions or names.

        The same rows serve training and evaluation. A sole reward is the primary one.
        Raises ConfigError where no reward, or more than one, is primary.
        """
        kept = tuple(rewards)
        if len(kept) == 1:
            kept = (Reward(kept[0].name, kept[0].function, kept[0].weight, True),)
        if sum(reward.primary for reward in kept) != 1:
            raise ConfigError(f"The pack {name} needs exactly one primary reward.", hint="Reward(…, primary=True)")
        numbered = tuple({"id": f"{n:04d}", "family": name, **row} for n, row in enumerate(rows))
        return cls(name, Path(), "", system, tuple(map(as_tool, tools)), kept, {}, {}, None, sandbox, numbered)

    def tasks(self, split: str, *, families: Sequence[str] | None = None, limit: int | None = None) -> list[Task]:
        """The rows of a split as tasks, in the order of the file.

        Raises NotFound where there is no such split or family, DataError for a bad row (file and line).
        """
        tasks, bad = self.read(split)
        if bad:
            where = f"{self._file(split)}:" if self.rows is None else f"the pack {self.name}, row "
            hint = f"{len(bad)} rows are bad; `agentrl check` lists those of a folder." if len(bad) > 1 else ""
            raise DataError(f"{where}{bad[0].number}: {bad[0].text}", hint=hint)
        if families is not None:
            known = sorted({task.family for task in tasks})
            for family in families:
                if family not in known:
                    raise NotFound.of(f"family in {split} of {self.name}", family, known)
            tasks = [task for task in tasks if task.family in families]
        return tasks[:limit]

    def read(self, split: str) -> tuple[list[Task], list[BadLine]]:
        """The good rows of a split as tasks, and the bad ones. Raises NotFound where there is no such split."""
        if self.rows is None and not self._file(split).is_file():
            known = sorted(path.stem for path in (self.dir / "data").glob("*.jsonl"))
            raise NotFound.of(f"split of {self.name}", split, known)
        tools = [tool.name for tool in self.tools]
        tasks: list[Task] = []
        bad: list[BadLine] = []
        seen: dict[str, int] = {}
        for number, row in _lines(self._file(split)) if self.rows is None else enumerate(self.rows, 1):
            wrong = row if isinstance(row, str) else _wrong(row, self.row, tools, seen)
            if wrong or isinstance(row, str):
                bad.append(BadLine(number, wrong))
            else:
                seen[row["id"]] = number
                tasks.append(self.task(row, split))
        return tasks, bad

    def _file(self, split: str) -> Path:
        return self.dir / "data" / f"{split}.jsonl"

    def task(self, row: Mapping[str, Any], split: str) -> Task:
        """A row as a task: the pack's system message, then the prompt."""
        prompt = row["prompt"]
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        data = {key: value for key, value in row.items() if key not in ("prompt", "tools")}
        tools = tuple(row["tools"]) if row.get("tools") is not None else None
        return Task(
            id=f"{self.name}/{row['id']}",
            pack=self.name,
            family=str(row.get("family", "")),
            split=split,
            prompt=tuple(messages),
            data=data,
            tools=tools,
        )

    def tools_of(self, task: Task) -> tuple[Tool, ...]:
        """The tools that a task may use."""
        if task.tools is None:
            return self.tools
        for name in task.tools:
            if name not in {tool.name for tool in self.tools}:
                raise NotFound.of(f"tool in {self.name}", name, [tool.name for tool in self.tools])
        return tuple(tool for tool in self.tools if tool.name in task.tools)

    def reweighted(self, weights: Mapping[str, float]) -> tuple[Reward, ...]:
        """The rewards with some weights replaced; names that this pack lacks are other packs' or tools' parts."""
        return tuple(
            Reward(r.name, r.function, weights.get(r.name, r.weight), r.primary) if r.name in weights else r
            for r in self.rewards
        )

    def open_session(self, sandbox: Sandbox | None, **more: Any) -> Callable[..., Any] | None:
        """What opens a sandbox session with the pack's own limits; None without a sandbox."""
        return partial(sandbox.session, **self.session, **more) if sandbox is not None else None

    def solution(self, task: Task) -> list[Message]:
        """Messages of the pack's own solution. Raises ConfigError where the pack has no solver."""
        solve = getattr(self.module, "solve", None)
        if solve is None:
            raise ConfigError(f"The pack {self.name} has no `solve(row)` in its task.py.")
        messages: list[Message] = solve(task.data)
        return messages


def load_pack(name: str | Path, *, base: Path | None = None) -> Pack:
    """Load a pack by its name, or by the path of its folder (relative to `base`).

    Raises NotFound for an unknown pack, ConfigError for a bad task.yaml, EnvError where its task.py fails.
    """
    folder = pack_path(str(name), base)
    if folder is None:
        raise NotFound.of("pack", str(name), pack_names(), hint="`agentrl init --list` shows them.")
    spec = _specification(folder / "task.yaml")
    module = load_file(folder / "task.py")
    rewards = _rewards(folder, spec.get("rewards") or {}, getattr(module, "REWARDS", {}))
    extra = {tool.name: tool for tool in map(as_tool, getattr(module, "TOOLS", []))}
    tools = [
        extra[t] if t in extra else as_tool(resolve("tools", TOOLS, t, base=folder)) for t in spec.get("tools") or []
    ]
    return Pack(
        name=str(spec.get("name") or folder.name),
        dir=folder,
        description=str(spec.get("description") or "").strip(),
        system=str(spec.get("system") or "").strip(),
        tools=tuple(tools),
        rewards=rewards,
        families=spec.get("families") or {},
        defaults=spec.get("defaults") or {},
        module=module,
        sandbox=spec.get("sandbox", True) is not False,
        session=_session(folder, spec.get("sandbox", True)),
        row=_fields(folder, spec.get("row")),
    )


def load_packs(names: Sequence[str], *, base: Path | None = None) -> dict[str, Pack]:
    """Packs by name. Raises ConfigError where two have the same name."""
    packs: dict[str, Pack] = {}
    for name in names:
        pack = load_pack(name, base=base)
        if pack.name in packs:
            raise ConfigError(f"Two packs are named {pack.name!r}.", hint="Change `name` in one task.yaml.")
        packs[pack.name] = pack
    return packs


def check_weights(packs: Mapping[str, Pack], weights: Mapping[str, float]) -> None:
    """Raise ConfigError naming the nearest where `rewards:` weighs a part that nothing can give.

    Parts of tools (`tool:NAME`), hooks (`hook:NAME`), `interaction` and `env` come and go with episodes: they pass.
    """
    known = sorted({reward.name for pack in packs.values() for reward in pack.rewards})
    for name in weights:
        if name not in known and not name.startswith(("tool:", "hook:")) and name not in ("interaction", "env"):
            unknown = NotFound.of(f"reward (rewards.{name}) in {', '.join(packs)}", name, known)
            raise ConfigError(unknown.message, hint=unknown.hint)


def _session(folder: Path, value: Any) -> dict[str, Any]:
    """The mapping under `sandbox:`, checked: limits as in the configuration, and `imports`, a list of packages."""
    from pydantic import ValidationError

    from agentrl_cli.config.models import SandboxConfig
    from agentrl_cli.sandbox import Limits

    if isinstance(value, bool):
        return {}
    where = f"{folder / 'task.yaml'}: sandbox"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be true, false, or limits, such as {{wall: 10, imports: [numpy]}}.")
    known = ["imports", *(limit.name for limit in fields(Limits))]
    for key in value:
        if key not in known:
            unknown = NotFound.of(f"key in {where}", str(key), known)
            raise ConfigError(unknown.message, hint=unknown.hint)
    imports = value.get("imports", [])
    if not isinstance(imports, list) or not all(isinstance(name, str) for name in imports):
        raise ConfigError(f"{where}.imports must be a list of packages.")
    try:
        limits = SandboxConfig.model_validate({key: value[key] for key in value if key != "imports"})
    except ValidationError as error:
        found = error.errors()[0]
        raise ConfigError(f"{where}.{found['loc'][0]}: {found['msg']}.") from None
    session = {key: getattr(limits, key) for key in value if key != "imports"}
    return {**session, "imports": tuple(imports)} if imports else session


def _fields(folder: Path, value: Any) -> tuple[str, ...]:
    names = value if value is not None else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{folder / 'task.yaml'}: `row` must be a list of names: the fields that every row has.")
    return tuple(names)


def _specification(path: Path) -> dict[str, Any]:
    try:
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(spec, dict):
        raise ConfigError(f"{path} must be a mapping with {', '.join(sorted(KEYS))}.")
    for key in spec:
        if key not in KEYS:
            unknown = NotFound.of(f"key in {path}", str(key), sorted(KEYS))
            raise ConfigError(unknown.message, hint=unknown.hint)
    return spec


def _rewards(folder: Path, spec: Mapping[str, Any], functions: Mapping[str, Any]) -> tuple[Reward, ...]:
    rewards = []
    for name, value in spec.items():
        value = {"weight": value} if isinstance(value, (int, float)) else dict(value or {})
        unknown = set(value) - {"weight", "primary", "function"}
        if unknown:
            raise ConfigError(f"{folder / 'task.yaml'}: rewards.{name} has unknown keys: {', '.join(sorted(unknown))}.")
        function = value.get("function")
        if function is None and name not in functions:
            raise NotFound.of(f"reward in {folder / 'task.py'} (REWARDS)", name, functions)
        loaded = resolve("rewards", {}, function, base=folder) if function else functions[name]
        rewards.append(Reward(name, loaded, float(value.get("weight", 1.0)), bool(value.get("primary", False))))
    if sum(reward.primary for reward in rewards) != 1:
        raise ConfigError(
            f"{folder / 'task.yaml'}: exactly one reward must be primary: it says what `solved` means.",
            hint="Write `primary: true` under the reward that counts.",
        )
    return tuple(rewards)


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """(number from 1, row) of the lines that are not empty; in place of a row a text that says why it is none."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            yield number, f"not UTF-8: {error.reason} at byte {error.start}."
        except json.JSONDecodeError as error:
            yield number, f"not JSON: {error.msg} at column {error.colno}."
        else:
            yield number, row if isinstance(row, dict) else "a row must be a JSON object."


def _wrong(row: Mapping[str, Any], fields: Sequence[str], tools: Collection[str], seen: Mapping[str, int]) -> str:
    """What is wrong with a row, in words for its author; empty where nothing is. `seen`: the lines of ids before."""
    missing = [name for name in ("id", "prompt", *fields) if row.get(name) is None]
    if missing:
        return f"the row lacks {', '.join(missing)}."
    if not isinstance(row["id"], str) or not row["id"]:
        return "`id` must be a text."
    if row["id"] in seen:
        return f"the id {row['id']!r} stands in line {seen[row['id']]} too."
    if not isinstance(row.get("family", ""), str):
        return f"`family` must be a text, not {row['family']!r}."
    return _wrong_prompt(row["prompt"]) or _wrong_tools(row.get("tools"), tools)


def _wrong_prompt(prompt: Any) -> str:
    if isinstance(prompt, str) and prompt:
        return ""
    if not isinstance(prompt, list) or not prompt:
        return "`prompt` must be a text or a list of messages with role and content."
    for place, message in enumerate(prompt):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            return f"`prompt`, message {place}: a message has role and content."
        if message["role"] not in ROLES:
            return f"`prompt`, message {place}: the role {message['role']!r} is none of {', '.join(ROLES)}."
        if not isinstance(message["content"], str):
            return f"`prompt`, message {place}: `content` must be a text, not {type(message['content']).__name__}."
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
    return f"the pack has no tool {unknown[0]!r}" + (f"; it has {' and '.join(near)}." if near else ", nor any other.")
