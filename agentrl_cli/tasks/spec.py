"""Loads a Pack from its `task.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.envs.load import load_interactions
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.paths import find_pack
from agentrl_cli.registry import load_file, resolve, trust
from agentrl_cli.registry.adapters import adapt
from agentrl_cli.rewards import Reward
from agentrl_cli.rewards.load import load_reward
from agentrl_cli.sandbox.results import read_options
from agentrl_cli.tasks.agent import read_agent
from agentrl_cli.tasks.pack import Pack
from agentrl_cli.tasks.sources import default_splits, source_of
from agentrl_cli.tools import TOOLS, Tool, as_tool
from agentrl_cli.tools.configured import load_tools

KEYS = {
    *(
        "name",
        "description",
        "system",
        "tools",
        "rewards",
        "row",
        "families",
        "defaults",
        "sandbox",
    ),
    *("data", "variants", "interaction", "agent"),
}

OWN_ROWS = 64
"""Tasks in a split of a pack without data whose environment gives the prompts."""


def load_pack(name: str | Path, *, base: Path | None = None) -> Pack:
    """Load a pack by its name, or by the path of its folder (relative to `base`).

    Raises NotFound for an unknown pack, ConfigError for an invalid task.yaml, EnvError if its task.py fails.
    """
    folder = find_pack(str(name), base)
    spec = _specification(folder / "task.yaml")
    trust.meet(folder)
    module = (
        load_file(folder / "task.py") if (folder / "task.py").is_file() else None
    )  # all may be named elsewhere
    agent = read_agent(spec.get("agent"), folder, f"{folder / 'task.yaml'}: agent")
    try:
        tools = _tools(folder, spec.get("tools") or [], getattr(module, "TOOLS", []))
        given = _section(folder, spec, "rewards") or next(
            filter(None, (tool.own_rewards for tool in tools)), {}
        )
        rewards = _rewards(folder, given, getattr(module, "REWARDS", {}), agent is not None)
    except NotFound as error:
        if module is not None:
            raise
        raise NotFound(
            f"{error.message} There is no {folder / 'task.py'} to look in.", hint=error.hint
        ) from error
    splits = _section(folder, spec, "data")
    sections = (adapt("data", folder, splits) or splits, _section(folder, spec, "variants"))
    data, variants = (
        {str(name): source_of(folder, str(name), value) for name, value in section.items()}
        for section in sections
    )
    bare = not data and not default_splits(folder) and any(tool.owns_rows for tool in tools)
    return Pack(
        name=str(spec.get("name") or folder.name),
        dir=folder,
        description=str(spec.get("description") or "").strip(),
        system=str(spec.get("system") or "").strip(),
        tools=tuple(tools),
        rewards=rewards,
        families=_families(folder, spec),
        defaults=_section(folder, spec, "defaults"),
        module=module,
        sandbox=spec.get("sandbox", True) is not False,
        session=read_options(spec.get("sandbox"), f"{folder / 'task.yaml'}: sandbox"),
        row=_fields(folder, spec.get("row")),
        sources=data,
        variants=variants,
        interactions=load_interactions(folder, spec.get("interaction")),
        agent=agent,
        rows=({},) * OWN_ROWS if bare else None,
    )


def load_packs(
    names: Sequence[str], *, base: Path | None = None, agent: Any = None
) -> dict[str, Pack]:
    """Packs by name, all with `agent` if one is given (`task.agent`). Raises ConfigError if two have the same name."""
    packs: dict[str, Pack] = {}
    given = read_agent(agent, base or Path.cwd(), "task.agent")
    for name in names:
        pack = load_pack(name, base=base)
        if given is not None:
            pack = replace(pack, agent=given)
        if pack.name in packs:
            raise ConfigError(
                f"Two packs are named {pack.name!r}.", hint="Change `name` in one task.yaml."
            )
        packs[pack.name] = pack
    return packs


def check_weights(packs: Mapping[str, Pack], weights: Mapping[str, float]) -> None:
    """Raise ConfigError, with the nearest name, if `rewards:` weighs an unknown part.

    Parts of tools (`tool:NAME`), hooks (`hook:NAME`), `interaction`, `agent` and `env` depend on the episode and are
    accepted.
    """
    known = sorted({reward.name for pack in packs.values() for reward in pack.rewards})
    for name in weights:
        passes = name.startswith(("tool:", "hook:")) or name in ("interaction", "agent", "env")
        if name not in known and not passes:
            kind = f"reward (rewards.{name}) in {', '.join(packs)}"
            raise ConfigError.of(kind, name, known)


def _section(folder: Path, spec: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = spec.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{folder / 'task.yaml'}: `{key}` must be a mapping, not {value!r}.")
    return value or {}


def _families(folder: Path, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    families = _section(folder, spec, "families")
    if not all(isinstance(names, list) for names in families.values()):
        raise ConfigError(f"{folder / 'task.yaml'}: `families` must map splits to lists of names.")
    return families


def _fields(folder: Path, value: Any) -> tuple[str, ...]:
    names = value if value is not None else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{folder / 'task.yaml'}: `row` must be a list of names: the required fields of a row."
        )
    return tuple(names)


def _specification(path: Path) -> dict[str, Any]:
    spec = load_yaml(path)
    if not isinstance(spec, dict):
        raise ConfigError(f"{path} must be a mapping with {', '.join(sorted(KEYS))}.")
    for key in spec:
        if key not in KEYS:
            raise ConfigError.of(f"key in {path}", str(key), sorted(KEYS))
    return spec


def _rewards(
    folder: Path, spec: Mapping[str, Any], functions: Mapping[str, Any], optional: bool
) -> tuple[Reward, ...]:
    """Return the parts of a pack. `optional`: it may have none, as its agent gives the reward."""
    rewards = []
    for name, value in spec.items():
        given = {"weight": value} if isinstance(value, (int, float)) else value or {}
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{folder / 'task.yaml'}: rewards.{name} must be a weight or a mapping, not {value!r}."
            )
        rewards.append(load_reward(folder, str(name), given, functions))
    if sum(reward.primary for reward in rewards) != 1 and not (optional and not rewards):
        raise ConfigError(
            f"{folder / 'task.yaml'}: exactly one reward must be primary: it defines `solved`.",
            hint="Write `primary: true` under the reward that counts.",
        )
    return tuple(rewards)


def _tools(folder: Path, names: Any, own: Sequence[Any]) -> list[Tool]:
    """Return the tools of a pack: `names` are tools of its task.py, built-in tools, paths, or files like tools.yaml."""
    schemas = [schema for schema in own if isinstance(schema, Mapping)]  # of a table's functions
    extra = {
        tool.name: tool
        for tool in map(as_tool, (value for value in own if not isinstance(value, Mapping)))
    }
    if not isinstance(names, list):
        raise ConfigError(f"{folder / 'task.yaml'}: `tools` must be a list of names.")
    tools: list[Tool] = []
    for name in names:
        if not isinstance(name, str) or name.endswith((".yaml", ".yml")):
            source = folder / name if isinstance(name, str) else [name]
            tools += load_tools(source, folder, extra)
        elif name in extra:
            tools.append(extra[name])
        else:
            found = resolve("tools", {**TOOLS, **extra}, name, base=folder)
            made = None
            if isinstance(found, Mapping):
                made = adapt("table", f"{folder / 'task.yaml'}: {name}", found, schemas)
            tools += made or [as_tool(found)]
    tools = [tool.at(folder) for tool in tools]
    for number, tool in enumerate(tools):
        if tool.name in {other.name for other in tools[:number]}:
            raise ConfigError(f"{folder / 'task.yaml'}: two tools are named {tool.name!r}.")
    return tools
