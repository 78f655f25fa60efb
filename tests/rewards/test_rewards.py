"""Reward parts: numbers and texts of people's functions, and what must never become a zero.

Graders, tools, hooks and worlds that answer nothing, never answer, or would end the process.
"""

import asyncio
import contextlib
import gc
import json
import shutil
import signal
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import agentrl_cli
from agentrl_cli import (
    Config,
    Episode,
    Outcome,
    Pack,
    RewardPart,
    ScriptedPolicy,
    Task,
)
from agentrl_cli.envs.tool_env import Env, Step
from agentrl_cli.errors import ConfigError, EnvError, ModelError, NotFound, SandboxFault
from agentrl_cli.hooks import HookList
from agentrl_cli.hooks.threads import contain, in_thread, thread_metrics
from agentrl_cli.rewards import Reward, RewardContext, rules, score
from agentrl_cli.rewards.calls import _match_calls, _same
from agentrl_cli.rewards.judge import Judge
from agentrl_cli.rewards.llm_client import Asked, ask
from agentrl_cli.rewards.load import load_reward
from agentrl_cli.rewards.model import RewardModel
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.sandbox import Limits
from agentrl_cli.tools import ToolContext, as_tool
from agentrl_cli.tools.search import SearchTool
from agentrl_cli.tools.sql import SqlTool
from agentrl_cli.types import Message
from tests.helpers.chat import BYTES, CHAT
from tests.helpers.processes import soon
from tests.helpers.rewards import TASK, context, episode, value
from tests.helpers.train import (
    TASK_PY,
    after_training,
    episodes_of,
    settings,
    write_pack,
)
from tests.helpers.trees import episode as branched
from tests.helpers.trees import fork, sub_agent
from tests.helpers.web import calls, completion, served

EPISODE = Episode("e", "t")


async def test_functions_sync_and_async_in_order() -> None:
    async def slow(episode: Episode, ctx: RewardContext) -> float:
        return 0.25

    rewards = [
        Reward(
            "right",
            lambda episode, ctx: float(ctx.task.data["ground_truth"] in ctx.final_text),
            2.0,
            True,
        ),
        Reward("slow", slow, 0.5),
        Reward("skipped", lambda episode, ctx: None),
        Reward("said", lambda episode, ctx: ctx.part(1, "one")),
        Reward("pair", lambda episode, ctx: (0.5, "half")),
        Reward("whole", lambda episode, ctx: RewardPart("own name", 3.0, 0.0)),
        Reward("also", lambda episode, ctx: RewardPart("also", 0.0), 1.0, True),
    ]
    parts = await score(EPISODE, rewards, context())
    assert parts == (
        RewardPart("right", 1.0, 2.0, True),
        RewardPart("slow", 0.25, 0.5),
        RewardPart("said", 1.0, 1.0, False, "one"),
        RewardPart("pair", 0.5, 1.0, False, "half"),
        RewardPart("own name", 3.0, 0.0),
        RewardPart("also", 0.0, 1.0, True),  # primary, whatever the function makes of it
    )
    graded = EPISODE.with_(reward_parts=parts)
    assert graded.reward == pytest.approx(2.0 + 0.125 + 1.0 + 0.5) and graded.primary == 1.0
    assert await score(EPISODE, [], context()) == ()


@pytest.mark.parametrize(
    "answer",
    [True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1), np.array(1), torch.tensor(1.0)],
)
async def test_booleans_and_the_numbers_of_numpy_and_torch_count_as_numbers(answer: Any) -> None:
    found, _ = await value(lambda episode, ctx: answer)
    assert found == 1.0 and isinstance(found, float)
    assert await value(lambda episode, ctx: ctx.part(answer, "why")) == (1.0, "why")


class Unprintable:
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("grade", "said"),
    [
        *(
            (lambda answer=answer: answer, "'r'")
            for answer in (
                "1.0",
                float("nan"),
                float("inf"),
                [1],
                {"value": 1},
                (None, "x"),
                RewardPart("r", float("nan")),
            )
        ),
        (lambda: (1.0, Unprintable()), "'r' raised"),
        (lambda: 10**400, "'r' raised"),
        (lambda: 1 / 0, "'r' raised ZeroDivisionError"),
    ],
)
async def test_what_is_no_number_and_what_raises_is_an_error_of_the_grader(
    grade: Callable[[], Any], said: str
) -> None:
    with pytest.raises(EnvError, match=said) as caught:
        await value(lambda episode, ctx: grade())
    if "Zero" in said:
        assert "neither scored nor trained" in caught.value.hint
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- the sandbox -----------------------------------------------------------------------------------------------------


