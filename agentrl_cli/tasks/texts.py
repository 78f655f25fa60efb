"""The texts of a pack that a model reads: its system message and the descriptions of its tools, as named parts.

`task.prompts` names a file with other ones, which `agentrl optimize --write` makes.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.tasks.pack import Pack
from agentrl_cli.tools import Tool

Parts = Mapping[str, str]
"""Name of a part (`system`, `task.prompt`, `tools.NAME.description`) to its text."""


def parts_of(pack: Pack) -> dict[str, str]:
    """Return all parts of a pack."""
    tools = {
        f"tools.{tool.name}.description": str(tool.schema["function"]["description"])
        for tool in pack.tools
    }
    return {"system": pack.system, "task.prompt": pack.template, **tools}


def with_parts(pack: Pack, parts: Parts) -> Pack:
    """Return the pack with other texts. Raises NotFound for a part that it lacks."""
    known = parts_of(pack)
    for name in parts:
        if name not in known:
            raise NotFound.of(f"text of the pack {pack.name}", name, list(known))
    tools = tuple(
        _describe(tool, parts.get(f"tools.{tool.name}.description")) for tool in pack.tools
    )
    template = parts.get("task.prompt", pack.template)
    if "{prompt}" not in template:
        raise ConfigError("task.prompt has no {prompt}, where the task's own text goes.")
    return replace(pack, system=parts.get("system", pack.system), template=template, tools=tools)


def apply_texts(packs: Iterable[Pack], file: str | None, base: Path) -> dict[str, Pack]:
    """Return packs by name, with the texts of the file that `task.prompts` names; None: as they are.

    Raises ConfigError, NotFound.
    """
    texts = {} if file is None else read_parts(base / Path(file).expanduser())
    return {pack.name: with_parts(pack, texts) if texts else pack for pack in packs}


def _describe(tool: Tool, text: str | None) -> Tool:
    if text is None:
        return tool
    other = copy.copy(tool)
    other.schema = copy.deepcopy(tool.schema)
    other.schema["function"]["description"] = text
    return other


def read_parts(path: Path) -> dict[str, str]:
    """Return the parts in a YAML file. Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"No prompts at {path}.", hint="Correct task.prompts.")
    found = load_yaml(path)
    if not isinstance(found, Mapping) or not all(isinstance(text, str) for text in found.values()):
        raise ConfigError(f"{path} must map the names of parts to texts, e.g. `system: You are …`.")
    return {str(name): text for name, text in found.items()}


def write_parts(path: Path, parts: Parts) -> None:
    """Write parts as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        yaml.safe_dump(dict(parts), allow_unicode=True, sort_keys=False, width=100),
        encoding="utf-8",
    )


def placeholders(text: str) -> set[str]:
    """Names in braces (`{question}`); of a text that `str.format` cannot read, those that can be found."""
    found: set[str] = set()
    try:
        found.update(name for _, name, _, _ in string.Formatter().parse(text) if name)
    except ValueError:
        return found | {""}
    return found


def explain_loss(old: str, new: str) -> str:
    """Return why `new` cannot replace `old`: a sentence, or "" if it can."""
    if not new.strip():
        return "it is empty"
    missing = sorted(name for name in placeholders(old) - placeholders(new) if name)
    return f"it lost {', '.join('{' + name + '}' for name in missing)}" if missing else ""
