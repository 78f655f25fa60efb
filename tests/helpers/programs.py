"""Agents of other projects: a worker that counts its imports, and published ones with a scripted model."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl_cli import Config, Episode, ScriptedPolicy, load_pack
from agentrl_cli.agents.programs import ForeignAgent
from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.commands import main
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.registry import resolve
from agentrl_cli.reports.reference import read_reference
from agentrl_cli.rollout import Job
from agentrl_cli.trainer.inputs import Inputs, hash_rows
from tests.helpers.chat import CHAT


def agent_of(file: Path) -> type[ForeignAgent]:
    return type("Other", (ForeignAgent,), {"name": "other", "worker": file, "needs": "other"})


LATE = """
import asyncio, json, os, sys, urllib.request
from pathlib import Path
sys.path.insert(0, os.path.dirname(__file__))

class Worker:
    def __init__(self, config):
        self.config = config
    def rows(self, limit):
        assert Path(self.config["package"]).is_file()
        return [{"id": "r", "prompt": "?", "sample": 0}]
    def rehearse(self):
        import large
    async def run(self, request):
        import large
        await asyncio.sleep(self.config["options"].get("start", 0))
        body = json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode()
        head = {"authorization": "Bearer " + request["api_key"], "content-type": "application/json"}
        asked = urllib.request.Request(request["base_url"] + "/chat/completions", body, head)
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked).read()
        await asyncio.sleep(self.config["options"].get("after", 0))
        return {"reward": 1.0}

WORKER, FORKED = Worker, True
"""
LARGE = "open(__file__ + '.imported', 'a').write('x')\n"


def rehearsed(folder: Path) -> Path:
    """A worker of which each run imports a module that counts its imports."""
    (folder / "late.py").write_text(LATE)
    (folder / "large.py").write_text(LARGE)
    (folder / "eval.py").write_text("")
    return folder / "late.py"


async def episode_of(folder: Path, said: Sequence[str] = ("Hi.",), **limits: int) -> Episode:
    pack = load_pack(folder)
    config = Config.model_validate(
        {"rollout": {"max_new_tokens": 200, "max_tokens": 4096, **limits}}
    )
    policy = ScriptedPolicy([*said], CHAT.tokenizer)
    rollout = AgentRollout(policy, CHAT, {pack.name: pack}, config)
    return await rollout.episode(Job(pack.tasks("train")[0], 0))


def python_with(kind: str, modules: str) -> str:
    name = f"{kind.upper().replace('-', '_')}_PYTHON"
    python = os.environ.get(name) or os.environ.get("WORLDS_PYTHON", sys.executable)
    code = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    if subprocess.run([python, "-c", code, *modules.split()], check=False).returncode:
        pytest.skip(f"{modules} are not installed, and {name} names no interpreter with them")
    return python


PRELUDE = """
import importlib.util, random, sys
spec = importlib.util.spec_from_file_location("worker", sys.argv[1])
W = importlib.util.module_from_spec(spec)
spec.loader.exec_module(W)
EPISODES = int(sys.argv[2])

def worker(package, **options):
    return W.WORKER({"package": package, "task": "", "score": "", "tool": False, "options": options})

def same(*pairs):
    for ours, theirs in pairs:
        assert ours == theirs, (ours, theirs)

def refusal(package, **options):
    try:
        worker(package, **options).open(0)
    except (LookupError, ValueError) as error:
        return error
    raise AssertionError((package, options))
"""


def compare(kind: str, modules: str, script: str, *more: str) -> None:
    """Run a script that plays episodes through a plugin's worker and through its package, and compares them.

    EPISODES is the number for each environment (10; 100 for the figures in docs/environments.md).
    """
    python = python_with(kind, modules)
    plugin = resolve("programs", {}, kind)
    given = [str(plugin.worker), os.environ.get("EPISODES", "10"), *more]
    done = subprocess.run(
        [python, "-c", PRELUDE + script, *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


async def play_published(source: str, modules: str, said: list[str], folder: Path) -> Episode:
    """Return an episode of a project made by `init --from SOURCE`, with the interpreter that has the modules."""
    python = python_with(source.partition(":")[0], modules)
    assert main(["init", str(folder), "--from", source, "--python", python]) == 0
    pack = load_pack(folder)
    every = (task for split in pack.splits() for task in pack.tasks(split))
    first = min(every, key=lambda task: task.data["sample"])
    config = Config.model_validate(
        {"rollout": {"max_tokens": 32000, "max_new_tokens": 400, "max_turns": 40}}
    )
    policy = ScriptedPolicy(said, CHAT.tokenizer)
    return await AgentRollout(policy, CHAT, {pack.name: pack}, config).episode(Job(first, 0))


def check_curve(source: str, modules: str, folder: Path) -> None:
    """Make a project of a source whose curve ships: it comes with its settings, and counts for these rows."""
    python = python_with(source.partition(":")[0], modules)
    assert main(["init", str(folder), "--from", source, "--python", python]) == 0
    pack = load_pack(folder)
    inputs = Inputs.of(pack.tasks("train"), [pack], "", folder)
    kept = read_reference(folder, "tiny-tools", hash_rows("".join(inputs.rows)))
    assert kept is not None and kept["source"] == source
    defaults = load_yaml(folder / "task.yaml")["defaults"]["rollout"]
    for name in ("max_turns", "prompts_per_step"):
        assert defaults[name] == kept["settings"][f"rollout.{name}"]