async def test_grading_opens_a_box_with_the_sessions_limits() -> None:
    asked: list[dict[str, Any]] = []

    async def start(**options: Any) -> None:
        asked.append(options)
        raise SandboxFault("No box could be started.")

    async def opened() -> Any:
        return SimpleNamespace(limits=Limits(), imports=(), sandbox=SimpleNamespace(session=start))

    with pytest.raises(SandboxFault):
        await context(open_session=opened).grade(
            "def f(): ...", [{"call": "f", "args": [], "expect": None}], wall=2.0
        )
    assert [(one["grading"], one["wall"]) for one in asked] == [(True, 2.0)]
    with pytest.raises(EnvError, match="no sandbox"):
        await context().session()


async def test_the_response_is_its_ids_decoded_or_without_a_tokenizer_its_texts() -> None:
    assert context().response(episode()) == "1 2 3 4 5 6"
    texts = context(decode=None)
    assert texts.response(episode()) == "\n5\nIt is 5."
    for tree in (branched(sub_agent()), branched(fork())):
        assert texts.response(tree) == "turn 1\nturn 4\nturn 5"


async def test_functions_by_path_with_keywords(tmp_path: Path) -> None:
    code = "def compute_score(episode, ctx, scale=1.0):\n    return scale\n"
    (tmp_path / "mine.py").write_text(code)
    mine = "mine.py:compute_score"
    reward = load_reward(tmp_path, "r", {"function": mine, "kwargs": {"scale": 0.25}}, {})
    assert (await score(episode(), [reward], context()))[0].value == 0.25
    wrong: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"function": "mine.py:compute"}, NotFound, "'compute'"),
        ({"wait": 1}, ConfigError, "No key in .*rewards.r named .wait."),
        ({"function": mine, "judge": {}}, ConfigError, "more than one"),
        ({"judge": None}, ConfigError, r"rewards\.r\.judge is empty"),
        ({"model": {}}, ConfigError, "model.name is missing"),
        ({"model": {"name": "x", "max_tokens": "many"}}, ConfigError, "max_tokens: .*integer"),
        ({"function": mine, "kwargs": [1]}, ConfigError, "kwargs: Input should be a valid dict"),
    )
    for given, error, words in wrong:
        with pytest.raises(error, match=words):
            load_reward(tmp_path, "r", given, {})


# --- rules -----------------------------------------------------------------------------------------------------------


MIXED = "```bash\nls\n```\nNow the code:\n```%s\nselect 1\n```\nso."
# A part of a rule, what it is given, and its answer.
PARTS: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
    *(
        (rules.final_number, (text,), number)
        for text, number in (
            ("so 1,234 then", "1234"),
            ("3 and\n#### -7.50 of 9", "-7.50"),
            ("a tip of $.50", ".50"),
            ("#### -.5", "-.5"),
            ("from 1..5", "5"),
            ("答案是－１２．５。", "-１２.５"),
            ("x = −3", "-3"),
            ("#### none", None),
            ("none", None),
        )
    ),
    *(
        (rules.same_number, (number, number), True)
        for number in ("1234", "-7.50", ".50", "-.5", "5", "-１２.５", "-3", "nan")
    ),
    # to the last digit
    (rules.same_number, ("121932631112635269.0", "121,932,631,112,635,269"), True),
    (rules.same_number, ("121932631112635268", "121932631112635269"), False),
    (rules.same_number, ("1", "one"), False),
    (rules.code_of, ("a\n```python\nx = 1\n```\nb",), "x = 1\n"),
    (rules.code_of, ("x",), "x"),
    (rules.code_of, (MIXED % "Python",), "select 1\n"),
    (rules.sql_of, (MIXED % "SQL",), "select 1"),
    (rules.sql_of, (MIXED % "",), "select 1"),
    # each call with its own, and texts are not lists
    (_match_calls, ([[0, 1], [0]],), {0: 1, 1: 0}),
    (_match_calls, ([[0], [0]],), {0: 0}),
    (_same, (["N", "Y"], "NY"), False),
    (_same, (["5"], "5"), False),
    (_same, ([1, "a"], [1.0, "A"]), True),
]


