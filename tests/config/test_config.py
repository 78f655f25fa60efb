"""Layers of settings: precedence, the source of each value, and messages for mistakes."""

from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from agentrl_cli import Config, load_config, paths
from agentrl_cli.commands.common import open_project
from agentrl_cli.commands.place import find_db
from agentrl_cli.config.algo import CHOICES
from agentrl_cli.config.choice import option_names
from agentrl_cli.config.estimators import ESTIMATORS
from agentrl_cli.config.losses import LOSSES
from agentrl_cli.config.models import fields, groups, leaves
from agentrl_cli.config.renamed import RENAMED
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


def test_defaults_are_valid_and_described_and_unknown_keys_forbidden(tmp_path: Path) -> None:
    config, sources = load_config()
    assert config == Config() and {sources[key] for key, _ in fields()} == {"default"}
    for text in ("# nothing\n", "train:\n  # lr: 3\n"):
        assert load_config([write(tmp_path / "a.yaml", text)])[0] == config
    assert [key for key, info in fields() if not info.description] == []
    assert len(FIRST) <= 60 and {key for key, _ in fields()} >= FIRST
    assert schema()["additionalProperties"] is False
    assert all(part["additionalProperties"] is False for part in schema()["$defs"].values())
    with pytest.raises(ValidationError):
        config.train.steps = 0


Wanted = dict[str, tuple[object, str]]
# A file, assignments, variables of the environment, and of each setting its value and where that came from.
LAYERS: dict[str, tuple[str, list[str], dict[str, str], Wanted]] = {
    "lists replace": ("hooks: [a, b]\n", ["hooks=[c]"], {}, {"hooks": (["c"], "--set")}),
    "weights merge": (
        "rewards: {tests: 1, format: 2}\n",
        ["rewards.format=3"],
        {},
        {"rewards.format": (3.0, "--set"), "rewards.tests": (1.0, "FILE:1")},
    ),
    **{
        f"{key}={text}": ("seed: 0\n", [f"{key}={text}"], {}, {key: (value, "--set")})
        for key, text, value in (
            ("train.lr", "1e-4", 1e-4),
            ("train.lr", "3", 3.0),
            ("train.lr", "0.5", 0.5),
            ("eval.limit", "", None),
            ("eval.limit", "null", None),
        )
    },
    "options under their name": (
        "algo:\n  loss: {name: clip_cov, fraction: 0.1}\n  advantage: gae\n",
        ["algo.loss.low=0.5"],
        {"AGENTRL_ALGO__ADVANTAGE__LAMBDA": "0.9"},
        {
            "algo.loss": ("clip_cov", "FILE:2"),
            "algo.loss.clip_low": (0.2, "default"),
            "algo.loss.clip_high": (0.28, "default"),
            "algo.loss.clip_dual": (None, "default"),
            "algo.loss.fraction": (0.1, "FILE:2"),
            "algo.loss.low": (0.5, "--set"),
            "algo.loss.high": (5.0, "default"),
            "algo.advantage": ("gae", "FILE:3"),
            "algo.advantage.gamma": (1.0, "default"),
            "algo.advantage.lambda": (0.9, "env:AGENTRL_ALGO__ADVANTAGE__LAMBDA"),
        },
    ),
    "another name drops the options of the first": (
        "algo: {advantage: {name: gae, lambda: 0.9}, loss: {clip_low: 0.1}}\n",
        ["algo.advantage=rloo", "algo.loss=gspo"],
        {},
        {
            "algo.advantage": ("rloo", "--set"),
            "algo.loss": ("gspo", "--set"),
            "algo.loss.clip_low": (3e-4, "default"),
        },
    ),
    "the same name keeps them": (
        "algo: {loss: {clip_low: 0.1}}\n",
        ["algo.loss=ppo_clip"],
        {},
        {"algo.loss.clip_low": (0.1, "FILE:1")},
    ),
    "a plain value is the main one of a group": (
        "train:\n  eval: {every: 5, tasks: 7}\n  stop_on: [nan, mask]\n",
        ["train.eval=9", "algo.kl={coef: 0.1, where: reward}"],
        {},
        {
            "train.eval": (9, "--set"),
            "train.eval.tasks": (7, "FILE:2"),
            "train.stop_on": (["nan", "mask"], "FILE:3"),
            "algo.kl": (0.1, "--set"),
            "algo.kl.where": ("reward", "--set"),
        },
    ),
    "mappings have keys of the user's own": (
        "model:\n  chat: {variables: {x: {y: 1}, z: 2}}\n",
        ["model.chat.variables.z=0.5"],
        {},
        {"model.chat.variables": ({"x": {"y": 1}, "z": 0.5}, "--set")},
    ),
    "texts that YAML would read otherwise": (
        "seed: 0\n",
        ["model.name='yes: #1'", "task.families=[a, b]", "adapter.path=null"],
        {},
        {"model.name": ("yes: #1", "--set"), "task.families": (["a", "b"], "--set")},
    ),
    **{
        f"an old and a new name: {today}": (
            f"train: {{eval_every: 7, {today}}}\n",
            [],
            {},
            {"train.eval": (7, "FILE:1")},
        )
        for today in ("eval: 7", "eval: {every: 7}")
    },
}


