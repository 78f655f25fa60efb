"""What a server answers with 200 and cannot be used: asked for again, then its episode's fault, never the run's end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer
from agentrl_cli.errors import BadAnswer, TrainingStopped
from agentrl_cli.policies.remote.policy import HttpPolicy
from agentrl_cli.policies.remote.text import OpenAIPolicy
from agentrl_cli.policies.remote.wires import SGLANG, VLLM
from agentrl_cli.types import Outcome, Sampling
from tests.helpers.remote import StandIn, server, vllm_answer
from tests.helpers.train import VOCABULARY, episodes_of, trainer_of

Spoil = Callable[[dict[str, Any]], Any]
SAMPLING = Sampling(max_new_tokens=12)


def choice(**values: Any) -> Spoil:
    """The answer with other values in its choice."""
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **values}]}


def logprobs(**values: Any) -> Spoil:
    """The answer with other values in its log-probabilities."""
    return lambda answer: choice(logprobs={**answer["choices"][0]["logprobs"], **values})(answer)


BODIES: dict[str, tuple[Spoil, str]] = {
    "a page": (lambda answer: b"<html>proxy</html>", "answered no JSON"),
    "nothing": (lambda answer: b"", "answered no JSON"),
    "no text": (lambda answer: b"\xff\xfe\x00", "answered no JSON"),
    "nested": (lambda answer: b"[" * 100_000, "nested too deeply"),
    "a list": (lambda answer: [answer], "answered list, not an object"),
    "no choices": (lambda answer: {"choices": []}, "has no choices"),
    "a choice that is a text": (lambda answer: {"choices": ["hello"]}, "has no choices"),
    "logprobs that are a list": (choice(logprobs=[1]), "which is not an object"),
    "ids that are texts": (choice(token_ids=["abc", "d"]), 'token id "abc"'),
    "ids that are null": (choice(token_ids=[None, None]), "token id null"),
    "ids that are fractions": (choice(token_ids=[1.5, 2]), "token id 1.5"),
    "ids below 0": (choice(token_ids=[-3, 65]), "token id -3"),
    "ids without end": (choice(token_ids=[10**12, 65]), "outside the vocabulary of 261"),
    "ids outside": (choice(token_ids=[VOCABULARY, 65]), "outside the vocabulary of 261"),
    "ids that are an object": (choice(token_ids={"a": 1}), "which is not a list"),
    "no ids": (choice(token_ids=[], logprobs={}), "sent no tokens"),
    "too few log-probabilities": (
        logprobs(token_logprobs=[-0.5]),
        "1 log-probabilities for 2 tokens",
    ),
    "a log-probability of 3": (logprobs(token_logprobs=[3.0, -0.5]), "log-probability 3.0"),
    "a log-probability of -inf": (
        logprobs(token_logprobs=[float("-inf"), -0.5]),
        "log-probability -Infinity",
    ),
    "a log-probability of NaN": (
        logprobs(token_logprobs=[float("nan"), -0.5]),
        "log-probability NaN",
    ),
    "a log-probability of null": (logprobs(token_logprobs=[None, -0.5]), "log-probability null"),
    "a log-probability in words": (logprobs(token_logprobs=["low", -0.5]), 'log-probability "low"'),
    "too many": (
        lambda answer: vllm_answer([65] * 4000, [-0.5] * 4000),
        "4000 tokens where 12 were asked for",
    ),
    "no reason": (choice(finish_reason=None), "finish reason null"),
    "another reason": (choice(finish_reason={"a": 1}), "the finish reason"),
    "likeliest in one place": (
        logprobs(top_logprobs=[{"token_id:65": -0.5}]),
        "likeliest tokens of 1 places",
    ),
    "likeliest outside": (
        logprobs(top_logprobs=[{"token_id:9999": -1}, None]),
        "9999 among the likeliest",
    ),
    "likeliest above 0": (
        logprobs(top_logprobs=[{"token_id:65": 2}, None]),
        "log-probability 2 among",
    ),
    "likeliest in a text": (
        logprobs(top_logprobs=["abc", None]),
        "in place of the likeliest tokens",
    ),
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")


async def test_a_bad_answer_is_asked_for_again_and_then_names_the_server() -> None:
    asked: list[bytes | Any] = []
    good = vllm_answer([65, 66], [-0.5, -0.25])

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, asked.pop(0)

    async with server(handler) as url:
        policy = HttpPolicy(VLLM, url, "m", retries=1, vocabulary=VOCABULARY)
        for name, (spoil, reason) in BODIES.items():
            bad = spoil(json.loads(json.dumps(good)))
            asked += [bad, good]
            assert (await policy.generate("a", [1], SAMPLING)).ids.tolist() == [65, 66], name
            asked += [bad, bad]
            with pytest.raises(BadAnswer) as failed:
                await policy.generate("a", [1], SAMPLING)
            assert reason in failed.value.message and url in failed.value.message, (
                name,
                failed.value.message,
            )
            assert "tried 2 times" in failed.value.message and not asked, name
        await policy.close()


async def test_rounding_is_no_fault() -> None:
    """A log-probability a hair above 0 is 0; alternatives that have none, or no id of their own, are fine."""
    tops = [{"token_id:65": 1e-6, "token_id:66": None, "word": -2.0}, None]
    answer = logprobs(token_logprobs=[1e-6, -9999.0], top_logprobs=tops)(
        vllm_answer([65, 66], [0.0, 0.0])
    )

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, answer

    async with server(handler) as url:
        policy = HttpPolicy(VLLM, url, "m", vocabulary=VOCABULARY)
        said = await policy.generate("a", [1], SAMPLING)
        await policy.close()
    assert said.logp_policy.tolist() == [0.0, -9999.0] and said.top_ids[0].tolist()[:3] == [
        65,
        -1,
        -1,
    ]


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"output_token_logprobs": "abc"}, "not a list"),
        ({"output_token_logprobs": [[-0.5]]}, "without ids"),
        ({"output_token_logprobs": [[-0.5, 10**12, None]]}, "outside the vocabulary"),
        ({"output_token_logprobs": [[0.5, 65, None]]}, "log-probability 0.5"),
        ({"output_top_logprobs": [[[-0.5, "abc"]]]}, '"abc" among the likeliest'),
        ({"finish_reason": None}, "finish reason null"),
        (["x"], "not an object"),
    ],
)
async def test_what_sglang_answers_is_checked_too(meta: Any, reason: str) -> None:
    good = {"output_token_logprobs": [[-0.5, 65, None]], "finish_reason": {"type": "stop"}}

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"meta_info": {**good, **meta} if isinstance(meta, dict) else meta}

    async with server(handler) as url:
        policy = HttpPolicy(
            SGLANG, url.removesuffix("/v1"), "base", retries=0, vocabulary=VOCABULARY
        )
        with pytest.raises(BadAnswer, match=reason):
            await policy.generate("a", [1], SAMPLING)
        await policy.close()


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"message": "hello"},
        {"message": {"content": 5}},
        {"message": {"tool_calls": [{"function": {"name": 3}}]}},
        {"message": {"content": "hello"}},
        {"message": {"content": "hello " * 500}, "finish_reason": "stop"},
        {"message": {"content": "a\ud800"}, "finish_reason": "stop"},
        {"message": {"content": [5]}, "finish_reason": "stop"},
        {"message": {"content": [{"type": "text"}]}, "finish_reason": "stop"},
        {
            "message": {"tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]},
            "finish_reason": "stop",
        },
        *(
            {"text": text, "finish_reason": "stop"}
            for text in ("a\ud800", {"role": "assistant"}, None)
        ),
    ],
)
async def test_a_text_only_server_is_checked(bad: dict[str, Any]) -> None:
    """Messages, and the texts of completions."""

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"choices": [bad]}

    async with server(handler) as url:
        mode = "completions" if "text" in bad else "chat"
        policy = OpenAIPolicy(url, "gpt", Chat(ByteTokenizer()), mode=mode, retries=0)
        policy.observe("a", [{"role": "user", "content": "Hello?"}])
        with pytest.raises(BadAnswer, match="sent"):
            await policy.generate("a", [1], SAMPLING)
        await policy.close()


class Spoilt(StandIn):
    """A stand-in whose answers are spoilt from one generation to another."""

    def __init__(self, folder: Path, spoil: Spoil, numbers: range) -> None:
        super().__init__("vllm", folder)
        self.spoil, self.numbers = spoil, numbers

    async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = await super().handle(path, body)
        spoilt = path == "/v1/completions" and self.generated in self.numbers
        return status, self.spoil(answer) if spoilt else answer


@pytest.mark.parametrize(
    ("fault", "numbers"), [("ids without end", range(3, 5)), ("a page", range(1, 100))]
)
async def test_a_training_skips_bad_answers_and_stops_if_there_is_nothing_else(
    tmp_path: Path, model: Path, fault: str, numbers: range
) -> None:
    stand_in = Spoilt(model, BODIES[fault][0], numbers)
    more: dict[str, Any] = {"adapter": {"enabled": False}, "rollout": {"concurrency": 1}}
    async with server(stand_in.handle) as url:
        remote = {"backend": "vllm", "url": url, "model": "base", "api_key_env": "SERVER_KEY"}
        more |= {"remote": {**remote, "retries": 0}, "algo": {"drop_zero_variance": False}}
        async with trainer_of(tmp_path, model, **more) as trainer:
            if fault == "a page":
                with pytest.raises(TrainingStopped, match="nothing_graded") as stopped:
                    await trainer.train()
                assert f"{url}/completions answered no JSON" in stopped.value.message
            else:
                run = await trainer.train()
                found = episodes_of(trainer.store, run)
                alerts = {alert["name"] for alert in trainer.store.journal.alerts(run.id)}
    await stand_in.close()
    if fault == "a page":
        return
    lost = [e for e in found if e.outcome is Outcome.ENV_ERROR]
    assert run.status == "finished" and len(found) == 16 and len(lost) == 2 and "errors" in alerts
    assert all(
        e.fact == "skipped:fault: env_error" and e.reward is None and url in e.error for e in lost
    )
    assert {e.fact for e in found if e not in lost} == {"trained"}


@pytest.mark.parametrize("field", ["ids", "logp_policy"])
async def test_a_stored_bad_episode_is_skipped_and_never_blocks_a_resume(
    tmp_path: Path, model: Path, field: str
) -> None:
    """As a version stored it that believed every server: the update died of it, at every resume again."""
    from agentrl_cli.store import Store

    more: dict[str, Any] = {"train": {"steps": 1}, "algo": {"drop_zero_variance": False}}
    async with trainer_of(tmp_path, model, **more) as trainer:
        run = trainer.run
        for episode in await trainer.rollout.run(trainer.collector.jobs(0)):
            if episode.sample == 1:
                spoil(trainer.store, episode, field)
        db = Path(trainer.store.path)
    with Store.open(db) as store:
        row = store.runs.get(run.id)
    async with trainer_of(tmp_path, model, run=row, **more) as trainer:
        done = await trainer.train()
        found = episodes_of(trainer.store, row)
        step = trainer.store.runs.steps(row.id)[0]
        alerts = {alert["name"] for alert in trainer.store.journal.alerts(row.id)}
    assert done.status == "finished" and len(found) == 8 and "bad_tokens" in alerts
    assert {e.fact for e in found if e.sample == 1} == {"skipped:bad_tokens"}
    assert {e.fact for e in found if e.sample != 1} == {"trained"} and np.isfinite(step["loss"])


def spoil(store: Any, episode: Any, field: str) -> None:
    """Put a value that no model can have sampled into the last turn of a stored episode."""
    turn = episode.turns[-1]
    tokens = episode.tokens.slice(turn.start, turn.end)
    values = getattr(tokens, field).copy()
    values[0] = 5_000_000 if field == "ids" else 3.0
    store.episodes.add_turn(episode.id, turn, replace(tokens, **{field: values}))
    store.flush()