@pytest.mark.parametrize(("function", "given", "wanted"), PARTS)
def test_parts_of_rules(function: Callable[..., Any], given: tuple[Any, ...], wanted: Any) -> None:
    assert function(*given) == wanted


@pytest.mark.parametrize(
    ("rule", "data", "text", "expected"),
    [
        (rules.gsm8k, TASK.data, "It is 5.", 1.0),
        (rules.gsm8k, TASK.data, "It is 6.", 0.0),
        *(
            (rules.contains, {"gt": wanted}, text, expected)
            for wanted, text, expected in (
                (["5", "apple"], "An Apple and 5", 1.0),
                (["5", "apple"], "An apple and 15", 0.0),
                (["5", "apple"], "5", 0.0),
                (["－１．５"], "为－１．５度", 1.0),
                (["－１．５"], "-1.5", 1.0),
                (["－１．５"], "１．５", 0.0),
            )
        ),
        (rules.contains, {}, "5", "has no gt or"),
    ],
)
async def test_rules(rule: Any, data: Any, text: str, expected: float | str) -> None:
    ctx = RewardContext(Task("p/1", "p", "", "train", TASK.prompt, data), text)
    if isinstance(expected, str):
        with pytest.raises(EnvError, match=expected):
            await value(rule, ctx)
    else:
        assert (await value(rule, ctx))[0] == expected
        submitted = replace(ctx, final_text="Done.", state={"answer": text})
        assert (await value(rule, submitted))[0] == expected


@pytest.mark.parametrize(
    ("query", "text", "same"),
    [
        ("SELECT 3 UNION ALL SELECT 1", "SELECT 1.0 UNION ALL SELECT 3", True),
        ("SELECT 3 UNION ALL SELECT 1", "SELECT 3 UNION ALL SELECT 3", False),
        ("SELECT 1 AS a UNION SELECT 3 ORDER\nBY a", "SELECT 3 UNION ALL SELECT 1", False),
        ("SELECT 1 AS a UNION SELECT 3 ORDER BY a", "SELECT 1 UNION ALL SELECT 3.0", True),
    ],
)
async def test_rows_are_compared_by_value(query: str, text: str, same: bool) -> None:
    task = Task("p/1", "p", "", "train", TASK.prompt, {"query": query})
    with contextlib.closing(sqlite3.connect(":memory:", check_same_thread=False)) as connection:
        ctx = RewardContext(task, text, state={"sql": connection})
        assert (await value(rules.same_rows, ctx))[0] == float(same)


# --- judge -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[Any]:
    """An OpenAI-compatible endpoint; `answers` are what it says next: a text, a status, seconds of silence, or a whole
    answer, of which the last one stays. `at` are the settings of a judge that asks it.
    """

    def answer(path: str, asked: Any) -> Any:
        made.bodies.append(asked)
        answer = made.answers.pop(0) if len(made.answers) > 1 else made.answers[0]
        if isinstance(answer, str):
            return completion(answer, usage={"total_tokens": 10})
        if isinstance(answer, float):
            threading.Event().wait(answer)
            answer = 503
        return (answer, "busy") if isinstance(answer, int) else answer

    with served(answer) as url:
        given = {"url": f"{url}/v1", "model": "m"}
        made = SimpleNamespace(bodies=[], answers=[], at=lambda **settings: {**given, **settings})
        yield made


