"""`interaction:` of task.yaml to makers of simulated users: a file with a list of entries, or entries.

interaction:
  - {name: guess, function: "agentrl_cli.envs.user_simulator:GuessNumber"}
  - {name: polite, script: ["Please explain.", "Thanks."]}
  - {name: user, model: {url: "http://127.0.0.1:8000/v1", model: qwen, persona: "You want a refund."}}
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, cast

from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.envs.user_simulator import INTERACTIONS, Maker, Ruled, Scripted, Simulated
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.registry import resolve
from agentrl_cli.registry.adapters import adapt, foreign_imports
from agentrl_cli.rewards.llm_client import Asked

TAKES = {"script": {"reward"}, "model": set[str](), "": {"class_name", "function", "config"}}
"""Keys of an entry beside `name`: those of a script, of a model, and of a class or function."""
KEYS = {"name", *TAKES, *TAKES["script"], *TAKES[""]} - {""}


def load_interactions(folder: Path, value: Any) -> dict[str, Maker]:
    """Name to maker from `interaction:` of task.yaml: a file's name, a shipped name, an entry, or a list of entries.

    Raises ConfigError for entries that say too little or too much, NotFound for a missing name.
    """
    if value is None:
        return {}
    where = folder / "task.yaml"
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):
        where = folder / value
        try:
            value = load_yaml(where)
        except NotFound:
            raise ConfigError(f"{where} does not exist.") from None
        if isinstance(value, dict) and "interaction" in value:
            value = value["interaction"]
    if isinstance(value, (str, Mapping)):
        value = [value]
    if not isinstance(value, list):
        raise ConfigError(f"{where}: `interaction` must be a list of entries.")
    makers: dict[str, Maker] = {}
    for entry in value:
        name, maker = _maker(
            where, {"name": entry, "function": entry} if isinstance(entry, str) else entry
        )
        if name in makers:
            raise ConfigError(f"{where}: two interactions are named {name!r}.")
        makers[name] = maker
    return makers


def _maker(where: Path, entry: Any) -> tuple[str, Maker]:
    if not isinstance(entry, Mapping) or set(entry) - KEYS:
        raise ConfigError(
            f"{where}: an interaction takes {', '.join(sorted(KEYS))}, not {entry!r}."
        )
    for key, kind in (("script", list), ("model", Mapping), ("config", Mapping), ("reward", Real)):
        if entry.get(key) is not None and not isinstance(entry[key], kind):
            raise ConfigError(
                f"{where}: an interaction's script is a list of texts, its reward a number, and its model and"
                f" config are mappings, not {entry[key]!r}."
            )
    config = dict(entry.get("config") or {})
    target = str(entry.get("class_name") or entry.get("function") or "")
    name = str(entry.get("name") or target.rpartition(".")[2].removesuffix("Interaction").lower())
    if not name:
        raise ConfigError(f"{where}: an interaction needs a name.")
    by = next((key for key in ("script", "model") if entry.get(key) is not None), "")
    if idle := sorted(key for key in {*entry} - {"name", by} - TAKES[by] if entry[key]):
        raise ConfigError(f"{where}: the interaction {name} has {idle[0]}, which would do nothing.")
    if entry.get("script") is not None:
        return name, partial(Scripted, [str(text) for text in entry["script"]], entry.get("reward"))
    if entry.get("model") is not None:
        given = dict(entry["model"])
        persona, stop_word = str(given.pop("persona", "")), str(given.pop("stop_word", "[DONE]"))
        asked = Asked.of(given, f"{where}: {name}", where.parent)
        return name, partial(Simulated, asked, persona, stop_word=stop_word)
    if not target:
        raise ConfigError(
            f"{where}: the interaction {name} needs class_name, function, script or model."
        )
    return name, _of_object(where, name, target, config)


def _of_object(where: Path, name: str, target: str, config: dict[str, Any]) -> Maker:
    """Return a class, of this project or another, or a function, by its path."""
    with foreign_imports(where.parent) as named:
        path = target if target in INTERACTIONS else named(target, "interactions")
        found = resolve("interactions", INTERACTIONS, path, base=where.parent)
    if not isinstance(found, type):
        if config:
            raise ConfigError(f"{where}: {target} is a function, so `config` would do nothing.")
        return partial(Ruled, found)
    if maker := adapt("interaction", found, {"name": name, **config}):
        return cast(Maker, maker)
    try:
        inspect.signature(found).bind(**config)
    except TypeError as error:
        raise ConfigError(f"{where}: {target} cannot be made with this config: {error}") from error
    return partial(found, **config)
