"""verl's own files beside a pack, without verl: relative imports, scorers, odd return types, a pack without task.py."""

import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import EnvError
from agentrl_cli.plugins.verl import scorers
from agentrl_cli.tasks.spec import load_pack
from agentrl_cli.types import Outcome
from tests.helpers.packs import answers, call, play

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
TASK = """
name: p
sandbox: false
tools: [tools.yaml]
interaction: interaction.yaml
rewards:
  right: {primary: true, function: "verl.utils.reward_score:default_compute_score"}
"""


def entry(target: str, name: str) -> str:
    return f"- class_name: {target}\n  config: {{type: native}}{SCHEMA.format(name=name)}"


@pytest.mark.parametrize("prefix", ["verl.tools.", ""], ids=["verls own name", "the file's name"])
async def test_verls_files_run_as_they_are(tmp_path: Path, prefix: str) -> None:
    named = f"{prefix}gsm8k_tool"
    (tmp_path / "gsm8k_tool.py").write_text(TOOL)
    (tmp_path / "gsm8k_interaction.py").write_text(INTERACTION)
    interaction = prefix.replace("tools", "interactions")
    (tmp_path / "tools.yaml").write_text(
        f"tools:\n{entry(f'{named}.Gsm8kTool', 'calc')}{entry(f'{named}.SearchTool', 'search')}"
    )
    (tmp_path / "interaction.yaml").write_text(
        f"interaction:\n- {{name: gsm8k, class_name: {interaction}gsm8k_interaction.Gsm8kInteraction, config: {{}}}}\n"
    )
    (tmp_path / "task.yaml").write_text(TASK)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(
        '{"data_source": "openai/gsm8k", "agent_name": "tool_agent", "prompt": [{"role": "user", "content": "2+3"}],'
        ' "reward_model": {"style": "rule", "ground_truth": "5"}, "extra_info": {"need_tools_kwargs": true,'
        ' "interaction_kwargs": {"name": "gsm8k", "ground_truth": "5"},'
        ' "tools_kwargs": {"calc": {"create_kwargs": {"ground_truth": "5"}},'
        ' "search": {"create_kwargs": {"ground_truth": "5"}}}}}\n'
    )
    pack = load_pack(tmp_path)
    assert not [name for name in sys.modules if name.split(".")[0] == "verl"]
    done = await play(
        pack,
        [call("calc", answer="4"), call("calc", answer="5"), call("search", answer="5"), "#### 5"],
    )
    assert done.outcome is Outcome.SOLVED, done.error
    assert answers(done)[0] == "Current parsed answer='4' reward=0.0"
    parts = {part.name: part.value for part in done.reward_parts}
    assert parts == {"right": 1.0, "tool:calc": 1.0, "interaction": 1.0, "env": 1.0}, (
        "SearchTool returned a list"
    )
    results = [result for turn in done.turns for result in turn.results]
    assert [result.reward for result in results] == [-0.05, 0.0, -0.05] and results[0].metrics == {
        "n": 1.0
    }


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
        '{"question": "1+1?", "answer": 2}\n{"question": "2+2?", "answer": 4}\n'
    )
    text = (
        "name: p\nsandbox: false\nrewards: {r: {primary: true, function: 'agentrl_cli.rewards.rules:gsm8k'}}\n"
        "data: {train_files: [aime/rows.jsonl], val_files: aime/rows.jsonl, suffix: ' Think.',\n"
        "       custom_cls: {path: retool.py, name: %s}}\n"
    )
    (tmp_path / "task.yaml").write_text(text % "CustomRLHFDataset")
    pack = load_pack(tmp_path)
    first, second = pack.tasks("train")
    assert first.prompt[-1]["content"] == "1+1? Think." and second.data["ground_truth"] == "4"
    assert first.data["data_source"] == "aime/rows.jsonl" and "input_ids" not in first.data
    assert (
        len(pack.tasks("validation")) == len(pack.tasks("test")) == 2 and "verl" not in sys.modules
    )
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
    """A pack whose one reward is the function of a file."""
    (folder / "scores").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "scores" / "reward.py").write_text(code)
    (folder / "data" / "train.jsonl").write_text('{"prompt": "2+3", "ground_truth": "5"}\n')
    rewards = "rewards: {right: {primary: true, function: 'scores/reward.py:compute_score'}}\n"
    (folder / "task.yaml").write_text(f"name: p\nsandbox: false\n{rewards}")
    return folder


async def test_relative_imports_of_a_reward_file_are_the_files_beside_it(tmp_path: Path) -> None:
    """Then verl's scorers of that name: math_batch.py imports `.math_reward`, and may be copied with it or alone."""
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


def test_a_package_that_a_reward_file_lacks_is_named_with_its_pip_line(tmp_path: Path) -> None:
    code = "import mathruler.grader\ndef compute_score(solution_str, ground_truth): ...\n"
    with pytest.raises(
        EnvError, match=r"scores/reward.py:1: ModuleNotFoundError: No module"
    ) as error:
        load_pack(reward_pack(tmp_path, code))
    assert error.value.hint.startswith("`pip install mathruler` if it is a package")
