"""Merges layers of settings into one validated Config, and records the source of each value.

Later layers win: defaults < the pack's own defaults < files in order < AGENTRL_SECTION__KEY < `--set a.b=c` < flags.
An unknown key is an error that names the nearest one; all problems are reported in one message, each with its file
and line.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentrl_cli.config.algo import CHOICES
from agentrl_cli.config.choice import option_names
from agentrl_cli.config.models import Config, leaves, mains, sections
from agentrl_cli.config.renamed import RENAMED, by_todays_names, is_foreign, new_key
from agentrl_cli.config.yamlfile import Value, flatten, parse_scalar, read_yaml
from agentrl_cli.errors import ConfigError, NotFound, nearest, suggest
from agentrl_cli.paths import find_pack, pack_path, portable
from agentrl_cli.registry import names, resolve
from agentrl_cli.registry.plugins import offers

_LOG = logging.getLogger(__name__)
ENV_PREFIX = "AGENTRL_"
WHOLE = 0.1
"""Extra weight of the similarity of whole names over that of last parts: `modle` is `model`, not `remote.model`."""
DEEPER = 0.1
"""What an option of an option loses against a setting: `stepz` is `train.steps`, not `algo.entropy.step`."""
NOT_CONFIG = frozenset({"DB", "PROJECT", "DEBUG", "CACHE", "LOG", "COMPLETE", "TOKEN", "SCREENS"})
"""Names after the prefix that other modules read; any other unknown name is an error."""


class Sources(dict[str, str]):
    """Dotted key → "default", "pack:NAME", "run", "file:PATH:LINE", "env:NAME", "--set" or "flag"."""

    def __missing__(self, key: str) -> str:
        return "default"


def load_config(
    files: Sequence[Path] = (),
    sets: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    base: Path | None = None,
    run: Mapping[str, Any] | None = None,
) -> tuple[Config, Sources]:
    """Return the configuration of these layers, and the source of each value that is not a default.

    `sets` are "a.b=value" (the value is YAML); `env` is searched for AGENTRL_* (None: no environment is read);
    `flags` maps dotted keys to values (None: not given); `base` is the project folder: packs are relative to it
    (default: the first file's folder, or the working folder), and paths inside it become relative; `run` are the
    settings in a run's row, the lowest layer.
    Raises ConfigError with every problem of the load.
    """
    stored, given = dict[str, Value](), dict[str, Value]()
    for name, value in by_todays_names(run or {}, mains()).items():
        stored |= _translate(flatten(name, value, "run"))
    for name, value in (flags or {}).items():
        plain = str(value) if isinstance(value, Path) else value
        given |= {} if value is None else flatten(name, plain, "flag")
    asked = [*map(read_yaml, files), _from_env(env or {}), *map(_from_set, sets)]
    layers = [_by_group(_rename(layer)) for layer in (stored, *map(_translate, asked), given)]
    packs = next((layer["task.packs"] for layer in reversed(layers) if "task.packs" in layer), None)
    if base is not None and packs is not None and packs.source.startswith("file:"):
        _require_packs(packs, base)
    base = base or (files[0].parent if files else None)
    merged: dict[str, Value] = {}
    for layer in (_by_group(_rename(_from_packs(packs, base))), *layers):
        _stack(merged, layer)
    _drop_foreign(merged)
    if base is not None:
        merged = {
            key: value._replace(value=portable(value.value, (base,)))
            for key, value in merged.items()
        }
    return _check(merged), Sources({key: value.source for key, value in merged.items()})


def _translate(layer: dict[str, Value]) -> dict[str, Value]:
    """Return a layer with the settings that plugins know by other names under ours."""
    for target in offers("layers").values():
        layer = resolve("layers", {}, target)(layer)
    return layer


def _rename(layer: Mapping[str, Value]) -> dict[str, Value]:
    """Return a layer with old keys under their new names; warn of them.

    Raises ConfigError for two values of one setting, by its old name and by its new one.
    """
    renamed = {key: new_key(key, value.value) for key, value in layer.items()}
    found = {key: layer[key] for key, (new, _) in renamed.items() if new == key}
    today = _by_group(found)
    for key, (new, plain) in renamed.items():
        value = layer[key]
        if new == key:
            continue
        _LOG.warning("%s: %s is now %s.", _where(value), key, new or RENAMED[key])
        twin = today.get(_short().get(new, new))
        if twin is None or not twin.value:
            place = value.place or value.source
            found |= {new: Value(plain, f"{value.source} ({key})", place, key)} if new else {}
        elif twin.value != plain:
            raise ConfigError(
                f"{_where(value)}: {key} is now {new}, and that is given too: {plain} and {twin.value}.",
                hint=f"Remove {key}.",
            )
    return found


def _by_group(layer: Mapping[str, Value]) -> dict[str, Value]:
    """Return a layer in which the key of a group stands for its main setting: `algo.kl` for `algo.kl.coef`."""
    short = _short()
    return {short.get(key, key): value for key, value in layer.items()}


def _short() -> dict[str, str]:
    return {f"{key}.{main}": key for key, main in mains().items()}


def _drop_foreign(merged: dict[str, Value]) -> None:
    """Drop options by an old key that the chosen loss or estimator does not have: once they were every choice's."""
    for key, value in list(merged.items()):
        choice = key.rpartition(".")[0]
        name = str(merged[choice].value) if choice in merged else _CHOSEN.get(choice, "")
        if value.old and is_foreign(key, name):
            del merged[key]
            _LOG.warning("%s: %s does not have %s: ignored.", _where(value), name, key)


def inside(config: Config, base: Path) -> Config:
    """Return the same settings, with paths inside the project folder `base` made relative to it, as
    in `load_config`.
    """
    return Config.model_validate(portable(config.model_dump(), (base,)))


def _stack(merged: dict[str, Value], layer: Mapping[str, Value]) -> None:
    """Merge a layer over the lower ones. Changing a choice's name drops the options that lower layers gave it."""
    for key, default in _CHOSEN.items():
        if key in layer and layer[key].value != (merged[key].value if key in merged else default):
            for option in [name for name in merged if name.startswith(f"{key}.")]:
                if not merged[option].old:  # an old key was under no name
                    del merged[option]
    merged.update(layer)


_KINDS = {"algo.advantage": "advantages", "algo.loss": "losses"}
_CHOSEN = {key: default for key, (_, default) in CHOICES.items()}


def _from_env(env: Mapping[str, str]) -> dict[str, Value]:
    layer: dict[str, Value] = {}
    for name, text in env.items():
        if (
            not name.startswith(ENV_PREFIX)
            or name.removeprefix(ENV_PREFIX).lstrip("_") in NOT_CONFIG
        ):
            continue
        key, source = name.removeprefix(ENV_PREFIX).lower().replace("__", "."), f"env:{name}"
        layer |= flatten(key, parse_scalar(text, source), source)
    return layer


def _from_set(text: str) -> dict[str, Value]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {text}: expected section.key=value.", hint="For example: --set train.lr=3e-5"
        )
    return flatten(key.strip(), parse_scalar(value, f"--set {text}"), "--set")


