"""Training with servers that sample: versions, restarts, faults, unusable answers; vLLM's requests and its start."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config
from agentrl_cli.commands import main
from agentrl_cli.errors import (
    BadAnswer,
    ConfigError,
    ModelError,
    PolicyError,
    TrainingStopped,
)
from agentrl_cli.plugins.engines.policy import HttpPolicy
from agentrl_cli.plugins.engines.server import run_server
from agentrl_cli.plugins.engines.wires import SGLANG, VLLM, Wire
from agentrl_cli.trainer import Trainer
from agentrl_cli.trainer.probe import CONTEXTS
from agentrl_cli.types import Outcome, Sampling, StopReason
from tests.helpers.processes import free_port
from tests.helpers.remote import SILENT, StandIn, serve_all, server, silent, vllm_answer
from tests.helpers.train import (
    STOP,
    VOCABULARY,
    after_training,
    episodes_of,
    trainer_of,
    write_model,
    write_project,
)

GAP = "sampling/sampling_logp_difference/max"
SAMPLING = Sampling(max_new_tokens=12)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "k")


@asynccontextmanager
async def policy_at(
    answers: Any, wire: Wire = VLLM, *, seen: list[Any] | None = None, **given: Any
) -> AsyncIterator[HttpPolicy]:
    """A policy on a server with the answers of a list in turn, or always the same: a body, or its status and it.

    `seen` gets the requests.
    """

    async def handler(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if seen is not None:
            seen.append({"path": path, **body})
        answer = answers.pop(0) if isinstance(answers, list) else answers
        return answer if isinstance(answer, tuple) else (200, answer)

    async with server(handler) as url:
        policy = HttpPolicy(wire, url if wire is VLLM else url.removesuffix("/v1"), "m", **given)
        yield policy
        await policy.close()


@asynccontextmanager
async def serving(kind: str, model: Path) -> AsyncIterator[tuple[StandIn, dict[str, Any]]]:
    """A stand-in, and the section `remote` that means it."""
    stand_in = StandIn(kind, model)
    async with serve_all(stand_in) as (url,):
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


@pytest.mark.parametrize(("kind", "adapter"), [("vllm", False), ("sglang", True)])
async def test_training_with_a_server(
    tmp_path: Path, model: Path, kind: str, adapter: bool
) -> None:
    more: dict[str, Any] = {
        "adapter": {"enabled": adapter, "r": 2},
        "train": {"steps": 2, "lr": 1e-2},
    }
    async with serving(kind, model) as (stand_in, remote):
        stand_in.dies_at = {13}
        async with after_training(tmp_path, model, remote=remote, **more) as (trainer, run):
            rows = trainer.store.runs.steps(run.id)
            episodes = episodes_of(trainer.store, run)
            alerts = [alert["name"] for alert in trainer.store.journal.folded_alerts(run.id)]
    assert run.status == "finished" and len(episodes) == 16 and all(e.fact for e in episodes)
    # The server's weights are the trainer's.
    gaps = [max(row[GAP], row["probe/logp_difference"]) for row in rows]
    assert len(gaps) == 2 and max(gaps) < 1e-4 and "mismatch" not in alerts
    versions = [e.turns[-1].weights_version for e in sorted(episodes, key=lambda e: e.step or 0)]
    assert versions == [f"{run.name}@{n}" for n in range(2) for _ in range(8)]
    left = [path.name for path in (tmp_path / "runs" / "remote").iterdir()]
    assert left == [f"{run.name}-2"], "old weights are not kept"
    commands = ("/load_lora_adapter", "/collective_rpc", "/update_weights_from_disk")
    # The start, two updates, and the restart.
    assert sum(path.endswith(commands) for path in stand_in.paths) == 4


@pytest.mark.parametrize(("kind", "adapter"), [("vllm", True), ("sglang", False)])
async def test_a_restart_between_two_requests_is_noticed(
    tmp_path: Path, model: Path, kind: str, adapter: bool
) -> None:
    more: dict[str, Any] = {
        "adapter": {"enabled": adapter, "r": 2},
        "train": {"steps": 2, "lr": 1e-2},
        "rollout": {"concurrency": 1},
    }
    async with serving(kind, model) as (stand_in, remote):
        # In the second step: 8 turns and at most 2 of the probe came before.
        stand_in.forgets_at = {11}
        async with after_training(tmp_path, model, remote=remote, **more) as (trainer, run):
            rows = trainer.store.runs.steps(run.id)
            steps = [episodes_of(trainer.store, run, step) for step in (1, 2)]
    assert [row[GAP] < 1e-4 for row in rows] == [True] * 2
    trained = [{one.group_id for one in episodes if one.fact == "trained"} for episodes in steps]
    probes = sum(min(CONTEXTS, len(groups)) for groups in trained)
    assert probes and stand_in.generated == 16 + probes + 1


def sglang(version: str = "x", finish: str = "stop", **meta: Any) -> dict[str, Any]:
    """An answer with the tokens 65 and STOP."""
    found = {
        "output_token_logprobs": [[-0.5, 65, None], [-0.25, STOP, None]],
        "output_top_logprobs": [[[-0.5, 65, None], [-1.0, 66, None]], None],
        "finish_reason": {"type": finish},
        "weight_version": version,
    }
    return {"text": "A", "output_ids": [65, STOP], "meta_info": found | meta}


async def test_weights_that_are_refused_and_a_server_with_others_are_named(model: Path) -> None:
    taken, refused = {"success": True}, {"success": False, "message": "shape mismatch"}
    answers = [refused, taken, sglang("run@1"), sglang("other@7"), taken, sglang("other@7")]
    async with policy_at(answers, SGLANG) as policy:
        with pytest.raises(PolicyError, match=r"did not take the weights.*shape mismatch"):
            await policy.load_weights(model, "run@1")
        assert policy.weights_version == "m", "it keeps its version"
        await policy.load_weights(model, "run@1")
        assert (await policy.generate("a", [9, 10], SAMPLING)).weights_version == "run@1"
        with pytest.raises(PolicyError, match=r"weights 'other@7' and was given 'run@1'"):
            await policy.generate("a", [9, 10], SAMPLING)
    assert not answers


async def test_sglang_wire_format() -> None:
    seen: list[dict[str, Any]] = []
    async with policy_at(sglang(), SGLANG, seen=seen) as policy:
        said = await policy.generate("a", [1, 2], Sampling(stop_ids=(STOP,), seed=2**40 + 3))
    assert (said.ids.tolist(), said.stop_reason) == ([65, STOP], StopReason.STOP)
    assert said.logp_policy.tolist() == [-0.5, -0.25]
    assert said.top_ids[0].tolist()[:2] == [65, 66]
    [request] = seen
    asked = {name: request[name] for name in ("path", "input_ids", "return_logprob")}
    assert asked == {"path": "/generate", "input_ids": [1, 2], "return_logprob": True}
    wanted = {"stop_token_ids": [STOP], "sampling_seed": 3}
    assert wanted.items() <= request["sampling_params"].items()


VLLM_SAYS = vllm_answer([65], [-0.5], "length")


@pytest.mark.parametrize(
    ("wire", "processed", "sampling", "known"),
    [
        (VLLM, False, {}, (True, True)),
        (VLLM, False, {"temperature": 0.7}, (False, False)),
        (VLLM, False, {"top_p": 0.9}, (False, True)),
        (VLLM, True, {"temperature": 0.7}, (True, True)),
        (VLLM, True, {"top_p": 0.9}, (True, False)),
        (SGLANG, False, {"temperature": 0.7}, (True, True)),
        (SGLANG, False, {"top_p": 0.5}, (False, True)),
        (SGLANG, False, {"repetition_penalty": 1.5}, (True, False)),
        (SGLANG, False, {"bad_ids": (7,)}, (True, False)),
    ],
)
async def test_servers_say_what_their_log_probabilities_are(
    wire: Wire, processed: bool, sampling: dict[str, Any], known: tuple[bool, bool]
) -> None:
    """Whether they are those that were sampled with, and the policy's; NaN else."""
    answer = VLLM_SAYS if wire is VLLM else sglang(finish="length")
    async with policy_at(answer, wire, processed=processed) as policy:
        said = await policy.generate("a", [1, 2], Sampling(**sampling))
    assert said.stop_reason is StopReason.LENGTH
    assert tuple(said.logp_sampled == said.logp_sampled) == (known[0],) * len(said.ids)
    assert tuple(said.logp_policy == said.logp_policy) == (known[1],) * len(said.ids)


