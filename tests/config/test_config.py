"""Layers of settings: precedence, the source of each value, and messages for mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from agentrl_cli.config import Config, load_config
from agentrl_cli.config.algo import CHOICES
from agentrl_cli.config.choice import OLD, option_names
from agentrl_cli.config.estimators import ESTIMATORS
from agentrl_cli.config.losses import LOSSES
from agentrl_cli.config.models import fields, keys
from agentrl_cli.config.show import FIRST, full_yaml, non_defaults, rows, schema, to_yaml
from agentrl_cli.errors import ConfigError, NotFound
from agentrl_cli.registry import resolve


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def problem(**layers: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**layers)  # type: ignore[arg-type]  # each test gives its own layer
    return caught.value.message


def test_every_field_has_a_description() -> None:
    assert [key for key, info in fields() if not info.description] == []


def test_defaults_are_valid_and_come_from_default() -> None:
    config, sources = load_config()
    assert config == Config()
    assert {sources[key] for key in keys()} == {"default"}


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    write(
        tmp_path / "task.yaml",
        "name: p\ndefaults: {train: {lr: 0.1, steps: 11, betas: [0.5, 0.5]}, seed: 11}\n",
    )
    first = write(tmp_path / "agentrl.yaml", "train:\n  lr: 0.2\n  steps: 22\n  warmup_steps: 22\n")
    second = write(tmp_path / "more.yaml", "train: {lr: 0.3, warmup_steps: 33}\n")
    env = {"AGENTRL_TRAIN__LR": "0.4", "AGENTRL_TRAIN__KEEP_LAST": "44", "OTHER": "1"}
    sets = ["train.lr=0.5", "train.eval_every=55"]
    config, sources = load_config(
        [first, second], sets, env, {"train.lr": 0.6, "train.steps": None}
    )
    assert config.train.lr == 0.6 and sources["train.lr"] == "flag"
    assert config.train.eval_every == 55 and sources["train.eval_every"] == "--set"
    assert (
        config.train.keep_last == 44
        and sources["train.keep_last"] == "env:AGENTRL_TRAIN__KEEP_LAST"
    )
    assert config.train.warmup_steps == 33 and sources["train.warmup_steps"] == f"file:{second}:1"
    assert config.train.steps == 22 and sources["train.steps"] == f"file:{first}:3"
    assert (
        config.train.betas == (0.5, 0.5)
        and config.seed == 11
        and sources["seed"] == f"pack:{tmp_path.name}"
    )
    assert sources["train.schedule"] == "default"


def test_lists_replace_and_reward_weights_merge(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "hooks: [a, b]\nrewards: {tests: 1, format: 2}\n")
    config, sources = load_config([file], ["hooks=[c]", "rewards.format=3"])
    assert config.hooks == ["c"]
    assert config.rewards == {"tests": 1.0, "format": 3.0}
    assert sources["rewards.format"] == "--set" and sources["rewards.tests"] == f"file:{file}:2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1e-4", 1e-4), ("3", 3.0), ("0.5", 0.5)],
)
def test_set_reads_numbers(text: str, expected: float) -> None:
    assert load_config(sets=[f"train.lr={text}"])[0].train.lr == expected


def test_mappings_have_keys_of_the_users_own(tmp_path: Path) -> None:
    """Also in the stored settings of a run, with which it is resumed."""
    file = write(tmp_path / "a.yaml", "model:\n  template_variables: {x: {y: 1}, z: 2}\n")
    config, _ = load_config(files=[file], sets=["model.template_variables.z=0.5"])
    assert config.model.template_variables == {"x": {"y": 1}, "z": 0.5}
    assert load_config(files=[write(tmp_path / "b.yaml", full_yaml(config))])[0] == config


def test_set_can_clear_a_value() -> None:
    assert load_config(sets=["eval.limit="])[0].eval.limit is None
    assert load_config(sets=["eval.limit=null"])[0].eval.limit is None


def test_empty_file_and_empty_section_are_fine(tmp_path: Path) -> None:
    assert load_config([write(tmp_path / "a.yaml", "# nothing\n")])[0] == Config()
    assert load_config([write(tmp_path / "b.yaml", "train:\n  # lr: 3\n")])[0] == Config()


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train.lrr", "train.lr"),
        ("lr", "train.lr"),
        ("trian.lr", "train.lr"),
        ("trian", "train"),
        ("sede", "seed"),
    ],
)
def test_unknown_key_names_the_nearest_with_file_and_line(
    tmp_path: Path, key: str, near: str
) -> None:
    section, _, leaf = key.rpartition(".")
    text = f"{section}:\n  {leaf}: 1\n" if section else f"\n{leaf}: 1\n"
    file = write(tmp_path / "a.yaml", text)
    assert problem(files=[file]) == f"{file}:2: unknown key {key}; did you mean {near}?"


def test_unknown_keys_of_environment_and_set() -> None:
    assert (
        problem(env={"AGENTRL_SEDE": "1"})
        == "env:AGENTRL_SEDE: unknown key sede; did you mean seed?"
    )
    assert problem(sets=["sandbox.ram=1"]).startswith("--set: unknown key sandbox.ram")
    assert "did you mean sandbox.memory_mb or rollout.memory?" in problem(sets=["sandbox.memory=1"])
    others = {"AGENTRL_DEBUG": "1", "AGENTRL_DB": "x", "AGENTRL_TOKEN": "x", "AGENTRL_SCREENS": "x"}
    assert load_config(env=others)[0] == Config()


def test_every_problem_is_reported_with_its_place(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "seed: many\ntrain:\n  steps: 0\n  betas: [1, 2]\nmodel: qwen\nrewards: 3\n",
    )
    lines = problem(files=[file], sets=["rewards.x=1"]).splitlines()
    assert sorted(line.removeprefix(f"{file}:").split(": ")[0:2] for line in lines) == [
        ["1", "seed"],
        ["3", "train.steps"],
        ["4", "train.betas"],
        ["5", "model is a section"],
        ["6", "rewards"],
    ]


def test_a_key_twice_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "train:\n  lr: 1\n  lr: 2\n")
    assert problem(files=[file]) == f"{file}:3: train.lr is set a second time (first in line 2)."


@pytest.mark.parametrize("text", ["train: [", "train:\n\tlr: 1\n"])
def test_broken_yaml_names_the_line(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "a.yaml", text)
    assert problem(files=[file]).startswith(f"{file}:")


def test_files_that_are_no_mapping_no_text_or_missing(tmp_path: Path) -> None:
    assert "expected a mapping" in problem(files=[write(tmp_path / "list.yaml", "- 1\n")])
    (tmp_path / "bytes.yaml").write_bytes(b"seed: \xff\n")
    assert "not UTF-8" in problem(files=[tmp_path / "bytes.yaml"])
    with pytest.raises(NotFound) as caught:
        load_config([tmp_path / "list.yml"])
    assert "list.yaml" in caught.value.hint


def test_set_without_a_value_is_an_error() -> None:
    assert "expected section.key=value" in problem(sets=["train.lr"])
    assert "not a YAML value" in problem(sets=["train.lr=[1"])


def test_settings_that_cannot_work_together() -> None:
    assert "leaves no room" in problem(sets=["rollout.max_tokens=256"])
    assert problem(sets=["rollout.stop=[x, '']"]).startswith("--set: rollout.stop: ")


def test_a_packs_bad_default_names_its_file(tmp_path: Path) -> None:
    pack = write(tmp_path / "task.yaml", "name: p\ndefaults:\n  train:\n    stepz: 3\n")
    config = write(tmp_path / "agentrl.yaml", "seed: 1\n")
    assert problem(files=[config]).startswith(f"{pack}:4: unknown key train.stepz")


def test_written_yaml_loads_back(tmp_path: Path) -> None:
    sets = [
        "train.lr=1e-5",
        "rewards.tests=2",
        "task.families=[a, b]",
        "model.name='yes: #1'",
        "adapter.path=null",
    ]
    config, sources = load_config(sets=sets)
    file = write(tmp_path / "a.yaml", to_yaml(non_defaults(config, sources)))
    assert load_config([file])[0] == config
    assert "# peak learning rate" in file.read_text(encoding="utf-8")
    assert Config.model_validate(yaml.safe_load(full_yaml(config))) == config


def test_rows_list_every_key_once() -> None:
    config, sources = load_config(sets=["rewards.a=1"])
    listed = [key for key, _, _ in rows(config, sources)]
    options = [
        "algo.advantage.eps",
        "algo.loss.clip_low",
        "algo.loss.clip_high",
        "algo.loss.clip_dual",
    ]
    assert len(listed) == len(set(listed)) and set(listed) - {"rewards.a"} | {"rewards"} == {
        *keys(),
        *options,
    }
    assert ("rewards.a", 1.0, "--set") in rows(config, sources)


def test_schema_forbids_unknown_keys() -> None:
    assert schema()["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema()["$defs"].values())


def test_assignment_is_checked() -> None:
    with pytest.raises(ValidationError):
        Config().train.steps = 0


def test_options_under_their_name_in_every_layer(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml", "algo:\n  loss: {name: clip_cov, fraction: 0.1}\n  advantage: gae\n"
    )
    env = {"AGENTRL_ALGO__ADVANTAGE__LAMBDA": "0.9"}
    config, sources = load_config([file], ["algo.loss.low=0.5"], env)
    assert config.algo.loss.model_dump() == {
        **{"name": "clip_cov", "clip_low": 0.2, "clip_high": 0.28, "clip_dual": None},
        **{"fraction": 0.1, "low": 0.5, "high": 5.0},
    }
    assert config.algo.advantage.model_dump() == {"name": "gae", "gamma": 1.0, "lambda": 0.9}
    assert sources["algo.loss"] == f"file:{file}:2" and sources["algo.loss.low"] == "--set"
    again = write(tmp_path / "b.yaml", to_yaml(non_defaults(config, sources)))
    assert load_config([again])[0] == config
    assert load_config(run=config.model_dump(mode="json"))[0] == config, "as a run stores it"


def test_another_name_drops_the_options_of_the_first(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml", "algo: {advantage: {name: gae, lambda: 0.9}, loss: {clip_low: 0.1}}\n"
    )
    config, _ = load_config([file], ["algo.advantage=rloo", "algo.loss=gspo"])
    assert config.algo.advantage.model_dump() == {"name": "rloo"}
    assert config.algo.loss.model_dump()["clip_low"] == 3e-4
    assert load_config([file], ["algo.loss=ppo_clip"])[0].algo.loss.model_dump()["clip_low"] == 0.1


@pytest.mark.parametrize("old", OLD)
def test_an_old_key_is_accepted_and_the_warning_names_the_new_one(
    old: str, caplog: pytest.LogCaptureFixture
) -> None:
    choice, option = OLD[old]
    table = CHOICES[choice][0]
    name = next(name for name, record in table.items() if option in option_names(record.options))
    value = 3 if old in ("clip_dual", "pass_k", "cov_high") else 0.5
    config, sources = load_config(sets=[f"algo.{choice}={name}", f"algo.{old}={value}"])
    assert getattr(config.algo, choice).model_dump()[option] == value
    assert f"algo.{old} is now algo.{choice}.{option}." in caplog.text
    assert sources[f"algo.{choice}.{option}"] == f"--set (algo.{old})"
    assert (
        load_config(
            env={f"AGENTRL_ALGO__{old.upper()}": str(value)}, sets=[f"algo.{choice}={name}"]
        )[0]
        == config
    )
    later = [f"algo.{choice}={name}", f"algo.{old}={value}", f"algo.{choice}.{option}={2 * value}"]
    assert load_config(sets=[later[0], later[2], later[1]])[0] == config, "the later layer wins"
    if value == 3:
        assert getattr(load_config(sets=later)[0].algo, choice).model_dump()[option] == 6


def test_an_old_key_of_another_choice_is_ignored_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert load_config(sets=["algo.sapo_positive=2"])[0] == Config()
    assert (
        "algo.sapo_positive is now algo.loss.positive, which ppo_clip does not have: ignored."
        in caplog.text
    )
    stored = {
        "algo": {
            "advantage": "grpo",
            "loss": "gspo",
            "clip_low": None,
            "cov_fraction": None,
            "lam": 1.0,
        }
    }
    caplog.clear()
    assert load_config(run=stored)[0] == Config.model_validate({"algo": {"loss": "gspo"}})
    assert not caplog.text, "the stored settings of a run are not to be changed"


def test_the_settings_that_people_meet_first() -> None:
    assert len(FIRST) <= 60 and set(keys()) >= FIRST


@pytest.mark.parametrize("name", [*ESTIMATORS, *LOSSES])
def test_every_record_has_its_function_and_its_text(name: str) -> None:
    record = ESTIMATORS[name] if name in ESTIMATORS else LOSSES[name]
    assert callable(resolve("advantages", {}, str(record.function)))
    assert record.text and record.source.startswith("http")
    assert all(
        info.description
        for info in record.options.model_fields.values()
        if info is not record.options.model_fields["name"]
    )


def test_the_page_of_the_algorithms_is_that_of_the_records() -> None:
    from docs.make_algorithms import TARGET, render

    assert TARGET.read_text(encoding="utf-8") == render(), "python docs/make_algorithms.py"


def test_a_mapping_where_a_text_belongs_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="unknown key algo"):
        load_config([], ["algo.advantage.name=distill", "algo.advantage.hint=Tests: {tests}"], {})