async def test_a_judge_scores_between_its_ends_and_is_asked_once(fake: Any, tmp_path: Path) -> None:
    fake.answers = [503, "Fine work.\nScore: 8"]
    given = fake.at(rubric="Grade the sum.", cache="c/judge.jsonl")
    reward = load_reward(tmp_path, "judged", {"judge": given, "weight": 0.5}, {})
    first, second = await asyncio.gather(*(score(episode(), [reward], context()) for _ in range(2)))
    (part,) = first
    assert first == second and (part.value, part.weight) == (0.8, 0.5)
    assert "Fine work." in part.detail
    assert len(fake.bodies) == 2  # the busy one, and its repetition
    asked = fake.bodies[-1]["messages"][0]["content"]
    for said in ("Grade the sum.", "[calls add {'a': 2}]", "tool: 5", "\n5\n====="):
        assert said in asked
    fake.answers = [500]
    assert (tmp_path / "c" / "judge.jsonl").is_file(), "beside task.yaml, wherever the command runs"
    again = Judge.of(given, "here", tmp_path)  # another process would read the file
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
    fake: Any, answers: list[Any], words: str
) -> None:
    fake.answers = answers
    rollout, jobs = rollout_of(Reward("judged", Judge.of(fake.at(retries=0), "here", Path())))
    (done,) = await rollout.run(jobs[:1])
    assert (done.outcome, done.reward_parts) == (Outcome.ENV_ERROR, ())
    assert words in done.error


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Score: -3", 0.2), ("**Score:** 5/5", 1.0), ("Score - 0", 0.5), ("Score: .5", 0.55)],
)
async def test_a_judge_may_score_below_zero(fake: Any, answer: str, expected: float) -> None:
    fake.answers = [answer]
    found, _ = await value(Judge.of(fake.at(low=-5, high=5), "here", Path()))
    assert found == pytest.approx(expected)


async def test_an_episode_that_is_cut_off_does_not_take_its_question_from_another(
    fake: Any,
) -> None:
    fake.answers = [0.5, "Score: 10"]
    asked, question = (
        Asked.of(fake.at(retries=1), "here", Path()),
        [{"role": "user", "content": "Well?"}],
    )
    first, second = (asyncio.ensure_future(ask(asked, question)) for _ in range(2))
    await asyncio.sleep(0.1)
    first.cancel()
    assert await second == "Score: 10" and first.cancelled()


async def test_a_judge_that_is_silent_or_answers_badly_is_asked_again(fake: Any) -> None:
    spoilt = {"choices": [{"message": {"content": "Score: 10"}}], "usage": {"total_tokens": "many"}}
    fake.answers = [{"error": "loading"}, 0.6, spoilt]
    judge = Judge.of(fake.at(timeout=0.2, retries=2), "here", Path())
    assert (await value(judge))[0] == 1.0 and len(fake.bodies) == 3
    fake.answers = [0.6]
    with pytest.raises(EnvError, match="n cannot be reached"):
        await value(Judge.of(fake.at(model="n", timeout=0.1, retries=1), "here", Path()))
    assert len(fake.bodies) == 5


@pytest.mark.parametrize(
    ("budget", "texts", "calls", "words"),
    [
        ({"budget_calls": 2}, "aab", 2, "budget of 2 calls"),  # the second "a" comes from memory
        ({"budget_tokens": 15, "cache": None}, "aa", 2, "budget of 15 tokens"),
    ],
)
async def test_budgets_of_calls_and_tokens(
    fake: Any, budget: dict[str, Any], texts: str, calls: int, words: str
) -> None:
    fake.answers, asked = ["Score: 1"], Asked.of(fake.at(**budget), "here", Path())
    for text in texts:
        assert await ask(asked, [{"role": "user", "content": text}]) == "Score: 1"
    assert asked.calls == calls
    with pytest.raises(EnvError, match=words):
        await ask(asked, [{"role": "user", "content": "c"}])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"uril": 1}, "No key in here named .uril."),
        ({"model": None}, "here.model is missing"),
        ({"url": "x"}, "not an HTTP address"),
        ({"concurrency": 0}, "concurrency: .* greater than or equal to 1"),
        ({"budget_calls": "few"}, "budget_calls: .*integer"),
        ({"low": 3, "high": 3}, "from low to high"),
        ({"low": "bad"}, "low: .*number"),
        ({"prompt": "{nothing}"}, "placeholder"),
    ],
)
def test_settings_of_a_judge_are_checked(bad: dict[str, Any], words: str) -> None:
    given = {"url": "http://x/v1", "model": "m", **bad}
    with pytest.raises(ConfigError, match=words):
        Judge.of(
            {name: value for name, value in given.items() if value is not None}, "here", Path()
        )


