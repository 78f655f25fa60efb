"""The names of Agent-Lightning 0.x: signatures and behaviour are compared with those of the real package."""

import importlib
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

import agentrl_cli.plugins.lightning as agl
from agentrl_cli.errors import StoreError
from agentrl_cli.plugins.lightning.store import serving
from tests.helpers.processes import ROOT, end_together, free_port
from tests.plugins.lightning import scenario

# Names that are not here; docs/lightning.md says why.
ABSENT = """
    AgentLightningClient AgentLightningServer CollectionBasedLightningStore DevTaskLoader FilterField
    FilterOptions GenericResponse LegacyAgentRunner
    RolloutLegacy RolloutRawResultLegacy SortOptions Task TaskIfAny
""".split()


# Signatures that take more here, or less of what has no meaning.
OTHER = """
    AgentOpsTracer.get_langchain_handler AgentOpsTracer.teardown_worker OtelTracer.teardown_worker
    Baseline.run InMemoryLightningStore() InMemoryLightningStore.query_spans LightningStore() Trainer()
    Trainer.dev Trainer.fit
""".split()


MISSING = """
    AgentOpsTracer.get_langchain_callback_handler AgentOpsTracer.instrument AgentOpsTracer.uninstrument
    Algorithm.get_client Baseline.get_client InMemoryLightningStore.wait_for_rollout LLMProxy.initialize
    TraceToMessages.get_tool_calls TracerTraceToTriplet.visualize Trainer.client Trainer.fit_v0 Trainer.init
    Trainer.init_worker Trainer.run Trainer.kill_orphaned_processes Trainer.teardown Trainer.teardown_worker
""".split()


def played(python: str, module: str) -> dict[str, Any]:
    command = [python, str(Path(scenario.__file__)), module]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_names_signatures_and_behaviour_are_those_of_the_real_package() -> None:
    real = json.loads(Path(__file__).with_name("real-0.3.0.json").read_text(encoding="utf-8"))
    if python := os.environ.get("AGENTLIGHTNING_PYTHON", ""):
        assert played(python, "agentlightning") == real
    ours = played(sys.executable, "agentrl_cli.plugins.lightning")
    names, mine = real.pop("names"), ours.pop("names")
    assert sorted({*names.pop("all")} - {*mine.pop("all")}) == ABSENT
    different = {name for name, value in names.items() if value != mine.get(name)}
    assert different <= {*OTHER, *MISSING}, sorted(different - {*OTHER, *MISSING})
    for part, said in real.items():
        assert ours[part] == said, part


async def test_all_stores_follow_the_same_rules(tmp_path: Path) -> None:
    memory, path = await scenario.queue(agl), tmp_path / "agentrl.db"
    assert [memory[12][0], memory[13][0]] == ["succeeded", "cancelled"]
    held = agl.InMemoryLightningStore(scan_debounce_seconds=0)
    async with AsyncExitStack() as stack:
        server = agl.LightningStoreServer(held, port=0)
        stack.push_async_callback(server.stop)
        await server.start()
        client = agl.LightningStoreClient(server.endpoint)
        sqlite = agl.SqliteLightningStore(path)
        for store in (client, sqlite):
            stack.push_async_callback(store.close)
            assert await scenario.queue(agl, store) == memory
        for side in (client, server):
            assert (await side.statistics())["total_rollouts"] == 3
        prompt = agl.PromptTemplate(template="{x}", engine="f-string")
        update = await client.add_resources({"p": prompt})
        assert update.resources["p"] == prompt and await server.get_latest_resources() == update
        with pytest.raises(ValueError, match="Rollout nothing not found"):
            await client.start_attempt("nothing")
        with pytest.raises(ValueError, match="cannot be sent"):
            await client.enqueue_rollout({"object": object()})
    again = agl.SqliteLightningStore(path)
    assert (await again.statistics())["total_rollouts"] == 3
    with pytest.raises(ValueError, match="cannot be kept"):
        await again.enqueue_rollout({"object": object()})
    assert [one.input["n"] for one in await again.query_rollouts(sort_by="start_time")] == [1, 2, 3]
    await again.close()
    with pytest.raises(ValueError, match="set AGENTRL_TOKEN"):
        agl.LightningStoreServer(held, "0.0.0.0")


