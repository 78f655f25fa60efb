"""Harbor task folders as packs."""

import asyncio
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

from agentrl_cli import Outcome, load_pack
from agentrl_cli.evaluate.grader_attacks import leave_early
from agentrl_cli.evaluate.pack_check import byte_chat, check_pack, play_texts
from agentrl_cli.paths import find_pack
from agentrl_cli.plugins.harbor.source import row_of
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.sft.demonstrations import Recipe, demonstrations
from tests.helpers.cli import Cli

DOCKERFILE = (
    "FROM ubuntu:24.04\nWORKDIR /srv\nCOPY notes.txt /srv/data/notes.txt\nRUN mkdir -p out\n"
)
TEST = """\
reward=0.0
grep -q HELLO /srv/out/big.txt && reward=1.0
echo "{\\"reward\\": $reward}" > /logs/verifier/reward.json
cat /tests/say
"""


def written(folder: Path, dockerfile: str) -> None:
    files = {
        "task.toml": '[metadata]\ncategory = "text"\n',
        "instruction.md": "Write /srv/data/notes.txt in capitals to /srv/out/big.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/notes.txt": "hello\n",
        "solution/solve.sh": "mkdir -p /srv/out\ntr a-z A-Z < /srv/data/notes.txt > /srv/out/big.txt\n",
        "tests/test.sh": TEST,
        "tests/say": "done",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


async def test_folders_become_a_pack_whose_own_solutions_pass(
    tmp_path: Path, cli: Cli, sandbox: Sandbox
) -> None:
    words = ("harbor", "tasks", "--pack", "swe-task", "--split", "test", "-n", "9")
    written_ones = await asyncio.to_thread(cli, *words)  # it has an event loop of its own
    assert len(written_ones.splitlines()) == 9
    await asyncio.to_thread(cli, *words, code=2, said="--force overwrites")
    await asyncio.to_thread(cli, *words, "--force")
    first = tmp_path / "tasks" / "swe-task-test-0000"
    found = {path.relative_to(first).as_posix() for path in first.glob("**/*")}
    assert {"task.toml", "instruction.md", "solution/solve.sh", "tests/test.sh"} <= found
    assert "environment/Dockerfile" in found and any("environment/files/" in one for one in found)
    source = load_pack(find_pack("swe-task")).tasks("test")[:9]
    written(tmp_path / "tasks" / "capitals", DOCKERFILE + "RUN touch go && chmod +x go\n")
    written(tmp_path / "tasks" / "grown", DOCKERFILE + "RUN apt-get install -y jq\n")
    written(tmp_path / "tasks" / "unsolved", DOCKERFILE)
    (tmp_path / "tasks" / "unsolved" / "solution" / "solve.sh").unlink()
    cli("init", "p", "--from", "harbor:tasks", said="grown (RUN apt-get install -y jq)")
    pack = load_pack(tmp_path / "p")
    rows = [task for split in pack.splits() for task in pack.tasks(split)]
    assert len(rows) == 11
    kept = ("prompt", "tests", "solution", "timeout", "root", "family")
    theirs = {task.data["solution"]: task for task in source}
    for task in rows:
        if (mine := theirs.pop(task.data.get("solution"), None)) is not None:
            assert [task.data.get(name) for name in kept] == [mine.data.get(name) for name in kept]
    assert not theirs, "every task came back"
    lessons = islice(demonstrations(Recipe(packs={"p": 1.0}), {"p": pack}, 0), 20)
    assert all(messages[-1]["role"] == "assistant" for *_, messages in lessons)
    prompt = next(row.prompt[-1]["content"] for row in rows if row.id.endswith("capitals"))
    assert prompt == "Write ./data/notes.txt in capitals to ./out/big.txt."
    split = next(row.split for row in rows if row.id.endswith("capitals"))
    folders = await asyncio.to_thread(cli, "harbor", "again", "-p", "p", "--split", split)
    dockers = [(tmp_path / one / "environment/Dockerfile").read_text() for one in folders.split()]
    assert any(text.endswith("RUN mkdir -p out\nRUN chmod +x ./go\n") for text in dockers)
    assert [str(problem) for problem in await check_pack(pack, sandbox, every=True)] == []


HEAD = "FROM ubuntu:24.04\nWORKDIR /srv\n"
MADE = {
    HEAD: set(),
    f"{HEAD}copy notes.txt .\n": {"notes.txt"},
    f"{HEAD}COPY --chown=1 notes.txt run.sh ./\n": {"notes.txt", "run.sh"},
    f'{HEAD}COPY ["/notes.txt", "/srv/Makefile"]\n': {"Makefile"},
    f"{HEAD}COPY *.txt data/\nRUN mkdir a && touch a/b; echo hi | cat > /srv/c 2>/dev/null\n": {
        "data/notes.txt", "a/b", "c",
    },
}  # fmt: skip


async def test_a_dockerfile_is_played(tmp_path: Path, sandbox: Sandbox) -> None:
    for number, (dockerfile, made) in enumerate(MADE.items()):
        written(folder := tmp_path / str(number), dockerfile)
        (folder / "environment" / "run.sh").write_text("#!/bin/sh\n")
        (folder / "environment" / "run.sh").chmod(0o755)
        row = row_of(folder)
        assert row["timeout"] == 600
        session = await sandbox.session()
        done = await session.cell(row["setup"])
        assert done.ok, done.text()
        assert {one.path for one in await session.list() if one.kind == "file"} == made
        assert "run.sh" not in made or (await session.bash("./run.sh")).ok
        await session.close()


LEFT: dict[str, tuple[str, bytes]] = {
    "Expected ']'": ("task.toml", b"[metadata"),
    "has no attribute": ("task.toml", b"metadata = 3"),
    "timeout_sec = -5": ("task.toml", b"[verifier]\ntimeout_sec = -5"),
    "could not convert": ("task.toml", b'[verifier]\ntimeout_sec = "x"'),
    "swe/x:1": ("task.toml", b'[environment]\ndocker_image = "swe/x:1"'),
    "docker-compose.yaml": ("environment/docker-compose.yaml", b""),
    "COPY notes.txt /opt/x": ("environment/Dockerfile", b"COPY notes.txt /opt/x"),
    "COPY --chmod=755 notes.txt x": ("environment/Dockerfile", b"COPY --chmod=755 notes.txt x"),
    "COPY notes.txt ../x": ("environment/Dockerfile", b"COPY notes.txt ../x"),
    "WORKDIR /app/sub": ("environment/Dockerfile", b"WORKDIR /app\nWORKDIR /app/sub\nCOPY notes.txt x"),
    "ENV A=1": ("environment/Dockerfile", b"FROM python:3.12-slim\nenv A=1"),
    "FROM python-scipy:1": ("environment/Dockerfile", b"FROM python-scipy:1"),
    "FROM --platform=a x/python/own:1": ("environment/Dockerfile", b"FROM --platform=a x/python/own:1"),
    "RUN echo y | apt-get install -y jq": ("environment/Dockerfile", b"RUN echo y | apt-get install -y jq"),
    "RUN touch x || pip install x": ("environment/Dockerfile", b"RUN touch x || pip install x"),
    "RUN mkdir /opt/x": ("environment/Dockerfile", b"RUN mkdir /opt/x"),
    "/etc/passwd is not a file of the task": ("environment/Dockerfile", b"COPY ../../../../../../../etc/passwd x"),
    "environment/none is not a file": ("environment/Dockerfile", b"COPY none x"),
    "cannot be read as text": ("tests/data", b"\xff"),
    "is larger than 1 MiB": ("tests/data", b" " * (2**20 + 1)),
}  # fmt: skip


def test_others_load_where_one_cannot(tmp_path: Path, cli: Cli) -> None:
    written(tmp_path / "tasks" / "good", HEAD)
    for number, (name, data) in enumerate(LEFT.values()):
        written(folder := tmp_path / "tasks" / f"bad{number}", HEAD)
        (folder / name).write_bytes(data)
    (tmp_path / "tasks" / "empty").mkdir()
    written(folder := tmp_path / "tasks" / "link", HEAD)
    (folder / "tests" / "link").symlink_to("/etc/passwd")
    cli("init", "p", "--from", "harbor:tasks", said="link is not a file of the task")
    for said in (*LEFT, "empty/task.toml is not a file"):
        assert said in " ".join(cli.err.split()), said
    pack = load_pack(tmp_path / "p")
    assert [task.id for split in pack.splits() for task in pack.tasks(split)] == ["p/good"]


def test_what_is_no_task(tmp_path: Path, cli: Cli) -> None:
    cli("init", "p", "--from", "harbor:none", code=2)
    (tmp_path / "bare").mkdir()
    cli("init", "p", "--from", "harbor:bare", code=2, said="task.toml is not a file of the task")
    written(tmp_path / "one", DOCKERFILE)
    (tmp_path / "one" / "tests" / "test.sh").unlink()
    cli("init", "p", "--from", "harbor:one", code=2, said="has no tests/test.sh")
    said = "is not graded by a script tests/test.sh"
    cli("harbor", "t", "--pack", "code-task", "-n", "1", code=2, said=said)
    assert not (tmp_path / "t").exists()


async def test_leaving_early_is_not_paid_and_nothing_graded_is_not_zero(sandbox: Sandbox) -> None:
    pack = load_pack(find_pack("swe-task"))
    task = pack.tasks("train")[0]
    chat = byte_chat(task)
    said = [one for one in pack.solution(task) if one["role"] == "assistant"]
    (*edited, _) = leave_early([chat.assistant_text(one, pack.schemas) for one in said])
    scripts = {
        "by the word": task.data["tests"]["test.sh"],
        "by exit status": "python3 /tests/test_hidden.py && echo 1 > /logs/verifier/reward.txt\n",
        "nothing": "echo pytest: command not found\n",
        "a limit": "sleep 60\n",
    }
    found = {}
    for name, script in scripts.items():
        tests = {**task.data["tests"], "test.sh": script}
        limit = 0.5 if name == "a limit" else 60.0
        row = replace(task, data={**task.data, "tests": tests, "timeout": limit})
        episode = await play_texts(pack, row, chat, [*edited, "Done."], sandbox)
        found[name] = (episode.reward, episode.outcome)
        assert ("wrote no number" in (episode.error or "")) is (name == "nothing"), episode.error
    assert found == {
        "by the word": (0.0, Outcome.FAILED),
        "by exit status": (1.0, Outcome.SOLVED),
        "nothing": (None, Outcome.ENV_ERROR),
        "a limit": (0.0, Outcome.FAILED),
    }


def test_rows_of_swe_task_are_those_of_its_generator() -> None:
    pack = load_pack(find_pack("swe-task"))
    for split, rows in pack.module.build().items():
        lines = (pack.dir / "data" / f"{split}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == rows