# --- reward model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    first, again = [(await value(raw.function))[0] for _ in range(2)]
    assert first == again and np.isfinite(first) and first != 0
    squashed, _ = await value(RewardModel(str(tiny), squash="sigmoid"))
    assert squashed == pytest.approx(1 / (1 + np.exp(-first)))


async def test_a_reward_model_gets_no_special_tokens_beside_its_template(
    tiny: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "rm")
    whole = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    text, other = ({"Sequence": {"id": id_, "type_id": 0}} for id_ in "AB")
    known = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    parts = {"single": [begin, text], "pair": [begin, text, other], "special_tokens": known}
    whole["post_processor"] = {"type": "TemplateProcessing", **parts}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    assert (await value(RewardModel(str(folder))))[0] == (await value(RewardModel(str(tiny))))[0]


async def test_a_reward_model_that_fails_masks_the_episode(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="takes 5"):
        await value(RewardModel(str(tiny), max_tokens=5))
    with pytest.raises(ModelError, match="cannot be loaded"):
        await value(RewardModel(str(tmp_path)))
    with pytest.raises(ConfigError, match=r"squash: .*.none. or .sigmoid."):
        RewardModel.of({"name": "x", "squash": "tanh"}, "here", tmp_path)


# --- graders that answer nothing, never answer, or would end the process ---


class Skipped(BaseException):
    """As a test framework's `skip()` raises it."""


ENDINGS = {
    "SystemExit: 3": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "Skipped: no": Skipped("no"),
    "CancelledError": None,
}


def rollout_of(
    *rewards: Reward, tools: tuple[Any, ...] = (), hooks: tuple[object, ...] = (), **limits: Any
) -> tuple[Rollout, list[Job]]:
    made = rewards or (Reward("right", lambda episode, ctx: 1.0),)
    pack = Pack.of("p", [{"prompt": "Go."}], made, tools=tools)
    config = Config.model_validate({"rollout": {"max_tokens": 2000, **limits}})
    replies = (
        ['<tool_call>\n{"name": "act", "arguments": {}}\n</tool_call>', "done"]
        if tools
        else ["done"]
    )
    rollout = Rollout(
        ScriptedPolicy(replies, BYTES), CHAT, {"p": pack}, config, hooks=HookList(hooks)
    )
    return rollout, [Job(pack.tasks("train")[0], seed=n, sample=n) for n in range(6)]


def in_world(world: type[Env], **limits: Any) -> tuple[Rollout, list[Job]]:
    rollout, jobs = rollout_of(**limits)
    module: Any = SimpleNamespace(make_env=lambda task: world())
    return rollout.with_(packs={"p": replace(rollout.context.packs["p"], module=module)}), jobs


def ends(words: str, *, later: bool) -> Callable[..., Any]:
    def end(sample: int) -> float:
        if sample == 1:
            raise ENDINGS[words] or asyncio.CancelledError()
        return 1.0

    async def coroutine(episode: Episode, ctx: Any) -> float:
        await asyncio.sleep(0)
        return end(episode.sample)

    return coroutine if later else lambda episode, ctx: end(episode.sample)


# --- what is not graded ----------------------------------------------------------------------------------------------


async def test_a_primary_reward_of_none_is_masked_counted_and_reported(
    tmp_path: Path, model: Path
) -> None:
    none = "    if episode.sample == 1:\n        return None\n    said ="
    write_pack(tmp_path, code=TASK_PY.replace("    said =", none, 1))
    async with after_training(tmp_path, model, algo={"drop_zero_variance": False}) as (
        trainer,
        run,
    ):
        found, step = episodes_of(trainer.store, run), trainer.store.runs.steps(run.id)[0]
        alerts = {a["name"]: a for a in trainer.store.journal.folded_alerts(run.id)}
    nothing = [e for e in found if e.sample == 1]
    masked = (Outcome.UNGRADED, "skipped:ungraded", None, None)
    assert {(e.outcome, e.fact, e.reward, e.advantage) for e in nothing} == {masked}
    assert "'even' is None" in nothing[0].error
    assert [part.name for part in nothing[0].reward_parts] == ["length"]
    assert {e.fact for e in found if e.sample != 1} == {"trained"}
    rest = [e.graded_reward for e in found if e.sample != 1 and e.step == 1]
    assert (step["ungraded/even"], step["reward"]) == (2, pytest.approx(np.mean(rest)))
    assert alerts["ungraded"]["value"] == 2 and "(even of 2)" in alerts["ungraded"]["text"]


