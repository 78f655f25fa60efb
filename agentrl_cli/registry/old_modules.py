"""Modules and objects under their names before 0.1: each works for one release, with a warning that says the new one.

MODULES and OBJECTS leave out `agentrl_cli.`; plugins add their own, of both kinds, as `moved` (`registry/plugins.py`).
An import of a module that is not there is looked up in them. A module that has lost an object ends with
`keep_old_names(__name__)`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from agentrl_cli.registry.plugins import offers

PACKAGE = "agentrl_cli."

MODULES: dict[str, str] = {
    "analysis.abilities": "evaluate.abilities",
    "analysis.compare": "reports.compare",
    "analysis.export": "reports.export",
    "analysis.html": "reports.html",
    "analysis.memory_fit": "trainer.memory_fit",
    "analysis.memory_plan": "trainer.memory_plan",
    "analysis.metric_names": "reports.compare",
    "analysis.pack_check": "evaluate.pack_check",
    "analysis.report": "reports.report",
    "analysis.report_pages": "reports.report_pages",
    "analysis.rescore": "reports.rescore",
    "analysis.spread": "evaluate.reward_spread",
    "analysis.svg": "reports.svg",
    "analysis.verdict": "reports.diagnosis",
    "analysis.whatif": "chat_session.rerun",
    "compat.programs": "agents.programs",
    "config.base": "types.section",
    "learning.device_trial": "doctor.device_trial",
    "learning.step": "learning.step_table",
    "registry.threads": "hooks.threads",
    "sandbox.attack_suite": "doctor.attacks",
    "servers.chat_session": "chat_session",
    "servers.model_server": "agents.serve",
    "store.live_episode": "store.buffer",
    "store.write_buffer": "store.buffer",
    "tasks.scaffold": "commands.init",
    "types.sampling": "types.tokens",
    "types.signals": "types.tokens",
}
"""Old module, with all below it, to the new one."""

OBJECTS: dict[str, str] = {
    "agents.programs:Foreign": "agents.programs:open_program",
    "tools:refused": "tools.base:refuse",
    "tools.base:refused": "tools.base:refuse",
}
"""Old `module:object` to the new one."""


def keep_old_names(module: str) -> None:
    """Let a module answer for the objects that it has lost."""
    below = module.removeprefix(PACKAGE)

    def __getattr__(name: str) -> Any:
        new = _add_moved(OBJECTS).get(f"{below}:{name}")
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, attribute = new.partition(":")
        _warn(f"{module}.{name}", f"{PACKAGE}{home}.{attribute}")
        return getattr(import_module(PACKAGE + home), attribute)

    vars(sys.modules[module])["__getattr__"] = __getattr__


class OldModules(MetaPathFinder, Loader):
    """Finds a module of this package under its old name. It is asked last."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return an old module's spec, or the spec of a package that had old modules; None if absent."""
        if not name.startswith(PACKAGE) or name.startswith(f"{PACKAGE}plugins"):
            return None
        below, table = name.removeprefix(PACKAGE), _add_moved(MODULES)
        old = next((one for one in table if f"{below}.".startswith(f"{one}.")), None)
        if old is None:
            holds_old = any(one.startswith(f"{below}.") for one in table)
            return ModuleSpec(name, self, is_package=True) if holds_old else None
        new = f"{PACKAGE}{table[old]}{below.removeprefix(old)}"
        if below == old:
            _warn(name, new)
        return ModuleSpec(name, self, origin=new, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give an old module the names of the new one. It is a module of its own: a package that is two would be
        searched for the modules below it under both names, and each of them would be there twice.
        """
        spec = module.__spec__
        if spec is not None and spec.origin is not None:
            vars(module)["__getattr__"] = partial(getattr, import_module(spec.origin))


def _warn(old: str, new: str) -> None:
    from agentrl_cli.types.old_names import warn  # late: numpy, which the front page does without

    warn(old, new)


def _add_moved(table: dict[str, str]) -> dict[str, str]:
    """Return a table with the entries of plugins that are of its kind."""
    has_objects = table is OBJECTS
    return table | {old: new for old, new in offers("moved").items() if (":" in old) == has_objects}
