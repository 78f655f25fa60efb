"""verl's files, tools, interactions, settings, rewards, scorers and rows, where verl is not installed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Outcome, Store, load_config, load_pack
from agentrl_cli.errors import ConfigError, DataError, EnvError, NotFound
from agentrl_cli.plugins.verl import scorers
from agentrl_cli.rewards import score
from agentrl_cli.rewards.load import load_reward
from agentrl_cli.tasks.forms import detect, normal
from agentrl_cli.tools import ToolContext
from tests.helpers.chat import call
from tests.helpers.packs import answers, pack, play, row
from tests.helpers.rewards import context, episode, value
from tests.plugins.verl import answers as random_answers

VERL = '''
import logging
from typing import Any, Optional, Tuple
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Gsm8kTool(BaseTool):
    """Written against https://verl.readthedocs.io/en/latest/sglang_multiturn/multiturn.html"""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        if instance_id is None:
            instance_id = str(uuid4())
        if ground_truth is None:
            ground_truth = kwargs.get("create_kwargs", {}).get("ground_truth", None)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> Tuple[ToolResponse, float, dict]:
        answer = parameters.get("answer", "")
        self._instance_dict[instance_id]["response"] = answer if isinstance(answer, str) else str(answer)
        reward = await self.calc_reward(instance_id)
        step = 0.0 if reward > self._instance_dict[instance_id]["reward"] else -0.05
        self._instance_dict[instance_id]["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=} {self.config['note']}"), step, {"tries": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return 1.0 if state["response"] == state["ground_truth"] else 0.0

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]


class Gsm8kInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs):
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(self, instance_id: str, messages: list, **kwargs) -> tuple[bool, str, float, dict]:
        content = next(item["content"] for item in reversed(messages) if item.get("role") == "assistant")
        if content.endswith(self._instance_dict[instance_id]["ground_truth"]):
            return True, "Your response is correct!", 1.0, {}
        return False, "Your response is incorrect! " + self.config["hint"], 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