async def test_a_proxy_off_the_loopback_answers_those_who_bring_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    entry = {"model_name": "served", "litellm_params": {"model": "scripted", "api_key": "key"}}
    store = agl.InMemoryLightningStore()
    with pytest.raises(ValueError, match="set AGENTRL_TOKEN"):
        agl.LLMProxy(model_list=[entry], store=store, host="0.0.0.0")
    monkeypatch.setenv("AGENTRL_TOKEN", "secret")
    proxy = agl.LLMProxy(model_list=[entry], store=store, host="0.0.0.0")
    await proxy.start()
    assert "litellm_params: these have no effect here: api_key" in caplog.text
    try:
        llm = proxy.as_resource()
        url = f"{llm.endpoint.replace('0.0.0.0', '127.0.0.1')}/chat/completions"
        body = {"model": llm.model, "messages": [{"role": "user", "content": "Hello"}]}
        async with httpx2.AsyncClient(trust_env=False, timeout=None) as client:
            for key, status in (("dummy", 401), (llm.api_key, 200)):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await client.post(url, json=body, headers=headers)).status_code == status
    finally:
        await proxy.stop()
    assert agl.LLMProxy(model_list=[entry], store=store).as_resource().api_key is None


def test_arguments_for_litellm_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    agl.LLMProxy(num_retries=0, num_workers=2, launch_mode="thread")
    assert "no effect here: num_workers, launch_mode" in caplog.text


SIDES = """
import sys, agentrl_cli.plugins.lightning as agl

@agl.rollout
def agent(task, llm):
    return float(task["n"])

@agl.algo
async def learn(*, store, train_dataset, **given):
    await store.add_resources({"llm": agl.LLM(endpoint="http://none/v1", model="m")})
    rollouts = [await store.enqueue_rollout(task) for task in train_dataset]
    ended = await store.wait_for_rollouts(rollout_ids=[one.rollout_id for one in rollouts])
    spans = [await store.query_spans(one.rollout_id) for one in ended]
    print([one.status for one in ended], [agl.find_final_reward(found) for found in spans], flush=True)

agl.Trainer(algorithm=learn, n_runners=1, max_rollouts=3).fit(agent, [{"n": n} for n in range(3)])
"""


def test_the_sides_of_a_training_meet_at_a_served_store(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SIDES)
    given = {"AGL_SERVER_HOST": "127.0.0.1", "AGL_SERVER_PORT": str(free_port())}
    given["PYTHONPATH"] = str(ROOT)
    sides = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={**os.environ, **given, "AGL_CURRENT_ROLE": role},
            stdout=subprocess.PIPE,
            text=True,
        )
        for role in ("algorithm", "runner")
    ]
    end_together(sides)
    said = [side.communicate()[0] for side in sides]
    assert said[0].strip() == "['succeeded', 'succeeded', 'succeeded'] [0.0, 1.0, 2.0]"
    assert [side.returncode for side in sides] == [0, 0]


SUBMODULES = """
from agentrl_cli.plugins.lightning.reward import find_final_reward, reward
from agentrl_cli.plugins.lightning.tracer.agentops import AgentOpsTracer
from agentrl_cli.plugins.lightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentrl_cli.plugins.lightning.store.memory import InMemoryLightningStore
from agentrl_cli.plugins.lightning.adapter.triplet import LlmProxyTraceToTriplet
from agentrl_cli.plugins.lightning.algorithm.verl import VERL
from agentrl_cli.plugins.lightning.litagent.decorator import llm_rollout
from agentrl_cli.plugins.lightning.types.core import Rollout
from agentrl_cli.plugins.lightning.semconv import make_tag_attributes
import agentrl_cli.plugins.lightning as agl
assert agl.LightningStoreClient is LightningStoreClient and agl.reward is reward and callable(agl.reward)
import sys
assert 'torch' not in sys.modules and 'agentlightning' not in sys.modules
import agentrl_cli.plugins.lightning.alias
import agentlightning
from agentlightning.adapter.triplet import LlmProxyTraceToTriplet as theirs
from agentlightning.algorithm.verl import VERL
from agentlightning.reward import find_final_reward
from agentlightning.utils.otel import *
from agentlightning.algorithm.apo import APO
assert callable(make_tag_attributes) and callable(query_linked_spans) and agl.APO is APO
import agentlightning.algorithm.apo, agentlightning.utils.otel
assert agentlightning.algorithm.apo.APO is APO and callable(agentlightning.utils.otel.make_link_attributes)
assert agentlightning is agl and agl.VERL is VERL and theirs is LlmProxyTraceToTriplet
assert 'torch' not in sys.modules
import agentrl_cli.lightning as old  # the name before 0.1
from agentrl_cli.lightning.store import InMemoryLightningStore as store
from agentrl_cli.lightning.tracer.agentops import AgentOpsTracer as tracer
assert old.Trainer is agl.Trainer and store is InMemoryLightningStore and tracer is AgentOpsTracer
sys.modules['agentlightning'] = sys
try: agl.alias.claim()
except ImportError as error: print(error)
"""


