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

import agentrl_cli
from agentrl_cli import (
    ByteTokenizer,
    Chat,
    Config,
    Episode,
    Outcome,
    Pack,
    RewardPart,
    ScriptedPolicy,
    Store,
    Task,
)
from agentrl_cli.envs.tool_env import Env, Step
from agentrl_cli.errors import ConfigError, EnvError, ModelError, NotFound, SandboxFault
from agentrl_cli.hooks import Hook, HookList
from agentrl_cli.hooks.threads import contain, in_thread, thread_metrics
from agentrl_cli.rewards import Reward, RewardContext, Scored, rules, score
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
from tests.helpers.cli import Cli
from tests.helpers.processes import soon
from tests.helpers.rewards import TASK, context, episode, value
from tests.helpers.train import (
    TASK_PY,
    after_training,
    episodes_of,
    settings,
    write_pack,
    write_project,
)
from tests.helpers.trees import episode as branched
from tests.helpers.trees import fork, sub_agent
from tests.helpers.web import completion, served

EPISODE = Episode("e", "t")


def one(function: Any, weight: float = 1.0) -> list[Reward]:
    return [Reward("part", function, weight, True)]


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
    ]
    parts = await score(EPISODE, rewards, context())
    assert parts == (
        RewardPart("right", 1.0, 2.0, True),
        RewardPart("slow", 0.25, 0.5),
        RewardPart("said", 1.0, 1.0, False, "one"),
        RewardPart("pair", 0.5, 1.0, False, "half"),
        RewardPart("own name", 3.0, 0.0),
    )
    graded = EPISODE.with_(reward_parts=parts)
    assert graded.reward == pytest.approx(2.0 + 0.125 + 1.0 + 0.5) and graded.primary == 1.0
    assert await score(EPISODE, [], context()) == ()


@pytest.mark.parametrize(
    "answer", [True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1), np.float64(1)]
)
async def test_booleans_and_the_numbers_of_numpy_count_as_numbers(answer: Any) -> None:
    (part,) = await score(EPISODE, one(lambda episode, ctx: answer), context())
    assert part.value == 1.0 and isinstance(part.value, float)
    (part,) = await score(EPISODE, one(lambda episode, ctx: ctx.part(answer, "why")), context())
    assert (part.value, part.detail) == (1.0, "why")


async def test_a_primary_part_stays_primary_whatever_the_function_makes_of_it() -> None:
    rewards = [Reward("right", lambda episode, ctx: RewardPart("right", 1.0), 1.0, True)]
    assert (await score(EPISODE, rewards, context()))[0].primary


@pytest.mark.parametrize(
    "answer",
    [
        "1.0",
        float("nan"),
        float("inf"),
        [1],
        {"value": 1},
        (None, "x"),
        RewardPart("part", float("nan")),
    ],
)
async def test_what_is_no_number_is_an_error_of_the_grader(answer: Any) -> None:
    with pytest.raises(EnvError, match="'part'"):
        await score(EPISODE, one(lambda episode, ctx: answer), context())


async def test_a_number_whose_text_would_end_the_process_is_an_error_of_the_grader() -> None:
    class Detail:
        def __str__(self) -> str:
            raise SystemExit(3)

    for answer in ((1.0, Detail()), 10**400):
        with pytest.raises(EnvError, match="'part' raised"):
            await score(EPISODE, one(lambda episode, ctx, answer=answer: answer), context())


async def test_a_function_that_raises_is_named() -> None:
    def broken(episode: Episode, ctx: RewardContext) -> float:
        return 1 / 0

    with pytest.raises(EnvError, match="'part' raised ZeroDivisionError") as caught:
        await score(EPISODE, one(broken), context())
    assert "neither scored nor trained" in caught.value.hint
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- the sandbox -----------------------------------------------------------------------------------------------------


class FaultySandbox:
    """A session, and the sandbox that it belongs to, which starts no further box."""

    limits, imports = Limits(), ()

    def __init__(self) -> None:
        self.sandbox, self.asked = self, list[dict[str, Any]]()

    async def session(self, **options: Any) -> None:
        self.asked.append(options)
        raise SandboxFault("No box could be started.")


