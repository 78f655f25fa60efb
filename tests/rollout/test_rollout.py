"""The agent loop with a scripted policy and a byte tokenizer: every token, every ending, every limit."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl_cli import Chat, Config, Pack, Reward, ScriptedPolicy, Tool, tool
from agentrl_cli.chat.spans import Rendered
from agentrl_cli.config import load_config
from agentrl_cli.errors import ConfigError, NotFound, PolicyError, StoreError
from agentrl_cli.hooks import HookList
from agentrl_cli.learning.dispositions import decide
from agentrl_cli.rewards import RewardContext
from agentrl_cli.rewards.calls import same_calls
from agentrl_cli.rewards.context import split_messages
from agentrl_cli.rollout import Job, Rollout, seed_of
from agentrl_cli.rollout.flags import find_flags
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.episodes import Episodes
from agentrl_cli.types import (
    Episode,
    Fact,
    Generation,
    Origin,
    Outcome,
    RewardPart,
    Sampling,
    StopReason,
    Task,
    ToolResult,
)
from tests.helpers.chat import BYTES, CHAT, add, call
from tests.helpers.processes import soon

STOP = BYTES.eos_ids[0]


def recite(count: int) -> str:
    """Say the alphabet.

    Args:
        count: How often.
    """
    return "abcdefghijklmnopqrstuvwxyz" * count


def fail(text: str) -> str:
    """Fail.

    Args:
        text: What to complain of.
    """
    raise ValueError(text)


COUNT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}


def exact(episode: Episode, ctx: Any) -> Any:
    return ctx.part(
        float(ctx.final_text == ctx.task.data.get("answer")), f"said {ctx.final_text!r}"
    )


def pack_of(
    *, tools: Sequence[Any] = (add, recite, fail), reward: Callable[..., Any] = exact, **row: Any
) -> Pack:
    data = {"prompt": "2 + 3?", "answer": "5", **row}
    return Pack.of("sums", [data], [Reward("exact", reward)], tools=tools, system="Use tools.")


def rollout_of(
    pack: Pack, replies: Any, *hooks: Any, store: Store | None = None, **limits: Any
) -> Rollout:
    given = {"max_tokens": 4000, "max_new_tokens": 400, "max_observation_tokens": 300, **limits}
    policy = replies if hasattr(replies, "generate") else ScriptedPolicy(replies, BYTES)
    config, packs = Config.model_validate({"rollout": given}), {pack.name: pack}
    return Rollout(policy, CHAT, packs, config, store=store, hooks=HookList([*hooks]))


class Noting(ScriptedPolicy):
    def __init__(self, replies: Any) -> None:
        super().__init__(replies, BYTES)
        self.seen: list[Sampling] = []

    async def generate(self, key: str, ids: Any, sampling: Sampling, **more: Any) -> Generation:
        self.seen.append(sampling)
        return await super().generate(key, ids, sampling, **more)


@pytest.fixture
def store(store: Store) -> Store:
    store.runs.add(RunRow(id="r1", name="fox"))
    return store


def job_of(pack: Pack, **facts: Any) -> Job:
    return Job(pack.tasks("train")[0], **{"seed": 1, **facts})


async def attempt(pack: Pack, replies: Any, **limits: Any) -> Episode:
    return await rollout_of(pack, replies, **limits).episode(job_of(pack))


def observations(episode: Episode) -> list[ToolResult]:
    return [result for turn in episode.turns for result in turn.results]


async def test_an_image_for_a_model_that_reads_text_is_refused() -> None:
    def look() -> ToolResult:
        """Look."""
        return ToolResult("see", images=(b"\x89PNG",))

    episode = await attempt(pack_of(tools=[look]), [call("look"), "5"])
    assert (episode.outcome, episode.reward_parts) == (Outcome.ENV_ERROR, ())
    assert "reads text alone" in episode.error


# --- tokens ----------------------------------------------------------------------------------------------------------


async def test_an_episode_with_a_tool(store: Store) -> None:
    pack, said = pack_of(), [call("add", a=2, b=3), "5"]
    store.tasks.add(pack.tasks("train"))
    job = job_of(pack, run_id="r1", step=3, group_id="g", sample=2, kind="train")
    episode = await rollout_of(pack, said, store=store).episode(job)
    tokens, stored = episode.tokens, store.episodes.get(episode.id)
    assert stored == episode.with_(tokens=stored.tokens) and not store.live.all("r1")
    for name in "ids origin logp_sampled logp_policy entropy top_ids top_logps".split():
        np.testing.assert_array_equal(getattr(stored.tokens, name), getattr(tokens, name), name)
    assert (episode.outcome, episode.reward, episode.primary) == (Outcome.SOLVED, 1.0, 1.0)
    assert (episode.tool_calls, episode.tool_errors, episode.step, episode.sample) == (1, 0, 3, 2)
    assert (episode.flags, episode.error) == ((), "") and episode.ended >= episode.started > 0
    # Turns cover the tokens without a gap, and what the model said is there as it was sampled.
    spans = [tokens.slice(turn.start, turn.end) for turn in episode.turns]
    assert np.concatenate([span.ids for span in spans]).tolist() == tokens.ids.tolist()
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [turn.role for turn in episode.turns] == roles
    for place, text in zip((2, 4), said, strict=True):
        assert spans[place].ids.tolist() == [*BYTES.encode(text), STOP]
        assert set(spans[place].origin) == {Origin.MODEL}
        assert episode.turns[place].stop_reason is StopReason.STOP
    # All of it is what the template would have written, and only the model's tokens are trained.
    written = CHAT.render(episode.messages, pack.schemas).ids
    assert tokens.ids.tolist() == written[: len(tokens)]
    assert episode.trained_tokens == sum(len(BYTES.encode(text)) + 1 for text in said)
    assert np.isnan(tokens.logp_policy[~tokens.trained_mask]).all()
    assert BYTES.decode(spans[3].ids[spans[3].origin == Origin.TOOL]) == "5"


async def test_a_cut_turn_is_closed_by_us_and_never_trained_there() -> None:
    episode = await attempt(pack_of(), ["x" * 50], max_new_tokens=10)
    assert (episode.outcome, episode.trained_tokens) == (Outcome.TRUNCATED_TOKENS, 10)
    assert (episode.tokens.origin[-1], episode.tokens.ids[-1]) == (Origin.FORCED, STOP)
    assert episode.turns[-1].stop_reason is StopReason.LENGTH and "TRUNC" in episode.flags
    assert episode.reward_parts and episode.reward == 0  # cut by its own limit: scored


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ('<tool_call>\n{"name": "add", \n</tool_call>', "malformed_call", ""),
        (call("ad", a=1, b=2), "unknown_tool", "add"),
        (call("add", a=1), "bad_arguments", "b"),
        (call("add", a="one", b=2), "bad_arguments", "a"),
        (call("fail", text="no way"), "exception", "ValueError: no way"),
    ],
)
async def test_a_bad_call_is_an_observation(text: str, error: str, says: str) -> None:
    episode = await attempt(pack_of(), [text, "5"])
    (result,) = observations(episode)
    assert (result.error, episode.outcome, episode.tool_errors) == (error, Outcome.SOLVED, 1)
    assert says in result.text and result.text
    tool_turn = next(turn for turn in episode.turns if turn.role == "tool")
    assert result.text in BYTES.decode(episode.tokens.ids[tool_turn.start : tool_turn.end])


async def test_parallel_calls_are_answered_in_order_and_no_more_than_allowed() -> None:
    text = "\n".join(call("add", a=n, b=0) for n in range(4))
    episode = await attempt(pack_of(), [text, "5"], max_parallel_calls=3)
    *results, last = observations(episode)
    assert [result.text for result in results] == ["0", "1", "2"]
    assert last.error == "too_many_calls" and "at most 3" in last.text
    ids = [call_.id for turn in episode.turns for call_ in turn.calls]
    tools = [message for message in episode.messages if message["role"] == "tool"]
    assert len(set(ids)) == 4 and [message["tool_call_id"] for message in tools] == ids


@pytest.mark.parametrize(
    ("said", "state"),
    [(call("submit", answer="5"), {"answer": "5"}), (call("finish"), {"finished": True})],
)
async def test_submit_and_finish_end_the_episode_and_the_reward_sees_what_they_left(
    said: str, state: dict[str, Any]
) -> None:
    pack = pack_of(
        tools=["submit", "finish"], reward=lambda episode, ctx: float(ctx.state == state)
    )
    episode = await attempt(pack, [said, "never said"])
    assert episode.outcome is Outcome.SOLVED and observations(episode)[0].done
    assert sum(turn.role == "assistant" for turn in episode.turns) == 1


async def test_every_episode_has_a_state_of_its_own() -> None:
    class Counter(Tool):
        name = "count"
        schema = COUNT

        async def create(self, ctx: Any) -> list[int]:
            return [0]

        async def execute(self, state: list[int], arguments: dict[str, Any]) -> ToolResult:
            state[0] += 1
            return ToolResult(str(state[0]))

        async def reward(self, state: list[int]) -> float:
            return float(state[0])

    pack = pack_of(tools=[Counter()])
    rollout = rollout_of(pack, [call("count"), call("count"), "5"])
    for episode in await rollout.run([job_of(pack, sample=n) for n in range(2)]):
        assert [result.text for result in observations(episode)] == ["1", "2"]
        assert RewardPart("tool:count", 2.0, 0.0) in episode.reward_parts and episode.reward == 1.0


async def test_without_tools_none_is_offered() -> None:
    pack = pack_of()
    rollout = rollout_of(pack, [call("add", a=2, b=3), "5"]).with_(with_tools=False)
    episode = await rollout.episode(job_of(pack))
    assert "<tools>" not in BYTES.decode(episode.tokens.ids[: episode.turns[0].end])
    assert [result.error for result in observations(episode)] == ["unknown_tool"]
    for tools, flags in ((False, []), (True, ["NOTOOL"])):
        answered = await rollout_of(pack, ["5"]).with_(with_tools=tools).episode(job_of(pack))
        assert [flag.name for flag in find_flags(answered)] == flags == [*answered.flags]


# --- limits ----------------------------------------------------------------------------------------------------------


async def test_a_prompt_that_does_not_fit() -> None:
    episode = await attempt(pack_of(prompt="x" * 900), ["5"], max_tokens=800)
    found = (episode.outcome, episode.trained_tokens, episode.reward_parts)
    assert found == (Outcome.TOO_LONG, 0, ())
    assert len(episode.tokens) > 900  # all of it is there to be looked at
    assert "a byte); more: --set rollout.max_tokens=" in episode.error
    assert (await attempt(pack_of(), ["5"], response_tokens=8)).trained_tokens
    with pytest.raises(ConfigError, match=r"response_tokens.* 8"):  # no turn would begin
        load_config(sets=["rollout.response_tokens=7"])
    narrow = ScriptedPolicy(["5"], BYTES, context_length=200)
    assert (await attempt(pack_of(prompt="x" * 300), narrow)).outcome is Outcome.TOO_LONG


@pytest.mark.parametrize(
    ("side", "begins", "ends"),
    [("left", "[…", "]vwxyz"), ("right", "abcde[…", "]"), ("middle", "ab[…", "]xyz")],
)
async def test_long_observations_are_cut(side: str, begins: str, ends: str) -> None:
    replies = [call("recite", count=20), "5"]
    episode = await attempt(pack_of(), replies, max_observation_tokens=5, truncate_side=side)
    (result,) = observations(episode)
    assert result.truncated and "515 tokens cut" in result.text
    assert result.text.startswith(begins) and result.text.endswith(ends)
    tool_turn = next(turn for turn in episode.turns if turn.role == "tool")
    assert result.text in BYTES.decode(episode.tokens.ids[tool_turn.start : tool_turn.end])


@pytest.mark.parametrize(
    ("overflow", "outcome"),
    [("stop", Outcome.TRUNCATED_TOKENS), ("truncate_observation", Outcome.SOLVED)],
)
async def test_a_result_that_overflows_the_context(overflow: str, outcome: Outcome) -> None:
    pack = pack_of()
    most = len(CHAT.prompt(pack.tasks("train")[0].prompt, pack.schemas).ids) + 260
    replies = [call("recite", count=10), "5"]
    limits = {"max_tokens": most, "max_new_tokens": 120, "max_observation_tokens": 1000}
    episode = await attempt(pack, replies, overflow=overflow, **limits)
    assert episode.outcome is outcome and len(episode.tokens) <= most
    (result,) = observations(episode)
    if outcome is Outcome.SOLVED:
        assert result.truncated and len(result.text) < 260
    else:  # kept for people, without a token that a model saw or a loss could touch
        turn, end = episode.turns[-1], len(episode.tokens)
        assert (turn.role, turn.start, turn.end) == ("tool", end, end)
        assert result.text == turn.messages[0]["content"] == recite(10)
        assert "DRIFT" not in episode.flags


@tool(timeout=1e9)
async def hang() -> None:
    """Wait for what never happens."""
    await asyncio.Event().wait()


@tool(name="hang", timeout=0.02)
async def hang_shortly() -> None:
    """Wait for what never happens."""
    await asyncio.Event().wait()


async def test_no_episode_is_masked_because_the_model_is_slow() -> None:
    slow = ScriptedPolicy([call("hang"), "5"], BYTES, delay=0.2)
    episode = await attempt(pack_of(tools=[hang_shortly]), slow, episode_timeout=0.1)
    assert episode.outcome is Outcome.SOLVED and observations(episode)[0].error == "timeout"
    assert sum(turn.seconds for turn in episode.turns if turn.role == "assistant") > 3 * 0.1


# --- infrastructure --------------------------------------------------------------------------------------------------


def raising(error: Exception) -> Callable[..., float]:
    def broken(episode: Episode, ctx: Any) -> float:
        raise error

    return broken


async def test_a_hook_that_raises_is_an_env_error_and_one_that_answers_is_a_part() -> None:
    class Bonus:
        def on_rollout_end(self, rollout: Episode) -> dict[str, float]:
            if rollout.sample:
                raise RuntimeError("the hook broke")
            return {"bonus": 0.5}

    pack = pack_of()
    rollout = rollout_of(pack, ["5"], Bonus())
    good, bad = await rollout.run([job_of(pack, sample=n) for n in range(2)])
    assert (good.reward, good.outcome) == (1.5, Outcome.SOLVED)
    assert bad.outcome is Outcome.ENV_ERROR and "the hook broke" in bad.error


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_part_that_is_not_a_number_is_an_env_error_of_any_source(value: float) -> None:
    class Opinion(Tool):
        name = "count"
        schema = COUNT

        async def reward(self, state: Any) -> float | None:
            return value

    pack, hook = pack_of(), SimpleNamespace(on_rollout_end=lambda rollout: {"bonus": value})
    for episode in (
        await rollout_of(pack, ["5"], hook).episode(job_of(pack)),
        await attempt(pack_of(tools=[Opinion()]), ["5"]),
    ):
        assert (episode.outcome, episode.reward) == (Outcome.ENV_ERROR, None)
        assert "finite" in episode.error


class Sticky(Tool):
    """Fails when it is freed, and says how often that was."""

    name = "count"
    schema = COUNT
    freed = 0

    async def release(self, state: Any) -> None:
        self.freed += 1
        raise OSError("it sticks")


async def test_what_goes_wrong_at_the_end_does_not_hide_what_ended_the_episode() -> None:
    sticky = Sticky()
    pack = pack_of(tools=[sticky, hang])
    fine = await attempt(pack, ["5"])
    assert fine.outcome is Outcome.ENV_ERROR and "it sticks" in fine.error
    late = await attempt(pack, [call("hang")], episode_timeout=0.05)
    assert (late.outcome, late.reward_parts) == (Outcome.TIMEOUT, ()) and "0.05 s" in late.error
    graded = await attempt(pack_of(tools=[sticky], reward=raising(KeyError("tests"))), ["5"])
    found = (graded.outcome, graded.reward_parts, graded.primary, graded.trained_tokens)
    assert found == (Outcome.ENV_ERROR, (), None, 2), "an error is never a zero"
    assert "'exact' raised KeyError" in graded.error and sticky.freed == 3


async def test_a_store_that_fails_ends_the_run_and_masks_nothing(store: Store) -> None:
    class Full(Episodes):
        def add_turn(self, *args: Any, **more: Any) -> None:
            raise StoreError("the disk is full")

    pack, works = pack_of(), store.episodes
    store.episodes = Full(store)
    rollout = rollout_of(pack, ["5"], store=store)
    job = job_of(pack, run_id="r1", step=1, kind="train")
    with pytest.raises(StoreError, match="full"):
        await rollout.run([job])
    store.episodes = works
    assert store.episodes.find_finished("r1", 1) == {}
    (again,) = await rollout.run([job])
    assert list(store.episodes.find_finished("r1", 1).values()) == [again.id]
    assert len(store.episodes.ids()) == 1  # the unfinished one was replaced


async def test_a_model_that_fails_ends_the_run_and_keeps_what_was_finished(store: Store) -> None:
    class Fragile(Noting):
        async def generate(self, *given: Any, **more: Any) -> Generation:
            if len(self.seen) == 2:
                raise PolicyError("out of memory")
            return await super().generate(*given, **more)

    pack, done = pack_of(), list[Episode]()
    rollout = rollout_of(pack, Fragile(["5"]), store=store, concurrency=1)
    jobs = [job_of(pack, sample=n, run_id="r1", step=1) for n in range(5)]
    with pytest.raises(PolicyError, match="out of memory"):
        await rollout.run(jobs, done.append)
    outcomes = [row.outcome for row in store.episodes.rows(store.episodes.ids(sort="time"))]
    assert outcomes[:3] == [Outcome.SOLVED, Outcome.SOLVED, Outcome.CANCELLED]
    assert set(outcomes[3:]) <= {Outcome.CANCELLED} and not store.live.all("r1")
    assert [episode.outcome for episode in done] == [Outcome.SOLVED] * 2


async def test_a_cancelled_run_stores_what_was_running_as_cancelled(store: Store) -> None:
    pack = pack_of(tools=[Sticky()])
    rollout = rollout_of(pack, ScriptedPolicy(["5"], BYTES, delay=30), store=store)
    jobs = [job_of(pack, sample=n, run_id="r1", step=1) for n in range(3)]
    running = asyncio.create_task(rollout.run(jobs))
    await soon(lambda: len(store.live.all("r1")) == 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    outcomes = [row.outcome for row in store.episodes.rows(store.episodes.ids())]
    assert outcomes == [Outcome.CANCELLED] * 3 and not store.live.all("r1")


# --- many at once ----------------------------------------------------------------------------------------------------


async def test_concurrency_is_bounded_and_episodes_come_in_the_order_of_the_jobs() -> None:
    class Busy(ScriptedPolicy):
        running = most = 0

        async def generate(self, key: str, ids: Any, sampling: Sampling, **more: Any) -> Generation:
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.001 * (sampling.seed % 7))
            self.running -= 1
            return await super().generate(key, ids, sampling, **more)

    pack, policy = pack_of(), Busy(["5"], BYTES)
    jobs = [job_of(pack, sample=n, seed=n) for n in range(20)]
    episodes = await rollout_of(pack, policy, concurrency=4).run(jobs)
    assert [episode.sample for episode in episodes] == list(range(20)) and policy.most == 4


async def test_seeds_are_the_jobs_own_and_new_for_every_turn() -> None:
    pack, policy = pack_of(), Noting([call("add", a=1, b=1), "5"])
    for seed in (7, 7, 8):
        await rollout_of(pack, policy).episode(job_of(pack, seed=seed))
    seeds = [sampling.seed for sampling in policy.seen]
    assert seeds[:2] == seeds[2:4] and len(set(seeds)) == 4


def test_seed_of_depends_on_all_its_parts() -> None:
    parts = [(0, "train", 1, 2), (0, "train", 12), (1, "train", 1, 2), (0, "eval", 1, 2)]
    seeds = [seed_of(*one) for one in parts]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [seed_of(*one) for one in parts]


async def test_a_task_of_an_unknown_pack() -> None:
    pack = pack_of()
    rollout = rollout_of(pack, ["5"]).with_(packs={"sumz": pack})
    with pytest.raises(NotFound, match="sums"):
        await rollout.run([job_of(pack)])


# --- the drift guard -------------------------------------------------------------------------------------------------


class Lossy(Chat):
    """Appends the first answer of the world without the separator before it."""

    def extend(self, messages_so_far: Any, new_messages: Any, *args: Any, **more: Any) -> Rendered:
        whole = super().extend(messages_so_far, new_messages, *args, **more)
        if sum(message["role"] == "assistant" for message in messages_so_far) > 1:
            return whole
        role, start, end = whole.spans[0]
        return Rendered(
            whole.ids[1:],
            whole.origin[1:],
            ((role, start, end - 1), *whole.spans[1:]),
            whole.text[1:],
        )


async def test_structural_drift_is_found_at_its_turn(store: Store) -> None:
    pack, found = pack_of(), list[list[tuple[str, int]]]()
    store.tasks.add(pack.tasks("train"))

    def seen(episode: str) -> list[tuple[str, int]]:
        store.flush()
        return [(row.kind, row.turn) for row in store.marks.drift(episode)]

    def replies(key: str, ids: Sequence[int]) -> str:
        found.append(seen(key))
        return "5" if len(found) == 3 else call("add", a=2, b=3)

    rollout = rollout_of(pack, replies, store=store).with_(chat=Lossy(BYTES))
    episode = await rollout.episode(job_of(pack))
    roles = " ".join(turn.role for turn in episode.turns)
    assert roles == "system user assistant tool assistant tool assistant"
    # Known before the model's second turn; the end adds nothing; the second answer was appended as it should be.
    drift = [("structural", 3)]
    assert [*found, seen(episode.id)] == [[], drift, drift, drift]
    assert rollout.drift == {episode.id: "structural"} and rollout.guard_seconds > 0


class Fragile(Chat):
    """Cannot render a conversation that is over."""

    def rendered_ids(self, messages: Any, *args: Any, **more: Any) -> list[int]:
        if messages[-1]["content"] == "5":
            raise RecursionError("nested too deeply")
        return super().rendered_ids(messages, *args, **more)


async def test_a_conversation_that_cannot_be_compared_masks_its_episode_alone(store: Store) -> None:
    pack = pack_of()
    store.tasks.add(pack.tasks("train"))
    answers = iter(["5", "4"])
    rollout = rollout_of(pack, lambda key, ids: next(answers), store=store, concurrency=1)
    jobs = [job_of(pack), job_of(pack, sample=1)]
    bad, good = await rollout.with_(chat=Fragile(BYTES)).run(jobs)
    assert (bad.outcome, bad.reward_parts) == (Outcome.ENV_ERROR, ())
    assert "nested too deeply" in bad.error and good.outcome is Outcome.FAILED
    assert store.episodes.get(bad.id).outcome is Outcome.ENV_ERROR


@pytest.mark.parametrize(
    ("skip", "outcome", "turns", "fact"),
    [
        (True, Outcome.DRIFT, 1, Fact.SKIPPED_DRIFT),
        (False, Outcome.TRUNCATED_TURNS, 3, Fact.TRAINED),
    ],
)
async def test_a_training_episode_ends_at_its_first_structural_drift(
    skip: bool, outcome: Outcome, turns: int, fact: Fact
) -> None:
    pack, said = pack_of(), [call("add", a=2, b=3)] * 9
    rollout = rollout_of(pack, said, max_turns=3).with_(chat=Lossy(BYTES))
    rollout = rollout.with_(config=rollout.context.config.replace(algo={"skip": {"drift": skip}}))
    episode = await rollout.episode(job_of(pack, kind="train"))
    assert sum(turn.role == "assistant" for turn in episode.turns) == turns
    assert episode.outcome is outcome and (episode.reward_parts == ()) is skip
    assert ("structural drift: the template writes" in episode.error) is skip
    given: dict[str, Any] = {"train_drifted": not skip, "drop_zero_variance": False}
    assert decide([[episode]], drift=rollout.drift, **given) == {episode.id: fact}


async def test_answers_in_the_prompts_history_are_not_the_models() -> None:
    """They used up its turns, and one of them was graded where the model had none left."""
    seen: dict[str, Any] = {}

    def grade(episode: Episode, ctx: RewardContext) -> Any:
        seen["text"], seen["response"] = ctx.final_text, ctx.response(episode)
        seen["parts"] = [[m["role"] for m in part] for part in split_messages(episode, ctx)]
        return same_calls(episode, ctx).value + exact(episode, ctx).value

    example = [("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 3?")]
    prompt = [{"role": role, "content": text} for role, text in example]
    pack = pack_of(reward=grade, prompt=prompt, ground_truth=[])
    done = await attempt(pack, ["5"], max_turns=1)
    assert (done.outcome, done.reward) == (Outcome.SOLVED, 2.0)
    assert seen["text"] == "5" and "2 + 3" not in seen["response"]
    assert seen["parts"] == [["system", "user", "assistant", "user"], ["assistant"]]


# --- how turns are sampled -------------------------------------------------------------------------------------------


async def test_stops_bad_tokens_and_a_hook_reach_the_policy() -> None:
    def draws(sampling: Sampling, task: Task, turn: int) -> Sampling | None:
        return replace(sampling, allow=lambda out: [7] if not out else None) if turn == 1 else None

    pack, policy = pack_of(), Noting([call("add", a=1, b=1), "5"])
    hook = SimpleNamespace(on_sample=draws)
    rollout = rollout_of(pack, policy, hook, stop=["Done."], bad_tokens=["<think>", "z"])
    assert rollout.context.config.rollout.truncates
    await rollout.episode(job_of(pack))
    bad = (BYTES.id_of("<think>"), ord("z"))
    assert [(s.stop_strings, s.bad_ids) for s in policy.seen] == [(("Done.",), bad)] * 2
    assert [s.allow and s.allow(()) for s in policy.seen] == [None, [7]]
    with pytest.raises(ConfigError, match="'no' is 2 tokens, not one"):
        rollout_of(pack, policy, bad_tokens=["no"])


async def test_a_sampling_hook_that_fails_masks_its_episode() -> None:
    hook = SimpleNamespace(on_sample=lambda sampling: "no sampling")
    episode = await rollout_of(pack_of(), ["5"], hook).episode(job_of(pack_of()))
    assert episode.outcome is Outcome.ENV_ERROR
    assert "it returned str; a Sampling or None" in episode.error


async def test_a_hook_that_asks_for_more_tokens_gets_no_more_than_there_is_room_for() -> None:
    pack = pack_of()
    prompt = len((await attempt(pack, ["5"])).tokens) - 2
    more = SimpleNamespace(on_sample=lambda sampling: replace(sampling, max_new_tokens=10**6))
    rollout = rollout_of(pack, ["x" * 500], more, max_tokens=prompt + 200, max_new_tokens=20)
    episode = await rollout.episode(job_of(pack))
    assert (episode.outcome, episode.trained_tokens) == (Outcome.TRUNCATED_TOKENS, 200)


class Counted(ScriptedPolicy):
    released: tuple[str, ...] = ()

    async def generate(self, key: str, ids: Any, sampling: Sampling, **more: Any) -> Generation:
        if self._reply(key, ids) == "break":
            raise PolicyError("the server is lost")
        return await super().generate(key, ids, sampling, **more)

    async def release(self, key: str) -> None:
        self.released += (key,)
        await super().release(key)


@pytest.mark.parametrize(
    "said", ["5", "6", "x" * 900, call("hang"), call("fail", text="no"), "break", "cancel"]
)
async def test_the_policy_forgets_an_episode_however_it_ends(said: str) -> None:
    """Else its keys and values would stay until the next update."""
    cancelled = said == "cancel"
    policy = Counted([call("hang") if cancelled else said] * 9, BYTES)
    pack = pack_of(tools=[hang, fail])
    rollout = rollout_of(pack, policy, episode_timeout=60 if cancelled else 0.2)
    running = asyncio.create_task(rollout.run([job_of(pack)]))
    if cancelled:
        await soon(lambda: bool(policy._turns))
        running.cancel()
    (ended,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(ended, BaseException) == (said in ("break", "cancel"))
    assert len(policy.released) == 1 and not policy._turns
    assert isinstance(ended, BaseException) or policy.released == (ended[0].id,)
