"""Programs of agents in the sandbox: the model's server is reachable, and nothing else of this machine is."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli import Config, Outcome, Store, Task
from agentrl_cli.agents.emit import AgentCall
from agentrl_cli.agents.runners.jail import JailedRunner, unavailable
from agentrl_cli.errors import ConfigError
from agentrl_cli.tasks.agent import read_agent
from tests.agents.test_remote import pipes
from tests.agents.test_runners import pack_of, play
from tests.helpers.processes import soon

COMMAND = {"command": ["python", "agent.py"], "sandbox": True, "timeout": 600}


jailed = pytest.mark.skipif(
    bool(unavailable()), reason=f"no jail starts here: {unavailable()[:100]}"
)


PROGRAM = """
import os, socket, sys
from agentrl_cli.agents import emit_reward

seen = {"here": sorted(os.listdir(".")), "host": [path for path in HOST if os.path.exists(path)]}
seen["env"] = sorted(os.environ)
for name, (host, port) in PLACES.items():
    try:
        socket.create_connection((host, port), timeout=2).close()
        seen[name] = "reached"
    except OSError as error:
        seen[name] = type(error).__name__
for name, path in (("own", "agent.py"), ("work", os.environ["HOME"] + "/note"), ("tmp", "/tmp/note")):
    try:
        open(path, "a").write("x")
        seen[name] = "written"
    except OSError as error:
        seen[name] = type(error).__name__
try:
    open("/work/big", "wb").write(bytes(70 << 20))
    seen["big"] = "written"
except OSError as error:
    seen["big"] = type(error).__name__
task = json.loads(os.environ["AGENTRL_TASK"])
said = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["messages"])
print(json.dumps(seen), file=sys.stderr)
emit_reward(float(said["content"] == "Four."))
"""


@jailed
async def test_a_program_in_the_sandbox_reaches_its_model_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """monkeypatch sets a variable of the environment, as a user's shell does; no part of the package is replaced."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / ".env").write_text("KEY=1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        places = {"neighbour": other.getsockname(), "internet": ("198.51.100.1", 80)}
        head = f"HOST = {[str(tmp_path), '/root', '/home', '/etc/shadow', '/var']!r}\nPLACES = {places!r}\n"
        with Store.open(tmp_path / "store.db") as store:
            episode = await play(pack_of(tmp_path / "pack", head + PROGRAM, COMMAND), store=store)
            said = store.journal.agent_stderr(None, episode.id)
    assert (episode.outcome, episode.reward) == (Outcome.SOLVED, 1.0), episode.error
    seen: dict[str, Any] = json.loads(said)
    assert seen["here"] == ["agent.py", "task.yaml"]  # neither rows nor hidden files
    assert seen["neighbour"] == "ConnectionRefusedError" and seen["internet"] == "OSError", seen
    assert seen["own"] in ("OSError", "PermissionError") and seen["big"] == "OSError"
    assert (seen["work"], seen["tmp"]) == ("written", "written")
    assert "AWS_SECRET_ACCESS_KEY" not in seen["env"] and not {"/root/.ssh", str(tmp_path)} & set(
        seen["host"]
    )


@jailed
async def test_packages_below_tmp_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """monkeypatch adds a folder of packages, as a virtual environment below /tmp does."""
    (tmp_path / "own-packages").mkdir()
    (tmp_path / "own-packages" / "lying.py").write_text("where = __file__")
    monkeypatch.syspath_prepend(str(tmp_path / "own-packages"))
    code = f"""
import os, sys, tempfile
sys.path.append({str(tmp_path / "own-packages")!r})
from agentrl_cli.agents import emit_reward
import lying
tempfile.TemporaryFile().write(b"x")
task = json.loads(os.environ["AGENTRL_TASK"])
ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["messages"])
emit_reward(float(lying.where.startswith({str(tmp_path)!r})))
"""
    episode = await play(pack_of(tmp_path / "pack", code, COMMAND))
    assert (episode.outcome, episode.reward) == (Outcome.SOLVED, 1.0), episode.error


JAILED_ENDS = {
    "exit status": ("import sys\nsys.exit('no key')", Outcome.AGENT_ERROR, "exit status 1: no key"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", Outcome.AGENT_ERROR, "exit status 137"),
    "memory": ("x = bytearray(3 << 30)", Outcome.AGENT_ERROR, "MemoryError"),
    "hangs": ("import time\ntime.sleep(3600)", Outcome.AGENT_TIMEOUT, "2 s"),
    "missing": ("", Outcome.AGENT_ERROR, "nowhere could not be started in the sandbox"),
}


@jailed
@pytest.mark.parametrize("name", JAILED_ENDS)
async def test_every_way_a_program_in_the_sandbox_can_end(tmp_path: Path, name: str) -> None:
    code, outcome, text = JAILED_ENDS[name]
    spec = {**COMMAND, "timeout": 2.0 if name == "hangs" else 600}
    if name == "missing":
        spec["command"] = ["nowhere"]
    before = pipes()
    episode = await play(pack_of(tmp_path, code, spec))
    assert (episode.outcome, text in episode.error) == (outcome, True), episode.error
    # Also the pipe by which the jail reports its start.
    await soon(lambda: pipes() <= before)


@jailed
def test_a_jail_for_a_folder_that_is_missing_leaves_no_pipe_open(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    spec = read_agent(COMMAND, tmp_path / "pack", "agent")
    assert spec is not None
    runner = JailedRunner(spec, Config.model_validate({}).sandbox)
    (tmp_path / "pack").rmdir()
    task = Task("r", "sums", "", "train", ())
    before = pipes()
    with pytest.raises(FileNotFoundError):
        runner.start(AgentCall(task, "http://127.0.0.1:1/e/k", "k", print, socket="/nowhere"))
    assert pipes() == before


@pytest.mark.parametrize("sandbox", [{"backend": "docker"}, {"backend": "landlock", "min_level": "landlock"},
                                     {"backend": "bare", "min_level": "bare"}, {"min_level": "docker"}])  # fmt: skip
def test_a_level_that_cannot_do_it_is_refused(tmp_path: Path, sandbox: dict[str, str]) -> None:
    spec = read_agent({**COMMAND, "command": [sys.executable, "agent.py"]}, tmp_path, "agent")
    assert spec is not None
    with pytest.raises(ConfigError, match="could not reach its model"):
        JailedRunner(spec, Config.model_validate({"sandbox": sandbox}).sandbox)
