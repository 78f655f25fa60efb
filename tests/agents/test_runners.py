"""Agents of others as the rollout loop: a scripted model played by real clients over HTTP, and every way to end."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from agentrl_cli import Config, Episode, Outcome, ScriptedPolicy, Store
from agentrl_cli.agents import emit_reward
from agentrl_cli.agents.runners import AgentRollout
from agentrl_cli.agents.runners.base import printed_names
from agentrl_cli.agents.runners.command import last_reward
from agentrl_cli.agents.runners.server import EpisodeServer
from agentrl_cli.errors import ConfigError, EnvError, PolicyError
from agentrl_cli.hooks import HookList
from agentrl_cli.rollout import Job
from agentrl_cli.tasks import Pack, load_pack, load_packs
from tests.helpers.chat import CHAT, call
from tests.helpers.processes import alive, soon
from tests.helpers.train import start_code

LIMITS = {"max_tokens": 4000, "max_new_tokens": 100, "max_turns": 4}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}

CLIENT = """\
import httpx2, json

def ask(base_url, api_key, messages, **more):
    with httpx2.Client(trust_env=False, verify=False, timeout=600) as client:
        answer = client.post(f"{base_url}/chat/completions", headers={"authorization": f"Bearer {api_key}"},
                             json={"model": "gpt-4o", "messages": messages, **more})
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]

"""


def pack_of(folder: Path, code: str = "", agent: Any = "agent.py:agent", rewards: str = "") -> Pack:
    """A pack with an agent: `code` after a small client; without rewards of its own unless given as YAML."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "task.yaml").write_text(
        f"name: sums\nsandbox: false\nagent: {json.dumps(agent)}\n{rewards}"
    )
    (folder / "agent.py").write_text(CLIENT + code)
    rows = [{"id": f"r{n}", "prompt": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(4)]
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return load_pack(folder)


def rollout_of(pack: Pack, replies: Any, limits: Any = LIMITS, **more: Any) -> AgentRollout:
    policy = replies if hasattr(replies, "generate") else ScriptedPolicy(replies, CHAT.tokenizer)
    config = Config.model_validate({"rollout": limits})
    return AgentRollout(policy, CHAT, {pack.name: pack}, config, **more)


async def play(
    pack: Pack, replies: Any = ("Four.",), store: Store | None = None, n: int = 1, **limits: Any
) -> Episode:
    rollout = rollout_of(pack, replies, {**LIMITS, **limits}, store=store)
    return (await rollout.run([Job(task, 7, group_id="g") for task in pack.tasks("train")[:n]]))[-1]


TOOLS = f"""
ADD = {ADD!r}

def agent(task, base_url, api_key, model):
    messages = [dict(message) for message in task.prompt]
    while True:
        said = ask(base_url, api_key, messages, tools=[ADD])
        messages.append(said)
        if not said.get("tool_calls"):
            return float(said["content"] == task.data["answer"])
        for one in said["tool_calls"]:
            given = json.loads(one["function"]["arguments"])
            messages.append({{"role": "tool", "tool_call_id": one["id"], "content": str(given["a"] + given["b"])}})
"""


async def test_a_function_with_its_own_loop_and_tools_becomes_one_episode(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store.db") as store:
        episode = await play(pack_of(tmp_path / "pack", TOOLS), [call("add", a=0, b=2), "2"], store)
        store.flush()
        stored = store.episodes.get(episode.id)
    assert (episode.outcome, episode.reward, episode.error) == (Outcome.SOLVED, 1.0, "")
    assert [turn.role for turn in episode.turns] == ["user", "assistant", "tool", "assistant"]
    assert (episode.linear, episode.flags, episode.tool_calls) == (True, (), 1)
    said = CHAT.decode(episode.tokens.ids[episode.tokens.trained_mask].tolist())
    assert said.count("<|im_end|>") == 2
    assert [(part.name, part.primary) for part in episode.reward_parts] == [("agent", True)]
    assert stored == episode.with_(tokens=stored.tokens)
    assert stored.tokens.ids.tolist() == episode.tokens.ids.tolist()
    assert (await play(pack_of(tmp_path / "pack", TOOLS), ["2"])).flags == ("NOTOOL",)


async def test_calls_that_the_parser_does_not_read_are_reported(tmp_path: Path) -> None:
    pack = pack_of(tmp_path, TOOLS)
    rollout = rollout_of(pack, ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 0, "b": 2}}]'])
    await rollout.episode(Job(pack.tasks("train")[0], 7, group_id="g"))
    assert "model.chat.parser=mistral." in rollout.foreign