@pytest.mark.parametrize(("text", "sets", "env", "wanted"), LAYERS.values(), ids=LAYERS)
def test_values_and_where_they_come_from(
    tmp_path: Path, text: str, sets: list[str], env: dict[str, str], wanted: Wanted
) -> None:
    file = write(tmp_path / "a.yaml", text)
    config, sources = load_config([file], sets, env)
    shown = {key: (value, source) for key, value, source in rows(config, sources)}
    places = {
        key: (value, source.replace("FILE", f"file:{file}"))
        for key, (value, source) in wanted.items()
    }
    assert shown | places == shown
    short = to_yaml(non_defaults(config, sources))
    assert load_config([write(tmp_path / "b.yaml", short)])[0] == config
    assert "train.lr" not in wanted or "# peak learning rate" in short
    assert load_config(run=config.model_dump(mode="json"))[0] == config, "as a run stores it"
    assert Config.model_validate(yaml.safe_load(full_yaml(config))) == config


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    write(
        tmp_path / "task.yaml",
        "name: p\ndefaults: {train: {lr: 0.1, steps: 11, optimizer: {betas: [0.5, 0.5]}}, seed: 11}\n",
    )
    first = write(
        tmp_path / "agentrl.yaml",
        "train:\n  lr: 0.2\n  steps: 22\n  schedule: {warmup_steps: 22}\n",
    )
    second = write(tmp_path / "more.yaml", "train: {lr: 0.3, schedule: {warmup_steps: 33}}\n")
    env = {"AGENTRL_TRAIN__LR": "0.4", "AGENTRL_TRAIN__SAVE__KEEP": "44", "OTHER": "1"}
    sets, flags = ["train.lr=0.5", "train.eval=55"], {"train.lr": 0.6, "train.steps": None}
    config, sources = load_config([first, second], sets, env, flags)
    for key, value, source in (
        ("train.lr", 0.6, "flag"),
        ("train.eval.every", 55, "--set"),
        ("train.save.keep", 44, "env:AGENTRL_TRAIN__SAVE__KEEP"),
        ("train.schedule.warmup_steps", 33, f"file:{second}:1"),
        ("train.steps", 22, f"file:{first}:3"),
        ("seed", 11, f"pack:{tmp_path.name}"),
    ):
        assert (attrgetter(key)(config), sources[key.removesuffix(".every")]) == (value, source)
    assert config.train.optimizer.betas == (0.5, 0.5) and sources["train.schedule"] == "default"


