"""tools.yaml and interaction.yaml in verl's form and in the short form, TRL environments, verl's keys, tool_choice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config, load_config
from agentrl_cli.errors import ConfigError, EnvError, NotFound
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack, load_pack
from agentrl_cli.tools import ToolContext
from agentrl_cli.tools.configured import load_tools
from agentrl_cli.types import Episode, Origin, Outcome

CHAT = Chat(ByteTokenizer())

TASK = '''
def right(episode, ctx):
    return float(ctx.final_text.endswith("5"))

REWARDS = {"right": right}

def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: One.
        b: Other.
    """
    return a + b
'''

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

TRL = '''
class Counter:
    """Written against https://huggingface.co/docs/trl/grpo_trainer (environment_factory)."""

    def reset(self, **kwargs) -> str | None:
        self.count = int(kwargs.get("start", 0))
        self.asked = kwargs["prompt"]
        return f"The counter is at {self.count}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: The amount to add.

        Returns:
            The new value.
        """
        self.count += step
        return self.count

    async def read(self) -> str:
        """Read the counter."""
        return f"now {self.count}"

    def get_reward(self) -> float:
        return float(self.count == 5)

    def close(self):
        CLOSED.append(self.count)

CLOSED = []


class Other:
    def reset(self, **kwargs):
        return None

    def speak(self, text: str) -> str:
        """Say something.

        Args:
            text: What.
        """
        return text.upper()
'''


def pack(folder: Path, spec: dict[str, Any], rows: list[dict[str, Any]], **files: str) -> Pack:
    (folder / "data").mkdir()
    (folder / "task.py").write_text(TASK + files.pop("task", ""))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    whole = {"name": "p", "sandbox": False, "rewards": {"right": {"primary": True}}, **spec}
    (folder / "task.yaml").write_text(json.dumps(whole))
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_pack(folder)


def call(name: str, **arguments: Any) -> str:
    return CHAT.parser.example(name, arguments)


async def play(
    made: Pack, said: list[str], *, store: Store | None = None, **settings: Any
) -> Episode:
    config = Config()
    config.rollout.max_tokens = 20_000
    for key, value in settings.items():
        setattr(config.rollout, key, value)
    rollout = Rollout(ScriptedPolicy(said, CHAT.tokenizer), CHAT, {"p": made}, config, store=store)
    return await rollout.episode(Job(made.tasks("train")[0], 1))


def answers(episode: Episode) -> list[str]:
    return [
        str(turn.messages[0]["content"]) for turn in episode.turns if turn.role in ("tool", "user")
    ][1:]


def row(**more: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "2 + 3?"}], **more}


# --- verl ------------------------------------------------------------------------------------------------------------


async def test_a_verl_tool_and_interaction_run_unchanged(tmp_path: Path) -> None:
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "5"}}}
    extra = {
        "tools_kwargs": kwargs,
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
    assert (
        "verl" not in sys.modules
        and "verl.tools.base_tool" not in sys.modules
        and str(tmp_path) not in sys.path
    )
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
    results = [result for turn in done.turns for result in turn.results]
    assert [result.reward for result in results] == [-0.05, 0.0] and results[0].metrics == {
        "tries": 1.0
    }
    parts = {part.name: part.value for part in done.reward_parts}
    assert parts["tool:calc_gsm8k_reward"] == 1.0 and parts["interaction"] == 1.0
    users = [turn for turn in kept.turns if turn.role == "user"]
    assert [turn.reward for turn in users] == [
        None,
        0.0,
        1.0,
    ]  # the task, then what the user thought of each turn
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
    own = {
        f"{name}_kwargs": {"zoom": name} for name in ("create", "execute", "calc_reward", "release")
    }
    tools = (
        TOOLS.replace("my_verl.Gsm8kTool", "looks.Look")
        .replace("calc_gsm8k_reward", "look")
        .replace("answer", "at")
    )
    extra = {"tools_kwargs": {"look": own}, "need_tools_kwargs": True}
    made = pack(
        tmp_path,
        {"tools": ["tools.yaml"]},
        [row(extra_info=extra)],
        tools__yaml=tools,
        looks__py=KEYWORDS,
    )
    (tool,) = made.tools
    ctx = ToolContext(made.tasks("train")[0])
    state = await tool.create(ctx)
    result = await tool.call(state, {"at": "left"})
    assert (
        result.text == "seen" and result.reward is None and result.images[0].startswith(b"\x89PNG")
    )
    assert await tool.reward(state) == 0.5
    await tool.release(state)
    wrapped: Any = tool
    seen = type(wrapped.wrapped).create.__globals__["SEEN"]
    assert seen == [
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


# --- the short form, and TRL -----------------------------------------------------------------------------------------


SHORT = """
- name: plus
  description: Sum of two.
  parameters: {a: number, b: {type: number, description: Second.}}
  function: "task.py:add"
  timeout: 3
  pure: true
