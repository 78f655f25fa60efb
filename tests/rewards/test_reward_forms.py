"""Reward functions of verl and TRL unchanged, rewards by rule, by a judge, by a reward model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.config import Config, SandboxConfig
from agentrl_cli.errors import ConfigError, EnvError, ModelError, NotFound
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rewards import Reward, RewardContext, rules, score
from agentrl_cli.rewards.judge import Judge
from agentrl_cli.rewards.llm_client import Asked, ask
from agentrl_cli.rewards.load import load_reward
from agentrl_cli.rewards.model import RewardModel
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode, Origin, Outcome, Task, Tokens, ToolResult, Turn
from tests.helpers.web import completion, served

TASK = Task(
    "p/1",
    "p",
    "math",
    "train",
    ({"role": "user", "content": "2 + 3?"},),
    {"data_source": "gsm8k", "ground_truth": "5", "extra_info": {"index": 7}, "solution": "5"},
)


def episode() -> Episode:
    """Asked, called a tool, answered 5; ids 0…8, the model's own are 1, 2, 5 and 6."""
    origin = [
        Origin.USER,
        Origin.MODEL,
        Origin.MODEL,
        Origin.TOOL,
        Origin.TOOL,
        Origin.MODEL,
        Origin.MODEL,
    ]
    call: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    turns = (
        Turn(0, "user", tuple(TASK.prompt), 0, 1),
        Turn(1, "assistant", (said,), 1, 3),
        Turn(
            2,
            "tool",
            ({"role": "tool", "content": "5"},),
            3,
            5,
            results=(ToolResult("5", reward=0.25),),
        ),
        Turn(3, "assistant", ({"role": "assistant", "content": "It is 5."},), 5, 7),
    )
    return Episode("e", "p/1", turns=turns, tokens=Tokens.given(range(7), origin), step=4)


def context(**changes: Any) -> RewardContext:
    plain = {"final_text": "It is 5.", "decode": lambda ids: " ".join(map(str, ids)), **changes}
    return RewardContext(TASK, **plain)


async def value(
    function: Callable[..., Any], ctx: RewardContext | None = None
) -> tuple[float, str]:
    (part,) = await score(episode(), [Reward("r", function)], ctx or context())
    return part.value, part.detail


# --- verl and TRL ----------------------------------------------------------------------------------------------------


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

    assert await value(compute_score) == (0.5, "")
    assert await value(named) == (1.0, "acc True, extra ['extra_info']")
    with pytest.raises(EnvError, match="needs `score`"):
        await value(lambda solution_str, ground_truth: {"acc": 1})


async def test_without_a_tokenizer_the_response_is_its_texts() -> None:
    def compute_score(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == "\n5\nIt is 5.")

    assert await value(compute_score, context(decode=None)) == (1.0, "")