async def test_many_agents_at_once_keep_their_own_episodes(tmp_path: Path) -> None:
    def answer(key: str, ids: Any) -> str:
        asked = CHAT.decode(list(ids)).partition("What is ")[2].partition(" ")[0]
        return str(int(asked) + 2)

    pack = pack_of(tmp_path, TOOLS)
    rollout = rollout_of(pack, ScriptedPolicy(answer, CHAT.tokenizer, delay=0.01))
    jobs = [Job(task, 7, sample) for task in pack.tasks("train") for sample in range(4)]
    found = [(episode.task_id, episode.outcome) for episode in await rollout.run(jobs)]
    assert found == [(job.task.id, Outcome.SOLVED) for job in jobs] and len(found) == 16


ASYNC = """
async def agent(task, base_url, api_key, model, emit_reward):
    async with httpx2.AsyncClient(trust_env=False, timeout=None) as client:
        body = {"model": model, "messages": list(task.prompt)}
        answer = await client.post(f"{base_url}/chat/completions", json=body)
        answer.raise_for_status()
    emit_reward(0.25)
    emit_reward(0.5)
"""
EMITS = """
from agentrl_cli.agents import emit_reward
def agent(task, base_url, api_key):
    ask(base_url, api_key, list(task.prompt))
    emit_reward(0.75)
"""
EVENT = """
def agent(task, base_url, api_key, event_url):
    ask(base_url, api_key, list(task.prompt))
    httpx2.post(event_url, json={"event_type": "reward", "data": {"value": 0.125}}).raise_for_status()
    assert httpx2.post(event_url, json={"reward": "much"}).status_code == 400
"""


@pytest.mark.parametrize(
    ("code", "reward"),
    [(ASYNC, 0.5), (EMITS, 0.75), (EVENT, 0.125)],
    ids=["async", "emit", "event"],
)
async def test_a_reward_may_be_emitted(tmp_path: Path, code: str, reward: float) -> None:
    episode = await play(pack_of(tmp_path, code))
    assert (episode.outcome, episode.reward, episode.flags) == (Outcome.FAILED, reward, ())


OWN = """
def exact(episode, ctx):
    return float(ctx.final_text == ctx.task.data["answer"])
REWARDS = {"exact": exact}
"""