# A file, assignments, variables of the environment, and a part of the message.
PROBLEMS: list[tuple[str, list[str], dict[str, str], str]] = [
    *(
        (text, [], {}, f"FILE:2: unknown key {key}; did you mean {near}?")
        for text, key, near in (
            ("train:\n  lrr: 1\n", "train.lrr", "train.lr"),
            ("\nlr: 1\n", "lr", "train.lr"),
            ("trian:\n  lr: 1\n", "trian.lr", "train.lr"),
            ("\ntrian: 1\n", "trian", "train"),
            ("\nsede: 1\n", "sede", "seed"),
            ("\nstepz: 1\n", "stepz", "train.steps"),
        )
    ),
    ("", [], {"AGENTRL_SEDE": "1"}, "env:AGENTRL_SEDE: unknown key sede; did you mean seed?"),
    *(
        ("", [given], {}, said)
        for given, said in (
            ("train.lr", "expected section.key=value"),
            ("train.lr=[1", "not a YAML value"),
            ("rollout.max_tokens=256", "leaves no room"),
            ("rollout.stop=[x, '']", "--set: rollout.stop: "),
            (f"seed={2**63}", "--set: seed: Input should be less than 9223372036854775808"),
            ("algo.kl.coeff=1", "unknown key algo.kl.coeff; did you mean algo.kl.coef?"),
            ("algo.kl.tarjet=1", "unknown key algo.kl.tarjet; did you mean algo.kl.target?"),
            ("sandbox.limits=5", "sandbox.limits is a section"),
            ("algo.kl=x", "algo.kl: Input should be a valid number"),
            ("sandbox.ram=1", "--set: unknown key sandbox.ram"),
            ("sandbox.memory=1", "did you mean sandbox.limits.memory_mb or rollout.memory?"),
        )
    ),
    (
        "",
        ["algo.advantage.name=distill", "algo.advantage.hint=Tests: {tests}"],
        {},
        "unknown key algo",
    ),
    ("train: [", [], {}, "FILE"),
    ("train:\n\tlr: 1\n", [], {}, "FILE"),
    ("seed: \udcff\n", [], {}, "FILE is not UTF-8 text"),
    ("- 1\n", [], {}, "FILE:1: expected a mapping"),
    ("seed: 1\ntask:\n  packs: [calc-task, cal-task]\n", [], {}, "FILE:3: "),
    ("task: {packs: [cal-task]}\n", [], {}, "'cal-task'"),
    ("task: {packs: ['./lost']}\n", [], {}, "FILE:1: The pack folder FOLDER/lost does not exist."),
    (
        "train:\n  lr: 1\n  lr: 2\n",
        [],
        {},
        "FILE:3: train.lr is set a second time (first in line 2).",
    ),
    *(
        (
            f"train: {{eval_every: 2, {today}}}",
            [],
            {},
            "FILE:1: train.eval_every is now train.eval.every, and that is given too: 2 and 7.",
        )
        for today in ("eval: 7", "eval: {every: 7}")
    ),
]


@pytest.mark.parametrize(("text", "sets", "env", "said"), PROBLEMS)
def test_a_setting_that_cannot_be_is_named_with_its_place(
    tmp_path: Path, text: str, sets: list[str], env: dict[str, str], said: str
) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    found = problem(files=[file], sets=sets, env=env, base=tmp_path)
    said = said.replace("FILE", str(file)).replace("FOLDER", str(tmp_path))
    assert said in found and found.count(str(file)) <= 1


def test_a_file_that_is_not_there_and_a_packs_bad_default(tmp_path: Path) -> None:
    pack = write(tmp_path / "task.yaml", "name: p\ndefaults:\n  train:\n    stepz: 3\n")
    config = write(tmp_path / "agentrl.yaml", "seed: 1\n")
    assert problem(files=[config]).startswith(f"{pack}:4: unknown key train.stepz")
    with pytest.raises(NotFound) as caught:
        load_config([tmp_path / "agentrl.yml"])
    assert "agentrl.yaml" in caught.value.hint
    others = {"AGENTRL_DEBUG": "1", "AGENTRL_DB": "x", "AGENTRL_TOKEN": "x", "AGENTRL_SCREENS": "x"}
    assert load_config(env=others)[0] == Config()


def test_every_problem_is_reported_with_its_place(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "seed: many\ntrain:\n  steps: 0\n  optimizer: {betas: [0.5, 1]}\nmodel: qwen\nrewards: 3\n"
        "algo: {loss: ppo_clp}\n",
    )
    lines = problem(files=[file], sets=["rewards.x=1"]).splitlines()
    assert sorted(line.removeprefix(f"{file}:").split(": ")[0:2] for line in lines) == [
        ["1", "seed"],
        ["3", "train.steps"],
        ["4", "train.optimizer.betas"],
        ["5", "model is a section"],
        ["6", "rewards"],
        ["7", "algo.loss"],
    ]


