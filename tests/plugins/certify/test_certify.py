"""Six faults are planted in a merged checkpoint and named; the clean one passes, in a folder and behind an address."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.commands import main
from agentrl_cli.config import Config
from agentrl_cli.errors import PolicyError
from agentrl_cli.evaluate import Attempt, EvalResult
from agentrl_cli.plugins.certify.replay import (
    KNOTS,
    Context,
    answers,
    check_pass,
    check_template,
    check_tokens,
    gap,
    name_fault,
    round_weights,
)
from agentrl_cli.plugins.certify.subjects import Here, LlamaPolicy, subject_of
from agentrl_cli.policies.load import load_policy
from agentrl_cli.types import Outcome, Sampling
from benchmarks.certify import CASES, double
from tests.helpers.cli import Cli
from tests.helpers.remote import server
from tests.helpers.train import write_model, write_pack, write_project

FEW = ("--contexts", "4", "--tasks", "0", "--nats", "0.002")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of two steps, whose adapter has moved a random model far."""
    folder = tmp_path_factory.mktemp("certify")
    model = write_model(folder / "model")
    project = write_project(write_pack(folder / "project"), model, train={"eval": 2})
    run = ["train", "--project", str(project), "--lora", "--steps", "2", "--lr", "0.1"]
    assert main(run) == 0
    return project


def swap(folder: Path) -> None:
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    words = data["model"]["vocab"]
    words["G"], words["o"] = words["o"], words["G"]
    file.write_text(json.dumps(data), encoding="utf-8")


def target_of(project: Path, fault: str, out: Path) -> Path:
    source, plant = CASES[fault]
    doubled = out.with_name("doubled")
    shutil.copytree(project / "runs" / "bandit-grpo" / "checkpoints" / "last", doubled)
    double(doubled)
    names = {"best": "bandit-grpo@last", "base": "bandit-grpo@base", "doubled": str(doubled)}
    assert main(["merge", names[source], str(out), "--project", str(project)]) == 0
    (out / "checksums.json").unlink()
    (swap if fault == "tokenizer" else plant)(out)
    return out


@pytest.mark.parametrize("fault", CASES)
def test_a_planted_fault_is_named_with_a_number_and_an_episode(
    fault: str, project: Path, tmp_path: Path, cli: Cli
) -> None:
    cli.folder = project
    target = target_of(project, fault, tmp_path / "target")
    said = cli.json("certify", "last", str(target), *FEW, code=4 * bool(fault))
    found = [one for one in said["checks"] if one["ok"] is False]
    assert (
        said["certified"] is not bool(fault)
        and [one["fault"] for one in found[:1]] == [fault][: bool(fault)]
    )
    if not fault:
        assert "Certified" in said["verdict"]
        return
    assert found[0]["value"] > 0 and found[0]["text"] in said["verdict"]
    cli("replay", found[0]["episode"], "--json")
    if fault == "tokenizer":  # the others' text is made of the same fields
        again = (fault, f"agentrl replay {found[0]['episode']}")
        assert said["verdict"] in cli("certify", "last", str(target), *FEW, code=4, said=again)


def test_a_run_that_began_from_an_adapter_is_compared_with_it(
    project: Path, tmp_path: Path, cli: Cli
) -> None:
    cli.folder = shutil.copytree(project, tmp_path / "project")
    cli("train", "--lora", "--steps", "1", "--lr", "0.1", "--model", "bandit-grpo@last")
    cli("merge", "bandit-grpo@last", "began")
    said = cli.json("certify", "last", "began", *FEW, code=4)
    assert said["checks"][2]["fault"] == "adapter missing", said["verdict"]


def test_pass_at_1_of_nothing_that_was_graded_is_unknown() -> None:
    lost = Attempt("t", "p", "", "test", 0, "e", Outcome.ENV_ERROR, None, 0, 0, 0)
    one = EvalResult("m", 1, 0, 1.0, True, (lost,))
    assert check_pass(one, one).ok is None


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
async def test_a_gguf_file_has_the_numbers_and_the_turns_of_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["merge", "tiny", str(out), "--gguf"]) == 0
    there = {"backend": {"name": "llama_cpp"}, "model": str(out / "out-f16.gguf")}
    config = Config.model_validate({"model": {"name": str(out)}, "remote": there})
    subject = subject_of(load_policy(None, config, base=tmp_path))
    here = Here(load_policy(str(out), Config(), base=tmp_path))
    said = [{"role": "user", "content": "What is 12 plus 345?"}]
    ids = here.chat.rendered_ids(said, None, add_generation_prompt=True)
    one = Context("e@t1", ids, [], said, [])
    assert (await check_tokens(here, subject, [one])).ok
    assert (await check_template(here, subject, [one])).ok
    places = list(range(1, len(ids)))
    assert gap(await here.score(ids, places), await subject.score(ids, places)) < 0.02
    turns = [await answers(subject_, here.chat, [one], 24) for subject_ in (here, subject)]
    assert turns[0] == turns[1]
    with pytest.raises(PolicyError, match="without images"):
        await subject.loaded.policy.generate("k", ids, Sampling(), images=[b"png"])
    for opened in (here, subject):
        await opened.loaded.policy.close()


