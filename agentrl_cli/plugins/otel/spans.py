"""Episodes as spans of the GenAI conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/

An episode is sent when it has ended, with the times of its turns, so that sending never delays a model or a tool.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

from agentrl_cli.errors import UsageError, describe_error, needs_extra
from agentrl_cli.hooks import Hook
from agentrl_cli.hooks.loggers import finite
from agentrl_cli.store.codec import dumps
from agentrl_cli.types import Episode, Message, ToolCall, ToolResult, Turn
from agentrl_cli.types.branches import path_to
from agentrl_cli.types.content import content_text
from agentrl_cli.types.masking import mask

PROVIDER = "agentrl"
ADDRESSES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def observer(config: Any) -> Callable[[Episode], None] | None:
    """Return a function that sends an episode; None if the settings want none. Raises UsageError, MissingDependency."""
    if not config.telemetry.spans:
        return None
    if not any(os.environ.get(name) for name in ADDRESSES):
        hint = f"export {ADDRESSES[0]}=http://127.0.0.1:4318"
        raise UsageError("telemetry.spans has no collector to send to.", hint=hint)
    return partial(send, tracer(), content=config.telemetry.content)


def call_observer(config: Any) -> Callable[[str, ToolCall, ToolResult, float], None] | None:
    """Return a function that sends a served call; None if the settings want none. Raises as `observer`."""
    if observer(config) is None:
        return None
    return partial(send_call, tracer(), content=config.telemetry.content)


def watcher(config: Any) -> Steps | None:
    """Return the hook that sends a training's steps; None if the settings want none. Raises as `observer`."""
    return None if observer(config) is None else Steps(tracer())