def test_a_missing_pack_of_another_layer_is_reported_when_it_is_loaded(tmp_path: Path) -> None:
    file = write(tmp_path / "agentrl.yaml", "task: {packs: ['./lost']}\n")
    load_config([file], ["task.packs=[calc-task]"], base=tmp_path)
    load_config([file], flags={"task.packs": ["lost"]}, base=tmp_path)


def test_rows_list_every_key_once() -> None:
    config, sources = load_config(sets=["rewards.a=1"])
    listed = [key for key, _, _ in rows(config, sources)]
    options = [
        "algo.advantage.eps",
        "algo.loss.clip_low",
        "algo.loss.clip_high",
        "algo.loss.clip_dual",
    ]
    bare = {key for key, kind in groups().items() if not kind.main()}
    other = {
        key
        for key in leaves()
        if not key.startswith(tuple(f"algo.{name}." for name in ("advantage", "loss")))
    }
    assert len(listed) == len(set(listed))
    assert set(listed) - {"rewards.a"} | {"rewards"} == {*other, *options} - bare
    assert ("rewards.a", 1.0, "--set") in rows(config, sources)


VALUES = {
    "algo.lam": 0.5,
    "drift.structural": "train",
    "remote.urls": ["http://a/v1"],
    "rollout.tool_server": "http://a:1",
}
SPECIAL = {  # a value other than the default where half of it, or its opposite, is none
    **{
        "cluster.shard": "full",
        "cluster.gpus": 1,
        "rollout.truncate_side": "left",
        "rollout.overflow": "truncate_observation",
        "algo.kl_in": "reward",
    },
    **{
        "algo.correction": "mis",
        "algo.reject": "token_k1",
        "algo.clip_dual": 3.0,
        "algo.pass_k": 3,
        "algo.cov_high": 3.0,
    },
    **{
        "model.template_variables": {"x": 1},
        "remote.mode": "chat",
        "train.betas": (0.5, 0.5),
        "algo.correction_floor": 0.5,
    },
}
TOGETHER: dict[str, dict[str, object]] = {  # settings that another needs
    "algo.kl_target": {"algo.kl": 0.1},
    "algo.ref_ema": {"algo.kl": 0.1},
    "algo.reject": {"algo.off_policy.reject_upper": 1.1},
    "algo.reject_lower": {"algo.off_policy": {"reject": "token_k1", "reject_upper": 1.1}},
}


def other_value(old: str, default: object) -> object:
    """A valid value of an old key that differs from the default."""
    if old in SPECIAL or old in VALUES:
        return {**SPECIAL, **VALUES}[old]
    if isinstance(default, bool):
        return not default
    if isinstance(default, list):
        return ["a"]
    if isinstance(default, str) or (default is None and "template" in old) or old.endswith("_dir"):
        return "abc"
    return (
        7 if isinstance(default, int) or (default is None and old.startswith("rollout.")) else 0.5
    )


