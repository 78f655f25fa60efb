"""Training with a server that samples: new versions, restarts, faults, and answers that cannot be used."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main
from agentrl_cli.errors import BadAnswer, ConfigError, ModelError, PolicyError, TrainingStopped
from agentrl_cli.plugins.engines.policy import HttpPolicy
from agentrl_cli.plugins.engines.wires import SGLANG, VLLM
from agentrl_cli.trainer.probe import CONTEXTS
from agentrl_cli.types import Outcome, Sampling, StopReason
from tests.helpers.remote import StandIn, server, silent, vllm_answer
from tests.helpers.train import STOP, VOCABULARY, episodes_of, trainer_of, write_project
from tests.plugins.engines.policies import policy_at

GAP = "sampling/sampling_logp_difference/max"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")


@asynccontextmanager
async def serving(kind: str, model: Path) -> AsyncIterator[tuple[StandIn, dict[str, Any]]]:
    """A stand-in, and the section `remote` that means it."""
    stand_in = StandIn(kind, model)
    async with server(stand_in.handle) as url:
        address = url if kind == "vllm" else url.removesuffix("/v1")
        yield (
            stand_in,
            {
                "backend": kind,
                "url": address,
                "model": "base",
                "api_key_env": "SERVER_KEY",
                "patience": 5,
            },
        )
    await stand_in.close()


@pytest.mark.parametrize(("kind", "adapter"), [("vllm", False), ("sglang", True)])
async def test_training_with_a_server(
    tmp_path: Path, model: Path, kind: str, adapter: bool
) -> None:
    async with serving(kind, model) as (stand_in, remote):
        stand_in.dies_at = {13}
        more: dict[str, Any] = {
            "adapter": {"enabled": adapter, "r": 2},
            "train": {"steps": 3, "lr": 1e-2},
        }
        async with trainer_of(tmp_path, model, remote=remote, **more) as trainer:
            run = await trainer.train()
            metrics = {row["step"]: row for row in trainer.store.runs.steps(run.id)}
            episodes = episodes_of(trainer.store, run)
        left = sorted(path.name for path in (tmp_path / "runs" / "remote").iterdir())
    assert run.status == "finished" and len(episodes) == 24 and all(e.fact for e in episodes)
    assert all(metrics[step][GAP] < 1e-4 for step in (1, 2, 3)), (
        "the server's weights are the trainer's"
    )
    versions = [e.turns[-1].weights_version for e in sorted(episodes, key=lambda e: e.step or 0)]
    assert versions == [f"{run.name}@{n}" for n in range(3) for _ in range(8)]
    assert left == [f"{run.name}-3"], "old weights are not kept"
    taken = [
        path for path in stand_in.paths if "load_lora" in path or "rpc" in path or "update" in path
    ]
    assert len([p for p in taken if "unload" not in p]) == 5, (
        "the start, three updates, and the restart"
    )


@pytest.mark.parametrize(("kind", "adapter"), [("vllm", True), ("sglang", False)])
async def test_a_restart_between_two_requests_is_noticed(
    tmp_path: Path, model: Path, kind: str, adapter: bool
) -> None:
    async with serving(kind, model) as (stand_in, remote):
        stand_in.forgets_at = {
            11
        }  # in the second step: 8 turns and at most 2 of the probe came before
        more: dict[str, Any] = {
            "adapter": {"enabled": adapter, "r": 2},
            "train": {"steps": 2, "lr": 1e-2},
        }
        async with trainer_of(
            tmp_path, model, remote=remote, rollout={"concurrency": 1}, **more
        ) as trainer:
            run = await trainer.train()
            metrics = {row["step"]: row for row in trainer.store.runs.steps(run.id)}
            steps = [episodes_of(trainer.store, run, step) for step in (1, 2)]
    assert all(metrics[step][GAP] < 1e-4 for step in (1, 2))
    trained = [{one.group_id for one in episodes if one.fact == "trained"} for episodes in steps]
    probes = sum(min(CONTEXTS, len(groups)) for groups in trained)
    assert probes and stand_in.generated == 16 + probes + 1


async def test_a_server_with_other_weights_is_named_and_refused(model: Path) -> None:
    async with serving("sglang", model) as (stand_in, remote):
        policy = HttpPolicy(SGLANG, remote["url"], "base", api_key="k")
        await policy.load_weights(model, "run@1")
        assert (
            await policy.generate("a", [9, 10], Sampling(max_new_tokens=2))
        ).weights_version == "run@1"

        async def lies(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            status, answer = await stand_in.handle(path, body)
            if path == "/generate":
                answer["meta_info"]["weight_version"] = "other@7"
            return status, answer

        async with server(lies) as url:
            policy.endpoint.url = url.removesuffix("/v1")
            with pytest.raises(PolicyError, match=r"weights 'other@7' and was given 'run@1'"):
                await policy.generate("a", [9, 10], Sampling(max_new_tokens=2))
        await policy.close()


async def test_a_server_that_refuses_weights_keeps_its_version(model: Path) -> None:
    async with policy_at({"success": False, "message": "shape mismatch"}, SGLANG) as policy:
        with pytest.raises(PolicyError, match=r"did not take the weights.*shape mismatch"):
            await policy.load_weights(model, "run@1")
        assert policy.weights_version == "m"


async def test_sglang_wire_format() -> None:
    seen: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        seen.append({"path": path, **body})
        meta: dict[str, Any] = {
            "output_token_logprobs": [[-0.5, 65, None], [-0.25, STOP, None]],
            "weight_version": "x",
        }
        meta["output_top_logprobs"] = [[[-0.5, 65, None], [-1.0, 66, None]], None]
        meta["finish_reason"] = {"type": "stop", "matched": STOP}
        if len(seen) > 3:
            meta = {"finish_reason": {"type": "length", "length": 2}}
        return 200, {"text": "A", "output_ids": [65, STOP], "meta_info": meta}

    async with policy_at(handler, SGLANG) as policy:
        said = await policy.generate(
            "a", [1, 2], Sampling(temperature=0.7, stop_ids=(STOP,), seed=2**40 + 3)
        )
        assert said.ids.tolist() == [
            65,
            STOP,
        ] and said.logp_policy.tolist() == said.logp_sampled.tolist() == [
            -0.5,
            -0.25,
        ]
        assert said.top_ids[0].tolist()[:2] == [65, 66] and said.stop_reason is StopReason.STOP
        cut = await policy.generate("a", [1, 2], Sampling(top_p=0.5))
        assert (
            cut.logp_policy.tolist() == [-0.5, -0.25]
            and (cut.logp_sampled != cut.logp_sampled).all()
        )
        steered = await policy.generate("a", [1, 2], Sampling(repetition_penalty=1.5, bad_ids=(7,)))
        assert (
            steered.logp_sampled.tolist() == [-0.5, -0.25]
            and (steered.logp_policy != steered.logp_policy).all()
        )
        assert seen[-1]["sampling_params"]["logit_bias"] == {"7": -100.0}
        with pytest.raises(PolicyError, match="no token ids"):
            await policy.generate("a", [1, 2], Sampling())
    assert (
        seen[0]["path"] == "/generate"
        and seen[0]["input_ids"] == [1, 2]
        and seen[0]["return_logprob"] is True
    )
    assert (
        seen[0]["sampling_params"]["stop_token_ids"] == [STOP]
        and seen[0]["sampling_params"]["sampling_seed"] == 3
    )


async def test_what_cannot_be(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("vllm", model) as (stand_in, remote):
        with pytest.raises(
            ModelError, match="cannot be trained: an OpenAI-compatible endpoint returns text"
        ):
            async with trainer_of(tmp_path, model, remote={**remote, "backend": "openai"}):
                pass
        monkeypatch.setenv("SERVER_KEY", "wrong")
        async with trainer_of(tmp_path, model, remote=remote) as trainer:
            with pytest.raises(PolicyError, match="401") as refused:
                await trainer.train()
            assert "remote.api_key_env" in refused.value.hint
            assert trainer.store.runs.get(trainer.run.id).status == "failed"
        monkeypatch.delenv("SERVER_KEY")
        with pytest.raises(ConfigError, match="SERVER_KEY"):
            async with trainer_of(tmp_path, model, remote=remote):
                pass
        assert not stand_in.generated


async def test_a_lost_server_is_waited_for_with_patience(model: Path) -> None:
    async with server(StandIn("sglang", model).handle) as url:
        pass
    policy = HttpPolicy(SGLANG, url, "base", retries=0, patience=0.5)
    started = asyncio.get_running_loop().time()
    with pytest.raises(PolicyError, match="cannot be reached"):
        await policy.generate("a", [1], Sampling())
    assert asyncio.get_running_loop().time() - started >= 0.5
    await policy.close()


class Faulty(StandIn):
    """A stand-in that goes wrong from its fourth generation on: `fault` says how."""

    def __init__(self, kind: str, folder: Path, fault: str) -> None:
        super().__init__(kind, folder)
        self.fault = fault

    async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        ask = path in ("/v1/completions", "/generate")
        if not ask or self.generated < 3 or self.fault == "wrong model":
            return await super().handle(path, body)
        if self.fault == "dies":
            raise ConnectionResetError
        if self.fault == "hangs":
            await asyncio.sleep(1)
        if self.fault == "500":
            return 500, {
                "error": {
                    "message": "CUDA out of memory",
                    "type": "InternalServerError",
                    "code": 500,
                }
            }
        if self.fault == "no JSON":
            return 200, b"<html>proxy</html>"
        status, answer = await super().handle(path, body)
        for choice in answer.get(
            "choices", ()
        ):  # an endpoint that knows nothing of vLLM's own fields
            del choice["token_ids"]
            choice["logprobs"]["tokens"] = ["A"] * len(choice["logprobs"]["tokens"])
        answer.get("meta_info", {}).pop("output_token_logprobs", None)
        return status, answer


FAULTS = {
    "dies": ("cannot be reached", "Is the server running?"),
    "500": ("answered 500: CUDA out of memory", "remote.request.retries is 0"),
    "hangs": ("did not answer within 0.5 s", "Raise remote.request.timeout"),
    "no JSON": ("answered no JSON: b'<html>proxy", ""),
    "no ids": ("token ids", ""),
    "wrong model": ("answered 404: The model `absent` does not exist.", "remote.model is the name"),
}


@pytest.mark.parametrize(
    ("kind", "fault", "command"),
    [("vllm", fault, "train") for fault in FAULTS] + [("sglang", "no ids", "rollout")],
)
async def test_a_fault_in_the_middle_is_a_message(
    tmp_path: Path,
    model: Path,
    kind: str,
    fault: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")
    stand_in = Faulty(kind, model, fault)
    async with server(stand_in.handle) as url:
        address = url if kind == "vllm" else url.removesuffix("/v1")
        remote: dict[str, Any] = {"backend": kind, "url": address, "api_key_env": "SERVER_KEY"}
        remote |= {"model": "absent" if fault == "wrong model" else "base"}
        remote |= {"timeout": 0.5 if fault == "hangs" else 600, "retries": 0, "patience": 0}
        adapter = {"enabled": False}
        write_project(
            tmp_path,
            model,
            remote=remote,
            adapter=adapter,
            rollout={"concurrency": 2},
            train={"steps": 4},
        )
        more = ["-n", "8"] if command == "rollout" else []
        code = await asyncio.to_thread(main, [command, "--project", str(tmp_path), *more])
    await stand_in.close()
    said = capsys.readouterr().err
    what, hint = FAULTS[fault]
    masked = fault in (
        "no JSON",
        "no ids",
    )  # of single episodes: a rollout has others, a training stops with the words
    assert code == (0 if masked and command == "rollout" else 1)
    assert (
        what in said.replace("\n", " ")
        and hint in said.replace("\n", " ")
        and "Traceback" not in said
    )
    assert "cannot be reached" not in said or fault == "dies"


async def test_an_episode_that_is_cut_off_is_cut_off_at_the_server_too() -> None:
    """vLLM and SGLang stop sampling for a client that has disconnected; and no thread waits for the answer."""
    async with silent() as (url, asked, left):
        policy = HttpPolicy(VLLM, url, "m")
        cut_off = asyncio.create_task(policy.generate("a", [1, 2], Sampling()))
        await asked.wait()
        cut_off.cancel()
        await left.wait()
        asked.clear()
        left.clear()
        running = asyncio.create_task(policy.generate("b", [1, 2], Sampling()))
        await asked.wait()
        await policy.close()  # the run is over: an interpreter that ends waits for its threads
        with pytest.raises(PolicyError, match="cannot be reached"):
            await running
        await left.wait()


async def test_a_request_says_everything_that_decides_what_is_drawn() -> None:
    """What a request does not say, a server takes from the model's generation_config.json."""
    seen: list[dict[str, Any]] = []

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        seen.append(body)
        return 400, {"error": {"message": "enough", "type": "BadRequestError", "code": 400}}

    async with policy_at(handler) as policy:
        with pytest.raises(PolicyError, match="answered 400: enough"):
            await policy.generate("a", [1], Sampling(seed=2**63 - 1))
    wanted = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 2**63 - 1}
    assert wanted.items() <= seen[0].items()