async def test_trls_reward_functions() -> None:
    def accuracy(completions: Any, solution: list[str], **kwargs: Any) -> list[float]:
        assert kwargs["prompts"] == [list(TASK.prompt)] and kwargs["completion_ids"] == [
            [1, 2, 3, 4, 5, 6]
        ]
        assert [message["role"] for message in completions[0]] == ["assistant", "tool", "assistant"]
        assert kwargs["trainer_state"].global_step == 4 and kwargs["ground_truth"] == ["5"]
        kwargs["log_metric"]("seen", 1)
        return [float(solution[0] in completions[0][-1]["content"])]

    async def slow(completions: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [None]

    assert await value(accuracy) == (1.0, "seen 1")
    assert await score(episode(), [Reward("r", slow)], context()) == ()  # not applicable: no part
    with pytest.raises(EnvError, match="a list of one number"):
        await value(lambda completions: [1.0, 2.0])


async def test_functions_by_path_with_keywords(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from verl.utils.rollout_trace import rollout_trace_op\n"
        "@rollout_trace_op\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):\n    return scale\n"
    )
    reward = load_reward(
        tmp_path, "r", {"function": "mine.py:compute_score", "kwargs": {"scale": 0.25}}, {}
    )
    assert (await score(episode(), [reward], context()))[0].value == 0.25
    with pytest.raises(NotFound, match="'compute'"):
        load_reward(tmp_path, "r", {"function": "mine.py:compute"}, {})
    with pytest.raises(ConfigError, match="unknown keys: wait"):
        load_reward(tmp_path, "r", {"wait": 1}, {})
    with pytest.raises(ConfigError, match="more than one"):
        load_reward(tmp_path, "r", {"function": "mine.py:compute_score", "judge": {}}, {})


async def test_in_a_rollout_verls_function_sees_the_response_without_control_tokens() -> None:
    seen: list[str] = []

    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> float:
        seen.append(solution_str)
        return float(ground_truth in solution_str)

    row = {"prompt": [{"role": "user", "content": "2 + 3?"}], "reward_model": {"ground_truth": "5"}}
    pack = Pack.of("p", [row], [Reward("r", compute_score)])
    chat = Chat(ByteTokenizer())
    rollout = Rollout(ScriptedPolicy(["It is 5."], chat.tokenizer), chat, {"p": pack}, Config())
    done = await rollout.episode(Job(pack.tasks("train")[0], 1))
    assert done.outcome is Outcome.SOLVED and seen[0].strip() == "It is 5."


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1,234 then", "1234"),
        ("3 and\n#### -7.50 of 9", "-7.50"),
        ("#### none", None),
        ("none", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert rules.final_number(text) == number


async def test_rules() -> None:
    assert (await value(rules.gsm8k))[0] == 1.0
    assert (await value(rules.gsm8k, context(final_text="It is 6.")))[0] == 0.0
    wanted = Task("p/1", "p", "", "train", TASK.prompt, {"gt": ["5", "apple"]})
    texts = {"An Apple and 5": 1.0, "An apple and 15": 0.0, "5": 0.0}
    for text, expected in texts.items():
        assert (await value(rules.contains, RewardContext(wanted, text)))[0] == expected
    with pytest.raises(EnvError, match="has no gt or"):
        await value(rules.contains, RewardContext(Task("p/1", "p", "", "train", TASK.prompt), "5"))
    assert rules.code_of("a\n```python\nx = 1\n```\nb") == "x = 1\n" and rules.code_of("x") == "x"


HUMANEVAL = {
    "task_id": "HumanEval/9000",
    "prompt": "import math\n\n\ndef half(n):\n    return n / 2\n\n\ndef area(r: float) -> float:\n"
    '    """ Half of a circle of radius r.\n    >>> round(area(1), 2)\n    1.57\n    """\n',
    "entry_point": "area",
    "canonical_solution": "    return half(math.pi * r * r)\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert abs(candidate(1) - 1.5708) < 1e-3\n"
    "    assert candidate(0) == 0\n",
}


async def test_humanevals_tests_decide_in_the_sandbox() -> None:
    """The published form: what the prompt begins may be continued, or written again without its imports."""
    pack = Pack.of("he", [HUMANEVAL], [Reward("passes", rules.humaneval)], sandbox=True)
    (task,) = pack.tasks("train")
    whole = "def area(r):\n    return half(math.pi * r * r)\n"
    said = {
        HUMANEVAL["canonical_solution"]: 1.0,
        f"I would write:\n```python\n{whole}```\nas asked.": 1.0,
        f"```python\nimport math\n{whole}```": 1.0,
        "```python\ndef area(r):\n    return 0\n```": 0.0,
        "```python\nprint('passed')\nraise SystemExit\ndef area(r):\n    return 0\n```": 0.0,
        "no code": 0.0,
    }
    async with await Sandbox.open(SandboxConfig(workers=1, wall=2.0)) as sandbox:
        session = await sandbox.session(seed=0)

        async def open_session() -> Any:
            return session

        for text, expected in said.items():
            ctx = RewardContext(task, text, open_session)
            (part,) = await score(episode(), pack.rewards, ctx)
            assert (part.value, part.fakeable) == (expected, True), (text, part)
            assert bool(part.detail) == (expected == 0.0)
        await session.close()
    with pytest.raises(EnvError, match="has no entry_point"):
        await value(rules.humaneval, context(final_text="x"))


# --- judge -----------------------------------------------------------------------------------------------------------


class Fake:
    """An OpenAI-compatible endpoint that returns given answers."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        """What to answer next: a text, a status, seconds of silence, or a whole answer; the last one stays."""

    def answer(self, path: str, asked: Any) -> Any:
        self.bodies.append(asked)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, str):
            return completion(answer, usage={"total_tokens": 10})
        if isinstance(answer, float):
            threading.Event().wait(answer)
            answer = 503
        return (answer, "busy") if isinstance(answer, int) else answer


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    with served(made.answer) as url:
        made.url = f"{url}/v1"
        yield made


async def test_a_judge_scores_between_its_ends_and_is_asked_once(
    fake: Fake, tmp_path: Path
) -> None:
    fake.answers = [503, "Fine work.\nScore: 8"]
    given = {
        "url": fake.url,
        "model": "m",
        "rubric": "Grade the sum.",
        "cache": str(tmp_path / "c" / "judge.jsonl"),
    }
    reward = load_reward(tmp_path, "judged", {"judge": given, "weight": 0.5}, {})
    first, second = await asyncio.gather(*(score(episode(), [reward], context()) for _ in range(2)))
    assert (
        first == second
        and first[0].value == 0.8
        and first[0].weight == 0.5
        and "Fine work." in first[0].detail
    )
    assert len(fake.bodies) == 2  # the busy one, and its repetition
    asked = fake.bodies[-1]["messages"][0]["content"]
    assert (
        "Grade the sum." in asked
        and "[calls add {'a': 2}]" in asked
        and "tool: 5" in asked
        and "\n5\n=====" in asked
    )
    fake.answers = [500]
    again = Judge.of(given, "here")  # another process would read the file
    assert (await value(again))[0] == 0.8 and len(fake.bodies) == 2


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (["I like it."], "gave no score"),
        (["Score: 11"], "not between 0 and 10"),
        ([500], "cannot be reached"),
        ([{"choices": []}], "has no choices"),
        ([{"choices": [{"message": {"content": None}}]}], "answered no text"),
        ([{"choices": [{"message": {"content": "Score: 5 \ud800"}}]}], "answered no text"),
    ],
)
async def test_a_judge_that_fails_masks_the_episode(
    fake: Fake, answers: list[Any], words: str
) -> None:
    fake.answers = answers
    judge = Judge.of({"url": fake.url, "model": "m", "retries": 0}, "here")
    with pytest.raises(EnvError, match=words):
        await value(judge)
    pack = Pack.of("p", [{"prompt": "2 + 3?"}], [Reward("judged", judge)])
    chat = Chat(ByteTokenizer())
    rollout = Rollout(ScriptedPolicy(["5"], chat.tokenizer), chat, {"p": pack}, Config())
    done = await rollout.episode(Job(pack.tasks("train")[0], 1))
    assert (
        done.outcome is Outcome.ENV_ERROR
        and done.reward_parts == ()
        and words.split(maxsplit=1)[0] in done.error
    )


async def test_a_judge_whose_answer_is_bad_is_asked_again(fake: Fake) -> None:
    """A 200 without a text is a failure of the server like any other; what it counts does not matter."""
    spoilt = {"choices": [{"message": {"content": "Score: 10"}}], "usage": {"total_tokens": "many"}}
    fake.answers = [{"error": "loading"}, spoilt]
    judge = Judge.of({"url": fake.url, "model": "m", "retries": 1}, "here")
    assert (await value(judge))[0] == 1.0 and len(fake.bodies) == 2


async def test_an_episode_that_is_cut_off_does_not_take_its_question_from_another(
    fake: Fake,
) -> None:
    fake.answers = [0.5, "Score: 10"]
    asked = Asked.of({"url": fake.url, "model": "m", "retries": 1}, "here")
    question = [{"role": "user", "content": "Well?"}]
    first, second = (asyncio.ensure_future(ask(asked, question)) for _ in range(2))
    await asyncio.sleep(0.1)
    first.cancel()
    assert await second == "Score: 10" and first.cancelled()


async def test_a_judge_that_is_silent_is_given_up_and_asked_again(fake: Fake) -> None:
    judge = Judge.of({"url": fake.url, "model": "m", "timeout": 0.2, "retries": 1}, "here")
    fake.answers = [0.6, "Score: 10"]
    assert (await value(judge))[0] == 1.0 and len(fake.bodies) == 2
    fake.answers = [0.6]
    other = Judge.of({"url": fake.url, "model": "n", "timeout": 0.1, "retries": 1}, "here")
    with pytest.raises(EnvError, match="n cannot be reached"):
        await value(other)
    assert len(fake.bodies) == 4


async def test_budgets_of_calls_and_tokens(fake: Fake) -> None:
    fake.answers = ["Score: 1"]
    calls = Asked.of({"url": fake.url, "model": "m", "budget_calls": 2}, "here")
    tokens = Asked.of({"url": fake.url, "model": "m", "budget_tokens": 15, "cache": None}, "here")
    for text in ("a", "a", "b"):
        assert await ask(calls, [{"role": "user", "content": text}]) == "Score: 1"
    assert calls.calls == 2  # the second "a" came from memory
    with pytest.raises(EnvError, match="budget of 2 calls"):
        await ask(calls, [{"role": "user", "content": "c"}])
    for _ in range(2):
        await ask(tokens, [{"role": "user", "content": "a"}])
    with pytest.raises(EnvError, match="budget of 15 tokens"):
        await ask(tokens, [{"role": "user", "content": "a"}])


def test_settings_of_a_judge_are_checked() -> None:
    good = {"url": "http://x/v1", "model": "m"}
    for bad, words in (
        ({**good, "uril": 1}, "unknown keys: uril"),
        ({"url": "http://x/v1"}, "model missing"),
        ({**good, "url": "x"}, "not an HTTP address"),
        ({**good, "low": 3, "high": 3}, "from low to high"),
        ({**good, "prompt": "{nothing}"}, "placeholder"),
    ):
        with pytest.raises(ConfigError, match=words):
            Judge.of(bad, "here")


# --- reward model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sequence classifier with one output, and the bundled tokenizer."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from agentrl_cli.paths import bundled_model

    folder = tmp_path_factory.mktemp("rm")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (bundled_model() / name).is_file():
            shutil.copy(bundled_model() / name, folder / name)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 4096,
    }
    shape |= {
        "num_attention_heads": 2,
        "num_labels": 1,
        "pad_token_id": 0,
        "max_position_embeddings": 256,
    }
    make: Any = LlamaForSequenceClassification
    make(LlamaConfig(**shape)).save_pretrained(folder)
    return folder


async def test_a_reward_model_scores_the_conversation(tiny: Path) -> None:
    raw = load_reward(tiny.parent, "liked", {"model": {"name": tiny.name}}, {})
    squashed = RewardModel(str(tiny), squash="sigmoid")
    first, again = (await value(raw.function))[0], (await value(raw.function))[0]
    assert first == again and np.isfinite(first) and first != 0
    assert (await value(squashed))[0] == pytest.approx(1 / (1 + np.exp(-first)))


async def test_a_reward_model_that_fails_masks_the_episode(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="takes 5"):
        await value(RewardModel(str(tiny), max_tokens=5))
    with pytest.raises(ModelError, match="cannot be loaded"):
        await value(RewardModel(str(tmp_path)))
    with pytest.raises(ConfigError, match="none or sigmoid"):
        RewardModel("x", squash="tanh")
    with pytest.raises(ConfigError, match="name missing"):
        load_reward(tmp_path, "r", {"model": {}}, {})
