"""What the real package and ours are asked to do: run as `python scenario.py MODULE`, prints one JSON object.

Ids and times differ from run to run, so they are left out or numbered in order of appearance.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import logging
import sys
import warnings
from typing import Any

FUNCTIONS = """
    emit_annotation emit_exception emit_message emit_object emit_reward find_final_reward find_reward_spans
    get_message_value get_object_value get_reward_value get_rewards_from_span is_reward_span operation
    rollout resolve_bool_env_var resolve_int_env_var resolve_str_env_var
""".split()
CLASSES = """
    AgentOpsTracer Algorithm AttemptedRollout Baseline ClientServerExecutionStrategy Hook
    InMemoryLightningStore LLM LLMProxy LightningStore LightningStoreThreaded LitAgent LitAgentRunner
    LlmProxyTraceToTriplet OtelTracer PromptTemplate ProxyLLM ResourcesUpdate Rollout RolloutConfig
    SharedMemoryExecutionStrategy Span Attempt EnqueueRolloutRequest TraceToMessages TracerTraceToTriplet
    Trainer Triplet Worker
""".split()


def signature(function: Any) -> list[Any]:
    """Names, kinds and plain defaults of parameters."""
    plain = (str, int, float, bool, type(None), tuple)
    return [
        [
            p.name,
            p.kind.name,
            p.default if isinstance(p.default, plain) else "…" if p.default is not p.empty else "-",
        ]
        for p in inspect.signature(function).parameters.values()
    ]


def names(agl: Any) -> dict[str, Any]:
    """Every public name, and the signatures of functions, constructors and methods."""
    found: dict[str, Any] = {
        "all": sorted(name for name in dir(agl) if name[0] != "_" and name[0] != name[0].lower())
    }
    found |= {name: signature(getattr(agl, name)) for name in FUNCTIONS}
    for name in CLASSES:
        one = getattr(agl, name)
        found[f"{name}()"] = (
            signature(one.__init__) if "model_fields" not in dir(one) else sorted(one.model_fields)
        )
        for method, value in inspect.getmembers(one, inspect.isfunction):
            if method[0] != "_" and "model_fields" not in dir(one):
                found[f"{name}.{method}"] = signature(value)
    return found


async def queue(agl: Any, made: Any = None) -> list[Any]:
    """Statuses as rollouts are queued, taken, retried, timed out and waited for."""
    store, said = made or agl.InMemoryLightningStore(scan_debounce_seconds=0), []

    async def state(rollout_id: str) -> Any:
        rollout = await store.get_rollout_by_id(rollout_id)
        attempts = await store.query_attempts(rollout_id)
        return [
            rollout.status,
            rollout.end_time is not None,
            [(a.sequence_id, a.status, a.worker_id) for a in attempts],
        ]

    said.append(await store.dequeue_rollout())
    resources = await store.add_resources({"main_llm": agl.LLM(endpoint="http://x/v1", model="m")})
    config = agl.RolloutConfig(
        max_attempts=2, retry_condition=["failed", "timeout"], timeout_seconds=0.3
    )
    one = await store.enqueue_rollout({"n": 1}, "train", config=config, metadata={"k": 1})
    two = await store.enqueue_rollout({"n": 2})
    three = await store.start_rollout({"n": 3}, worker_id="w3")
    said += [
        [one.resources_id == resources.resources_id, one.metadata, await state(one.rollout_id)],
        [await state(three.rollout_id), three.attempt.status],
    ]
    taken = await store.dequeue_rollout("w1")
    said.append(
        [taken.rollout_id == one.rollout_id, await state(one.rollout_id), taken.attempt.sequence_id]
    )
    await store.update_attempt(one.rollout_id, "latest", status="failed")
    said.append(await state(one.rollout_id))
    order = await store.dequeue_many_rollouts(limit=5, worker_id="w1")
    said.append([[r.input["n"] for r in order], await state(one.rollout_id)])
    for sequence_id in (7, 7):
        span = agl.Span.from_attributes(
            attributes={"a": 1},
            rollout_id=two.rollout_id,
            attempt_id=order[0].attempt.attempt_id,
            sequence_id=sequence_id,
            span_id="0011223344556677",
            trace_id="0" * 32,
        )
        said.append((await store.add_span(span)) is not None)
    said += [
        [await store.get_next_span_sequence_id(two.rollout_id, order[0].attempt.attempt_id)],
        await state(two.rollout_id),
        await store.wait_for_rollouts(rollout_ids=[two.rollout_id, "unknown"], timeout=0),
    ]
    await asyncio.sleep(0.5)
    said.append(await state(one.rollout_id))
    await store.update_attempt(two.rollout_id, order[0].attempt.attempt_id, status="succeeded")
    ended = await store.wait_for_rollouts(rollout_ids=[two.rollout_id], timeout=600)
    said.append([ended[0].status, await state(two.rollout_id)])
    await store.update_rollout(three.rollout_id, status="cancelled", metadata=None)
    said.append(await state(three.rollout_id))
    page = await store.query_rollouts(
        status_in=["succeeded", "cancelled"], sort_by="start_time", limit=1
    )
    either = await store.query_rollouts(
        status_in=["failed"], rollout_id_contains=two.rollout_id, filter_logic="or"
    )
    said += [
        [page.total, len(page), page[0].input, type(page[0]).__name__],
        sorted(r.input["n"] for r in either),
    ]
    workers = sorted(await store.query_workers(), key=lambda w: w.worker_id)
    said += [[w.worker_id, w.status, w.current_rollout_id is not None] for w in workers]
    for call in (
        store.update_rollout("nope", status="failed"),
        store.start_attempt("nope"),
        store.update_attempt("nope", "latest", status="failed"),
        store.add_span(span.model_copy(update={"rollout_id": "nope"})),
    ):
        try:
            await call
            said.append("no error")
        except ValueError:
            said.append("ValueError")
    return said


async def emitted(agl: Any) -> list[Any]:
    """Names and attributes of spans, their order and parents, and the values in them."""
    store, tracer = agl.InMemoryLightningStore(), agl.OtelTracer()
    rollout = await store.start_rollout({"q": 1})

    where = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    with tracer.lifespan(store):
        async with tracer.trace_context("t", store=store, **where) as inner:
            with inner.start_as_current_span("outer"), inner.start_as_current_span("inner"):
                agl.emit_message("hello", {"tag": {"a": [1, 2], "b": [1, "x"]}})

            @agl.operation(category="math")
            def double(value: int, *more: int) -> dict[str, int]:
                return {"twice": 2 * value}

            double(3, 4)
            with agl.operation(user="u") as op:
                op.set_input(1, key={"deep": True})
                op.set_output([1.5, "two"])
            agl.emit_object({"x": [1, None]})
            agl.emit_object(b"bytes")
            agl.emit_object(True)
            agl.emit_annotation({"list": [1, 2], "nested": {"k": 0.5}})
            agl.emit_reward(
                {"style": 0.25, "right": 1}, primary_key="right", attributes={"why": "because"}
            )
            agl.emit_reward(0.5)
            try:
                raise KeyError("oops")
            except KeyError as error:
                agl.emit_exception(error)
            for wrong in ({"a": 1}, "text", {"a": "b"}):
                try:
                    agl.emit_reward(wrong)
                except (TypeError, ValueError) as error:
                    agl.emit_message(type(error).__name__)
    spans = list(await store.query_spans(rollout.rollout_id))
    ids = {span.span_id: span.name for span in spans}
    said: list[Any] = []
    for span in spans:
        known = {k: v for k, v in sorted(span.attributes.items()) if k != "exception.stacktrace"}
        said += [
            [span.name, ids.get(span.parent_id or ""), known, span.status.status_code],
            [
                agl.get_reward_value(span),
                agl.get_message_value(span),
                str(agl.get_object_value(span)),
            ],
            [(r.name, r.value) for r in agl.get_rewards_from_span(span)],
        ]
    status = (await store.get_rollout_by_id(rollout.rollout_id)).status
    return [*said, [agl.find_final_reward(spans), len(agl.find_reward_spans(spans)), status]]


def adapted(agl: Any) -> list[Any]:
    """Triplets and messages from spans as proxies and tracers write them."""

    def span(
        number: int,
        name: str,
        start: float,
        end: float,
        parent: int | None = None,
        **attributes: Any,
    ) -> Any:
        return agl.Span.from_attributes(
            attributes={key.replace("__", "."): value for key, value in attributes.items()},
            rollout_id="r",
            attempt_id="a",
            sequence_id=number,
            name=name,
            trace_id="1" * 32,
            span_id=f"{number:016x}",
            parent_id=None if parent is None else f"{parent:016x}",
            start_time=start,
            end_time=end,
        )

    def call(
        number: int, start: float, parent: int | None, name: str = "openai.chat.completion"
    ) -> Any:
        held = {
            "gen_ai__prompt__0__role": "user",
            "gen_ai__prompt__0__content": f"q{number}",
            "gen_ai__completion__0__role": "assistant",
            "gen_ai__completion__0__content": f"a{number}",
            "gen_ai__request__model": "m",
            "gen_ai__response__id": f"id{number}",
            "prompt_token_ids": [1, number],
            "response_token_ids": [number],
        }
        return span(number, name, start, start + 1, parent, **held)

    def reward(number: int, at: float, value: float, parent: int | None) -> Any:
        held = {
            "agentlightning__reward__0__name": "primary",
            "agentlightning__reward__0__value": value,
        }
        return span(number, "agentlightning.annotation", at, at, parent, **held)

    spans = [
        span(1, "root", 0, 20),
        span(2, "agent", 1, 8, 1, agent__name="writer"),
        call(3, 2, 2),
        call(4, 4, 2),
        reward(5, 7, 0.25, 2),
        span(6, "agent", 9, 15, 1, agent__name="checker"),
        call(7, 10, 6),
        reward(8, 16, 1.0, 1),
    ]
    flat = [
        call(1, 1, None, "litellm_request"),
        call(2, 3, None, "litellm_request"),
        reward(3, 5, 0.5, None),
    ]

    def of(triplet: Any) -> tuple[Any, ...]:
        return triplet.prompt["token_ids"], triplet.response["token_ids"], triplet.reward

    said: list[Any] = []
    for options in (
        {},
        {"agent_match": "write"},
        {"reward_match": "first_sibling"},
        {"repair_hierarchy": False},
    ):
        found = agl.TracerTraceToTriplet(**options).adapt(list(spans))
        said.append([(*of(t), t.metadata["agent_name"]) for t in found])
    said.append([of(t) for t in agl.LlmProxyTraceToTriplet().adapt(flat)])
    with contextlib.suppress(ImportError):  # the real one wants the package openai
        said.append(json.loads(json.dumps(agl.TraceToMessages().adapt(flat[:2]), default=str)))
    return said


async def ran(agl: Any) -> list[Any]:
    """What runners do with results, hooks and exceptions; what decorators take."""
    said: list[Any] = []

    class Watch(agl.Hook):  # type: ignore[misc]
        async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
            said.append("rollout_start")

        async def on_trace_start(
            self, *, agent: Any, runner: Any, tracer: Any, rollout: Any
        ) -> None:
            said.append("trace_start")

        async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
            said.append("trace_end")

        async def on_rollout_end(
            self, *, agent: Any, runner: Any, rollout: Any, spans: Any
        ) -> None:
            said.append(["rollout_end", len(spans) > 0 or rollout.mode != "train"])
            raise RuntimeError("hooks may fail")

    @agl.rollout
    async def emits(task: Any, llm: Any, rollout: Any) -> None:
        agl.emit_reward(task["r"])
        said.append(
            [llm.endpoint.split("/rollout/")[0], type(llm).__name__, llm.endpoint.endswith("/v1")]
        )

    @agl.rollout
    def returns(task: Any, prompt_template: Any) -> float:
        said.append(prompt_template.format(name="x"))
        return float(task["r"])

    class Fails(agl.LitAgent):  # type: ignore[misc]
        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            raise LookupError(sorted(resources))

        def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return -1.0

    resources = {
        "main_llm": agl.ProxyLLM(endpoint="http://proxy:1/v1", model="m"),
        "prompt": agl.PromptTemplate(template="Hi {name}", engine="f-string"),
    }
    for agent, mode in ((emits, "train"), (returns, None), (Fails(), "val"), (Fails(), "train")):
        store = agl.InMemoryLightningStore()
        runner = agl.LitAgentRunner(agl.OtelTracer(), heartbeat_interval=0)
        with runner.run_context(agent=agent, store=store, hooks=[Watch()]):
            try:
                done = await runner.step({"r": 0.75}, resources=resources, mode=mode)
                spans = await store.query_spans(done.rollout_id)
                said.append([done.status, agl.find_final_reward(list(spans))])
            except LookupError as error:
                said.append(
                    ["raised", str(error), [r.status for r in await store.query_rollouts()]]
                )
    for wrong in (lambda: None, lambda task: None, lambda task, other: None):
        try:
            agl.rollout(wrong)
        except NotImplementedError:
            said.append("NotImplementedError")
    said.append([emits.is_async(), returns.is_async(), returns({"r": 2}, resources["prompt"])])
    return said


def main() -> None:
    """Run everything with the package that the command line names."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    agl = importlib.import_module(sys.argv[1])
    found = {"names": names(agl), "adapted": adapted(agl)}
    for part in (queue, emitted, ran):
        found[part.__name__] = asyncio.run(part(agl))
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