# --- what would end the process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("words", ENDINGS)
async def test_a_grader_that_ends_the_process_masks_its_episode(words: str, later: bool) -> None:
    rollout, jobs = rollout_of(Reward("judge", ends(words, later=later)))
    found = await rollout.run(jobs)
    assert [e.outcome for e in found] == [Outcome.SOLVED, Outcome.ENV_ERROR, *[Outcome.SOLVED] * 4]
    assert f"The reward 'judge' raised {words}" in found[1].error and found[1].reward is None


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("words", ENDINGS)
async def test_a_tool_that_ends_the_process_masks_its_episode(words: str, later: bool) -> None:
    def act() -> str:
        """Act."""
        raise ENDINGS[words] or asyncio.CancelledError()

    async def acts() -> str:
        """Act."""
        await asyncio.sleep(0)
        return act()

    acts.__name__ = "act"
    rollout, jobs = rollout_of(tools=(acts if later else act,))
    (episode,) = await rollout.run(jobs[:1])
    assert episode.outcome is Outcome.ENV_ERROR and f"The tool act raised {words}" in episode.error


@pytest.mark.parametrize("words", ["SystemExit: 3", "KeyboardInterrupt", "Skipped: no"])
async def test_a_grader_s_task_that_ends_the_process_masks_its_episode(words: str) -> None:
    """asyncio lets SystemExit and KeyboardInterrupt of a task out of the event loop: the run ended without a word."""
    end = ends(words, later=True)
    forgotten: list[asyncio.Task[float]] = []

    async def grade(episode: Episode, ctx: Any) -> float:
        forgotten.append(asyncio.create_task(end(episode, ctx)))
        (value,) = await asyncio.gather(asyncio.create_task(end(episode, ctx)))
        return float(value)

    rollout, jobs = rollout_of(Reward("judge", grade))
    found = await rollout.run(jobs)
    assert [e.outcome for e in found] == [Outcome.SOLVED, Outcome.ENV_ERROR, *[Outcome.SOLVED] * 4]
    assert f"The reward 'judge' raised {words}" in found[1].error
    assert len(await asyncio.gather(*forgotten, return_exceptions=True)) == 6


def test_a_ctrl_c_of_the_user_is_not_the_code_s_own() -> None:
    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        for one in (signal.default_int_handler, handler):
            signal.signal(signal.SIGINT, one)
            with pytest.raises(KeyboardInterrupt), contain("The code"):
                signal.raise_signal(signal.SIGINT)
        with (
            pytest.raises(EnvError, match="The code raised KeyboardInterrupt"),
            contain("The code"),
        ):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


# --- what takes too long ---------------------------------------------------------------------------------------------


async def test_a_deadline_cuts_off_whatever_hangs() -> None:
    let = threading.Event()
    hook = SimpleNamespace(on_rollout_end=lambda rollout: let.wait())

    class World(Env):
        def reset(self, task: Task) -> list[Message]:  # type: ignore[override]
            let.wait()
            return list(task.prompt)

    try:
        by_reward, jobs = rollout_of(Reward("slow", lambda episode, ctx: let.wait(), timeout=0.2))
        (episode,) = await by_reward.run(jobs[:1])
        assert episode.outcome is Outcome.ENV_ERROR
        assert "'slow' took longer than 0.2 s" in episode.error
        for rollout, _ in (
            rollout_of(Reward("slow", lambda episode, ctx: let.wait()), episode_timeout=0.3),
            rollout_of(hooks=(hook,), episode_timeout=0.3),
            in_world(World, episode_timeout=0.3),
        ):
            (episode,) = await rollout.run(jobs[:1])
            assert (episode.outcome, episode.reward) == (Outcome.TIMEOUT, None)
        assert thread_metrics() == {"threads/abandoned": 4.0}
    finally:
        let.set()


