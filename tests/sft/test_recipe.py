"""Recipes by path: a stranger's own, those of a checkout by their names, and the message for a missing one."""

import json
from pathlib import Path

import pytest

from agentrl_cli.errors import NotFound
from agentrl_cli.paths import packs_dir
from agentrl_cli.sft.recipe import RecipeRun, find_recipe
from agentrl_cli.sft.train import use_recipe
from tests.helpers.cli import Cli

OWN = """
import json

from . import words
from agentrl_cli.sft.recipe import RecipeRun


def make(run: RecipeRun) -> bool:
    for step in range(run.settings["steps"]):
        run.report(step + 1, run.settings["steps"], 2.0 - step)
    run.folder.mkdir(exist_ok=True)
    said = [words.WORD, run.settings["seed"], run.resume, run.stopped()]
    (run.folder / "made.json").write_text(json.dumps(said))
    return run.settings["seed"] != 5
"""


def write_recipe(folder: Path, word: str) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text("steps: 2\nseed: 3\n")
    (folder / "words.py").write_text(f"WORD = {word!r}\n")
    (folder / "recipe.py").write_text(OWN)
    return folder


def test_a_strangers_recipe_runs_with_the_modules_beside_it(cli: Cli) -> None:
    for word in ("lantern", "copper"):  # two folders with modules of the same names
        write_recipe(cli.folder / f"a-{word}", word)
        made = cli.json("sft", word, "--recipe", f"a-{word}")
        assert made == {"folder": word, "loss": 1.5}
        said = json.loads((cli.folder / word / "made.json").read_text())
        assert said == [word, 3, False, False]


def test_options_replace_settings_and_a_stopped_recipe_is_resumed(cli: Cli) -> None:
    write_recipe(cli.folder / "mine", "x")
    again = "agentrl sft out --recipe mine --resume"
    cli("sft", "out", "--recipe", "mine", "--seed", "5", code=130, said=again)
    cli("sft", "out", "--recipe", "mine/recipe.yaml", "--seed", "6", "--resume")
    said = json.loads((cli.folder / "out" / "made.json").read_text())
    assert said == ["x", 6, True, False]


def test_a_recipe_without_make_or_with_a_mistake_is_named(cli: Cli) -> None:
    folder = write_recipe(cli.folder / "mine", "x")
    for code, said, status in (
        ("", "has no function `make`", 2),
        ("from .nowhere import x\n", "has no nowhere.py", 1),
    ):
        (folder / "recipe.py").write_text(code)
        cli("sft", "out", "--recipe", "mine", code=status, said=said)
    (folder / "recipe.yaml").write_text("")
    empty = "recipe.yaml is not a recipe: it has no settings"
    cli("sft", "out", "--recipe", "mine", code=2, said=empty)


def test_the_bundled_models_recipes_go_by_their_names_in_a_checkout() -> None:
    recipes = packs_dir().parent / "recipes"
    assert find_recipe("tiny-tools") == recipes / "tiny_tools" / "recipe.yaml"
    assert find_recipe("tiny-agent") == recipes / "tiny_agent" / "recipe.yaml"
    with pytest.raises(NotFound, match="tiny-other is not a recipe") as found:
        find_recipe("tiny-other")
    assert "recipes/tiny_tools of a checkout" in found.value.hint


def test_a_recipe_of_packs_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    adapter = {"r": 2, "alpha": 4}
    settings = {"packs": {"echo-task": 1.0}, "steps": 3, "rows": 2, "adapter": adapter}
    steps: list[tuple[int, int]] = []

    def report(step: int, total: int, loss: float) -> None:
        steps.append((step, total))

    run = RecipeRun(
        settings=settings,
        path=tmp_path / "recipe.yaml",
        folder=tmp_path / "out",
        report=report,
        stopped=lambda: len(steps) == 2,
    )
    with pytest.raises(KeyboardInterrupt):
        use_recipe(run)
    assert steps == [(1, 3), (2, 3)] and not list(tmp_path.iterdir())