async def test_what_cannot_be(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("vllm", model) as (stand_in, remote):
        text = "cannot be trained: an OpenAI-compatible endpoint returns text"
        with pytest.raises(ModelError, match=text):
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


# Of a server that goes wrong from its fourth generation on: what it answers, the message and the hint.
FAULTS: dict[str, tuple[Any, str, str]] = {
    "dies": (ConnectionResetError(), "cannot be reached", "Is the server running?"),
    "500": (
        (500, {"error": {"message": "CUDA out of memory", "type": "InternalServerError"}}),
        "answered 500: CUDA out of memory",
        "remote.request.retries is 0",
    ),
    "hangs": (1.0, "did not answer within 0.5 s", "Raise remote.request.timeout"),
    "no JSON": ((200, b"<html>proxy</html>"), "answered no JSON: b'<html>proxy", ""),
    # An endpoint that knows nothing of vLLM's own fields, or of SGLang's.
    "no ids": (
        (200, {"choices": [{"logprobs": {"tokens": ["A"]}}], "meta_info": {}}),
        "token ids",
        "",
    ),
    "wrong model": (
        None,
        "answered 404: The model `absent` does not exist.",
        "remote.model is the name",
    ),
}


class Faulty(StandIn):
    fault: Any

    async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in ("/v1/completions", "/generate") and self.generated >= 3:
            if isinstance(self.fault, ConnectionResetError):
                raise self.fault
            if isinstance(self.fault, float):
                await asyncio.sleep(self.fault)
            elif self.fault is not None:
                status, answer = self.fault
                return status, answer
        return await super().handle(path, body)


async def test_a_fault_is_a_message_and_a_hint(model: Path) -> None:
    for fault, (_, what, hint) in FAULTS.items():
        stand_in = Faulty("vllm", model)
        stand_in.fault, stand_in.generated = FAULTS[fault][0], 3
        async with serve_all(stand_in) as (url,):
            name = "absent" if fault == "wrong model" else "base"
            more: dict[str, Any] = {"timeout": 0.5} if fault == "hangs" else {}
            policy = HttpPolicy(VLLM, url, name, api_key="k", retries=0, patience=0.0, **more)
            with pytest.raises(PolicyError, match=re.escape(what)) as failed:
                await policy.generate("a", [1], SAMPLING)
            assert hint in failed.value.hint
            await policy.close()


@pytest.mark.parametrize(
    ("kind", "fault", "command"), [("vllm", "dies", "train"), ("sglang", "no ids", "rollout")]
)
async def test_a_fault_in_the_middle_is_a_message(
    tmp_path: Path,
    model: Path,
    kind: str,
    fault: str,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in = Faulty(kind, model)
    stand_in.fault, what, hint = FAULTS[fault]
    async with serve_all(stand_in) as (url,):
        remote = {
            "backend": kind,
            "url": url if kind == "vllm" else url.removesuffix("/v1"),
            "api_key_env": "SERVER_KEY",
            "model": "base",
            "retries": 0,
            "patience": 0,
        }
        more = {"rollout": {"concurrency": 2}, "train": {"steps": 4}}
        write_project(tmp_path, model, remote=remote, adapter={"enabled": False}, **more)
        words = [command, "--project", str(tmp_path), *["-n", "8"] * (command == "rollout")]
        code = await asyncio.to_thread(main, words)
    said = capsys.readouterr().err.replace("\n", " ")
    # A rollout has other episodes than the masked ones; a training stops with the words.
    assert code == (0 if command == "rollout" else 1)
    assert what in said and hint in said and "Traceback" not in said


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
    refused = (400, {"error": {"message": "enough", "type": "BadRequestError", "code": 400}})
    async with policy_at(refused, seen=seen) as policy:
        with pytest.raises(PolicyError, match="answered 400: enough"):
            await policy.generate("a", [1], Sampling(seed=2**63 - 1, bad_ids=(7,)))
    wanted = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {"7": -100.0},
        "seed": 2**63 - 1,
    }
    [request] = seen
    assert wanted.items() <= request.items()


Spoil = Callable[[dict[str, Any]], Any]


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


async def test_bad_answers_are_asked_for_again_and_then_name_the_server() -> None:
    """At the same time: between two tries a client waits."""

    async def check(spoil: Spoil, reason: str) -> None:
        good = vllm_answer([65, 66], [-0.5, -0.25])
        bad = spoil(json.loads(json.dumps(good)))
        answers = [bad, good, bad, bad]
        async with policy_at(answers, retries=1, vocabulary=VOCABULARY) as policy:
            assert (await policy.generate("a", [1], SAMPLING)).ids.tolist() == [65, 66], reason
            with pytest.raises(BadAnswer) as failed:
                await policy.generate("a", [1], SAMPLING)
            for part in (reason, policy.endpoint.url, "tried 2 times"):
                assert part in failed.value.message
        assert not answers

    await asyncio.gather(*(check(*given) for given in BODIES.values()))


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

    spoil: Spoil
    numbers: range

    async def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        status, answer = await super().handle(path, body)
        spoilt = path == "/v1/completions" and self.generated in self.numbers
        return status, self.spoil(answer) if spoilt else answer


@asynccontextmanager
async def trainer_with(
    fault: str, numbers: range, model: Path, folder: Path
) -> AsyncIterator[Trainer]:
    """A training with a server whose answers are spoilt."""
    stand_in = Spoilt("vllm", model)
    stand_in.spoil, stand_in.numbers = BODIES[fault][0], numbers
    more: dict[str, Any] = {"adapter": {"enabled": False}, "rollout": {"concurrency": 1}}
    more["algo"] = {"drop_zero_variance": False}
    async with serve_all(stand_in) as (url,):
        remote = {"backend": "vllm", "url": url, "model": "base", "api_key_env": "SERVER_KEY"}
        async with trainer_of(folder, model, remote={**remote, "retries": 0}, **more) as trainer:
            yield trainer


async def test_a_training_skips_bad_answers(tmp_path: Path, model: Path) -> None:
    async with trainer_with("ids without end", range(3, 5), model, tmp_path) as trainer:
        run = await trainer.train()
        found = episodes_of(trainer.store, run)
        alerts = {alert["name"] for alert in trainer.store.journal.folded_alerts(run.id)}
    lost = [e for e in found if e.outcome is Outcome.ENV_ERROR]
    assert run.status == "finished" and len(found) == 16 and len(lost) == 2 and "errors" in alerts
    for e in lost:
        assert (e.fact, e.reward) == ("skipped:fault: env_error", None)
        assert "/v1/completions sent the token id" in e.error
    assert {e.fact for e in found if e not in lost} == {"trained"}


async def test_a_training_stops_if_there_are_only_bad_answers(tmp_path: Path, model: Path) -> None:
    async with trainer_with("a page", range(1, 100), model, tmp_path) as trainer:
        with pytest.raises(TrainingStopped, match="nothing_graded") as stopped:
            await trainer.train()
    assert "/v1/completions answered no JSON" in stopped.value.message


# --- vLLM's requests and release; several servers behind one policy, and one that a run starts ---


# --- a vLLM server that a run starts ---


PROGRAM = f"""#!/usr/bin/env -S "{sys.executable}"
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if "--fail" in sys.argv:
    sys.exit("no such device")

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.endswith("/die"):
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(7)
        self.send_response(200)
        self.end_headers()
        found = {{"pid": os.getpid(), "argv": sys.argv[1:], "key": os.environ["VLLM_API_KEY"]}}
        modes = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
        self.wfile.write(json.dumps({{**found, "modes": [name for name in modes if name in os.environ]}}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""


def settings_of(folder: Path, **sections: Any) -> Config:
    program = folder / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o700)
    base = {"remote": {"backend": "vllm"}, "adapter": {"enabled": True}}
    base["engine"] = {"start": True, "env": str(folder)}
    return Config.model_validate({**base, **sections})


@asynccontextmanager
async def running(
    folder: Path, log: Path, retries: int = 0
) -> AsyncIterator[tuple[str, HttpPolicy]]:
    """A server's address, and a policy on it."""
    async with run_server(settings_of(folder), folder / "model", log) as found:
        url = found.config.remote.address
        policy = HttpPolicy(VLLM, url, "base", retries=retries)
        yield url, policy
        await policy.close()


# --- a real vLLM server, where there is one to start ---
#
#     AGENTRL_VLLM=/path/of/a/venv/bin/vllm python -m pytest tests/plugins/engines -k real_vllm
#
# Whole weights and adapters, a temperature with processed log-probabilities, a model that the server does not know. The
# stand-ins speak the same formats and run everywhere; this shows that they do.


REAL_VLLM = os.environ.get("AGENTRL_VLLM", "")


@contextmanager
def starting(model: Path, log: Path, *options: str) -> Iterator[dict[str, Any]]:
    port = free_port()
    words = f"""--served-model-name base --dtype float32 --enforce-eager --max-model-len 256
                --host 127.0.0.1 --port {port} --api-key k"""
    command = [REAL_VLLM, "serve", str(model), *words.split(), *options]
    extra = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=inherited | extra) as process,
    ):
        try:
            while not _healthy(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None, log.read_text()[-2000:]
                time.sleep(0.5)
            yield {
                "backend": "vllm",
                "url": f"http://127.0.0.1:{port}/v1",
                "model": "base",
                "api_key_env": "SERVER_KEY",
                "retries": 0,
            }
        finally:
            process.terminate()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.mark.skipif(not REAL_VLLM, reason="AGENTRL_VLLM names no vllm to start")
@pytest.mark.parametrize("adapter", [False, True])
async def test_training_with_a_real_vllm(tmp_path: Path, adapter: bool) -> None:
    # The least head_dim that vLLM's attention on a CPU knows.
    model = write_model(tmp_path / "model", head_dim=32)
    (model / "generation_config.json").write_text(json.dumps({**SILENT, "eos_token_id": STOP}))
    words = "--enable-lora --max-lora-rank 8 --logprobs-mode processed_logprobs" if adapter else ""
    more: dict[str, Any] = {
        "adapter": {"enabled": adapter, "r": 2},
        "train": {"steps": 3, "lr": 1e-2},
        "rollout": {"temperature": 0.7} if adapter else {},
    }
    with starting(model, tmp_path / "log", *words.split()) as remote:
        remote["processed_logprobs"] = adapter
        async with after_training(tmp_path, model, remote=remote, **more) as (trainer, run):
            rows = trainer.store.runs.steps(run.id)
        assert run.status == "finished"
        assert [row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows] == [True] * 3
        # What it says of another model or key: the stand-ins say the same.
        policy = HttpPolicy(VLLM, remote["url"], "absent", api_key="k")
        with pytest.raises(PolicyError, match="404: The model `absent` does not exist"):
            await policy.generate("a", [1], Sampling())
        await policy.close()
