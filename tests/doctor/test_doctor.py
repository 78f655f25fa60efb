"""`agentrl doctor`: every check answers, and says what to do where something is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.commands import main
from agentrl_cli.config import Config, SandboxConfig
from agentrl_cli.config.remote import RemoteConfig
from agentrl_cli.doctor import Check
from agentrl_cli.doctor.machine import check_machine, check_server
from agentrl_cli.doctor.sandbox import sandbox_level
from agentrl_cli.policies.remote.wires import TESTED_VLLM
from tests.helpers.cli import Cli
from tests.helpers.train import write_tokenizer
from tests.helpers.web import served


def test_every_check_answers(tmp_path: Path) -> None:
    checks = {check.name: check for check in check_machine(tmp_path / "runs" / "agentrl.db")}
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
    assert checks["store"] == Check(
        "store", "ok", f"none yet; it will be {tmp_path}/runs/agentrl.db"
    )
    assert all(check.fix for check in checks.values() if check.status == "fail")


def test_the_minimum_of_the_project_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    level, *_ = sandbox_level()
    if level in (None, "docker"):
        pytest.skip("nothing here is weaker than docker")
    (tmp_path / "agentrl.yaml").write_text("sandbox: {min_level: docker}\n")
    (tmp_path / "program.py").write_text("print(1)")
    starts = main(["sandbox", "run", str(tmp_path / "program.py"), "--project", str(tmp_path)]) == 0
    capsys.readouterr()
    code = main(["doctor", "--json", "--project", str(tmp_path)])
    found = next(
        check for check in json.loads(capsys.readouterr().out) if check["name"] == "sandbox"
    )
    if starts:  # an engine with the image: where code runs, doctor reports it
        assert found["status"] == "ok" and found["detail"].startswith("docker;")
    else:
        assert (
            code == 3
            and found["status"] == "fail"
            and "sandbox.min_level is docker" in found["detail"]
        )
        assert found["detail"].rstrip(": ") == found["detail"] and not found["fix"].startswith(
            " "
        )  # it says why


def test_the_backend_of_the_project_counts(tmp_path: Path) -> None:
    def found(backend: str, least: Any = "ns") -> Check:
        config = Config(sandbox=SandboxConfig(backend=backend, min_level=least))
        checks = check_machine(tmp_path / "s.db", config)
        return next(check for check in checks if check.name == "sandbox")

    if sandbox_level()[0] not in ("ns", "docker"):
        pytest.skip("no strong sandbox starts here")
    weak = found("landlock")  # every command that runs code refuses it
    assert weak.status == "fail" and "weaker than sandbox.min_level ns" in weak.detail
    assert "min_level: landlock" in weak.fix
    unknown = found("nothing")
    assert unknown.status == "fail" and "Unknown sandbox backend 'nothing'" in unknown.detail
    bare = found("bare", "bare")
    assert (
        bare.status == "warn"
        and "isolates NOTHING" in bare.detail
        and "sandbox.backend is bare" in bare.detail
    )


def test_a_store_that_is_none_fails(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text(
        "this is not a database, only text that is long enough to be looked at" * 20
    )
    store = next(check for check in check_machine(tmp_path / "s.db") if check.name == "store")
    assert store.status == "fail"


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
    cli("doctor", "--level", level, code=2)  # it would be read and change nothing


def test_the_server_that_samples_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed vLLM is a folder of metadata on the path, which is all that is read of one."""

    def asked(url: str, backend: str = "vllm") -> Check:
        return check_server(RemoteConfig.model_validate({"backend": backend, "url": url}))

    silent = asked("http://127.0.0.1:9/v1")
    assert (
        silent.status == "fail"
        and "cannot be reached" in silent.detail
        and "agentrl-cli[vllm]" in silent.fix
    )
    assert "vllm" not in asked("http://127.0.0.1:9/v1", "openai").fix
    with served(lambda path, asked: {}) as address:
        url = f"{address}/v1"
        for installed, status in (("", "ok"), (f"{TESTED_VLLM}.3", "ok"), ("0.14.0", "warn")):
            if installed:
                info = tmp_path / installed / f"vllm-{installed}.dist-info"
                info.mkdir(parents=True)
                (info / "METADATA").write_text(
                    f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed}\n"
                )
                monkeypatch.syspath_prepend(info.parent)
            check = asked(url)
            assert (check.status, bool(check.fix)) == (status, status == "warn"), installed
            assert check.detail.startswith(f"vllm answers at {url}")
