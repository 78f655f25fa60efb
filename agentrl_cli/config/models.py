"""The settings: one pydantic model per section, a description on every field.

The algorithm's keys are in algo.py, reading and merging of layers in load.py, printing in show.py. The defaults suit
the bundled model on a CPU. Relative paths are relative to the project folder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, create_model, model_validator
from typing_extensions import TypeIs

from agentrl_cli.config.algo import CHOICES, AlgoConfig
from agentrl_cli.config.conflicts import check_together
from agentrl_cli.config.remote import RemoteConfig
from agentrl_cli.config.renamed import by_todays_names
from agentrl_cli.config.rollout import RolloutConfig
from agentrl_cli.config.train import EvalConfig, TrainConfig
from agentrl_cli.errors import AgentRLError, ConfigError
from agentrl_cli.registry import resolve
from agentrl_cli.registry.plugins import offers
from agentrl_cli.types.section import Count, Group, Positive, Seconds, Section

S = TypeVar("S", bound=Section)
_LOG = logging.getLogger(__name__)


class ChatConfig(Group):
    """How the model's conversations are written and read."""

    template: str | None = Field(
        default=None,
        description="a Jinja file in place of the tokenizer's; for a base model chatml, llama3, gemma or plain",
    )
    variables: dict[str, Any] = Field(
        default_factory=dict,
        description="variables of the chat template besides messages and tools: {enable_thinking: false} for Qwen3",
    )
    append_only: bool = Field(
        default=False,
        description="train even if appending turns differs from the chat template's own rendering: the appended"
        " one is trained; false: refuse with the reason (`agentrl doctor --template FOLDER`)",
    )
    parser: str = Field(
        default="auto", description="tool-call parser: auto, hermes, or module:object"
    )