async def test_grading_opens_a_box_with_the_sessions_limits() -> None:
    session, opened = FaultySandbox(), list[int]()

    async def open_session() -> FaultySandbox:
        opened.append(1)
        return session

    ctx = context(open_session=open_session)
    assert opened == []
    with pytest.raises(SandboxFault):
        await ctx.grade("def f(): ...", [{"call": "f", "args": [], "expect": None}], wall=2.0)
    assert opened == [1] and session.asked[0]["grading"] and session.asked[0]["wall"] == 2.0


async def test_a_fault_of_the_sandbox_is_not_a_failed_test() -> None:
    async def open_session() -> FaultySandbox:
        return FaultySandbox()

    async def tests(episode: Episode, ctx: RewardContext) -> float:
        return float((await ctx.grade("", [])).passed)

    with pytest.raises(SandboxFault):
        await score(EPISODE, one(tests), context(open_session=open_session))


async def test_a_run_without_a_sandbox_reports_it() -> None:
    with pytest.raises(EnvError, match="no sandbox"):
        await context().session()


def test_scored_has_a_text() -> None:
    assert Scored(1.0) == (1.0, "") and context().part(0.5, "why") == Scored(0.5, "why")


async def test_the_response_is_its_ids_decoded_or_without_a_tokenizer_its_texts() -> None:
    assert context().response(episode()) == "1 2 3 4 5 6"
    texts = context(decode=None)
    assert texts.response(episode()) == "\n5\nIt is 5."
    one = branched(sub_agent())
    assert one.main.turns == (0, 1, 4, 5)
    for tree in (one, branched(fork())):
        assert texts.response(tree) == "turn 1\nturn 4\nturn 5"