class Steps(Hook):
    """Sends `train`, and in it `train_step` and `evaluate` with their numbers; secrets are in none of them."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._run: Any = None
        self._started = 0

    def on_step_start(self, run: Any, step: int) -> None:
        self._begin(run)
        self._started = time.time_ns()

    def on_update(self, metrics: Mapping[str, float], step: int) -> None:
        self._send("train_step", step, metrics, self._started)

    def on_eval(self, result: Any, step: int, run: Any = None) -> None:
        if run is not None and run.kind == "train":  # that of the base comes before any step
            self._begin(run)
        numbers = {"solved": result.pass_rate}
        for split, found in result.report()["splits"].items():
            numbers |= {f"{split}.{name}": value for name, value in found.items()}
        self._send("evaluate", step, numbers, time.time_ns() - int(result.seconds * 1e9))

    def _begin(self, run: Any) -> None:
        if self._run is None:
            about = {"agentrl.run": run.id, "agentrl.run.name": run.name}
            self._run = self._tracer.start_span(f"train {run.name}", attributes=about)

    def _send(self, name: str, step: int, numbers: Mapping[str, Any], started: int) -> None:
        from opentelemetry.trace import set_span_in_context

        inside = None if self._run is None else set_span_in_context(self._run)
        given: dict[str, Any] = {
            f"agentrl.{name}": value for name, value in finite(numbers).items()
        }
        given["agentrl.step"] = step  # last: of more than it keeps the SDK drops the first
        self._tracer.start_span(name, inside, start_time=started, attributes=given).end()

    def on_run_end(self, run: Any, error: BaseException | None) -> None:
        if self._run is not None:
            _fail(self._run, "" if error is None else describe_error(error))
            self._run.end()


@cache
def tracer() -> Any:
    """Return the tracer of this process, which sends in batches and at its end. Raises MissingDependency."""
    with needs_extra("telemetry.spans needs opentelemetry.", "otel"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "agentrl"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("agentrl")


def send(tracer: Any, episode: Episode, *, content: bool) -> None:
    """Send an episode: its agent, in it every model call and every tool."""
    from opentelemetry.trace import set_span_in_context

    name = episode.pack or "agentrl"
    about = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": name,
        "gen_ai.conversation.id": episode.id,
        "agentrl.task": episode.task_id,
        "agentrl.outcome": str(episode.outcome),
    }
    root = tracer.start_span(
        f"invoke_agent {name}", start_time=_ns(episode.started), attributes=about
    )
    inside = set_span_in_context(root)
    for turn in episode.turns:
        parts = _chat(episode, turn, content) if turn.stop_reason is not None else ()
        for title, seconds, given, error in parts or _tools(episode, turn, content):
            span = tracer.start_span(title, inside, start_time=_ns(turn.started), attributes=given)
            _fail(span, error)
            span.end(_ns(turn.started + seconds))
    total = [] if episode.reward is None else [("reward", episode.reward)]
    for part, value in (*total, *((one.name, one.value) for one in episode.reward_parts)):
        score = {"gen_ai.evaluation.name": part, "gen_ai.evaluation.score.value": value}
        root.add_event("gen_ai.evaluation.result", score, _ns(episode.ended))
    _fail(root, episode.error)
    root.end(_ns(episode.ended))


Part = tuple[str, float, dict[str, Any], str]


def _chat(episode: Episode, turn: Turn, content: bool) -> Iterable[Part]:
    """Return a model call as a span; its input is the branch before it."""
    before = [episode.turns[n] for n in path_to(episode.parents, turn.index)[:-1]]
    model = turn.weights_version or episode.weights_version or "model"
    reason = str(turn.stop_reason or "stop").removesuffix("_string")
    given = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": sum(one.end - one.start for one in before),
        "gen_ai.usage.output_tokens": turn.end - turn.start,
        "gen_ai.response.finish_reasons": [reason],
    }
    if content:
        asked = [_message(said, one) for one in before for said in one.messages]
        given["gen_ai.input.messages"] = dumps(mask(asked))
        said = [{**_message(one, turn), "finish_reason": reason} for one in turn.messages]
        given["gen_ai.output.messages"] = dumps(mask(said))
    yield f"chat {model}", turn.seconds, given, ""


def _tools(episode: Episode, turn: Turn, content: bool) -> Iterable[Part]:
    """Yield a span for each result, named by the call that it answers."""
    parent = episode.parents[turn.index]
    calls = episode.turns[parent].calls if parent >= 0 else ()
    for call, result in zip(calls, turn.results, strict=False):
        yield _tool(call, result, content)


def _tool(call: ToolCall, result: ToolResult, content: bool) -> Part:
    given = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name}
    given |= {"gen_ai.tool.call.id": call.id, "gen_ai.tool.type": "function"}
    if content:
        given["gen_ai.tool.call.arguments"] = dumps(mask(call.arguments))
        given["gen_ai.tool.call.result"] = mask(result.text)
    return f"execute_tool {call.name}", result.seconds, given, result.error or ""


def send_call(
    tracer: Any, session: str, call: ToolCall, result: ToolResult, at: float, *, content: bool
) -> None:
    """Send a call that a tool server answered, as a trace of its own."""
    title, seconds, given, error = _tool(call, result, content)
    given["gen_ai.conversation.id"] = session
    span = tracer.start_span(title, start_time=_ns(at), attributes=given)
    _fail(span, error)
    span.end(_ns(at + seconds))


def _message(said: Message, turn: Turn) -> dict[str, Any]:
    """Return a message with its parts."""
    text = content_text(said.get("content"))
    parts: list[Mapping[str, Any]] = [{"type": "text", "content": text}] if text else []
    if said["role"] == "tool":
        parts = [{"type": "tool_call_response", "id": said.get("tool_call_id"), "response": text}]
    if reasoning := said.get("reasoning_content"):
        parts.insert(0, {"type": "reasoning", "content": reasoning})
    for call in turn.calls if said["role"] == "assistant" else ():
        named = {"id": call.id, "name": call.name, "arguments": call.arguments}
        parts.append({"type": "tool_call", **named})
    return {"role": said["role"], "parts": parts}


def _fail(span: Any, error: str) -> None:
    from opentelemetry.trace import StatusCode

    if error:
        error = mask(error)
        span.set_attribute("error.type", error.split(":", 1)[0][:80])
        span.set_status(StatusCode.ERROR, error[:200])


def _ns(seconds: float) -> int:
    return int(max(0.0, seconds) * 1e9)