class ModelConfig(Section):
    """The model that is trained."""

    name: str = Field(
        default="tiny",
        description='"tiny" or "tiny-tools" (bundled), a Hugging Face id, or a local folder',
    )
    revision: str | None = Field(
        default=None, description="branch, tag or commit on the Hugging Face hub"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="auto: bfloat16 on a GPU that supports it, float32 elsewhere and for full training",
    )
    quantization: Literal["none", "4bit", "8bit"] = Field(
        default="none",
        description="base weights in 4 or 8 bits under an adapter (QLoRA; extra quant)",
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1 …")
    chat: ChatConfig = Field(
        default_factory=ChatConfig,
        description="the chat template; with options: {template: chatml, parser: hermes}",
    )
    offline: bool = Field(
        default=False, description="never contact the hub: cache and local folders only"
    )
    trust_remote_code: bool = Field(
        default=False,
        description="run the Python files of a model's folder, which some models need; false: refuse",
    )


class LoraConfig(Section):
    """A LoRA adapter through peft; off means that all weights are trained."""

    enabled: bool = Field(default=False, description="train an adapter instead of all weights")
    r: Positive = Field(default=16, description="rank")
    alpha: float = Field(
        default=32.0, gt=0, description="scale: the update is multiplied by alpha / r"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout on the adapter's input")
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description='"all-linear", or the names of the modules that get an adapter',
    )
    use_rslora: bool = Field(
        default=False, description="rsLoRA: scale by alpha / sqrt(r), for large ranks"
    )
    use_dora: bool = Field(
        default=False, description="DoRA: LoRA for the direction, a separate magnitude; slower"
    )
    path: str | None = Field(default=None, description="a peft adapter folder to start from")


class TaskConfig(Section):
    """The tasks."""

    packs: list[str] = Field(
        default=["."], min_length=1, description='packs by name or folder; "." is this project'
    )
    split_train: str = Field(default="train", description="the split to train on")
    families: list[str] | None = Field(
        default=None, description="only tasks of these families; null: all"
    )
    limit: Positive | None = Field(default=None, description="only the first N tasks; null: all")
    agent: str | dict[str, Any] | None = Field(
        default=None,
        description="the program that makes the episodes, for all packs: file.py:function, module:function, or a"
        " mapping as `agent` in a task.yaml; null: each pack's own agent, or the built-in loop",
    )
    prompts: str | None = Field(
        default=None,
        description="a YAML file with texts in place of the pack's own (system, tools.NAME.description), as `agentrl"
        " optimize --write` writes it; null: the pack's",
    )
    order: Literal["shuffle", "curriculum", "balanced"] = Field(
        default="shuffle",
        description="shuffle: each once per epoch; curriculum: mostly tasks solved about half the time;"
        " balanced: equally many hard, medium and easy ones",
    )


class LimitsConfig(Group):
    """Limits of the model's code."""

    bare = True

    wall: Seconds = Field(
        default=5.0, description="seconds of one execution, without its waits for a processor"
    )
    cpu: Seconds = Field(default=5.0, description="CPU seconds of one execution")
    memory_mb: Positive = Field(default=1024, description="memory of a session, MiB")
    processes: Positive = Field(default=32, description="processes and threads of a session")
    file_mb: Positive = Field(default=64, description="size of one file, MiB")
    disk_mb: Positive = Field(default=64, description="files of a session together, MiB")
    inodes: Positive = Field(default=4096, description="number of files of a session")
    output_kb: Positive = Field(default=64, description="output kept, KiB")
    open_files: Positive = Field(default=256, description="open files of a process")


class SandboxConfig(Section):
    """The sandbox of the model's code and its limits."""

    backend: str = Field(
        default="auto", description="auto, ns, landlock, docker, bare, or module:object"
    )
    min_level: Literal["docker", "ns", "landlock", "bare"] = Field(
        default="ns",
        description="refuse weaker isolation than this: docker and ns are strong, bare is none",
    )
    limits: LimitsConfig = Field(
        default_factory=LimitsConfig,
        description="limits of an execution (wall, cpu) and of a session (memory_mb, disk_mb …)",
    )
    imports: list[str] = Field(
        default=[],
        description="packages besides the standard library that every session can import, e.g. [numpy]",
    )
    seed: Count | None = Field(
        default=None,
        description="seed of `random` in sessions; null: each episode's own, so that a replay repeats it",
    )
    workers: Positive | None = Field(
        default=None,
        description="warm runners, each with four programs at once; null: one per core, at most 8",
    )


class StoreConfig(Section):
    """The store."""

    path: str | None = Field(
        default=None, description="the SQLite file; null: runs/agentrl.db of the project"
    )
    keep_tokens_days: Positive | None = Field(
        default=None, description="days to keep per-token numbers; null: forever"
    )
    precision: Literal["float32", "float16"] = Field(
        default="float32", description="precision of per-token numbers after training"
    )


class Config(Section):
    """All settings."""

    model: ModelConfig = Field(default_factory=ModelConfig, description="the model that is trained")
    adapter: LoraConfig = Field(default_factory=LoraConfig, description="a LoRA adapter")
    task: TaskConfig = Field(default_factory=TaskConfig, description="the tasks")
    rollout: RolloutConfig = Field(
        default_factory=RolloutConfig, description="how episodes are sampled"
    )
    algo: AlgoConfig = Field(default_factory=AlgoConfig, description="how rewards become gradients")
    train: TrainConfig = Field(
        default_factory=TrainConfig, description="optimizer, schedule, evaluation, checkpoints"
    )
    eval: EvalConfig = Field(default_factory=EvalConfig, description="agentrl eval")
    sandbox: SandboxConfig = Field(
        default_factory=SandboxConfig, description="where the model's code runs"
    )
    remote: RemoteConfig = Field(default_factory=RemoteConfig, description="an inference server")
    store: StoreConfig = Field(default_factory=StoreConfig, description="the store")
    rewards: dict[str, float] = Field(
        default={}, description="weights of reward parts by name, over the pack's"
    )
    hooks: list[str] = Field(
        default=[],
        description="hooks by name, module:object or file.py:object, called in this order",
    )
    loggers: list[str] = Field(
        default=[],
        description="loggers of metrics besides the store: tensorboard, wandb, trackio, mlflow, jsonl, module:object",
    )
    logger_seconds: float = Field(
        default=60.0,
        gt=0,
        description="seconds without progress after which the end of a run abandons a logger",
    )
    seed: Count = Field(
        default=0, description="the one seed: data order, sampling, initial adapter"
    )
    deterministic: bool = Field(
        default=False,
        description="interrupted and uninterrupted CPU runs end with identical weights",
    )

    def section(self, kind: type[S]) -> S:
        """Return the section that a plugin declares by this class."""
        return next(section for section in vars(self).values() if isinstance(section, kind))

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, given: Any) -> Any:
        return by_todays_names(given, mains()) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _fits(self) -> Config:
        for name in offers("checks"):
            resolve("checks", {}, name)(self)
        check_together(self.rollout, self.algo, self.train, self.deterministic)
        return self