Spoil = Callable[[dict[str, Any]], Any]
SAMPLING = Sampling(max_new_tokens=12)


def choice(**values: Any) -> Spoil:
    return lambda answer: {**answer, "choices": [{**answer["choices"][0], **values}]}


def logprobs(**values: Any) -> Spoil:
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


async def test_a_bad_answer_is_asked_for_again_and_then_names_the_server() -> None:
    asked: list[bytes | Any] = []
    good = vllm_answer([65, 66], [-0.5, -0.25])

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, asked.pop(0)

    async with policy_at(handler, retries=1, vocabulary=VOCABULARY) as policy:
        for name, (spoil, reason) in BODIES.items():
            bad = spoil(json.loads(json.dumps(good)))
            asked += [bad, good]
            assert (await policy.generate("a", [1], SAMPLING)).ids.tolist() == [65, 66], name
            asked += [bad, bad]
            with pytest.raises(BadAnswer) as failed:
                await policy.generate("a", [1], SAMPLING)
            assert reason in failed.value.message and policy.endpoint.url in failed.value.message, (
                name,
                failed.value.message,
            )
            assert "tried 2 times" in failed.value.message and not asked, name


async def test_rounding_is_no_fault() -> None:
    tops = [{"token_id:65": 1e-6, "token_id:66": None, "word": -2.0}, None]
    answer = logprobs(token_logprobs=[1e-6, -9999.0], top_logprobs=tops)(
        vllm_answer([65, 66], [0.0, 0.0])
    )

    async with policy_at(answer, vocabulary=VOCABULARY) as policy:
        said = await policy.generate("a", [1], SAMPLING)
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
    answer = {"meta_info": {**good, **meta} if isinstance(meta, dict) else meta}
    async with policy_at(answer, SGLANG, retries=0, vocabulary=VOCABULARY) as policy:
        with pytest.raises(BadAnswer, match=reason):
            await policy.generate("a", [1], SAMPLING)


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