async def test_an_exception_from_a_thread_frees_what_its_frames_hold() -> None:
    """At once, not at the next garbage collection: a socket that a tool was reading from, for instance."""

    class Held:
        pass

    def fails() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        raise ValueError("no")

    seen: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await in_thread(fails)
        assert await soon(lambda: seen[0]() is None)  # its thread is idle again
    finally:
        gc.enable()


async def test_a_world_of_plain_functions_runs_in_a_thread() -> None:
    seen: list[int] = []

    class World(Env):
        def reset(self, task: Task) -> list[Message]:  # type: ignore[override]
            seen.append(threading.get_ident())
            return list(task.prompt)

        def step(self, turn: Any) -> Step:  # type: ignore[override]
            seen.append(threading.get_ident())
            return Step(reward=1.0, terminated=True)

    rollout, jobs = in_world(World)
    (episode,) = await rollout.run(jobs[:1])
    assert episode.outcome is Outcome.SOLVED and RewardPart("env", 1.0, 0.0) in episode.reward_parts
    assert len(seen) == 2 and threading.get_ident() not in seen


async def test_a_grader_that_needs_the_main_thread_gets_it() -> None:
    """`signal.alarm` is how other projects' graders bound their time."""

    def alarmed(episode: Episode, ctx: Any) -> float:
        before = signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.signal(signal.SIGALRM, before)
        return 1.0

    assert await value(alarmed) == (1.0, "")


# --- tools and commands ----------------------------------------------------------------------------------------------


async def test_an_object_without_a_text_form_is_an_error() -> None:
    class Said:
        def __str__(self) -> str:
            return "said"

    def give() -> Any:
        """Give."""
        return values.pop(0)

    values: list[Any] = [Said(), {"n": Said()}, object(), [object()], iter("ab")]
    said, nested, *wrong = [await as_tool(give).call(ToolContext(), {}) for _ in range(5)]
    assert (said.text, nested.text) == ('"said"', '{"n": "said"}')
    for answer in wrong:
        assert answer.error == "exception" and "0x" not in answer.text
        assert "has no text form" in answer.text


def test_a_script_s_stdout_is_its_own(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    short = {"group_size": 2, "prompts_per_step": 1, "max_new_tokens": 4}
    config = Config.model_validate(settings(model, rollout=short, train={"steps": 1}))
    pack = Pack.of("p", [{"prompt": "Go."}], [Reward("n", lambda e, ctx: float(e.sample))])
    agentrl_cli.train(config, packs=[pack], project=tmp_path)
    out, err = capfd.readouterr()
    assert out == "" and "step 1/1" in err


async def test_a_database_larger_than_its_memory_is_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "large.db"
    with contextlib.closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE t AS SELECT 1 AS n, zeroblob(3000000) AS padding")
    before, tool = path.stat().st_mtime_ns, SqlTool(str(path), memory_mb=1)
    read, *refused = await calls(
        tool,
        {"query": "SELECT n FROM t"},
        {"query": "UPDATE t SET n = 2"},
        {"query": "CREATE TEMP TABLE u (a)"},
        {"query": "ATTACH ':memory:' AS x"},
    )
    assert read.text == "n\n1" and [result.error for result in refused] == ["refused"] * 3
    assert path.stat().st_mtime_ns == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(EnvError, match="database or disk is full") as caught:
        await calls(SqlTool(str(path), memory_mb=1, writable=True))
    assert "memory_mb" in caught.value.hint


async def test_search_finds_chinese_japanese_and_korean(tmp_path: Path) -> None:
    texts = {
        "土星的卫星": "土星最大的卫星是土卫六。",
        "秘鲁有哪些河流": "秘鲁的河流很多。",
        "日本の首都": "東京は日本の首都です。",
        "한국의 수도": "서울은 한국의 수도이다.",
        "titan moon": "The moon Titan.",
        "zebra 飞机": "No passage",
    }
    rows = [json.dumps({"text": text}) + "\n" for text in [*texts.values()][:-1]]
    (tmp_path / "c.jsonl").write_text("".join(rows))
    asked = ({"query": query, "top_k": 1} for query in texts)
    found = await calls(SearchTool("c.jsonl").at(tmp_path), *asked)
    for result, text in zip(found, texts.values(), strict=True):
        assert text in result.text