def _from_packs(packs: Value | None, base: Path | None) -> dict[str, Value]:
    """Return the `defaults` of the packs' task.yaml. A pack that is missing here is reported when it is loaded."""
    names = packs.value if packs is not None and isinstance(packs.value, list) else ["."]
    layer: dict[str, Value] = {}
    folders = (pack_path(str(name), base) for name in names if str(name) != "." or base)
    for folder in filter(None, folders):
        for key, value in read_yaml(folder / "task.yaml", only="defaults").items():
            key, given = key.removeprefix("defaults."), value.value
            inside = base is not None and base.resolve() == folder.resolve()  # it stays relative
            if key == "model.name" and not inside and (folder / str(given)).is_dir():
                given = str(folder / str(given))
            layer[key] = Value(given, f"pack:{folder.name}", value.source)
    return layer


def _require_packs(packs: Value, base: Path) -> None:
    """Raise ConfigError, with the line, for a pack that does not exist; "." is the default, and may be absent."""
    for name in packs.value if isinstance(packs.value, list) else ():
        try:
            if name != ".":
                find_pack(str(name), base)
        except NotFound as error:
            raise ConfigError(f"{_where(packs)}: {error.message}", hint=error.hint) from error


def _check(layers: Mapping[str, Value]) -> Config:
    tree: dict[str, Any] = {}
    problems: list[str] = []
    known = leaves()
    parents = {*sections(), *(key for key, main in mains().items() if not main)}
    for key, value in layers.items():
        if key.startswith(_OPEN) or (key in known and key not in parents):
            _put(tree, key, value.value)
        elif key not in parents:
            near = " or ".join(_suggest(key))
            problems.append(
                f"{_where(value)}: unknown key {key}" + (f"; did you mean {near}?" if near else "")
            )
        elif value.value not in (None, {}):  # null: "train:" with all its lines commented out
            problems.append(
                f"{_where(value)}: {key} is a section: keys are expected under it, not {value.value!r}"
            )
    for key in _CHOSEN:
        problems += _unknown_choice(key, layers)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += dict.fromkeys(_explain(detail, layers) for detail in error.errors())
    if problems:
        raise ConfigError(
            "\n".join(problems), hint="`agentrl config show --all` lists every key with its value."
        )
    return config


_MAPPINGS = tuple(
    f"{key}." for key, info in leaves().items() if "dict[" in str(info.annotation) and "." in key
)
"""Prefixes of keys whose value is a mapping with keys of the user's own, which the layers have flattened."""
_OPEN = ("rewards.", *(f"{key}." for key in _CHOSEN), *_MAPPINGS)
"""Prefixes of keys that validation checks later: names of rewards, options that depend on the choice, mappings."""


def _where(value: Value) -> str:
    return (value.place or value.source).removeprefix("file:")


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a value in the tree of sections. Where something else than a mapping is above it, validation reports that."""
    groups, main = tuple(f"{group}." for group in mains()), mains().get(key, "")
    if key in mains():
        path = [*key.split("."), *([main] if main and value != {} else [])]
    else:
        path = key.split(
            ".", -1 if key.startswith(_MAPPINGS) else 2 if key.startswith(groups) else 1
        )
    *path, last = path
    inside: Any = tree
    for name in path:
        inside = inside.setdefault(name, {})
        if not isinstance(inside, dict):
            return
    inside[last] = {**value, **inside.get(last, {})} if isinstance(value, dict) else value


_ELSEWHERE = {
    **{f"{key.partition('.')[0]}.{key.rpartition('.')[2]}": key for key in leaves()},
    **RENAMED,
}
"""An option directly under its section, or an old key → the current key."""


def _suggest(key: str) -> list[str]:
    """Return the nearest dotted keys, at most two: by prefix (`train.step`: `train.steps`) or the same last part in
    another section, then the most similar within the section, then as a whole or by the last part (`stpes`).
    """
    section, _, leaf = key.rpartition(".")
    known = [*leaves(), *_ELSEWHERE]
    inside = [name for name in known if section and name.startswith(f"{section}.")]
    found = [name for name in inside if name.startswith(f"{key}_")]
    found += [name for name in known if name.rpartition(".")[2] == leaf]
    ends = {name.removeprefix(f"{section}."): name for name in inside}
    if not (found := found[:2] or [ends[end] for end in nearest(leaf, ends, 1)]):
        ratios = {}
        for name in [*known, *sections()]:
            last = difflib.SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio()
            whole = difflib.SequenceMatcher(None, key, name).ratio()
            deep = _ELSEWHERE.get(name, name).count(".") > 1
            ratios[name] = max(WHOLE + whole, last) - DEEPER * deep
        best = max(0.6, *ratios.values())
        found = [name for name, ratio in ratios.items() if ratio == best][:2]
    return list(dict.fromkeys(_ELSEWHERE.get(name, name) for name in found))


def _unknown_choice(key: str, layers: Mapping[str, Value]) -> Iterator[str]:
    """Yield the error for a loss or estimator whose name is unknown; a path is looked up later."""
    value = layers.get(key)
    if value is None or value.source == "run" or not isinstance(value.value, str):
        return  # what a stored run chose is looked up when it is continued
    if ":" not in value.value and value.value not in CHOICES[key][0]:
        known = names(_KINDS[key], CHOICES[key][0])
        if value.value not in known:
            hint = suggest(value.value, known, 'Your own is written "file.py:function".')
            yield f"{_where(value)}: {key}: no {value.value!r}. {hint}"


def _no_option(key: str, layers: Mapping[str, Value]) -> str:
    """Return the error for an option that the chosen loss or estimator lacks, with the nearest of its own."""
    choice = next(name for name in _CHOSEN if key.startswith(f"{name}."))
    option = key.removeprefix(f"{choice}.")
    name = str(layers[choice].value) if choice in layers else _CHOSEN[choice]
    record = CHOICES[choice][0].get(name)
    own = option_names(record.options) if record else []
    has = f"{name} has {', '.join(own) or 'no options'}"
    if near := nearest(option, own, 1):
        has = f"did you mean {choice}.{near[0]}?"
    return f"unknown key {key} with {choice}: {name}; {has}"


def _explain(detail: ErrorDetails, layers: Mapping[str, Value]) -> str:
    location = [str(part) for part in detail["loc"]]
    text = str(detail["msg"]).removeprefix("Value error, ")
    if not location or (
        detail["type"] == "value_error" and location[0] in sections() and len(location) == 1
    ):
        return text  # conflicting settings, named in the text
    group = ".".join(location[:2])
    depth = 3 if group in mains() and location[2:3] != [mains()[group]] else 2
    key = ".".join(location[:depth]) if location[0] in (*sections(), "rewards") else location[0]
    value = layers.get(key) or layers.get(location[0])
    where = _where(value) if value else "default"
    if detail["type"] == "extra_forbidden" and group in _CHOSEN:
        return f"{where}: {_no_option(key, layers)}"
    if key in mains() and detail["type"] == "value_error":
        return text if text.startswith(f"{location[0]}.") else f"{where}: {key}: {text}"
    shown = repr(detail["input"])
    return f"{where}: {key}: {text} (it is {shown if len(shown) < 60 else shown[:57] + '…'})"
