"""`agentrl doctor`: every check answers, and says what to do; a device is tried beside transformers."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.commands import main
from agentrl_cli.config import Config, SandboxConfig
from agentrl_cli.config.records import PolicySettings
from agentrl_cli.config.remote import RemoteConfig
from agentrl_cli.doctor import Check
from agentrl_cli.doctor.device_trial import try_part
from agentrl_cli.doctor.machine import _check_engine, check_machine, check_server
from agentrl_cli.doctor.sandbox import sandbox_level
from agentrl_cli.errors import EnvironmentProblem, ModelError
from agentrl_cli.inference.remembered import recall
from agentrl_cli.learning.forward import avoid, way_of
from agentrl_cli.models.device import pick_device
from agentrl_cli.policies.device_check import PARTS, Part, Verdict, keep, try_device
from agentrl_cli.policies.load import runner_for
from agentrl_cli.types import Sampling
from tests.helpers.cli import Cli
from tests.helpers.local import policy_of, tiny
from tests.helpers.train import write_tokenizer
from tests.helpers.web import served


def test_every_check_answers_and_the_minimum_of_the_project_counts(cli: Cli) -> None:
    with contextlib.suppress(OSError, UnicodeError):  # a file system may take no such names
        folder = cli.folder / os.fsdecode(b"caf\xe9")
        folder.mkdir()
        cli.folder = folder
    weaker = sandbox_level()[0] not in (None, "docker")
    least = "docker" if weaker else "ns"
    (cli.folder / "agentrl.yaml").write_text(f"sandbox: {{min_level: {least}}}\n")
    (cli.folder / "program.py").write_text("print(1)")
    with contextlib.chdir(cli.folder):
        starts = main(["sandbox", "run", "program.py", "--project", "."]) == 0
        cli.capture.readouterr()
        assert main(["doctor", "--json"]) == (0 if starts else 3)
    found = json.loads(cli.capture.readouterr().out)
    checks = {row["name"]: Check(**row) for row in found}
    assert list(checks) == [
        "python",
        "packages",
        "machine",
        "disk",
        "sandbox",
        "packs",
        "model",
        "store",
        "torch",
        "engine",
    ]
    assert checks["engine"] == Check("engine", "ok", "paged for tiny")
    assert checks["python"].status == checks["torch"].status == checks["packs"].status == "ok"
    store = checks["store"]
    assert store.status == "ok" and store.detail.startswith("none yet; it will be ")
    assert store.detail.endswith("/runs/agentrl.db") and f"{cli.folder}"[:-1] in store.detail
    assert all(check.fix for check in checks.values() if check.status == "fail")
    sandbox = checks["sandbox"]
    assert sandbox.status == ("ok" if starts else "fail"), "where code runs, doctor reports it"
    if weaker and starts:
        assert sandbox.detail.startswith("docker;")
    elif weaker:
        assert "sandbox.min_level is docker" in sandbox.detail, "it says why"
        assert sandbox.detail.rstrip(": ") == sandbox.detail and sandbox.fix[0] != " "


def test_a_store_that_is_none_fails_and_the_backend_of_the_project_counts(tmp_path: Path) -> None:
    def found(backend: str, least: Any, name: str = "sandbox") -> Check:
        config = Config(sandbox=SandboxConfig(backend=backend, min_level=least))
        checks = check_machine(tmp_path / "s.db", config)
        return next(check for check in checks if check.name == name)

    (tmp_path / "s.db").write_text("not a database, only text that is long enough" * 20)
    assert found("auto", "ns", "store").status == "fail"
    if sandbox_level()[0] not in ("ns", "docker"):
        pytest.skip("no strong sandbox starts here")
    for backend, least, status, *said in (
        # every command that runs code refuses it
        ("landlock", "ns", "fail", "weaker than sandbox.min_level ns", "min_level: landlock"),
        ("nothing", "ns", "fail", "Unknown sandbox backend 'nothing'"),
        ("bare", "bare", "warn", "isolates NOTHING", "sandbox.backend is bare"),
    ):
        check = found(backend, least)
        assert check.status == status
        assert [text for text in said if text not in f"{check.detail} {check.fix}"] == []


def test_a_template_is_audited(cli: Cli, tmp_path: Path) -> None:
    report = cli.json("doctor", "--template", "tiny")
    assert report["append_only"] and report["stop_token_trained"] and report["problems"] == []
    write_tokenizer(
        tmp_path,
        "{% for m in messages %}<|im_start|>{{ m.role if loop.last else 'x' }}{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
    )
    printed = cli("doctor", "--template", str(tmp_path), code=1)
    assert "turns can be appended: False" in printed and "model.chat.append_only=true" in printed
    cli("doctor", "--template", str(tmp_path / "none"), code=2, said="no such folder")


def test_the_sandbox_is_attacked_and_the_matrix_shown(cli: Cli) -> None:
    level, *_ = sandbox_level()
    if level not in ("ns", "docker"):
        pytest.skip(f"only {level} starts here")
    rows = {row["name"]: row["status"] for row in cli.json("doctor", "--sandbox", "--level", level)}
    assert rows.pop("hard limit") in ("ok", "warn")
    assert set(rows.values()) == {"ok"} and len(rows) == 9
    (row,) = cli.json("doctor", "--sandbox", "--level", "bare", code=3, said="level bare")
    assert row["status"] == "fail"
    cli("doctor", "--sandbox", "--level", "nothing", code=2)
    cli("doctor", "--level", level, code=2, said="--level does nothing without --sandbox")
    cli("doctor", "--sandbox", "--gpu", code=2, said="--sandbox does nothing with --gpu")


@pytest.mark.parametrize("content", [b"\xff", b"[1]", b"{"])
def test_a_damaged_model_folder_is_a_failed_check(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert _check_engine(str(tmp_path), Path()).status == "fail"


def test_the_server_that_samples_is_asked() -> None:
    def asked(url: str) -> Check:
        return check_server(RemoteConfig.model_validate({"backend": "openai", "url": url}))

    silent = asked("http://127.0.0.1:9/v1")
    assert silent.status == "fail" and "cannot be reached" in silent.detail
    with served(lambda path, asked: {}) as address:
        check = asked(f"{address}/v1")
    assert (check.status, check.detail) == ("ok", f"openai answers at {address}/v1")


CPU = torch.device("cpu")


@pytest.mark.parametrize("part", ["paged", "packed"])
def test_a_trial_of_this_cpu(part: str) -> None:
    found = try_part(part, CPU, 0.0)
    assert not found["problem"] and found["worst"] < 1e-4
    assert part == "packed" or found["tokens_per_second"] > 0


def test_what_a_device_without_numbers_fails_at() -> None:
    assert "meta" in try_part("paged", torch.device("meta"), 0.0)["problem"]


def test_a_fault_of_one_part_is_its_own(tmp_path: Path) -> None:
    program = tmp_path / "trial.py"
    program.write_text(
        "import json, os, sys\n"
        "print(json.dumps({'device': 'H1000', 'driver': '1.2'}), flush=True)\n"
        "for part in sys.argv[3:]:\n"
        "    if part == 'paged': os.write(2, b'CUDA error: an illegal memory access'); os._exit(134)\n"
        "    print(json.dumps({'part': part, 'problem': 'by 0.5' if part == 'packed' else ''}), flush=True)\n"
    )
    verdict = try_device("cuda:0", 1.0, program=[sys.executable, str(program)])
    assert (
        tuple(sorted(verdict.parts)) == tuple(sorted(PARTS))
        and verdict.identity["device"] == "H1000"
    )
    assert "illegal memory access" in verdict.problem("paged") and not verdict.problem("fallback")
    assert list(verdict.ways) == ["packed"]
    keep(verdict)
    kept = recall("devices", "H1000 / 1.2")
    assert kept is not None and json.loads(kept)["parts"]["packed"]["problem"] == "by 0.5"
    nothing = tmp_path / "nothing.py"
    nothing.write_text("raise SystemExit('the driver is too old')")
    with pytest.raises(EnvironmentProblem, match="the driver is too old"):
        try_device("cuda:0", 1.0, program=[sys.executable, str(nothing)])


async def test_what_failed_is_not_used() -> None:
    bad = {
        name: Part(name, problem="log-probabilities differ by 2")
        for name in ("paged", "packed", "graphs")
    }
    verdict, config = Verdict({}, bad), Config()
    policy = policy_of(
        tiny(), runner=runner_for(PolicySettings.of(config), torch.device("cuda"), verdict)
    )
    assert (
        policy.engine == "fallback"
        and "`agentrl doctor --gpu` found on this GPU" in policy.describe()
    )
    assert len((await policy.generate("a", [7, 8, 9], Sampling(max_new_tokens=2))).ids) == 2
    await policy.close()
    model = tiny()
    avoid(model, verdict.ways)
    assert way_of(model) == "padded"
    auto = PolicySettings.of(Config.model_validate({"rollout": {"cuda_graphs": "auto"}}))
    assert runner_for(auto, torch.device("cuda"), Verdict()) is not None
    assert runner_for(auto, torch.device("cuda"), Verdict({}, {"graphs": bad["graphs"]})) is None
    assert runner_for(PolicySettings.of(Config()), torch.device("cuda"), Verdict()) is None, (
        "graphs are off until a project asks"
    )
    with pytest.raises(EnvironmentProblem, match="No engine"):
        Verdict({}, {**bad, "fallback": Part("fallback", problem="too")}).require_engine()
    full = Verdict({}, {"paged": Part("paged", problem="CUDA out of memory")})
    assert full.starved and not full.problem("paged"), "another program had the memory"


def test_the_command(cli: Cli) -> None:
    cli("doctor", "--device", "cpu", code=2, said="--device does nothing without --gpu")
    for way in ("--gpu", "--sandbox", "--template=tiny"):
        said = f"--set does nothing with {way.partition('=')[0]}"
        cli("doctor", way, "--set", "seed=1", code=2, said=said)
    for device in ("nonsense", "xpu:99", "meta"):
        with pytest.raises(ModelError, match=f"Unknown model.device '{device}'"):
            pick_device(device)
    cli("doctor", "--gpu", "--device", "meta", "--json", code=3, said="model.device 'meta'")
    with pytest.raises(ModelError, match=r"model\.device is cuda:99, and torch finds"):
        pick_device("cuda:99")
