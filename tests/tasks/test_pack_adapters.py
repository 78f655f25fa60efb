"""Packs with an adapter of their own: it is small, belongs to the bundled model, and is what a project trains on."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from agentrl_cli.commands import main
from agentrl_cli.commands.common import open_project
from agentrl_cli.config import Config, load_config
from agentrl_cli.errors import ConfigError, ModelError
from agentrl_cli.models.merge import merge
from agentrl_cli.models.save import save_model
from agentrl_cli.paths import bundled_model, packs_dir
from agentrl_cli.policies.load import load_policy
from agentrl_cli.sft.demonstrations import Recipe, parse_recipe
from agentrl_cli.sft.train import make
from agentrl_cli.store import Store
from agentrl_cli.trainer.memory_plan import plan
from tests.helpers.train import trainer_of, write_model

ADAPTERS = {"sql-task": "tiny-sql", "search-task": "tiny-search"}
MOST = 1_000_000
"""Bytes of a pack's adapter, its tokenizer included."""


def small(steps: int = 2) -> Recipe:
    adapter = {"r": 2, "alpha": 4}
    return Recipe(packs={"echo-task": 1.0}, steps=steps, rows=2, lr=1e-2, warmup=1, adapter=adapter)


@pytest.mark.parametrize(("pack", "name"), ADAPTERS.items())
def test_what_a_pack_brings(pack: str, name: str) -> None:
    folder = packs_dir() / pack / name
    files = {path.name: path for path in folder.iterdir()}
    assert sum(path.stat().st_size for path in files.values()) <= MOST
    assert {tensor.dtype for tensor in load_file(files["adapter_model.safetensors"]).values()} == {
        torch.float16
    }
    reported = json.loads(files["adapter_config.json"].read_text())
    assert reported["base_model_name_or_path"] == "tiny"
    for own in ("tokenizer.json", "chat_template.jinja"):
        assert files[own].read_bytes() == (bundled_model() / own).read_bytes()
    recipe = parse_recipe(yaml.safe_load((folder / "recipe.yaml").read_text()), folder)
    assert list(recipe.packs) == [pack] and recipe.adapter is not None
    assert (recipe.adapter["r"], recipe.adapter["alpha"]) == (reported["r"], reported["lora_alpha"])
    base = hashlib.sha256((bundled_model() / "model.safetensors").read_bytes()).hexdigest()
    assert recipe.extra["base_sha256"] == base, (
        "another bundled model: make the adapter again by its recipe"
    )
    assert yaml.safe_load((packs_dir() / pack / "task.yaml").read_text())["defaults"]["model"] == {
        "name": name
    }


def test_a_project_starts_from_the_packs_adapter_and_trains_it(tmp_path: Path) -> None:
    assert main(["init", "--min-level", "ns", "sql-task", str(tmp_path / "p")]) == 0
    config = open_project(tmp_path / "p").config
    assert config.model.name == "tiny-sql"
    loaded = load_policy(None, config, base=tmp_path / "p", trainable=True)
    assert loaded.folder == tmp_path / "p" / "tiny-sql"
    trained = [name for name, p in loaded.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert (
        main(["init", "--min-level", "ns", "sql-task", str(tmp_path / "q"), "--model", "tiny"]) == 0
    )
    assert open_project(tmp_path / "q").config.model.name == "tiny"


def test_without_a_project_the_packs_folder_is_named(tmp_path: Path) -> None:
    config, sources = load_config(sets=["task.packs=[search-task]"], base=tmp_path)
    assert Path(config.model.name) == packs_dir() / "search-task" / "tiny-search"
    assert sources["model.name"] == "pack:search-task"
    assert load_config(sets=["task.packs=[search-task]", "model.name=tiny"])[0].model.name == "tiny"


def test_a_recipe_makes_the_same_adapter_again(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make(dataclasses.replace(small(), seed=seed), tmp_path / name)
    weights = {name: (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    found = load_policy(str(tmp_path / "a"), Config(), base=tmp_path)
    assert found.hash == load_policy("tiny", Config(), base=tmp_path).hash
    with pytest.raises(ConfigError, match="neither `architecture` nor `adapter`"):
        make(dataclasses.replace(small(), adapter=None), tmp_path / "d")


def test_an_adapter_is_planned_for_on_its_base(tmp_path: Path) -> None:
    make(small(1), tmp_path / "a")
    found = plan(Config(), tmp_path / "a")
    fresh = plan(Config.model_validate({"adapter": {"enabled": True, "r": 2}}), bundled_model())
    assert (found.parameters, found.trainable) == (fresh.parameters, fresh.trainable)
    pulled = Config.model_validate({"algo": {"kl_coef": 0.1}})
    assert "reference" in plan(pulled, tmp_path / "a").update
    (tmp_path / "a" / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        plan(Config(), tmp_path / "a")


async def test_the_reference_is_what_the_training_started_from(tmp_path: Path) -> None:
    """KL to the adapter it began with, not to the base under it; and the run in the store names that adapter."""
    base = write_model(tmp_path / "base")
    start = tmp_path / "start"
    config = Config.model_validate(
        {
            "model": {"name": str(base), "device": "cpu"},
            "adapter": {"enabled": True, "r": 2},
            "seed": 1,
        }
    )
    loaded: Any = load_policy(None, config, base=tmp_path, trainable=True)
    with torch.no_grad():
        for name, weights in loaded.model.named_parameters():
            if "lora_B" in name:
                weights.normal_(0, 0.2)
    start.mkdir()
    save_model(loaded.model, base, start)
    sections: dict[str, Any] = {
        "algo": {"kl_coef": 0.1, "drop_zero_variance": False},
        "train": {"steps": 1, "lr": 1e-9},
        "deterministic": True,
    }
    async with trainer_of(tmp_path / "run", start, **sections) as trainer:
        run = await trainer.train()
        (row,) = trainer.store.runs.steps(run.id)
        with Store.open(trainer.store.path, readonly=True) as store:
            assert store.runs.get(run.name).model == str(start)
    assert abs(row["kl"]) < 1e-6, "nothing has moved yet"


def test_merged_it_is_the_same_model(tmp_path: Path) -> None:
    """Its adapter is on the tied head too, which must not change the embedding."""
    folder = packs_dir() / "sql-task" / "tiny-sql"
    done = merge(str(folder), tmp_path / "out", Config().model, base=tmp_path, dtype="float32")
    ids = torch.arange(5, 60)[None]
    wanted, whole = (
        load_policy(str(where), Config(), base=tmp_path).model(ids).logits
        for where in (folder, done.folder)
    )
    assert torch.allclose(wanted, whole, atol=1e-4)
