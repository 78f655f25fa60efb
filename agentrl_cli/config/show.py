"""Prints settings: a table with sources, a commented YAML file, the JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from agentrl_cli.config.load import Sources
from agentrl_cli.config.models import Config, fields, groups

FIRST = frozenset(
    """
    model.name model.dtype model.device model.quantization adapter.enabled adapter.r adapter.alpha
    task.packs task.split_train task.families task.limit task.order
    rollout.group_size rollout.prompts_per_step rollout.resample_rounds rollout.concurrency rollout.max_turns
    rollout.max_new_tokens rollout.max_tokens rollout.temperature rollout.async_staleness
    algo.advantage algo.loss algo.aggregation algo.kl algo.entropy algo.off_policy algo.epochs
    algo.minibatches algo.length_penalty
    train.steps train.lr train.schedule train.optimizer train.token_budget train.checkpointing
    train.eval train.save train.stop_on
    eval.split eval.k eval.limit eval.fail_under sandbox.backend sandbox.min_level
    remote.backend remote.url store.path rewards hooks loggers seed deterministic
    """.split()
)
"""The settings shown by default: at most 60. The others are shown by name or with `--all`."""


def rows(config: Config, sources: Sources) -> list[tuple[str, Any, str]]:
    """(dotted key, plain value, source) of every setting, in the order of the models."""
    tree, mains = config.model_dump(mode="json"), {key: k.main() for key, k in groups().items()}
    found: list[tuple[str, Any, str]] = []
    for key, _ in fields():
        value, main = get(tree, key), mains.get(key, "")
        if main:
            found.append((key, value.pop(main), sources[key]))
        if key in mains or (isinstance(value, dict) and value):
            found += [
                (f"{key}.{name}", inner, _source(f"{key}.{name}", inner, sources))
                for name, inner in value.items()
            ]
        else:
            found.append((key, value, sources[key]))
    return found


def _source(key: str, value: Any, sources: Sources) -> str:
    """Return where a setting came from; a mapping with keys of the user's own has the source of its last entry."""
    entries = [source for name, source in sources.items() if name.startswith(f"{key}.")]
    return entries[-1] if entries and isinstance(value, dict) else sources[key]


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Return a YAML file that sets these dotted keys, grouped by section, each with its description as a comment.

    Keys keep the order of the models. The text loads back to the same values.
    """
    descriptions = {key: info.description or "" for key, info in fields()}
    order = {key: index for index, key in enumerate(descriptions)}
    lines: list[str] = []
    section = ""
    settings = _join_groups(settings)
    for key in sorted(
        settings, key=lambda name: order.get(name, order.get(name.partition(".")[0], len(order)))
    ):
        head, _, leaf = key.partition(".")
        if leaf and head != section:
            lines += [""] if lines else []
            lines.append(f"{head}:")
        elif not leaf and section:
            lines.append("")
        section = head if leaf else ""
        text = f"{'  ' if leaf else ''}{leaf or head}: {scalar(settings[key])}"
        note = descriptions.get(key, "")
        lines.append(f"{text:<34}  # {note}" if note else text)
    return "\n".join(lines) + "\n"


def _join_groups(settings: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(settings)
    for key, kind in groups().items():
        options = {
            name.removeprefix(f"{key}."): out.pop(name)
            for name in settings
            if name.startswith(f"{key}.")
        }
        if options:
            given = {} if key not in out else {kind.main(): out[key]}
            joined = {**given, **options}
            out[key] = joined.get(kind.main()) if {*joined} == {kind.main()} else joined
    return out


def non_defaults(config: Config, sources: Sources) -> dict[str, Any]:
    """Return the settings that a layer set, by dotted key: a file with them reproduces this configuration."""
    return {key: value for key, value, source in rows(config, sources) if source != "default"}


def full_yaml(config: Config) -> str:
    """Return every setting as plain YAML: the config.yaml of a run, which loads back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def schema() -> dict[str, Any]:
    """Return the JSON Schema of agentrl.yaml."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def scalar(value: Any) -> str:
    """Return a value on one line of YAML."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("\n").removesuffix("\n...")


def get(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key of nested mappings. Raises KeyError."""
    value: Any = tree
    for part in key.split("."):
        value = value[part]
    return value
