"""Harbor task folders as packs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl_cli.commands import main
from agentrl_cli.config import Config
from agentrl_cli.evaluate.pack_check import check_pack
from agentrl_cli.paths import find_pack
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.tasks import load_pack

DOCKERFILE = (
    "FROM ubuntu:24.04\nWORKDIR /srv\nCOPY notes.txt /srv/data/notes.txt\nRUN mkdir -p out\n"
)
SCRIPT = "mkdir -p /srv/out\ntr a-z A-Z < /srv/data/notes.txt > /srv/out/big.txt\n"
TEST = "grep -q HELLO /srv/out/big.txt && echo '{\"reward\": 1.0}' > /logs/verifier/reward.json\ncat /tests/say\n"


def written(folder: Path, dockerfile: str) -> None:
    files = {
        "task.toml": '[metadata]\ncategory = "text"\n',
        "instruction.md": "Write /srv/data/notes.txt in capitals to /srv/out/big.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/notes.txt": "hello\n",
        "solution/solve.sh": SCRIPT,
        "tests/test.sh": TEST,
        "tests/say": "done",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


async def test_folders_become_a_pack_whose_own_solutions_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of swe-task and a shell task; one that installs a package is left out by its name."""
    made = load_pack(find_pack("swe-task")).module
    made.harbor(str(tmp_path / "tasks"), 7, 9)
    written(tmp_path / "tasks" / "capitals", DOCKERFILE)
    written(tmp_path / "tasks" / "grown", DOCKERFILE + "RUN apt-get install -y jq\n")
    assert main(["init", str(tmp_path / "p"), "--from", f"harbor:{tmp_path / 'tasks'}"]) == 0
    assert "grown (RUN apt-get install -y jq)" in capsys.readouterr().err
    pack = load_pack(tmp_path / "p")
    rows = [task for split in pack.splits() for task in pack.tasks(split)]
    assert len(rows) == 10
    prompt = next(row.prompt[-1]["content"] for row in rows if row.id.endswith("capitals"))
    assert prompt == "Write ./data/notes.txt in capitals to ./out/big.txt."
    async with await Sandbox.open(Config().sandbox) as sandbox:
        assert [str(problem) for problem in await check_pack(pack, sandbox, every=True)] == []


def test_what_is_no_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["init", str(tmp_path / "p"), "--from"]
    assert main([*given, f"harbor:{tmp_path / 'none'}"]) == 2
    written(tmp_path / "one", DOCKERFILE)
    (tmp_path / "one" / "tests" / "test.sh").unlink()
    assert main([*given, f"harbor:{tmp_path / 'one'}"]) == 2
    assert "has no tests/test.sh" in capsys.readouterr().err


def test_rows_of_swe_task_are_those_of_its_generator() -> None:
    pack = load_pack(find_pack("swe-task"))
    for split, rows in pack.module.build().items():
        lines = (pack.dir / "data" / f"{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows
