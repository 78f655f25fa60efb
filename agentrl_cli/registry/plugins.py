"""Plugins: parts that the core can do without, each reached through one line here or through an entry point.

A plugin offers objects of the kinds that the core asks for, under the names that a user writes:

    OFFERS = {"commands": {"optimize": ("Run", "my_package.command:command", "One line of help")},
              "settings": {"engine": "my_package.settings:EngineConfig"}}

An outsider's package registers the same mapping under the entry-point group `agentrl.plugins`; the module that holds it
imports nothing of agentrl, which is being imported. The kinds:

    commands    name to (panel, a Typer function or group, one line of help)
    examples    name of a command to two command lines for its help
    subcommands "COMMAND NAME" to a function
    packs       name to a context manager (packs by name, config) that yields the packs of a run
    flags       "COMMAND NAME" to a function: its parameters are further options of that command, and it returns the
                settings by dotted key that they mean
    teams       name to a context manager (config, project folder, folder for logs) that yields the processes that
                compute a run's updates together, this one leading (`trainer.compute.Team`), or None
    joins       name to a function (config, project folder, store's path) that is a process of a team led by another,
                until the run has ended, and returns whether this process is one
    learners    name to a function (config) that returns what makes a run's learner (`trainer.compute.LearnerMaker`),
                or None
    tables      name of a table of the store to the statements that make it (`store.file`)
    renamed     old key of agentrl.yaml to the new one
    moved       old Python module or `module:object` to the new one, without `agentrl_cli.` (`old_modules`)
    settings    section of agentrl.yaml to its `Section`
    checks      name to a function (config) that raises ValueError if settings contradict each other
    servers     name to a context manager (config, project folder, store's path, model or None) that starts a server
                for a run and yields the settings that mean it, or None
    probes      name of a backend to a function (settings `remote`) that returns doctor's `Check` of its servers
    pools       name to a context manager (config, project folder, loaded model, packs, store; spec, trainable, objects)
                that yields the workers of a run (`rollout.context.Workers`), or None
    spread      setting to (its default, a value): with the values two processes of this machine make the episodes
    doctors     name to an async function (config, project folder, store's path, narrate) that returns what
                `agentrl doctor --cluster` prints, by the name of the option: (name, ok | warn | fail, detail,
                what to do) for each check
    screens     name to a Textual screen; a run of a kind that has the name of a screen opens it
    layers      name to a function of one layer of settings, {dotted key: Value}, that returns it under our keys
    forms       name to a `tasks.forms.Form`: how a row of another project is recognised and converted
    adapters    kind to how other projects' files of that kind are read (`registry.adapters`)
    programs    name to a `ForeignAgent`, for `agentrl init --from NAME:PACKAGE`
    sources     name to a function (draft, what follows the colon) that adds to a new pack, for
                `agentrl init --from NAME:WHERE` (`commands.init.draft.Draft`)
    syntaxes    name to a tool-call parser that `model.chat.parser: auto` can choose too (`chat.parsers.Parser`); one
                that is only ever named is of the kind `parsers`
    models      kind of source to a function (name of a model, config, base folder) that returns the folder of that
                model, got and converted first, or None if the name is not of its kind
    writers     name of a setting of `flags` for merge to a function (folder of the merged model, its value) that
                writes the model in another form into the folder and returns the file
    wires       name of a setting of `flags` for `tools serve` to a context manager (context, packs, host, port, token,
                …) that serves packs by a protocol of its own and yields its address
    explanations  `token` to a function (store, episode id, (turn, token), project folder) that returns the lines
                and the JSON of `agentrl why EPISODE@t2.31`
    exports     name of a format of `agentrl export` to a function (store, episode ids, masked) that yields its lines
    observers   name to a function (config) that returns what gets each episode that ended, or None (`rollout.recorder`)
    call_observers  name to a function (config) that returns what gets each call of a tool server when it is answered
                (session, `ToolCall`, `ToolResult`, begin), or None
    watchers    name to a function (config) that returns a hook of every run, or None
    readers     name to a function (path, store) that adds the episodes of a file to a store, all or none, and returns
                their ids and sentences on the parts that were left out; None for a file that is not of its kind
    imports     type of another project's models, with Llama's or Qwen's decoder, to the command that imports a SOURCE

and every kind that `registry.resolve` is asked for: tools, rewards, parsers, policies, adapters …
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

PLUGINS: dict[str, str] = {
    "verl": "agentrl_cli.plugins.verl:OFFERS",  # the forms of its rows and rewards are the narrowest: asked first
    "minimind": "agentrl_cli.plugins.minimind:OFFERS",
    "mcp_client": "agentrl_cli.plugins.mcp_client:OFFERS",
    "certify": "agentrl_cli.plugins.certify:OFFERS",
    "datasets": "agentrl_cli.plugins.datasets:OFFERS",
    "browser": "agentrl_cli.plugins.browser:OFFERS",
    "ask": "agentrl_cli.plugins.ask:OFFERS",
    "bfcl": "agentrl_cli.plugins.bfcl:OFFERS",
    "engines": "agentrl_cli.plugins.engines:OFFERS",
    "failures": "agentrl_cli.plugins.failures:OFFERS",
    "gym": "agentrl_cli.plugins.gym:OFFERS",
    "harbor": "agentrl_cli.plugins.harbor:OFFERS",
    "inspect": "agentrl_cli.plugins.inspect:OFFERS",
    "lightning": "agentrl_cli.plugins.lightning:OFFERS",
    "openenv": "agentrl_cli.plugins.openenv:OFFERS",
    "otel": "agentrl_cli.plugins.otel:OFFERS",
    "parsers": "agentrl_cli.plugins.parsers:OFFERS",
    "pretrained": "agentrl_cli.plugins.pretrained:OFFERS",
    "prompts": "agentrl_cli.plugins.prompts:OFFERS",
    "ray": "agentrl_cli.plugins.ray:OFFERS",
    "ranks": "agentrl_cli.plugins.ranks:OFFERS",
    "reasoning_gym": "agentrl_cli.plugins.reasoning_gym:OFFERS",
    "taught": "agentrl_cli.plugins.taught:OFFERS",
    "tau2": "agentrl_cli.plugins.tau2:OFFERS",
    "textarena": "agentrl_cli.plugins.textarena:OFFERS",
    "textworld": "agentrl_cli.plugins.textworld:OFFERS",
    "traces": "agentrl_cli.plugins.traces:OFFERS",
    "trackers": "agentrl_cli.plugins.trackers:OFFERS",
    "trl": "agentrl_cli.plugins.trl:OFFERS",
    "verifiers": "agentrl_cli.plugins.verifiers:OFFERS",
    "verl_tool": "agentrl_cli.plugins.verl_tool:OFFERS",
    "web": "agentrl_cli.plugins.web:OFFERS",
}
"""Name to the mapping of a plugin that ships. Of two that recognise the same file, the first reads it."""

ROOM = 3.5 * 2**30
"""Bytes of memory of a machine on which three processes have torch loaded: 1.7 GB with the bundled model."""

_LOG = logging.getLogger(__name__)

Offers = Mapping[str, Mapping[str, Any]]


@cache
def load_plugins() -> dict[str, Offers]:
    """Return the mapping of every plugin by its name, the shipped ones first.

    A plugin of an outsider that cannot be imported is reported as a warning and left out: it must not keep every
    command from starting.
    """
    from importlib.metadata import entry_points  # late: it costs every command a tenth of its start

    found = {name: _load(target) for name, target in PLUGINS.items()}
    for point in entry_points(group="agentrl.plugins"):
        if point.name in found:
            _LOG.warning(
                "The plugin %s of %s has the name of another and is left out.",
                point.name,
                point.value,
            )
            continue
        try:
            found[point.name] = _load(point.value)
        except Exception as error:  # noqa: BLE001 - a broken plugin is reported, and the rest works
            _LOG.warning(
                "The plugin %s could not be loaded: %s: %s", point.name, type(error).__name__, error
            )
    return found


def offers(kind: str) -> dict[str, Any]:
    """Return everything that plugins offer of a kind, by name. A name that two offer is the first one's."""
    found: dict[str, Any] = {}
    for offered in load_plugins().values():
        found |= {key: value for key, value in offered.get(kind, {}).items() if key not in found}
    return found


def spread_settings(config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings, by dotted key, with which two processes make the episodes.

    None on one core, with less memory than `ROOM`, without a plugin that offers them, or if `config`, of a run, has
    other values than the defaults.
    """
    found = {}
    for key, (default, value) in offers("spread").items():
        section, _, name = key.partition(".")
        if (config or {}).get(section, {}).get(name, default) != default:
            return {}
        found[key] = value
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found if processors() > 1 and memory > ROOM else {}


def processors() -> int:
    """Return the number of processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load(target: str) -> Offers:
    module, _, attribute = target.partition(":")
    return cast(Offers, getattr(importlib.import_module(module), attribute))