async def test_functions_by_path_with_keywords(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(episode, ctx, scale=1.0):\n    return scale\n"
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
    mixed = "```bash\nls\n```\nNow the code:\n```%s\nselect 1\n```\nso."
    assert rules.code_of(mixed % "Python") == "select 1\n"
    assert rules.sql_of(mixed % "SQL") == "select 1" == rules.sql_of(mixed % "")


async def test_rows_are_compared_by_value() -> None:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    for query, text, expected in (
        ("SELECT 3 UNION ALL SELECT 1", "SELECT 1.0 UNION ALL SELECT 3", 1.0),
        ("SELECT 3 UNION ALL SELECT 1", "SELECT 3 UNION ALL SELECT 3", 0.0),
        ("SELECT 1 AS a UNION SELECT 3 ORDER\nBY a", "SELECT 3 UNION ALL SELECT 1", 0.0),
        ("SELECT 1 AS a UNION SELECT 3 ORDER BY a", "SELECT 1 UNION ALL SELECT 3.0", 1.0),
    ):
        task = Task("p/1", "p", "", "train", TASK.prompt, {"query": query})
        ctx = RewardContext(task, text, state={"sql": connection})
        assert (await value(rules.same_rows, ctx))[0] == expected
    connection.close()


# --- judge -----------------------------------------------------------------------------------------------------------


class Fake:
    """An OpenAI-compatible endpoint that returns given answers."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        # What to answer next: a text, a status, seconds of silence, or a whole answer; the last
        # one stays.
        self.answers: list[Any] = []

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
        "cache": "c/judge.jsonl",
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
    fake: Fake, answers: list[Any], words: str
) -> None:
    fake.answers = answers
    judge = Judge.of({"url": fake.url, "model": "m", "retries": 0}, "here", Path())
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("Score: -3", 0.2), ("**Score:** 5/5", 1.0), ("Score - 0", 0.5), ("Score: .5", 0.55)],
)
async def test_a_judge_may_score_below_zero(fake: Fake, answer: str, expected: float) -> None:
    fake.answers = [answer]
    judge = Judge.of({"url": fake.url, "model": "m", "low": -5, "high": 5}, "here", Path())
    assert (await value(judge))[0] == pytest.approx(expected)


async def test_a_judge_whose_answer_is_bad_is_asked_again(fake: Fake) -> None:
    spoilt = {"choices": [{"message": {"content": "Score: 10"}}], "usage": {"total_tokens": "many"}}
    fake.answers = [{"error": "loading"}, spoilt]
    judge = Judge.of({"url": fake.url, "model": "m", "retries": 1}, "here", Path())
    assert (await value(judge))[0] == 1.0 and len(fake.bodies) == 2


async def test_an_episode_that_is_cut_off_does_not_take_its_question_from_another(
    fake: Fake,
) -> None:
    fake.answers = [0.5, "Score: 10"]
    asked = Asked.of({"url": fake.url, "model": "m", "retries": 1}, "here", Path())
    question = [{"role": "user", "content": "Well?"}]
    first, second = (asyncio.ensure_future(ask(asked, question)) for _ in range(2))
    await asyncio.sleep(0.1)
    first.cancel()
    assert await second == "Score: 10" and first.cancelled()


async def test_a_judge_that_is_silent_is_given_up_and_asked_again(fake: Fake) -> None:
    judge = Judge.of({"url": fake.url, "model": "m", "timeout": 0.2, "retries": 1}, "here", Path())
    fake.answers = [0.6, "Score: 10"]
    assert (await value(judge))[0] == 1.0 and len(fake.bodies) == 2
    fake.answers = [0.6]
    other = Judge.of({"url": fake.url, "model": "n", "timeout": 0.1, "retries": 1}, "here", Path())
    with pytest.raises(EnvError, match="n cannot be reached"):
        await value(other)
    assert len(fake.bodies) == 4


async def test_budgets_of_calls_and_tokens(fake: Fake) -> None:
    fake.answers = ["Score: 1"]
    calls = Asked.of({"url": fake.url, "model": "m", "budget_calls": 2}, "here", Path())
    tokens = Asked.of(
        {"url": fake.url, "model": "m", "budget_tokens": 15, "cache": None}, "here", Path()
    )
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
        ({**good, "concurrency": 0}, "concurrency. must be at least 1"),
        ({**good, "low": 3, "high": 3}, "from low to high"),
        ({**good, "prompt": "{nothing}"}, "placeholder"),
    ):
        with pytest.raises(ConfigError, match=words):
            Judge.of(bad, "here", Path())


# --- reward model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    with pytest.raises(ConfigError, match="none or sigmoid"):
        RewardModel("x", squash="tanh")
    with pytest.raises(ConfigError, match="name missing"):
        load_reward(tmp_path, "r", {"model": {}}, {})


# --- graders that answer nothing, never answer, or would end the process ---

CALL = '<tool_call>\n{"name": "act", "arguments": {}}\n</tool_call>'


class Skipped(BaseException):
    """As a test framework's `skip()` raises it."""


ENDINGS = {
    "SystemExit: 3": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "Skipped: no": Skipped("no"),
    "CancelledError": None,
}


def right(episode: Episode, ctx: Any) -> float:
    return 1.0


def rollout_of(
    *rewards: Reward, tools: tuple[Any, ...] = (), hooks: tuple[object, ...] = (), **limits: Any
) -> tuple[Rollout, list[Job]]:
    made = rewards or (Reward("right", right),)
    pack = Pack.of("p", [{"prompt": "Go."}], made, tools=tools)
    config = Config.model_validate({"rollout": {"max_tokens": 2000, **limits}})
    replies = [CALL, "done"] if tools else ["done"]
    rollout = Rollout(
        ScriptedPolicy(replies, BYTES), CHAT, {"p": pack}, config, hooks=HookList(hooks)
    )
    return rollout, [Job(pack.tasks("train")[0], seed=n, sample=n) for n in range(6)]


def in_world(rollout: Rollout, world: type[Env]) -> Rollout:
    module: Any = SimpleNamespace(make_env=lambda task: world())
    return rollout.with_(packs={"p": replace(rollout.context.packs["p"], module=module)})


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
    code = TASK_PY.replace(
        "    said =", "    if episode.sample == 1:\n        return None\n    said =", 1
    )
    write_pack(tmp_path, code=code)
    async with after_training(tmp_path, model, algo={"drop_zero_variance": False}) as (
        trainer,
        run,
    ):
        store = trainer.store
        found = episodes_of(store, run)
        nothing = [e for e in found if e.sample == 1]
        assert {(e.outcome, e.fact, e.reward, e.advantage) for e in nothing} == {
            (Outcome.UNGRADED, "skipped:ungraded", None, None)
        }
        assert "'even' is None" in nothing[0].error and [
            p.name for p in nothing[0].reward_parts
        ] == ["length"]
        assert {e.fact for e in found if e.sample != 1} == {"trained"}
        step = store.runs.steps(run.id)[0]
        rest = [e.graded_reward for e in found if e.sample != 1 and e.step == 1]
        assert step["ungraded/even"] == 2 and step["reward"] == pytest.approx(sum(rest) / len(rest))
        alert = next(a for a in store.journal.alerts(run.id) if a["name"] == "ungraded")
    assert alert["value"] == 2 and "(even of 2)" in alert["text"]


async def test_another_part_that_is_none_is_left_out_with_its_weight() -> None:
    parts = (
        Reward("right", right, primary=True),
        Reward("style", lambda episode, ctx: None, weight=0.5),
    )
    rollout, jobs = rollout_of(*parts)
    (episode,) = await rollout.run(jobs[:1])
    assert (episode.outcome, episode.reward, len(episode.reward_parts)) == (Outcome.SOLVED, 1.0, 1)


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


async def test_graders_that_sleep_hold_neither_the_others_nor_the_loop() -> None:
    all_wait, let = threading.Barrier(12), threading.Event()

    def slow(episode: Episode, ctx: Any) -> float:
        if all_wait.wait() == 0:
            loop.call_soon_threadsafe(let.set)
        let.wait()
        return 1.0

    loop = asyncio.get_running_loop()
    rollout, jobs = rollout_of(Reward("slow", slow))
    assert len(jobs) == 6
    assert {e.outcome for e in await rollout.run([*jobs, *jobs])} == {Outcome.SOLVED}


async def test_a_deadline_cuts_off_whatever_hangs() -> None:
    let = threading.Event()

    class Stuck(Hook):
        def on_rollout_end(self, rollout: Episode, task: Task) -> None:
            let.wait()

    class World(Env):
        def reset(self, task: Task) -> list[Message]:  # type: ignore[override]
            let.wait()
            return list(task.prompt)

        async def step(self, turn: Any) -> Step:
            return Step(terminated=True)

    try:
        by_reward, jobs = rollout_of(Reward("slow", lambda episode, ctx: let.wait(), timeout=0.2))
        (episode,) = await by_reward.run(jobs[:1])
        assert (
            episode.outcome is Outcome.ENV_ERROR
            and "'slow' took longer than 0.2 s" in episode.error
        )
        grader, _ = rollout_of(Reward("slow", lambda episode, ctx: let.wait()), episode_timeout=0.3)
        hook, _ = rollout_of(hooks=(Stuck(),), episode_timeout=0.3)
        world, _ = rollout_of(episode_timeout=0.3)
        world = in_world(world, World)
        for rollout in (grader, hook, world):
            (episode,) = await rollout.run(jobs[:1])
            assert episode.outcome is Outcome.TIMEOUT and episode.reward is None
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

    rollout, jobs = rollout_of()
    rollout = in_world(rollout, World)
    (episode,) = await rollout.run(jobs[:1])
    assert (
        episode.outcome is Outcome.SOLVED and len(seen) == 2 and threading.get_ident() not in seen
    )
    assert RewardPart("env", 1.0, 0.0) in episode.reward_parts


async def test_a_grader_that_needs_the_main_thread_gets_it() -> None:
    """`signal.alarm` is how other projects' graders bound their time."""

    def alarmed(episode: Episode, ctx: Any) -> float:
        before = signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.signal(signal.SIGALRM, before)
        return 1.0

    (part,) = await score(
        Episode("e", "t"),
        [Reward("alarmed", alarmed)],
        RewardContext(Task("t", "p", "", "", ()), ""),
    )
    assert part.value == 1.0


# --- tools and commands ----------------------------------------------------------------------------------------------


async def test_an_object_without_a_text_form_is_an_error() -> None:
    class Plain:
        pass

    class Said:
        def __str__(self) -> str:
            return "said"

    def give() -> Any:
        """Give."""
        return values.pop(0)

    values: list[Any] = [Plain(), [Plain()], iter("ab"), Said(), {"n": Said()}]
    answers = [await as_tool(give).call(ToolContext(), {}) for _ in range(5)]
    for answer in answers[:3]:
        assert (
            answer.error == "exception"
            and "has no text form" in answer.text
            and "0x" not in answer.text
        )
    assert [answer.text for answer in answers[3:]] == ['"said"', '{"n": "said"}']


def test_a_rollout_and_an_eval_of_which_nothing_is_graded_fail(
    tmp_path: Path, model: Path, cli: Cli
) -> None:
    write_pack(
        tmp_path,
        code="def even(episode, ctx):\n    return None\n\n\nREWARDS = {'even': even, 'length': even}\n",
    )
    write_project(tmp_path, model, eval={"k": 1, "limit": 2})
    cli("rollout", "-n", "2", code=1, said="No episode could be graded (of 2)")
    cli("eval", code=1, said="No attempt could be graded (of 2)")
    with Store.open(tmp_path / "runs" / "agentrl.db", readonly=True) as store:
        assert {row.reward for row in store.episodes.rows(store.episodes.ids("", "time"))} == {None}
    (tmp_path / "data" / "train.jsonl").write_text("")
    cli("rollout", "-n", "2", code=2, said="No tasks in split train")


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
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE t AS SELECT 1 AS n, zeroblob(3000000) AS padding")
    before = path.stat().st_mtime_ns
    tool = SqlTool(str(path), memory_mb=1)
    state = await tool.create(ToolContext())
    assert (await tool.call(state, {"query": "SELECT n FROM t"})).text == "n\n1"
    for query in ("UPDATE t SET n = 2", "CREATE TEMP TABLE u (a)", "ATTACH ':memory:' AS x"):
        assert (await tool.call(state, {"query": query})).error == "refused"
    await tool.release(state)
    assert path.stat().st_mtime_ns == before and [item.name for item in tmp_path.iterdir()] == [
        "large.db"
    ]
    with pytest.raises(Exception, match="database or disk is full") as caught:
        await SqlTool(str(path), memory_mb=1, writable=True).create(ToolContext())
    assert "memory_mb" in str(getattr(caught.value, "hint", ""))


async def test_search_finds_chinese_japanese_and_korean(tmp_path: Path) -> None:
    texts = [
        "土星最大的卫星是土卫六。",
        "秘鲁的河流很多。",
        "東京は日本の首都です。",
        "서울은 한국의 수도이다.",
        "The moon Titan.",
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tool = SearchTool("c.jsonl").at(tmp_path)
    state = await tool.create(ToolContext())
    for query, number in (
        ("土星的卫星", 0),
        ("秘鲁有哪些河流", 1),
        ("日本の首都", 2),
        ("한국의 수도", 3),
        ("titan moon", 4),
    ):
        found = await tool.call(state, {"query": query, "top_k": 1})
        assert texts[number] in found.text, query
    assert "No passage" in (await tool.call(state, {"query": "zebra 飞机"})).text


def test_calls_are_matched_each_with_its_own_and_texts_are_not_lists() -> None:
    assert _match_calls([[0, 1], [0]]) == {0: 1, 1: 0} and _match_calls([[0], [0]]) == {0: 0}
    assert not _same(["N", "Y"], "NY") and not _same(["5"], "5") and _same([1, "a"], [1.0, "A"])