def test_submodules_lie_behind_the_one_changed_import_and_the_alias_hides_no_package() -> None:
    """What `import agentlightning.x` becomes by replacing the package's name alone; docs list what there is not.

    The alias is there when it is asked for, and never in place of the real package.
    """
    done = subprocess.run(
        [sys.executable, "-c", SUBMODULES], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.startswith("The real agentlightning was imported before"), done.stderr
    assert "agentrl_cli.lightning is now agentrl_cli.plugins.lightning" in done.stderr
    listed = (ROOT / "docs" / "lightning.md").read_text(encoding="utf-8")
    for name in (
        "get_tracer_provider",
        "utils.metrics",
        "setup_module_logging",
        "tracer.weave",
        "store.mongo",
    ):
        assert f"`{name}`" in listed
        with pytest.raises(ImportError):
            importlib.import_module(f"agentrl_cli.plugins.lightning.{name}")


class Full(agl.InMemoryLightningStore):
    """Takes neither resources nor the end of an attempt."""

    async def update_attempt(self, *where: Any, **what: Any) -> Any:
        raise ConnectionError("no room")

    async def add_resources(self, resources: Any) -> Any:
        raise StoreError("The disk is full.")


class Agent(agl.LitAgent[Any]):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return 1.0

    def on_rollout_end(self, task: Any, rollout: Any, runner: Any, tracer: Any) -> None:
        raise OSError("the disk is full")


async def test_an_attempt_ends_though_the_agents_own_callback_fails() -> None:
    store, runner = agl.InMemoryLightningStore(), agl.LitAgentRunner[Any](agl.OtelTracer())
    with runner.run_context(agent=Agent(), store=store):
        ended = await runner.step({}, resources={})
    assert (ended.status, ended.reward) == ("succeeded", 1.0)


async def test_an_end_that_the_store_does_not_take_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, runner = Full(), agl.LitAgentRunner[Any](agl.OtelTracer(), max_rollouts=1)
    await store.enqueue_rollout({})
    with runner.run_context(agent=Agent(), store=store):
        await runner.iter()
    assert "cannot be stored" in caplog.text and "no room" in caplog.text


async def test_a_served_store_says_what_its_file_lacks_and_gives_its_port_back() -> None:
    port = free_port()
    client = agl.LightningStoreClient(f"http://127.0.0.1:{port}")
    full = pytest.raises(RuntimeError, match=r"The disk is full\.")
    with full, serving(Full(), "127.0.0.1", port):
        await client.add_resources({})
    await client.close()
    with serving(agl.InMemoryLightningStore(), "127.0.0.1", port):
        pass


def test_spans_that_lie_within_each_other_are_read() -> None:
    times: Any = {"start_time": 1.0, "end_time": 2.0}
    spans = [
        agl.Span.from_attributes(
            attributes={}, name="openai.chat.completion", span_id="a", parent_id="b", **times
        ),
        agl.Span.from_attributes(attributes={}, name="agent", span_id="b", parent_id="a", **times),
    ]
    assert len(agl.TracerTraceToTriplet().adapt(spans)) == 1
    # The parent ends before its child, which then seems to be around it.
    spans = [
        agl.Span.from_attributes(attributes={}, name="agent", span_id="a", **times),
        agl.Span.from_attributes(
            attributes={}, name="openai.chat.completion", span_id="b", parent_id="a",
            start_time=1.0, end_time=3.0,
        ),
    ]  # fmt: skip
    assert len(agl.TracerTraceToTriplet().adapt(spans)) == 1