'''

TOOLS = """
tools:
  - class_name: "my_verl.Gsm8kTool"
    config: {type: native, note: noted}
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k."
        parameters:
          type: "object"
          properties: {answer: {type: "string", description: "The answer."}}
          required: ["answer"]
"""

INTERACTIONS = """
interaction:
  - name: "gsm8k"
    class_name: "my_verl.Gsm8kInteraction"
    config: {hint: "Again."}
"""

# --- verl ------------------------------------------------------------------------------------------------------------


async def test_a_verl_tool_and_interaction_run_unchanged(tmp_path: Path) -> None:
    extra = {
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "5"}}},
        "interaction_kwargs": {"name": "gsm8k", "query": "q", "ground_truth": "5"},
    }
    made = pack(
        tmp_path,
        {"tools": ["tools.yaml"], "interaction": "interaction.yaml"},
        [row(reward_model={"ground_truth": "5"}, extra_info=extra)],
        tools__yaml=TOOLS,
        interaction__yaml=INTERACTIONS,
        my_verl__py=VERL,
    )
    assert not {"verl", "verl.tools.base_tool"} & {*sys.modules} and str(tmp_path) not in sys.path
    (tool,) = made.tools
    assert tool.schema["function"]["parameters"]["required"] == ["answer"]
    said = [call(tool.name, answer="4"), call(tool.name, answer="5"), "It is 4", "It is 5"]
    with Store.open(tmp_path / "s.db") as store:
        done = await play(made, said, store=store)
        kept = store.episodes.get(done.id)
    assert done.outcome is Outcome.SOLVED
    assert answers(done) == [
        "Current parsed answer='4' reward=0.0 noted",
        "Current parsed answer='5' reward=1.0 noted",
        "Your response is incorrect! Again.",
        "Your response is correct!",
    ]
    results = [(one.reward, one.metrics["tries"]) for turn in done.turns for one in turn.results]
    assert results == [(-0.05, 1.0), (0.0, 1.0)]
    parts = {part.name: part.value for part in done.reward_parts}
    assert parts["tool:calc_gsm8k_reward"] == 1.0 and parts["interaction"] == 1.0
    # The task, then what the user thought of each turn.
    assert [turn.reward for turn in kept.turns if turn.role == "user"] == [None, 0.0, 1.0]
    assert tool.wrapped._instance_dict == {}  # type: ignore[attr-defined]  # released


KEYWORDS = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

SEEN = []


class Look(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        SEEN.append(("create", kwargs["create_kwargs"]))
        return "i", ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        SEEN.append(("execute", kwargs["zoom"], kwargs["agent_data"].task.id))
        from PIL import Image
        return ToolResponse(text="seen", image=[Image.new("RGB", (8, 4))]), None, None

    async def calc_reward(self, instance_id, **kwargs):
        SEEN.append(("calc_reward", kwargs))
        return 0.5

    async def release(self, instance_id, **kwargs):
        SEEN.append(("release", kwargs))
"""


async def test_a_verl_tool_gets_the_rows_keywords_and_may_show_pictures(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    names = ("create", "execute", "calc_reward", "release")
    own = {f"{name}_kwargs": {"zoom": name} for name in names}
    made = pack(
        tmp_path,
        {"tools": ["tools.yaml"]},
        [row(extra_info={"tools_kwargs": {"look": own}, "need_tools_kwargs": True})],
        tools__yaml=TOOLS.replace("my_verl.Gsm8kTool", "looks.Look")
        .replace("calc_gsm8k_reward", "look")
        .replace("answer", "at"),
        looks__py=KEYWORDS,
    )
    tool: Any = made.tools[0]
    state = await tool.create(ToolContext(made.tasks("train")[0]))
    result = await tool.call(state, {"at": "left"})
    assert (result.text, result.reward) == ("seen", None)
    assert result.images[0].startswith(b"\x89PNG") and await tool.reward(state) == 0.5
    await tool.release(state)
    assert type(tool.wrapped).create.__globals__["SEEN"] == [
        ("create", {"zoom": "create"}),
        ("execute", "execute", made.tasks("train")[0].id),
        ("calc_reward", {"zoom": "calc_reward"}),
        ("release", {"zoom": "release"}),
    ]


def test_the_stand_ins_do_not_hide_what_is_missing(tmp_path: Path) -> None:
    broken = VERL.replace("verl.tools.schemas", "verl.tools.shemas")
    with pytest.raises((EnvError, NotFound, ModuleNotFoundError)) as caught:
        pack(tmp_path, {"tools": ["tools.yaml"]}, [row()], tools__yaml=TOOLS, my_verl__py=broken)
    assert "shemas" in str(caught.value) and "verl" not in sys.modules


async def test_a_row_that_names_no_interaction_of_the_pack(tmp_path: Path) -> None:
    made = pack(
        tmp_path,
        {"interaction": "interaction.yaml"},
        [row(interaction_kwargs={"name": "gsm9k"})],
        interaction__yaml=INTERACTIONS,
        my_verl__py=VERL,
    )
    done = await play(made, ["5"])
    assert done.outcome is Outcome.ENV_ERROR and "gsm9k" in done.error


# --- verl's keys -----------------------------------------------------------------------------------------------------


def test_verls_keys_become_ours_and_say_so(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "actor_rollout_ref:\n  rollout:\n    response_length: 300\n    multi_turn:\n      max_assistant_turns: 3\n"
        "      max_user_turns: 2\n      max_parallel_calls: 1\n      max_tool_response_length: 900\n"
        "      tool_response_truncate_side: left\n"
    )
    config, sources = load_config([file], base=tmp_path)
    rollout, seen = config.rollout, config.rollout.observation
    assert (rollout.max_turns, rollout.max_user_turns, rollout.max_parallel_calls) == (3, 2, 1)
    # verl names the side that stays
    assert (seen.chars, seen.tokens, seen.cut, rollout.response_tokens) == (900, 900, "right", 300)
    assert sources["rollout.max_turns"] == f"file:{file}:5 (verl: max_assistant_turns)"
    sets = ["rollout.max_assistant_turns=9", "rollout.observation.tokens=50"]
    ours = load_config([file], sets, base=tmp_path)[0].rollout
    assert (ours.max_turns, ours.observation.tokens) == (9, 50)
    file.write_text("\n\nactor_rollout_ref:\n  rollout:\n    max_asistant_turns: 3\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:5: unknown key actor_rollout_ref"):
        load_config([file], base=tmp_path)


async def test_verls_compute_score() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> float:
        assert (data_source, solution_str, ground_truth) == ("gsm8k", "1 2 3 4 5 6", "5")
        assert extra_info == {"index": 7, "num_turns": 4, "rollout_reward_scores": [0.25]}
        return 0.5

    async def named(
        data_source: str, solution_str: str, ground_truth: str, **kwargs: Any
    ) -> dict[str, Any]:
        return {"score": 1, "acc": True, "extra": sorted(kwargs)}

    def batch(
        data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any
    ) -> list[Any]:
        return [
            {"score": compute_score(*one), "of": len(solution_strs)}
            for one in zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
        ]

    assert await value(compute_score) == (0.5, "")
    assert await value(batch) == (0.5, "of 1")
    assert await value(named) == (1.0, "acc True, extra ['extra_info']")
    with pytest.raises(EnvError, match="needs `score`"):
        await value(lambda solution_str, ground_truth: {"acc": 1})


ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {
        "split": "train",
        "index": 0,
        "need_tools_kwargs": True,
        "tools_kwargs": {"lookup": {"create_kwargs": {"ground_truth": "5"}}},
        "interaction_kwargs": {"name": "gsm8k", "ground_truth": "5"},
    },
}


def test_rows(tmp_path: Path) -> None:
    tools = [{"name": "lookup", "function": "task.py:add", "description": "Look."}]
    rows = [ROW, {**ROW, "use_tool": False}, {**ROW, "agent_name": "single_turn_agent"}]
    plain, *others = pack(tmp_path, {"tools": tools}, rows).tasks("train")
    assert detect({**ROW, "entry_point": "f", "test": "t"}) == "verl", "before any other form"
    assert (plain.id, plain.family) == ("p/train-00001", "openai/gsm8k")
    assert plain.prompt == tuple(ROW["prompt"])
    assert plain.data["ground_truth"] == "5" and plain.data["extra_info"] == ROW["extra_info"]
    # Those of its tools_kwargs.
    assert [task.tools for task in (plain, *others)] == [("lookup",), (), ()]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"reward_model": "rule"}, "must be objects"),
        ({"prompt": []}, "must be a list of messages"),
        ({"agent_name": "their_agent"}, "one of verl's own agent loops"),
    ],
)
def test_rows_that_cannot_be(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        normal({**ROW, **changed})


async def test_a_reward_of_verl_s_names_loads_with_its_decorators(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from verl.utils.rollout_trace import rollout_trace_op\n"
        "@rollout_trace_op\n"
        "def compute_score(data_source, solution_str, ground_truth, scale=1.0, **kwargs):\n    return scale\n"
    )
    spec = {"function": "mine.py:compute_score", "kwargs": {"scale": 0.25}}
    reward = load_reward(tmp_path, "r", spec, {})
    (part,) = await score(episode(), [reward], context())
    assert part.value == 0.25, "with **kwargs it is verl's, not one of a row's columns"


TOOL = """
import json
from uuid import uuid4

from verl.utils.reward_score import gsm8k
from verl.utils.rollout_trace import rollout_trace_op

from .base_tool import BaseTool
from .schemas import OpenAIFunctionToolSchema, ToolResponse


class Gsm8kTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(self, instance_id=None, ground_truth=None, **kwargs) -> str:
        instance_id = instance_id or str(uuid4())
        self._instance_dict[instance_id] = {"response": "", "truth": kwargs["create_kwargs"]["ground_truth"]}
        return instance_id

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: str, **kwargs):
        answer = json.loads(parameters).get("answer", "")
        self._instance_dict[instance_id]["response"] = answer if answer.startswith("#### ") else "#### " + answer
        reward = await self.calc_reward(instance_id)
        return f"Current parsed {answer=} {reward=}", 0.0 if reward else -0.05, {"status": "unknown", "n": 1}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        state = self._instance_dict[instance_id]
        return gsm8k.compute_score(state["response"], state["truth"], method="flexible", format_score=0.0, score=1.0)

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]


class SearchTool(Gsm8kTool):
    async def calc_reward(self, instance_id: str, **kwargs) -> str:
        return []
"""
INTERACTION = """
from verl.utils.reward_score import gsm8k

from .base import BaseInteraction


class Gsm8kInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.truth = ground_truth
        return "1"

    async def generate_response(self, instance_id, messages, **kwargs):
        right = gsm8k.compute_score("#### " + messages[-1]["content"], self.truth, method="flexible") == 1.0
        return right, "Right!" if right else "Again.", float(right), {}
"""
SCHEMA = """
  tool_schema:
    type: function
    function:
      name: {name}
      description: A tool.
      parameters: {{type: object, properties: {{answer: {{type: string, item: {{type: string}}}}}}, required: [answer]}}
"""


def entry(target: str, name: str) -> str:
    return f"- class_name: {target}\n  config: {{type: native}}{SCHEMA.format(name=name)}"


@pytest.mark.parametrize("prefix", ["verl.tools.", ""], ids=["verls own name", "the file's name"])
async def test_verls_files_run_as_they_are(tmp_path: Path, prefix: str) -> None:
    of_row = {"create_kwargs": {"ground_truth": "5"}}
    extra = {
        "need_tools_kwargs": True,
        "interaction_kwargs": {"name": "gsm8k", "ground_truth": "5"},
        "tools_kwargs": {"calc": of_row, "search": of_row},
    }
    asked = {**ROW, "agent_name": "tool_agent", "extra_info": extra}
    scorer = {"primary": True, "function": "verl.utils.reward_score:default_compute_score"}
    named, theirs = f"{prefix}gsm8k_tool", prefix.replace("tools", "interactions")
    made = pack(
        tmp_path,
        {"tools": ["tools.yaml"], "interaction": "interaction.yaml", "rewards": {"right": scorer}},
        [asked],
        gsm8k_tool__py=TOOL,
        gsm8k_interaction__py=INTERACTION,
        tools__yaml=f"tools:\n{entry(f'{named}.Gsm8kTool', 'calc')}{entry(f'{named}.SearchTool', 'search')}",
        interaction__yaml="interaction:\n- {name: gsm8k, config: {}, class_name: "
        f"{theirs}gsm8k_interaction.Gsm8kInteraction}}\n",
    )
    assert not [name for name in sys.modules if name.split(".")[0] == "verl"]
    calls = [call("calc", answer="4"), call("calc", answer="5"), call("search", answer="5")]
    done = await play(made, [*calls, "#### 5"])
    assert done.outcome is Outcome.SOLVED, done.error
    assert answers(done)[0] == "Current parsed answer='4' reward=0.0"
    parts = {part.name: part.value for part in done.reward_parts}
    # SearchTool returned a list, not a number.
    assert parts == {"right": 1.0, "tool:calc": 1.0, "interaction": 1.0, "env": 1.0}
    results = [result for turn in done.turns for result in turn.results]
    assert [result.reward for result in results] == [-0.05, 0.0, -0.05]
    assert results[0].metrics == {"n": 1.0}


@pytest.mark.parametrize(
    ("source", "text", "truth", "value"),
    [
        ("openai/gsm8k", "so\n#### 1,234", "1234", 1.0),
        ("openai/gsm8k", "1234", "1234", 0.0),
        ("aime2024", "Answer: $\\frac12$ dollars", "\\frac{1}{2}", 1.0),
        ("math_dapo", "Answer: 7", "8", -1.0),
        ("lighteval/MATH", "It is \\boxed{\\dfrac{1}{2}}", "\\frac12", 1.0),
        ("lighteval/MATH", "It is 1/2", "\\frac12", 0.0),
        ("searchR1_nq", "<answer>The Beatles!</answer>", {"target": ["beatles"]}, 1.0),
        ("searchR1_nq", "<answer>x</answer>", {"target": "beatles"}, 0.0),
    ],
)
def test_verls_scorers(source: str, text: str, truth: Any, value: float) -> None:
    found = scorers.default_compute_score(source, text, truth)
    assert (found["score"] if isinstance(found, dict) else found) == value


CUSTOM = '''
import torch
from verl.utils.dataset.rl_dataset import RLHFDataset


