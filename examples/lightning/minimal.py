"""After Agent-Lightning's minimal examples: traces, and the LLM proxy.

python examples/lightning/minimal.py [--model tiny]
"""

import argparse
import asyncio

import httpx2

import agentrl_cli.plugins.lightning as agl


async def write_traces() -> list[agl.Span]:
    tracer, store = agl.OtelTracer(), agl.InMemoryLightningStore()
    rollout = await store.start_rollout(input={"origin": "write_traces_example"})
    with tracer.lifespan(store):
        async with tracer.trace_context(
            "trace-manual",
            store=store,
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
        ) as inner:
            with (
                inner.start_as_current_span("grpc-span-1"),
                inner.start_as_current_span("grpc-span-2"),
            ):
                pass
            with inner.start_as_current_span("grpc-span-3"):
                pass
            agl.emit_reward(1.0)
    return list(await store.query_spans(rollout_id=rollout.rollout_id))


async def serve_llm_proxy(model: str) -> list[agl.Span]:
    store = agl.InMemoryLightningStore()
    entry = {"model_name": "served", "litellm_params": {"model": model}}
    proxy = agl.LLMProxy(model_list=[entry], store=store)
    await proxy.start()
    try:
        rollout = await store.start_rollout(input={"origin": "test_llm_proxy"})
        llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id)
        async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
            body = {
                "model": llm.model,
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 8,
            }
            answer = await client.post(f"{llm.endpoint}/chat/completions", json=body)
            answer.raise_for_status()
        await asyncio.sleep(0.05)
        return list(await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id))
    finally:
        await proxy.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    for span in [
        *asyncio.run(write_traces()),
        *asyncio.run(serve_llm_proxy(parser.parse_args().model)),
    ]:
        print(span.sequence_id, span.name, sorted(span.attributes))
