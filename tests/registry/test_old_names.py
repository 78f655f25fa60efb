"""Python names before 0.1: every one of the tables still means the object that it meant, and names the new one."""

import importlib
import sys
from types import ModuleType

import pytest

from agentrl_cli import Task, Tool
from agentrl_cli.config.losses import LOSSES, Loss
from agentrl_cli.learning.losses import LossInput
from agentrl_cli.registry import resolve
from agentrl_cli.registry.old_modules import MODULES, OBJECTS
from agentrl_cli.registry.plugins import offers
from agentrl_cli.types.old_names import OldAttribute, adopt_override
from agentrl_cli.types.tokens import Tokens

MOVED = MODULES | OBJECTS | offers("moved")


@pytest.fixture(autouse=True)
def _forget_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    olds = tuple(f"agentrl_cli.{old}." for old in MOVED)
    for name in [one for one in sys.modules if f"{one}.".startswith(olds)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("old", [old for old in MOVED if ":" not in old])
def test_an_old_module_has_the_objects_of_the_new_one(old: str) -> None:
    new = f"agentrl_cli.{MOVED[old]}"
    with pytest.warns(FutureWarning, match=f"^agentrl_cli.{old} is now {new}.$") as said:
        module = importlib.import_module(f"agentrl_cli.{old}")
    assert len([one for one in said if old in str(one.message)]) == 1
    real = importlib.import_module(new)
    assert real.__name__ == new and real.__spec__ is not None and real.__spec__.name == new
    for name in [one for one in dir(real) if not one.startswith("__")]:
        value = getattr(real, name)
        assert isinstance(value, ModuleType) or getattr(module, name) is value


@pytest.mark.parametrize("old", [old for old in MOVED if ":" in old])
def test_an_old_object_is_the_new_one(old: str) -> None:
    with pytest.warns(FutureWarning, match=f"{old.replace(':', '.')} is now agentrl_cli."):
        found = resolve("rewards", {}, f"agentrl_cli.{old}")
    assert found is resolve("rewards", {}, f"agentrl_cli.{MOVED[old]}")


def test_modules_below_an_old_package_are_the_same_and_loaded_once() -> None:
    with pytest.warns(FutureWarning) as said:
        from agentrl_cli.servers.model_server.server import open_server  # type: ignore[import-untyped]
    assert [str(one.message).partition(" ")[0] for one in said] == [
        "agentrl_cli.servers.model_server"
    ]
    assert said[0].filename == __file__
    from agentrl_cli.agents.serve.server import open_server as now

    assert open_server is now


def test_other_names_are_still_missing() -> None:
    for name in ("agentrl_cli.analysis.nothing", "agentrl_cli.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    with pytest.raises(AttributeError, match="nothing"):
        _ = importlib.import_module("agentrl_cli.tools").nothing


TASK = Task(id="1", pack="", family="", split="", prompt=[])
OLD_ATTRIBUTES: dict[type, dict[str, str]] = {
    Loss: {"mark": "select"},
    LossInput: {"marked": "selected", "held": "entropy_masked"},
    Tokens: {"given": "from_ids", "sampled": "from_generation"},
    Tool: {"offered": "offer"},
}


def test_old_attributes_read_the_new_ones() -> None:
    for kind, names in OLD_ATTRIBUTES.items():
        held = {name for name, value in vars(kind).items() if isinstance(value, OldAttribute)}
        assert held == set(names)
        for old, new in names.items():
            assert hasattr(kind, new)
            with pytest.warns(FutureWarning, match=f"^{kind.__name__}.{old} is now .*{new}.$"):
                assert getattr(kind, old) == getattr(kind, new)
    assert LossInput.kept is None
    with pytest.warns(FutureWarning, match="Loss.mark is now Loss.select"):
        assert LOSSES["clip_cov"].mark == LOSSES["clip_cov"].select != ""
    with pytest.warns(FutureWarning, match=r"Tokens.given is now Tokens.from_ids"):
        assert list(Tokens.given([3], [0]).ids) == [3]


def test_methods_that_users_override_under_old_names_are_called() -> None:
    with pytest.warns(FutureWarning, match="Twice.offered is now Twice.offer"):

        class Twice(Tool):
            def offered(self, task: Task) -> list[Tool]:
                return [self, self]

    assert len(Twice().offer(TASK)) == 2

    class Own:
        def published(self) -> str:
            return "weights"

    with pytest.warns(FutureWarning, match="Own.published is now Own.last_published"):
        adopt_override(Own, "published", "last_published")
    adopt_override(Tool, "published", "last_published")  # not without an old name
    assert vars(Own)["last_published"](Own()) == "weights"