class CustomRLHFDataset(RLHFDataset):
    """With recipes' own columns, as retool's: they become messages and a ground truth."""

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        name = "/".join(self.data_files[0].split("/")[-2:])
        self.dataframe = self.dataframe.map(lambda row: self.row(row, name), remove_columns=["question"])

    def row(self, row, name):
        prompt = row["question"] + self.config.get("suffix", "")
        return {"prompt": [{"role": "user", "content": prompt}], "data_source": name, "agent_name": "tool_agent",
                "reward_model": {"style": "rule", "ground_truth": str(row["answer"])}}

    def __getitem__(self, item):
        row = super().__getitem__(item)
        return {**row, "input_ids": torch.zeros(3), "index": item}
'''


def test_a_dataset_class_of_verl_replaces_its_own(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "retool.py").write_text(CUSTOM)
    (tmp_path / "aime").mkdir()
    (tmp_path / "aime" / "rows.jsonl").write_text(
        '{"question": "1+1?", "answer": 2}\n{"question": "2+2?", "answer": 4, "extra_info": {"n": 3}}\n'
    )
    text = (
        "name: p\nsandbox: false\nrewards: {r: {primary: true, function: 'agentrl_cli.rewards.rules:gsm8k'}}\n"
        "data: {train_files: [aime/rows.jsonl], val_files: aime/rows.jsonl, suffix: ' Think.',\n"
        "       custom_cls: {path: retool.py, name: %s}}\n"
    )
    (tmp_path / "task.yaml").write_text(text % "CustomRLHFDataset")
    made = load_pack(tmp_path)
    first, second = made.tasks("train")
    assert first.prompt[-1]["content"] == "1+1? Think." and second.data["ground_truth"] == "4"
    assert not first.data["extra_info"] and second.data["extra_info"] == {"n": 3}
    assert first.data["data_source"] == "aime/rows.jsonl" and "input_ids" not in first.data
    assert len(made.tasks("validation")) == len(made.tasks("test")) == 2
    assert "verl" not in sys.modules
    (tmp_path / "task.yaml").write_text(text % "CustomDataset")
    with pytest.raises(Exception, match=r"CustomDataset.*CustomRLHFDataset|class in retool\.py"):
        load_pack(tmp_path).tasks("train")


BATCH = """
from .math_reward import compute_score as score_one
{more}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return score_one(solution_str, ground_truth)
"""


def reward_pack(folder: Path, code: str) -> Path:
    (folder / "scores").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "scores" / "reward.py").write_text(code)
    (folder / "data" / "train.jsonl").write_text('{"prompt": "2+3", "ground_truth": "5"}\n')
    rewards = "rewards: {right: {primary: true, function: 'scores/reward.py:compute_score'}}\n"
    (folder / "task.yaml").write_text(f"name: p\nsandbox: false\n{rewards}")
    return folder


async def test_relative_imports_of_a_reward_file_are_the_files_beside_it(tmp_path: Path) -> None:
    alone = load_pack(reward_pack(tmp_path / "alone", BATCH.format(more="")))
    done = await play(alone, ["It is \\boxed 5"])
    assert done.reward == 1.0
    folder = reward_pack(tmp_path / "both", BATCH.format(more="from .other import K"))
    (folder / "scores" / "math_reward.py").write_text(
        "def compute_score(text, truth):\n    return 0.25\n"
    )
    (folder / "scores" / "other.py").write_text("K = 1\n")
    done = await play(load_pack(folder), ["It is \\boxed 5"])
    assert done.reward == 0.25
    with pytest.raises(EnvError, match=r"reward.py:3: ModuleNotFoundError") as error:
        load_pack(reward_pack(tmp_path / "none", BATCH.format(more="from .helpers import K")))
    assert error.value.hint.endswith("has no helpers.py.")


SCORERS: dict[str, Callable[..., float]] = {
    "gsm8k": scorers.gsm8k,
    "math_reward": scorers.math_reward,
}
FAR = "x" * 300

HARD: list[tuple[str, str, Any, float]] = [
    # The last mark counts, within the last 300 characters; `format_score` is 0.25.
    ("gsm8k", "#### 70 wrong #### 72", "72", 1.0),
    ("gsm8k", "#### 72, no: #### 70", "72", 0.25),
    ("gsm8k", f"#### 72 {FAR}", "72", 0.0),
    ("gsm8k", f"{FAR} #### 72", "72", 1.0),
    ("gsm8k", "#### 1,234", "1234", 1.0),
    ("gsm8k", "#### 72.", "72", 0.25),
    ("gsm8k", "#### $72", "72", 0.0),
    ("gsm8k", "####72", "72", 0.0),
    ("gsm8k", "#### -", "72", 0.0),
    ("gsm8k", "#### .", "72", 0.25),
    ("math_reward", "\\boxed 72", "72", 1.0),
    ("math_reward", "$\\boxed 72$ is it", "72", 1.0),
    ("math_reward", "\\boxed{70}, no: \\boxed{72}", "72", 1.0),
    ("math_reward", "\\boxed {72}", "72", 0.0),
    ("math_reward", "\\boxed{72\\%}", "72", 1.0),
    ("math_reward", "\\boxed{72\\%}", "72%", 0.0),
    ("math_reward", "\\boxed{72%}", "72%", 1.0),
    ("math_reward", "\\fbox{72}", "72", 0.0),
    ("math_reward", "\\boxed 1 \\boxed{2}", "2", 0.0),
    ("math_reward", "\\boxed{0.5}", "\\frac12", 1.0),
    ("math_reward", "\\boxed{1/2}", "\\dfrac{1}{2}", 1.0),
    ("math_reward", "\\boxed{01/2}", "1/2", 0.0),
    ("math_reward", "\\boxed{x=5}", "5", 1.0),
    ("math_reward", "\\boxed{a=b=5}", "b=5", 0.0),
    ("math_reward", "\\boxed{5 \\text{ cm}}", "5", 1.0),
    ("math_reward", "\\boxed{5\\text{ a}\\text{ b}}", "5", 0.0),
    ("math_reward", "\\boxed{5\\text{ a}\\text{ b}}", "5\\text{ a}\\text{ b}", 1.0),
    ("math_reward", "\\boxed{\\sqrt3}", "\\sqrt{3}", 1.0),
    ("math_reward", "\\boxed{\\sqrt}", "\\sqrt", 1.0),
    ("math_reward", "\\boxed{\\frac}", "\\frac1", 0.0),
    ("math_reward", "\\boxed{.5}", "0.5", 1.0),
    ("math_reward", "\\boxed{(.5)}", "(0.5)", 0.0),
    ("math_reward", "\\boxed{72", "72", 0.0),
    ("math_reward", "72", "72", 0.0),
]


@pytest.mark.parametrize(("module", "text", "truth", "score"), HARD)
def test_hard_answers_are_scored_as_verl_does(
    module: str, text: str, truth: Any, score: float
) -> None:
    given = {"format_score": 0.25} if module == "gsm8k" else {}
    assert SCORERS[module](text, truth, **given) == score


def test_thousands_of_random_answers_are_scored_as_verl_does() -> None:
    python = os.environ.get("VERL_PYTHON", "")
    if not python and importlib.util.find_spec("verl") is not None:
        python = sys.executable
    if not python:
        pytest.skip(
            "verl is not installed: VERL_PYTHON names an interpreter with it (pip install --no-deps verl)"
        )
    command = [python, random_answers.__file__]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout)
    for module, scorer in SCORERS.items():
        ours, asked = random_answers.scores(module, scorer), random_answers.answers(module)
        both = zip(asked, theirs[module], ours, strict=True)
        different = [(answer, real, mine) for answer, real, mine in both if real != mine]
        assert len(ours) == random_answers.COUNT and not different, different[:5]
        assert sum(score == 1.0 for score in ours) > 300, (
            "the answers must be right often enough to compare anything"
        )