async def test_llama_cpp_refuses_settings_that_it_is_not_given() -> None:
    policy = object.__new__(
        LlamaPolicy
    )  # without its library: what is refused is refused before it
    for given in ({"stop_strings": ("x",)}, {"bad_ids": (3,)}, {"allow": lambda ids: None}):
        with pytest.raises(PolicyError, match=next(iter(given))) as refused:
            await policy.generate("k", [1], Sampling(**given))
        assert "rollout.stop" in refused.value.hint


async def test_an_address_is_asked_as_any_client_asks_it(model: Path) -> None:
    here = Here(load_policy(str(model), Config(), base=model))
    chat, extra, form = here.chat, 0, "text"

    def listed(top: list[tuple[int, float]]) -> dict[str, Any]:
        if form in ("text", "token_id"):
            names = {n: f"token_id:{n}" if form == "token_id" else chat.decode([n]) for n, _ in top}
            return {"top_logprobs": [{names[n]: logp for n, logp in top}]}
        words = {
            n: {"id": n} if form == "id" else {"bytes": list(chat.tokenizer.token_text(n).encode())}
            for n, _ in top
        }
        tops = [{"token": "same", **words[n], "logprob": logp} for n, logp in top]
        return {"content": [{"top_logprobs": tops}]}

    async def handle(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/chat/completions":
            ids = chat.rendered_ids(body["messages"], body.get("tools"), add_generation_prompt=True)
            return 200, {"choices": [], "usage": {"prompt_tokens": len(ids)}}
        if path != "/v1/completions" or not isinstance(body["prompt"], str):
            return 422, {"error": "a text is wanted"}
        if body.get("logprobs", 0) > 5:
            return 400, {"error": "5 at most"}
        ids = chat.tokenizer.encode(body["prompt"])
        logits = here.loaded.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        top = [(int(n), float(logits[n])) for n in logits.argsort()[-20:]]
        choice = {"text": "", "logprobs": listed(top)}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids) + extra}}

    async with server(handle) as url:
        there = {"backend": {"name": "openai", "mode": "chat"}, "url": url, "model": "m"}
        config = Config.model_validate({"model": {"name": str(model)}, "remote": there})
        subject = subject_of(load_policy(None, config, base=model))
        said = [{"role": "user", "content": "Go, and come back, quickly."}]
        ids = chat.rendered_ids(said, None, add_generation_prompt=True)
        assert await subject.prompt(said, []) == len(ids)
        assert await subject.prompt([*said, {"role": "assistant", "tool_calls": [{}]}], []) is None
        places = list(range(10, 40))
        theirs, ours = await subject.score(ids, places), await here.score(ids, places)
        known = ~np.isnan(theirs)
        assert known.any() and not known.all()  # it lists the likeliest tokens alone
        np.testing.assert_allclose(theirs[known], ours[known], atol=1e-5)
        for other in ("token_id", "id", "bytes"):  # several tokens may have one text
            form = other
            np.testing.assert_allclose(await subject.score(ids, places), theirs, atol=1e-5)
        one = Context("e@t1", ids, [], said, [])
        assert (await check_tokens(here, subject, [one])).ok
        extra = 1
        found = await check_tokens(here, subject, [one])
        assert (found.ok, found.fault, found.episode) == (False, "BOS", "e@t1")
        await subject.loaded.policy.close()


def test_a_scale_is_found_between_the_knots_and_rounding_by_its_size() -> None:
    model = torch.nn.Linear(32, 4, bias=False)
    own, base = torch.randn(4, 32), {"weight": torch.zeros(4, 32)}
    model.weight.data.copy_(own)

    def score() -> Any:
        return model.weight.detach().numpy()[0].copy()

    fault, why = name_fault(model, base, score, 1.25 * own.numpy()[0])
    assert fault == "adapter scale" and "1.25 times" in why and 1.25 not in KNOTS
    assert name_fault(model, base, score, 0 * own.numpy()[0])[0] == "adapter missing"
    rounded = round_weights(4, "", own).numpy()[0]
    assert name_fault(model, base, score, rounded) == (
        "quantisation",
        "as far off as weights that are rounded to 4 bits",
    )
    assert name_fault(model, base, score, own.numpy()[0][::-1].copy())[0] == "other weights"
    assert torch.equal(model.weight, own)
    assert gap(np.array([1.0, 5.0], np.float32), np.array([1.5, np.nan], np.float32)) == 0.5


def test_mistakes_are_sentences(project: Path, cli: Cli) -> None:
    cli.folder = project
    cli("certify", "last", "nowhere", code=2, said=("no such folder or file", "NAME@http"))
    cli("certify", "tiny", "nowhere", code=2, said="not a checkpoint of a run")
    if find_spec("llama_cpp") is None:
        (project / "some.gguf").write_bytes(b"")
        cli("certify", "last", "some.gguf", code=3, said="pip install llama-cpp-python")
    for account in ("", "user:pass-word@"):
        target = f"m@http://{account}127.0.0.1:9/v1"
        cli("certify", "last", target, *FEW, code=1, said="cannot be reached")
        assert "pass-word" not in cli.err