def _with_plugins(core: type[Config]) -> type[Config]:
    """Return the settings with the sections of plugins, each described by its docstring.

    A section with the name of one of the core's, or that cannot be loaded, is reported and left out.
    """
    sections: dict[str, Any] = {}
    for name in offers("settings"):
        try:
            kind = resolve("settings", {}, name)
            if name in core.model_fields:
                raise ConfigError(f"the core has a section {name}")
        except AgentRLError as error:
            _LOG.warning("The section %s of a plugin is left out: %s", name, error)
            continue
        sections[name] = (kind, Field(default_factory=kind, description=kind.__doc__))
    return create_model(
        "Config", __base__=core, __doc__=core.__doc__, __module__=__name__, **sections
    )


if not TYPE_CHECKING:
    Config = _with_plugins(Config)


def fields() -> list[tuple[str, Any]]:
    """Return every dotted key with its pydantic FieldInfo, in the order of the models (`rewards` is one)."""
    found: list[tuple[str, Any]] = []
    for name, info in Config.model_fields.items():
        kind = info.annotation
        inside = kind.model_fields if _is(kind, Section) else {}
        found += [(f"{name}.{leaf}", one) for leaf, one in inside.items()] or [(name, info)]
    return found


@cache
def groups() -> Mapping[str, type[Group]]:
    """Return every dotted key whose value is a group of settings, with its class."""
    return {key: info.annotation for key, info in fields() if _is(info.annotation, Group)}


@cache
def mains() -> dict[str, str]:
    """Return the key of each group with the name of its main setting, or empty."""
    return {key: kind.main() for key, kind in groups().items()}


def options(key: str) -> dict[str, Any]:
    """Return the options of a group besides its main one, of every name of a choice, with their FieldInfo."""
    kinds: list[type[Group]] = (
        [record.options for record in CHOICES[key][0].values()]
        if key in CHOICES
        else [groups()[key]]
    )
    return {
        info.alias or name: info
        for kind in kinds
        for name, info in kind.model_fields.items()
        if name != kind.main()
    }


@cache
def leaves() -> Mapping[str, Any]:
    """Return every dotted key that can be set, with its FieldInfo: those of `fields`, and options of groups."""
    found = dict(fields())
    for key in groups():
        found |= {f"{key}.{name}": info for name, info in options(key).items()}
    return found


def fixed_sections() -> list[str]:
    """Return the sections of plugins that a resume cannot change."""
    kinds = {name: info.annotation for name, info in Config.model_fields.items()}
    return [name for name, kind in kinds.items() if _is(kind, Section) and kind.fixed]


def sections() -> list[str]:
    """Return the names of the sections."""
    return [name for name, info in Config.model_fields.items() if _is(info.annotation, Section)]


def _is(annotation: object, base: type[S]) -> TypeIs[type[S]]:
    return isinstance(annotation, type) and issubclass(annotation, base)