async def test_without_a_reward_of_its_own_the_packs_parts_count(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(OWN)
    rewards = "rewards: {exact: {weight: 2.0, primary: true}}\n"
    code = "def agent(base_url, api_key, task): ask(base_url, api_key, list(task.prompt))"
    pack = pack_of(tmp_path, code, rewards=rewards)
    for said, outcome, reward in (("2", Outcome.SOLVED, 2.0), ("3", Outcome.FAILED, 0.0)):
        episode = await play(pack, [said])
        assert (episode.outcome, episode.reward) == (outcome, reward)


ENDS = {
    "raises": ("def agent(task, base_url, api_key):\n ask(base_url, api_key, list(task.prompt))\n task['x']",
               Outcome.AGENT_ERROR, "KeyError: 'x' (agent.py:"),
    "exits": ("def agent():\n raise SystemExit(3)", Outcome.AGENT_ERROR, "SystemExit: 3"),
    "never calls": ("def agent():\n return 1.0", Outcome.NO_CALLS, "no call"),
    "no number": ("def agent(task, base_url, api_key):\n ask(base_url, api_key, list(task.prompt)); return 'good'",
                  Outcome.AGENT_ERROR, "'good' is not a reward"),
    "no reward": ("def agent(task, base_url, api_key):\n ask(base_url, api_key, list(task.prompt))",
                  Outcome.UNGRADED, "gave no reward"),
    "error with a reward": (
        "def agent(task, base_url, api_key, emit_reward):\n"
        " ask(base_url, api_key, list(task.prompt)); emit_reward(1); raise KeyError('late')", Outcome.SOLVED, ""),
    "foreign": (
        "def agent(task, base_url, api_key):\n"
        " m = list(task.prompt); m.append(ask(base_url, api_key, m)); m.append({'role': 'user', 'content': 'And?'})\n"
        " m += [{'role': 'assistant', 'content': 'Mine.'}, {'role': 'user', 'content': 'So?'}]\n"
        " ask(base_url, api_key, m); return 1.0", Outcome.FOREIGN_TEXT, "turn 3"),
    "rewritten": (
        "def agent(task, base_url, api_key):\n"
        " m = list(task.prompt); ask(base_url, api_key, m)\n"
        " m += [{'role': 'assistant', 'content': 'In short: yes.'}, {'role': 'user', 'content': 'So?'}]\n"
        " ask(base_url, api_key, m); return 1.0", Outcome.SOLVED, ""),
    "example": (
        "def agent(task, base_url, api_key):\n"
        " m = [{'role': 'user', 'content': '1 + 1?'}, {'role': 'assistant', 'content': '2'}, *task.prompt]\n"
        " ask(base_url, api_key, m); return 1.0", Outcome.SOLVED, ""),
}  # fmt: skip


@pytest.mark.parametrize("style", ["def", "async def"])
async def test_an_agent_that_hangs_is_stopped_at_its_time_limit(tmp_path: Path, style: str) -> None:
    mark = tmp_path / "over"
    wait = "time.sleep" if style == "def" else "await asyncio.sleep"
    code = f"""
import asyncio, os, time
{style} agent(task, base_url, api_key):
    while not os.path.exists({str(mark)!r}):
        {wait}(0.02)
"""
    try:
        episode = await play(
            pack_of(tmp_path, code, {"function": "agent.py:agent", "timeout": 0.2})
        )
    finally:
        mark.touch()
    assert episode.outcome is Outcome.AGENT_TIMEOUT and "0.2 s" in episode.error


async def test_an_agents_clock_stands_while_the_model_answers(tmp_path: Path) -> None:
    slow = ScriptedPolicy(["2"], CHAT.tokenizer, delay=2.5)
    pack = pack_of(tmp_path, TOOLS, {"function": "agent.py:agent", "timeout": 2.0})
    episode = await play(pack, slow, episode_timeout=2.0)
    assert (episode.outcome, episode.reward) == (Outcome.SOLVED, 1.0), episode.error


async def test_a_hook_gets_an_agents_call_no_more_tokens_than_it_may_have(tmp_path: Path) -> None:
    pack = pack_of(tmp_path, TOOLS)
    more = SimpleNamespace(on_sample=lambda sampling: replace(sampling, max_new_tokens=10**6))
    limits = {**LIMITS, "max_new_tokens": 30}
    rollout = rollout_of(pack, ["x" * 500], limits, hooks=HookList([more]))
    (episode,) = await rollout.run([Job(pack.tasks("train")[0], 7)])
    assert episode.trained_tokens == 30, episode


async def test_calls_after_the_end_and_with_unknown_keys_are_refused(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = (
        f"import pathlib\ndef agent(base_url):\n pathlib.Path({str(seen)!r}).write_text(base_url)"
    )
    await play(pack_of(tmp_path, code))
    address = seen.read_text()
    root, event = address.partition("/e/")[0], address.removesuffix("/v1") + "/events"
    given = {"reward": 1.0}
    cases: list[tuple[str, dict[str, Any], int]] = [
        (f"{address}/chat/completions", {"json": BODY}, 409),
        (f"{root}/e/ep-guess/v1/chat/completions", {"json": BODY}, 401),
        (f"{root}/v1/chat/completions", {"json": BODY}, 401),
        (event, {"json": given}, 409),
        (event, {"content": json.dumps(given)}, 409),  # as curl -d sends it
        # a page that knows the key
        (event, {"json": given, "headers": {"Host": "evil.example"}}, 403),
        (event, {"json": given, "headers": {"Origin": "http://evil.example"}}, 403),
    ]
    async with httpx2.AsyncClient(trust_env=False, timeout=None) as client:
        for url, more, status in cases:
            assert (await client.post(url, **more)).status_code == status, url


BODY = {"messages": [{"role": "user", "content": "x"}]}
ANTHROPIC = """
def agent(task, base_url, api_key, model):
    root = base_url.removesuffix("/v1")
    with httpx2.Client(trust_env=False, verify=False, headers={"x-api-key": api_key}) as client:
        named = client.get(f"{root}/v1/models").json()["data"][0]["id"]
        assert named == model and client.get(f"{root}/v1/models/{model}").json()["id"] == model
        assert client.get(f"{root}/v1/models/other").status_code == 404
        body = {"model": "claude", "messages": list(task.prompt)}
        counted = client.post(f"{root}/v1/messages/count_tokens", json=body).json()["input_tokens"]
        said = client.post(f"{root}/v1/messages", json={**body, "max_tokens": 50}).json()
        assert said["usage"]["input_tokens"] == counted
        return float(said["content"][0]["text"] == "Four.")
"""


async def test_anthropics_client_finds_its_routes_under_the_episodes_address(
    tmp_path: Path,
) -> None:
    assert (await play(pack_of(tmp_path, ANTHROPIC))).reward == 1.0


async def test_a_model_that_fails_stops_the_run_and_is_not_the_agents_fault(tmp_path: Path) -> None:
    class Broken(ScriptedPolicy):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise PolicyError("out of memory")

    pack = pack_of(tmp_path / "pack", TOOLS)
    with Store.open(tmp_path / "store.db") as store:
        with pytest.raises(PolicyError, match="out of memory"):
            await play(pack, Broken([], CHAT.tokenizer), store)
        (row,) = store.episodes.rows(store.episodes.ids("", "time"))
    assert row.outcome is Outcome.CANCELLED


# --- programs ---------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
task = json.loads(os.environ["AGENTRL_TASK"])
said = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["messages"])
print("thinking aloud", file=sys.stderr)
print(json.dumps({"env": sorted(os.environ), "task": task}))
print(json.dumps({"reward": float(said["content"] == "Four.")}))
"""
AGENT = {"function": "agent.py:agent"}
COMMAND = {"command": [sys.executable, "agent.py"], "env": {"MODE": "fast"}}


@pytest.mark.parametrize(("rewards", "part"), [("", ("agent", 7)), ("exact", ("exact", 0))])
async def test_a_number_alone_is_the_answer_if_the_pack_has_rewards(
    rewards: str, part: tuple[str, float], tmp_path: Path
) -> None:
    if rewards:
        code = "def exact(episode, ctx):\n    return 0.0\n\nREWARDS = {'exact': exact}\n"
        (tmp_path / "task.py").write_text(code)
        rewards = "rewards: {exact: {primary: true}}\n"
    episode = await play(pack_of(tmp_path, f"{PROGRAM}print(7)", COMMAND, rewards))
    assert [(one.name, one.value) for one in episode.reward_parts] == [part]


async def test_a_program_is_an_agent_and_sees_nothing_of_our_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """monkeypatch sets a variable of the environment, as a user's shell does; no part of the package is replaced."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    path = tmp_path / "seen.json"
    code = f"{PROGRAM}open({str(path)!r}, 'w').write(json.dumps([dict(os.environ), task]))"
    with Store.open(tmp_path / "store.db") as store:
        episode = await play(pack_of(tmp_path / "pack", code, COMMAND), store=store)
        assert store.journal.agent_stderr(None, episode.id) == "thinking aloud\n"
    assert (episode.outcome, episode.reward) == (Outcome.SOLVED, 1.0)
    env, task = json.loads(path.read_text())
    assert "hidden" not in str(env) and env["MODE"] == "fast"
    named = (
        "OPENAI_BASE_URL OPENAI_API_KEY ANTHROPIC_BASE_URL ANTHROPIC_API_KEY"
        " AGL_OPENAI_BASE_URL AGL_EVENT_URL AGL_KEY"
    )
    assert set(named.split()) <= set(env)
    assert env["ANTHROPIC_BASE_URL"] + "/v1" == env["OPENAI_BASE_URL"]
    own = {name for name in env if name.startswith("AGENTRL_")}
    assert own <= {"AGENTRL_TASK", "AGENTRL_MODEL"}
    assert task["messages"][0]["content"] == "What is 0 + 2?" and "answer" not in task


PROGRAMS = {
    "exit status": ("import sys\nsys.exit('no key')", Outcome.AGENT_ERROR, "exit status 1: no key"),
    "killed": ("import os\nos.kill(os.getpid(), 9)", Outcome.AGENT_ERROR, "with SIGKILL"),
    "killed without a name": (
        "import os\nos.kill(os.getpid(), 40)",
        Outcome.AGENT_ERROR,
        "with signal 40",
    ),
    "program never calls": ("print(1.0)", Outcome.NO_CALLS, "no call"),
    "program hangs": (
        "import time\nprint('waiting', flush=True)\ntime.sleep(3600)",
        Outcome.AGENT_TIMEOUT,
        "1.5 s",
    ),
    "program gives no number": (
        PROGRAM + "print(json.dumps({'reward': 'x'}))",
        Outcome.AGENT_ERROR,
        "'x' is not a reward",
    ),
}


@pytest.mark.parametrize("name", [*ENDS, *PROGRAMS])
async def test_every_way_to_end_has_an_outcome(tmp_path: Path, name: str) -> None:
    code, outcome, text = {**ENDS, **PROGRAMS}[name]
    command = {**COMMAND, "timeout": 1.5 if name == "program hangs" else 600}
    agent = command if name in PROGRAMS else "agent.py:agent"
    episode = await play(pack_of(tmp_path, code, agent), ["One.", "Two.", "Three."])
    assert (episode.outcome, text in episode.error) == (outcome, True), episode.error
    assert episode.reward is None or not outcome.is_error


START = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
mark = open({mark!r}, "a")
for apart in (False, True):
    print(subprocess.Popen(sleep, start_new_session=apart).pid, file=mark, flush=True)
if os.fork() == 0:
    os.setsid()
    daemon = os.fork()
    if daemon == 0:
        os.execv(sleep[0], sleep)
    print(daemon, file=mark, flush=True)
    os._exit(0)
os.wait()
"""


async def test_what_a_program_started_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    code = START.format(mark=str(mark))
    ends = pack_of(tmp_path / "ends", code, {**COMMAND, "timeout": 600})
    hangs = pack_of(tmp_path / "hangs", code + "time.sleep(3600)", {**COMMAND, "timeout": 2.0})
    for pack in (ends, hangs):
        await play(pack)
    pids = [int(pid) for pid in mark.read_text().split()]
    assert len(pids) == 6
    assert await soon(lambda: not any(map(alive, pids)))


async def test_a_run_that_is_stopped_ends_its_programs(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(3600)"
    pack = pack_of(tmp_path / "pack", code, {**COMMAND, "timeout": 600})
    with Store.open(tmp_path / "store.db") as store:
        playing = asyncio.ensure_future(play(pack, store=store))
        while not (mark.is_file() and mark.read_text()):
            await asyncio.sleep(0.05)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        (row,) = store.episodes.rows(store.episodes.ids("", "time"))
    assert row.outcome is Outcome.CANCELLED
    assert not alive(int(mark.read_text()))


async def test_a_program_does_not_outlive_a_killed_trainer(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = (
        START.format(mark=str(mark)) + "print(os.getpid(), file=mark, flush=True)\ntime.sleep(3600)"
    )
    pack_of(tmp_path / "pack", code, {**COMMAND, "timeout": 600})
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom tests.agents.test_runners import play\n"
        "from agentrl_cli.tasks import load_pack\nasyncio.run(play(load_pack(Path(sys.argv[1]))))"
    )
    trainer = start_code(tmp_path, script, str(tmp_path / "pack"))
    while not (mark.is_file() and len(mark.read_text().split()) == 4):
        await asyncio.sleep(0.05)
    trainer.process.kill()
    trainer.end()
    assert await soon(lambda: not any(alive(int(pid)) for pid in mark.read_text().split()))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"reward": 0.5}\nbye\n', 0.5),
        ("starting\n1\n", 1.0),
        ('{"answer": 3}', None),
        ('["Paris"]', None),
        ("", None),
        ('{"reward": NaN}', None),
    ],
)
def test_the_last_line_of_json_is_the_reward(text: str, reward: float | None) -> None:
    found, problem, _ = last_reward(text)
    assert found == reward and bool(problem) == ("NaN" in text)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        ({"command": ["x"], "cwd": "missing"}, "no such folder"),
        ({"command": []}, "empty"),
        ({"command": ["x"], "timeout": -1}, "timeout: Input should be greater than 0"),
        ({"command": ["x"], "functoin": 1}, "functoin"),
        ({"function": "agent.py"}, "not a function; write file.py:function"),
        ({"url": "x"}, "`command` or `remote`"),
        ("agent.py:odd", "'question', which no episode gives"),
        *(({**AGENT, "on_error": value}, "agent.on_error") for value in ("zero", 1, True)),
        ({**AGENT, "rejects": "X"}, "agent.rejects"),
    ],
)
async def test_an_agent_that_cannot_be_run_is_refused_with_the_reason(
    tmp_path: Path, agent: Any, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        await play(pack_of(tmp_path, "def odd(question): ...", agent))
    assert text in error.value.message


async def test_tools_of_an_agent_cannot_be_taken_away(tmp_path: Path) -> None:
    pack = pack_of(tmp_path, TOOLS)
    rollout = rollout_of(pack, [], with_tools=False)
    with pytest.raises(ConfigError, match="brings its own tools"):
        await rollout.episode(Job(pack.tasks("train")[0], 0))


def test_emit_reward_outside_of_an_episode_is_refused() -> None:
    with pytest.raises(EnvError, match="outside of an episode"):
        emit_reward(1.0)
    with pytest.raises(ValueError, match="finite"):
        emit_reward(float("nan"))


def test_the_setting_gives_every_pack_the_agent(tmp_path: Path) -> None:
    pack_of(tmp_path / "one", agent="agent.py:agent")
    packs = load_packs(["one"], base=tmp_path, agent="mine.py:solve")
    assert packs["sums"].agent is not None and packs["sums"].agent.text == "mine.py:solve"
    assert os.path.samefile(packs["sums"].agent.folder, tmp_path)


LOOP = f"""
import os
ADD = {ADD!r}

class Rejected(Exception): "What a framework raises for an answer that it cannot use."

def agent(task, base_url, api_key, model):
    messages = task.prompt
    while True:
        said = ask(base_url, api_key, messages, tools=[ADD])
        messages.append(said)
        for one in said.get("tool_calls") or ():
            if one["function"]["name"] != "add":
                raise LookupError(f"Tool {{one['function']['name']}} not found in agent Triage")
            given = json.loads(one["function"]["arguments"])
            messages.append({{"role": "tool", "tool_call_id": one["id"], "content": str(given["a"] + given["b"])}})
        if not said.get("tool_calls"):
            AFTER
            return float(said["content"] == task.data["answer"])
"""
AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor

def agent(task, base_url, api_key, model):
    def part(n):
        return ask(base_url, api_key, [{"role": "user", "content": f"Part {n}."}])
    with ThreadPoolExecutor(3) as pool:  # the third call is refused while the model answers the others
        list(pool.map(part, range(3)))
"""
GOOD = call("add", a=0, b=2)
UNREADABLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>'


def loop(after: str = "pass") -> str:
    return LOOP.replace("AFTER", after)


REJECTS = "raise ValueError('no output') from Rejected('not in the form that was asked for')"
# The agent's code and settings, what the model says, how the episode ends, its reward, and a text of its error.
EXCEPTIONS: dict[str, tuple[str, dict[str, Any], list[str], Outcome, float | None, str]] = {
    **{
        f"{name}, {given}": (loop(), {**AGENT, **given}, said, outcome, reward, "(agent.py:")
        for name, said in {
            "an unknown tool": [call("add_up", a=0, b=2)],
            "unreadable": [GOOD, UNREADABLE],
            "an argument of another type": [call("add", a="x", b=2)],
        }.items()
        for given, outcome, reward in (
            ({}, Outcome.FAILED, 0.0),
            ({"on_error": -0.5}, Outcome.FAILED, -0.5),
            ({"on_error": "mask"}, Outcome.AGENT_ERROR, None),
        )
    },
    **{  # the agent answers the model's mistakes
        after: (
            loop(after).replace('str(given["a"] + given["b"])', "'done'"),
            *(AGENT, [said, "2"], Outcome.AGENT_ERROR, None, ""),
        )
        for said, after in (
            (GOOD, "raise KeyError('a bug of the agent')"),
            (UNREADABLE, "raise KeyError('after the model had written it well')"),
        )
    },
    "a machine's fault": (
        loop().replace(
            "given = ",
            "raise RuntimeError('the search') from ConnectionError('refused')\n            given = ",
        ),
        *(AGENT, [UNREADABLE], Outcome.AGENT_ERROR, None, ""),
    ),
    **{
        f"rejected by a function, {rejects}": (
            loop(REJECTS),
            *({**AGENT, "rejects": rejects}, ["two"], outcome, reward, ""),
        )
        for rejects, outcome, reward in (
            ([], Outcome.AGENT_ERROR, None),
            (["Rejected"], Outcome.FAILED, 0.0),
        )
    },
    **{
        f"rejected by a program, {rejects}, {said[:9]}": (
            loop(REJECTS)
            + """
from types import SimpleNamespace
task = SimpleNamespace(prompt=json.loads(os.environ["AGENTRL_TASK"])["messages"], data={})
agent(task, os.environ["OPENAI_BASE_URL"], "k", "")
""",
            *({"command": COMMAND["command"], "rejects": rejects}, [said], outcome, reward, ""),
        )
        for rejects, said, outcome, reward in (
            ([], "two", Outcome.AGENT_ERROR, None),
            (["Rejected"], "two", Outcome.FAILED, 0.0),
            ([], call("add_up", a=1), Outcome.FAILED, 0.0),  # an unknown tool ends a program, too
        )
    },
    "after a call that was cut": (
        loop(),
        AGENT,
        [f'<tool_call>\n{{"name": "add", "arguments": {{"a": {"1" * 200}'],
        *(Outcome.TRUNCATED_TOKENS, 0.0, "KeyError"),
    ),
    **{
        f"after a text that was cut, {rejects}": (
            loop("json.loads(said['content'])"),
            *({**AGENT, "rejects": rejects}, ["two " * 80], outcome, reward, ""),
        )
        for rejects, outcome, reward in (
            (["JSONDecodeError"], Outcome.TRUNCATED_TOKENS, 0.0),
            ([], Outcome.AGENT_ERROR, None),
        )
    },
    "a limit beside a reward of the agent's own": (
        loop()
        .replace("said = ask", "emit_reward(0.25); said = ask")
        .replace("model):", "model, emit_reward):"),
        *(AGENT, [GOOD] * 9, Outcome.TRUNCATED_TURNS, 0.25, ""),
    ),
}


@pytest.mark.parametrize(
    ("code", "agent", "said", "outcome", "reward", "text"), EXCEPTIONS.values(), ids=EXCEPTIONS
)
async def test_an_exception_is_scored_if_the_model_caused_it_and_else_masked(
    tmp_path: Path,
    code: str,
    agent: dict[str, Any],
    said: list[str],
    outcome: Outcome,
    reward: float | None,
    text: str,
) -> None:
    episode = await play(pack_of(tmp_path, code, agent), said)
    assert (episode.outcome, episode.reward) == (outcome, reward), episode.error
    assert text in episode.error


@pytest.mark.parametrize(
    ("on_error", "parts", "reward"),
    [(0, "", 0.0), ("mask", "", 0.0), (0, "rewards: {half: {weight: 1.0, primary: true}}\n", 0.5)],
)
async def test_limits_and_mistakes_are_scored_by_the_packs_parts_or_as_0(
    tmp_path: Path, on_error: Any, parts: str, reward: float
) -> None:
    (tmp_path / "task.py").write_text("REWARDS = {'half': lambda episode, ctx: 0.5}\n")
    pack = pack_of(tmp_path, loop(), {**AGENT, "on_error": on_error}, rewards=parts)
    turns = await play(pack, [GOOD] * 9)
    assert (turns.outcome, turns.reward) == (Outcome.TRUNCATED_TURNS, reward)
    assert sum(turn.role == "assistant" for turn in turns.turns) == 4 and "400" in turns.error
    tokens = await play(pack, [GOOD] * 99, max_tokens=700, max_turns=50)
    assert (tokens.outcome, tokens.reward) == (Outcome.TRUNCATED_TOKENS, 0.0)
    assert tokens.tokens.trained_mask.nonzero()[0].max() < 700, "the model's tokens fit"
    mistake = await play(pack, [call("add_up", a=0)])
    assert mistake.reward == (None if on_error == "mask" else reward)
    (tmp_path / "agent.py").write_text(CLIENT + AT_ONCE)
    slow = ScriptedPolicy(["two"] * 2, CHAT.tokenizer, delay=0.3)
    several = await play(load_pack(tmp_path), slow, max_turns=2)
    assert (several.outcome, several.reward) == (Outcome.TRUNCATED_TURNS, reward), several.error


async def test_too_long_names_tokens_limit_and_setting(tmp_path: Path) -> None:
    episode = await play(pack_of(tmp_path, loop()), ["2"], max_tokens=20, max_new_tokens=10)
    assert episode.outcome is Outcome.TOO_LONG and "rollout.max_tokens" in episode.error
    numbers = {int(word) for word in re.findall(r"\d+", episode.error)}
    assert "20 tokens" in episode.error and max(numbers) > 20


async def test_the_prompt_is_a_list_of_plain_dicts_of_its_own(tmp_path: Path) -> None:
    code = """
def agent(task, base_url, api_key):
    assert type(task.prompt) is list and all(type(message) is dict for message in task.prompt)
    task.prompt.append({"role": "user", "content": "Be brief."})
    task.prompt[0]["content"] = "Changed."
    ask(base_url, api_key, task.prompt)
    return float(len(task.prompt) == 2)
"""
    pack = pack_of(tmp_path, code)
    for _ in range(2):
        assert (await play(pack)).reward == 1.0
    assert pack.tasks("train")[0].prompt[0]["content"] == "What is 0 + 2?"


CHAINED = """\
OSError: [Errno 111] handled and logged long before
Traceback (most recent call last):
  File "a.py", line 1, in one
ValueError: first

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 2, in two
frame.errors.BadCall: no tool zzz
"""


def test_only_the_exception_that_ended_a_program_counts() -> None:
    chained, last = printed_names(CHAINED), printed_names("OSError: logged\nKeyError: 'x'\n")
    assert {"BadCall", "ValueError"} <= set(chained) and "OSError" not in chained
    assert last[0] == "KeyError" and "OSError" not in last and printed_names("") == ()


def test_servers_end_with_the_event_loop_without_an_error() -> None:
    """The loop closed the generator of the socket and the one around it at once: an error after every run."""
    said: list[Mapping[str, Any]] = []

    async def main() -> Path:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        return Path(await EpisodeServer.here(CHAT).socket())

    path = asyncio.run(main())
    assert said == [] and not path.parent.exists()