def named(key: str) -> dict[str, object]:
    choice, _, option = key.rpartition(".")
    table = CHOICES[choice][0] if choice in CHOICES else {}
    names = [name for name, record in table.items() if option in option_names(record.options)]
    return {choice: names[0]} if names else {}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_works_everywhere_and_the_message_names_the_new_one(
    old: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new, section, leaf = RENAMED[old], *old.split(".")
    group, _, option = new.rpartition(".")
    info = leaves().get(new) or groups()[group].model_fields[option]
    value = other_value(old, info.get_default(call_default_factory=True))
    others = {**named(new), **TOGETHER.get(old, {})}
    flags = {**others, new: value if old != "drift.structural" else False}
    meant, _ = load_config(flags=flags)
    assert meant != load_config(flags=others)[0], "the value differs from the default"
    assert not caplog.text
    text = (
        yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
        .removesuffix("...\n")
        .strip()
    )
    file = write(tmp_path / "a.yaml", f"{section}:\n  {leaf}: {text}\n")
    assert load_config([file], flags=others)[0] == meant
    assert f"{file}:2: {old}" in caplog.text and f" is now {new}" in caplog.text
    caplog.clear()
    config, sources = load_config(sets=[f"{old}={text}"], flags=others)
    assert config == meant and f"--set: {old}" in caplog.text
    shown = group if group in groups() and groups()[group].main() == option else new
    assert any(
        source.startswith(f"--set ({old}")
        for key, source in sources.items()
        if key.startswith(shown)
    )
    assert load_config(env={f"AGENTRL_{section}__{leaf}".upper(): text}, flags=others)[0] == meant
    caplog.clear()
    choice = {key.partition(".")[2]: value for key, value in named(new).items()}
    stored = {section: {**choice, leaf: value}}
    assert load_config(run=stored, flags=others)[0] == meant and not caplog.text


def test_a_run_that_an_older_version_stored() -> None:
    stored = {
        "algo": {
            **{
                "advantage": "grpo",
                "loss": "gspo",
                "clip_low": None,
                "cov_fraction": None,
                "lam": 1.0,
            },
            **{
                "kl": "k1",
                "kl_coef": 0.1,
                "kl_in": "loss",
                "value_lr": 0.001,
                "correction": "auto",
            },
            **{"mask_void": False, "length_penalty": 0.0, "overlong_penalty": 0.0},
        },
        "train": {"optimizer": "muon", "weight_decay": 0.1, "stop_on": ["nan"], "stop_patience": 2},
        "remote": {"url": "http://a/v1", "urls": [], "backend": "vllm", "sleep": True},
        "drift": {"structural": "skip"},
    }
    meant = {
        "algo": {"loss": "gspo", "kl": {"estimate": "k1", "coef": 0.1}},
        "train": {"optimizer": {"name": "muon", "weight_decay": 0.1}, "stop_on": {"patience": 2}},
        "remote": {"url": "http://a/v1", "backend": {"name": "vllm", "sleep": True}},
    }
    assert (
        load_config(run=stored)[0] == Config.model_validate(stored) == Config.model_validate(meant)
    )


def test_an_old_option_of_another_choice_is_ignored_as_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert load_config(sets=["algo.sapo_positive=2"])[0] == Config()
    assert "algo.sapo_positive is now algo.loss.positive." in caplog.text
    assert "ppo_clip does not have algo.loss.positive: ignored." in caplog.text
    assert load_config(sets=["algo.kl=k1"])[0].algo.kl.estimate == "k1"


def test_the_number_of_settings() -> None:
    """Rows of docs/config.md, which tests/guards compares with the settings: a group of them is one."""
    assert len([*fields()]) <= 110


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


# --- where packs, project and store are found ---


def test_the_project_is_searched_upwards(tmp_path: Path) -> None:
    deep, file = tmp_path / "a" / "b", tmp_path / "a" / "agentrl.yaml"
    deep.mkdir(parents=True)
    file.touch()
    assert paths.find_project(deep) == paths.find_project(deep, override=file) == tmp_path / "a"
    with pytest.raises(ConfigError, match="is not a project"):
        paths.find_project(deep, override=tmp_path)


def test_the_store_is_the_projects_unless_said_otherwise(tmp_path: Path) -> None:
    project = tmp_path / "p"
    for text, place in (
        ("seed: 1\n", "runs/agentrl.db"),
        ("store: {path: elsewhere/s.db}\n", "elsewhere/s.db"),
    ):
        write(project / "agentrl.yaml", text)
        assert find_db(project, must_exist=False) == open_project(project).db == project / place
    assert find_db(project, tmp_path / "x.db", must_exist=False) == tmp_path / "x.db"
    with pytest.raises(NotFound, match="No store"):
        find_db(project)


def test_a_bundled_model_has_a_name_of_its_own() -> None:
    assert paths.bundled_model("tiny-agent") == paths.bundled_model("tiny")
    assert paths.is_bundled("tiny") and paths.is_bundled("tiny-agent")
    for name in ("", ".", "..", "tiny-agent/", "../models/tiny-agent", "another", "a\0b"):
        assert not paths.is_bundled(name), name
