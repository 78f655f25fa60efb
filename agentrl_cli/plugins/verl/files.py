"""verl's files as they are: tools, simulated users, reward functions, rows, and a `data` section.

BaseTool           a tool, whose state lasts for the episode: verl creates it again for each call
BaseInteraction    a simulated user: its four coroutines around one episode
compute_score      (data_source, solution_str, ground_truth, extra_info=None, **kwargs) → a number, or {"score": …}
                   whose other entries are shown with the part; a batch's function has the same names with an s
rows               prompt (messages), data_source, reward_model.ground_truth, extra_info (tools_kwargs …)
data               train_files: data/train.parquet            one or a list
                   val_files: [data/test.parquet]             the splits validation and test
                   custom_cls: {path: retool.py, name: CustomRLHFDataset}      a dataset class of a file
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from agentrl_cli.chat.media import frames_of, image_bytes
from agentrl_cli.envs.user_simulator import Maker, Reply, kwargs_of
from agentrl_cli.errors import ConfigError, DataError, EnvError, NotFound, describe_error
from agentrl_cli.hooks.threads import call
from agentrl_cli.plugins.verl.stand_ins import OpenAIFunctionToolSchema, RLHFDataset, wants_verl
from agentrl_cli.registry import load_file
from agentrl_cli.registry.adapters import foreign_imports
from agentrl_cli.rewards.adapt import Parameters, accept_arguments
from agentrl_cli.rewards.context import RewardContext
from agentrl_cli.tasks.forms import Form, Row, message_list
from agentrl_cli.tools.base import Tool, ToolContext, as_result
from agentrl_cli.types import Episode, Message, Task, ToolResult


@dataclass
class Instance:
    """A tool's instance of one episode."""

    id: str
    kwargs: Mapping[str, Any]
    """create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs of the row's `tools_kwargs`."""
    context: ToolContext

    def of(self, name: str) -> dict[str, Any]:
        """Return the keyword arguments of one of the four coroutines."""
        return dict(self.kwargs.get(f"{name}_kwargs") or {})


class VerlTool(Tool):
    """Calls `create`, `execute`, `calc_reward` and `release` of the wrapped tool like verl's agent loop."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        schema = wrapped.get_openai_tool_schema()
        self.schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        self.schema.setdefault("type", "function")
        self.name = str(self.schema["function"]["name"])

    @classmethod
    def of(cls, kind: type, config: Mapping[str, Any], schema: Any, where: str) -> VerlTool:
        """Make one from a class, its `config` and its `tool_schema` (a mapping, or None if the class has one).

        Raises ConfigError for an invalid schema, EnvError if the class cannot be instantiated.
        """
        try:
            read = OpenAIFunctionToolSchema.model_validate(schema) if schema is not None else None
        except ValueError as error:
            raise ConfigError(
                f"{where}: `tool_schema` is not a function schema: {error}"
            ) from error
        try:
            return cls(kind(config=dict(config), tool_schema=read))
        except Exception as error:
            raise EnvError(f"{where}: {kind.__name__} raised {describe_error(error)}") from error

    async def create(self, ctx: ToolContext) -> Instance:
        given = {} if ctx.task is None else kwargs_of(ctx.task, "tools_kwargs").get(self.name)
        made = Instance("", given if isinstance(given, Mapping) else {}, ctx)
        answer = await self.wrapped.create(create_kwargs=made.of("create"), **made.of("create"))
        made.id = str(answer[0] if isinstance(answer, tuple) else answer)
        return made

    async def execute(self, state: Instance, arguments: dict[str, Any]) -> ToolResult:
        taken = inspect.signature(self.wrapped.execute).parameters.get("parameters")
        as_text = taken is not None and taken.annotation in (str, "str")  # as verl had it at first
        given = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        answer = await self.wrapped.execute(
            state.id, given, agent_data=state.context, **state.of("execute")
        )
        response, reward, metrics = answer if isinstance(answer, tuple) else (answer, None, {})
        numbers = {
            key: float(value)
            for key, value in (metrics or {}).items()
            if isinstance(value, (int, float))
        }
        images = [image_bytes(image) for image in getattr(response, "image", None) or ()]
        images += [
            frame for video in getattr(response, "video", None) or () for frame in frames_of(video)
        ]
        text = response.text if hasattr(response, "text") else as_result(response).text
        step = None if reward is None else float(reward)
        return ToolResult(text or "", reward=step, metrics=numbers, images=tuple(images))

    async def reward(self, state: Instance) -> float | None:
        """Return `calc_reward`, for tools that the row's `tools_kwargs` name. Anything but a number gives no part."""
        if not state.kwargs:
            return None
        value = await self.wrapped.calc_reward(state.id, **state.of("calc_reward"))
        return float(value) if isinstance(value, Real) else None

    async def release(self, state: Instance) -> None:
        await self.wrapped.release(state.id, **state.of("release"))


def adapt_tool(kind: Any, config: Mapping[str, Any], schema: Any, where: str) -> Tool | None:
    """Return the class as a Tool; None if it is not one of verl's."""
    return VerlTool.of(kind, config, schema, where) if wants_verl(kind, "execute") else None


class VerlInteraction:
    """One instance of the class, for one episode."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self._id: str | None = None
        self._kwargs: dict[str, Any] = {}

    async def start(self, task: Task) -> None:
        self._kwargs = {key: value for key, value in kwargs_of(task).items() if key != "name"}
        self._id = await self.wrapped.start_interaction(None, **self._kwargs)

    async def reply(self, messages: Sequence[Message]) -> Reply:
        answer = await self.wrapped.generate_response(
            self._id, [dict(m) for m in messages], **self._kwargs
        )
        ends, text, score, *_ = answer
        return Reply(str(text) or None, float(score), bool(ends))

    async def stop(self) -> None:
        if self._id is not None:
            await self.wrapped.finalize_interaction(self._id)


def adapt_interaction(kind: type, config: Mapping[str, Any]) -> Maker | None:
    """Return a maker of an interaction for each episode; None if the class is not one of verl's."""
    if not wants_verl(kind, "generate_response"):
        return None
    return lambda: VerlInteraction(kind(dict(config)))