- name: calculator
  description: Compute.
- finish
"""


async def test_the_short_form(tmp_path: Path) -> None:
    made = pack(
        tmp_path,
        {"tools": ["tools.yaml", {"name": "sql", "config": {"rows": 1}}]},
        [row()],
        tools__yaml=SHORT,
    )
    plus, calculator, finish, sql = made.tools
    assert plus.schema["function"] == {
        "name": "plus",
        "description": "Sum of two.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number"},
                "b": {"type": "number", "description": "Second."},
            },
            "required": ["a", "b"],
        },
    }
    assert (plus.timeout, plus.pure, finish.name, sql.name) == (3, True, "finish", "sql")
    assert calculator.schema["function"]["description"] == "Compute."
    assert (
        load_pack("calc-task").tools[0].schema["function"]["description"] != "Compute."
    )  # ours alone
    done = await play(made, [call("plus", a=2, b=3), call("calculator", expression="2+3"), "5"])
    assert answers(done) == ["5", "5"] and done.outcome is Outcome.SOLVED


async def test_trl_environments(tmp_path: Path) -> None:
    spec = {
        "tools": [{"environment": "task.py:Counter"}],
        "rewards": {
            "world": {"primary": True, "function": "agentrl_cli.rewards.rules:environment"}
        },
    }
    made = pack(tmp_path, spec, [row(start=3)], task=TRL)
    assert [tool.name for tool in made.tools] == ["increment", "read"]
    done = await play(made, [call("increment", step=2) + call("read"), "done"])
    assert str(done.turns[0].messages[-1]["content"]) == "2 + 3?\n\nThe counter is at 3."
    assert [result.text for turn in done.turns for result in turn.results] == ["5", "now 5"]
    assert done.outcome is Outcome.SOLVED
    assert {part.name: part.value for part in done.reward_parts} == {
        "world": 1.0,
        "tool:increment": 1.0,
    }
    assert made.module.CLOSED == [5]  # once, though two tools share it


async def test_a_row_picks_its_trl_environment(tmp_path: Path) -> None:
    spec = {"tools": [{"environment": {"counter": "task.py:Counter", "other": "task.py:Other"}}]}
    made = pack(tmp_path, spec, [row(environment="other")], task=TRL)
    done = await play(made, [call("speak", text="a"), call("read"), "5"])
    spoken, refused = answers(done)
    assert spoken == "A" and refused.startswith(
        'Bad tool call: unknown tool "read"; there are: speak.'
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (3, "a name or a mapping"),
        ({"nme": "a"}, "unknown keys: nme"),
        ({"description": "a"}, "needs a name"),
        (
            {"name": "sql", "config": {"row": 1}},
            "config takes: anywhere, database, memory_mb, rows",
        ),
        (
            {"name": "calculator", "parameters": {"x": "number"}},
            "calculator has no parameter x; it has expression",
        ),
        ({"class_name": "pathlib.Path"}, "neither a verl BaseTool nor a Tool"),
        ({"environment": "pathlib:Path"}, "needs reset"),
        ({"mcp": {"x": {"command": "a", "url": "b"}}}, "either a command or a url"),
        ({"mcp": {"x": {"command": "a", "sesion": "b"}}}, "unknown keys: sesion"),
        ({"mcp": {"mcp_servers_config_path": "missing.json"}}, "does not exist"),
        ({"mcp": {}}, "no MCP server is named"),
    ],
)
def test_entries_that_cannot_be(tmp_path: Path, entry: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tools([entry], tmp_path)
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_two_tools_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two tools are named 'finish'"):
        pack(tmp_path, {"tools": ["finish", {"name": "finish"}]}, [row()])


# --- verl's keys -----------------------------------------------------------------------------------------------------


def test_verls_keys_become_ours_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "actor_rollout_ref:\n  rollout:\n    response_length: 300\n    multi_turn:\n      max_assistant_turns: 3\n"
        "      max_user_turns: 2\n      max_parallel_calls: 1\n      max_tool_response_length: 900\n"
        "      tool_response_truncate_side: left\n"
    )
    config, sources = load_config([tmp_path / "a.yaml"], base=tmp_path)
    rollout = config.rollout
    assert (rollout.max_turns, rollout.max_user_turns, rollout.max_parallel_calls) == (3, 2, 1)
    assert (rollout.max_observation_chars, rollout.max_observation_tokens) == (900, 900)
    assert (rollout.truncate_side, rollout.response_tokens) == (
        "right",
        300,
    )  # verl names the side that stays
    assert sources["rollout.max_turns"] == f"file:{tmp_path}/a.yaml:5 (verl: max_assistant_turns)"
    again, _ = load_config([tmp_path / "a.yaml"], ["rollout.max_assistant_turns=9"], base=tmp_path)
    assert again.rollout.max_turns == 9
    ours, _ = load_config(
        [tmp_path / "a.yaml"], ["rollout.max_observation_tokens=50"], base=tmp_path
    )
    assert ours.rollout.max_observation_tokens == 50
    with pytest.raises(ConfigError, match=r"a\.yaml:5: unknown key actor_rollout_ref"):
        (tmp_path / "a.yaml").write_text(
            "\n\nactor_rollout_ref:\n  rollout:\n    max_asistant_turns: 3\n"
        )
        load_config([tmp_path / "a.yaml"], base=tmp_path)


async def test_limits_of_user_turns_characters_and_response(tmp_path: Path) -> None:
    made = pack(tmp_path, {"tools": [{"name": "sql"}]}, [row()])
    long = call("sql", query="SELECT 'abcdefghij' || 'klmnopqrst' AS x")
    cut = await play(made, [long, "5"], max_observation_chars=10, truncate_side="right")
    assert answers(cut) == ["x\nabcdefgh[… 12 characters cut …]"]
    assert cut.turns[-2].results[0].truncated
    once = await play(made, [long, long, "5"], max_user_turns=1)
    assert (
        once.outcome is Outcome.TRUNCATED_TURNS
        and sum(turn.role == "tool" for turn in once.turns) == 1
    )
    short = await play(made, [long, long, "5"], response_tokens=150)
    assert short.outcome is Outcome.TRUNCATED_TOKENS
    prompt = next(turn.start for turn in short.turns if turn.role == "assistant")
    assert len(short.tokens) - prompt == 150 + 1  # and the stop token that closes the turn


# --- tool_choice -----------------------------------------------------------------------------------------------------


async def test_tool_choice_none_and_auto(tmp_path: Path) -> None:
    made = pack(tmp_path, {"tools": ["calculator"]}, [row(tool_choice="none")])
    done = await play(made, [call("calculator", expression="2+3"), "5"])
    assert (
        done.turns[-2].results[0].error == "unknown_tool"
        and "calculator" not in done.turns[0].messages[0]["content"]
    )
    other = tmp_path / "other"
    other.mkdir()
    plain = await play(pack(other, {"tools": ["calculator"]}, [row(tool_choice="auto")]), ["5"])
    assert plain.outcome is Outcome.SOLVED and Origin.FORCED not in plain.tokens.origin[:-2]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "calculator"}}]
)
async def test_tool_choice_forces_the_beginning_of_a_call(tmp_path: Path, choice: Any) -> None:
    made = pack(tmp_path, {"tools": ["calculator", "finish"]}, [row(tool_choice=choice)])
    whole = call("calculator", expression="2+3")
    begins = (
        whole[: whole.index("calculator")]
        if choice == "required"
        else whole[: whole.index('{"expression')]
    )
    done = await play(made, [whole.removeprefix(begins), "5"])
    assert done.outcome is Outcome.SOLVED and answers(done) == ["5"]
    turn = next(turn for turn in done.turns if turn.role == "assistant")
    origin = done.tokens.origin[turn.start : turn.end]
    forced = len(CHAT.tokenizer.encode(begins))
    assert (origin[:forced] == Origin.FORCED).all() and origin[forced] == Origin.MODEL
    assert CHAT.decode(done.tokens.ids[turn.start : turn.start + forced].tolist()) == begins
    last = [turn for turn in done.turns if turn.role == "assistant"][-1]
    assert (
        done.tokens.origin[last.start] == Origin.MODEL
    )  # the second turn is free: else an episode could not end
    assert done.flags == ()


@pytest.mark.parametrize(
    "parser", ["hermes", "llama3_json", "mistral", "qwen3_coder", "glm", "deepseek"]
)
def test_every_parser_reads_a_call_that_was_begun_for_the_model(parser: str) -> None:
    from agentrl_cli.chat.tool_choice import forced_text

    chat = Chat(ByteTokenizer(), parser=parser)
    schemas = [tool.schema for tool in load_pack("calc-task").tools]
    whole = chat.parser.example("calculator", {"expression": "2+3"})
    for choice in ("required", {"type": "function", "function": {"name": "calculator"}}):
        begun = forced_text(chat, schemas, choice)
        assert begun and whole.startswith(begun)
        assert ("calculator" in begun) == (choice != "required")
    assert forced_text(chat, schemas, "auto") == forced_text(chat, (), "required") == ""
