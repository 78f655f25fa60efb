"""Recipes by path: a stranger's own, those of a checkout by their names, and the message for a missing one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.errors import NotFound
from agentrl_cli.paths import packs_dir
from agentrl_cli.sft.recipe import RecipeRun, find_recipe
from agentrl_cli.sft.train import use_recipe

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


def test_a_strangers_recipe_runs_with_the_modules_beside_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for word in ("lantern", "copper"):  # two folders with modules of the same names
        folder, out = write_recipe(tmp_path / f"a-{word}", word), tmp_path / word
        assert main(["sft", str(out), "--recipe", str(folder), "--json"]) == 0
        assert json.loads((out / "made.json").read_text()) == [word, 3, False, False]
        assert json.loads(capfd.readouterr().out) == {"folder": str(out), "loss": 1.5}


def test_options_replace_settings_and_a_stopped_recipe_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, out = write_recipe(tmp_path / "mine", "x"), tmp_path / "out"
    assert main(["sft", str(out), "--recipe", str(folder), "--seed", "5"]) == 130
    assert f"agentrl sft {out} --recipe {folder} --resume" in capfd.readouterr().err
    assert (
        main(["sft", str(out), "--recipe", str(folder / "recipe.yaml"), "--seed", "6", "--resume"])
        == 0
    )
    assert json.loads((out / "made.json").read_text()) == ["x", 6, True, False]


def test_a_recipe_without_make_or_with_a_mistake_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_recipe(tmp_path / "mine", "x")
    wrong = (("", "has no function `make`"), ("from .nowhere import x\n", "has no nowhere.py"))
    for code, said in wrong:
        (folder / "recipe.py").write_text(code)
        assert main(["sft", str(tmp_path / "out"), "--recipe", str(folder)]) != 0
        assert said in capfd.readouterr().err
    (folder / "recipe.yaml").write_text("")
    assert main(["sft", str(tmp_path / "out"), "--recipe", str(folder)]) == 2
    assert "recipe.yaml is not a recipe: it has no settings" in capfd.readouterr().err


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