def adapt_reward(
    function: Callable[..., Any], parameters: Parameters, extra: dict[str, Any]
) -> Any:
    """Return the function as one of (episode, ctx); None if it does not have verl's parameters.

    One of its batch reward manager (`solution_strs` …) gets a batch of one.
    """
    many = set(parameters) >= {"solution_strs", "ground_truths"}
    if not many and not set(parameters) >= {"solution_str", "ground_truth"}:
        return None

    async def reward(episode: Episode, ctx: RewardContext) -> Any:
        data = ctx.task.data
        if (data.get("reward_model") or {}).get(
            "style"
        ) == "model":  # a reward model scores this row, not a rule
            return None
        rewards = [
            result.reward
            for turn in episode.turns
            for result in turn.results
            if result.reward is not None
        ]
        info = {
            **(data.get("extra_info") or {}),
            "num_turns": len(episode.turns),
            "rollout_reward_scores": rewards,
        }
        given = {
            "data_source": data.get("data_source") or episode.family,
            "solution_str": ctx.response(episode),
            "ground_truth": data.get("ground_truth", data.get("answer")),
            "extra_info": info,
        }
        given = {f"{name}s": [value] for name, value in given.items()} if many else given
        answer = await call(function, **accept_arguments({**given, **extra}, parameters))
        return _answer(answer[0] if many else answer)

    return reward


def _answer(answer: Any) -> Any:
    if not isinstance(answer, Mapping):
        return answer
    if "score" not in answer:
        raise EnvError(f"The reward function returned {sorted(answer)}; a mapping needs `score`.")
    return answer["score"], ", ".join(
        f"{key} {value}" for key, value in answer.items() if key != "score"
    )


AGENTS = ("single_turn_agent", "tool_agent")


def convert(row: Row) -> Row:
    """Lift `ground_truth` to the row: https://verl.readthedocs.io/en/latest/preparation/prepare_data.html"""
    model = row.get("reward_model") or {}
    extra = row.get("extra_info") or {}
    if not isinstance(model, Mapping) or not isinstance(extra, Mapping):
        raise DataError("`reward_model` and `extra_info` must be objects.")
    if isinstance(row.get("prompt"), list):
        row["prompt"] = message_list(row["prompt"], "prompt")
    row.setdefault("family", str(row.get("data_source") or ""))
    row.setdefault("ground_truth", model.get("ground_truth"))
    agent, kwargs = row.get("agent_name"), extra.get("tools_kwargs")
    if agent not in (None, *AGENTS):
        raise DataError(
            f"`agent_name` is {agent!r}, one of verl's own agent loops; {' and '.join(AGENTS)} run here."
        )
    if agent == "single_turn_agent" or row.get("use_tool") is False:
        row["tools"] = []
    elif extra.get("need_tools_kwargs") and isinstance(kwargs, Mapping) and kwargs:
        row.setdefault(
            "tools", list(kwargs)
        )  # verl shows a row the tools that it has arguments for
    return row


FORM = Form(
    lambda row: "prompt" in row and ("reward_model" in row or "data_source" in row), convert
)


SPLITS = {"train_files": ("train",), "val_files": ("validation", "test")}
ROWS = "agentrl_cli.plugins.verl.files:read_rows"


class Options(dict[str, Any]):
    """A mapping with attributes, as verl's configuration is."""

    __getattr__ = dict.get


def adapt_data(folder: Path, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section as one that names a source for each split; None of any other section. Raises ConfigError."""
    if not {"custom_cls", *SPLITS} & set(data):
        return None
    found: dict[str, Any] = {}
    for key, names in SPLITS.items():
        files = data.get(key)
        if files is not None:
            places = [files] if isinstance(files, str) else list(files)
            args = {"folder": str(folder), "files": places, "config": dict(data)}
            found |= {name: {"dataset": ROWS, "args": args} for name in names}
    if "train" not in found:
        raise ConfigError(
            f"{folder / 'task.yaml'}: data.custom_cls needs `train_files` beside it, as in verl."
        )
    return found


def read_rows(folder: str, files: list[str], config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of verl's dataset, or of the class that replaces it. Raises NotFound, ConfigError, DataError."""
    custom, base = config.get("custom_cls") or {}, Path(folder)
    kind: Any = RLHFDataset
    places = [str(base / Path(file).expanduser()) for file in files]
    with foreign_imports(base):
        if custom.get("path"):
            module = load_file(base / Path(custom["path"]).expanduser())
            kind = getattr(module, str(custom.get("name")), None)
            if not isinstance(kind, type):
                known = [name for name, value in vars(module).items() if isinstance(value, type)]
                raise NotFound.of(
                    f"class in {custom['path']} (data.custom_cls)", str(custom.get("name")), known
                )
        made = kind(data_files=places, tokenizer=None, config=Options(config), processor=None)
        return [_plain(made[index]) for index in range(len(made))]


def _plain(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the columns that verl's loader adds for its batches."""
    row = {
        key: value for key, value in item.items() if not type(value).__module__.startswith("torch")
    }
    if "raw_prompt" in row:
        row["prompt"] = [dict(message) for message in row.pop("raw_prompt")]
    return row
