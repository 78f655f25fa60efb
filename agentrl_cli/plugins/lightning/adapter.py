"""Adapters: the spans of an attempt as training triplets, or as OpenAI's messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar

from agentrl_cli.plugins.lightning.emitter import (
    find_reward_spans,
    get_reward_value,
    is_reward_span,
)
from agentrl_cli.plugins.lightning.semconv import (
    AGL_OPERATION,
    AGL_REWARD,
    LLM_CALL,
    LightningSpanAttributes,
    filter_and_unflatten_attributes,
)
from agentrl_cli.plugins.lightning.spans import Span
from agentrl_cli.plugins.lightning.types import Triplet

AGENT_KEYS = ("agent.name", "recipient_agent_type", "langchain.chain.type", "executor.id")


T_from = TypeVar("T_from")
T_to = TypeVar("T_to")


class Adapter(Generic[T_from, T_to]):
    """Turns one form into another."""

    def __call__(self, source: T_from, /) -> T_to:
        return self.adapt(source)

    def adapt(self, source: T_from, /) -> T_to:
        """Return the other form."""
        raise NotImplementedError("Adapter.adapt() is not implemented")


class OtelTraceAdapter(Adapter[Sequence[Any], T_to], Generic[T_to]):
    """Adapts OpenTelemetry's spans."""


class TraceAdapter(Adapter[Sequence[Span], T_to], Generic[T_to]):
    """Adapts the spans of an attempt."""


class TraceToMessages(TraceAdapter[list[dict[str, Any]]]):
    """For each model call `messages`, its answer included, and the `tools` that were offered, or None."""

    def adapt(self, source: Sequence[Span], /) -> list[dict[str, Any]]:
        """Return the calls in the order of the spans. Raises ValueError unless messages are a list."""
        return [call for span in source if (call := self._call(span, source)) is not None]

    def _call(self, span: Span, spans: Sequence[Span]) -> dict[str, Any] | None:
        names = ("prompt", "completion", "request", "response")
        prompt, completion, request, response = (
            _read_nested(span.attributes, f"gen_ai.{name}") for name in names
        )
        if not (prompt or completion or request or response):
            return None
        for name, held in (("prompt", prompt or []), ("completion", completion or [])):
            if not isinstance(held, list):
                raise ValueError(f"Extracted {name} from trace is not a list: {held}")
        messages = [_message(item) for item in [*(prompt or []), *(completion or [])]]
        children = [child for child in spans if child.parent_id == span.span_id]
        traced = [held for child in children if (held := _read_nested(child.attributes, "tool"))]
        if traced and messages:  # a tracer has put each call into a span of its own
            messages[-1]["tool_calls"] = [_tool_call(held) for held in traced]
        functions = request.get("functions") if isinstance(request, dict) else None
        tools = [_tool(item) for item in functions] if functions else None
        return {"messages": messages, "tools": tools}


def _message(held: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": held["role"], "content": held.get("content", "")}
    if calls := held.get("tool_calls"):
        made["tool_calls"] = [
            {
                "id": c.get("id", ""),
                "type": "function",
                "function": {"name": c["name"], "arguments": c["arguments"]},
            }
            for c in calls
        ]
        made["content"] = made["content"] or None
    if held["role"] == "tool":
        made["tool_call_id"] = held.get("tool_call_id", "")
    return made


def _tool_call(held: dict[str, Any]) -> dict[str, Any]:
    call, function = held["call"], {"name": held["name"], "arguments": held["parameters"]}
    return {"id": call["id"], "type": call["type"], "function": function}


def _tool(held: dict[str, Any]) -> dict[str, Any]:
    parameters = held["parameters"]
    parameters = json.loads(parameters) if isinstance(parameters, str) else parameters
    function = {
        "name": held["name"],
        "description": held.get("description", ""),
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


class RewardMatchPolicy(StrEnum):
    """Which call a reward belongs to: the last one before it, or the last of those beside it in the tree of spans."""

    FIRST_SIBLING = "first_sibling"
    FIRST_OCCURRENCE = "first_occurrence"


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Base of adapters to triplets."""


class TracerTraceToTriplet(TraceToTripletBase):
    """Triplets from a tracer's spans: a tree, in which agents and rewards are spans around calls."""

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = r"openai\.chat\.completion",
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        """`repair_hierarchy`: a span without a parent belongs to the shortest other one that lasts at least as long."""
        self.repair_hierarchy, self.llm_call_match = repair_hierarchy, llm_call_match
        self.agent_match, self.reward_match = agent_match, RewardMatchPolicy(reward_match)
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self._skip_empty_token_spans = _skip_empty_token_spans

    def adapt(self, source: Sequence[Any], /) -> list[Triplet]:
        """Return the calls in order of their start. Raises ValueError for no spans."""
        if not source:
            raise ValueError("No spans provided to create TraceTree.")
        spans = [
            item if isinstance(item, Span) else Span.from_opentelemetry(item, "", "", 0)
            for item in source
        ]
        spans.sort(key=lambda span: span.start_time or 0.0)
        above = self._parents(spans)
        calls: list[tuple[Span, Triplet]] = []
        seen: set[str] = set()
        for span in spans:
            around = list(_around(span, above))
            if not re.search(self.llm_call_match, span.name) or (
                self.exclude_llm_call_in_reward and any(map(_is_reward, around))
            ):
                continue
            agent = next((name for outer in around if (name := agent_name(outer))), None)
            if self.agent_match is not None and not re.search(self.agent_match, agent or ""):
                continue
            made = triplet(span, agent or "*")
            answer = made.metadata["response_id"]
            if answer in seen or (self._skip_empty_token_spans and not made.response["token_ids"]):
                continue
            seen |= {answer} - {None}
            calls.append((span, made))
        rewards = self._rewards(spans, [span for span, _ in calls], above)
        return [
            made.model_copy(update={"reward": rewards.get(span.span_id)}) for span, made in calls
        ]

    def _parents(self, spans: Sequence[Span]) -> dict[str, Span]:
        """Span id → the span around it."""
        known = {span.span_id: span for span in spans}
        above = {span.span_id: known[span.parent_id] for span in spans if span.parent_id in known}
        if not self.repair_hierarchy:
            return above
        for span in spans:
            around = [
                other
                for other in spans
                if span.span_id not in above
                and other is not span
                and (other.start_time or 0) <= (span.start_time or 0)
                and (other.end_time or 0) >= (span.end_time or 0)
                and _length(other) > _length(span)
            ]
            if around:
                above[span.span_id] = min(around, key=_length)
        return above

    def _rewards(
        self, spans: Sequence[Span], calls: Sequence[Span], above: dict[str, Span]
    ) -> dict[str, float]:
        """Span id of a call → its reward."""
        found: dict[str, float] = {}
        for span in find_reward_spans(spans):
            before = [call for call in calls if (call.end_time or 0) <= (span.start_time or 0)]
            if self.reward_match is RewardMatchPolicy.FIRST_SIBLING:
                beside = above.get(span.span_id)
                before = [call for call in before if above.get(call.span_id) is beside]
            if free := [call for call in before if call.span_id not in found]:
                found[free[-1].span_id] = get_reward_value(span) or 0.0
        return found


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Triplets from a proxy's spans, in order of their sequence ids: a reward belongs to the last call before it."""

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """Return the calls whose token ids are known."""
        spans = sorted(source, key=lambda span: (span.sequence_id, span.start_time or 0.0))
        found: list[Triplet] = []
        seen: set[str] = set()
        for span in spans:
            if is_reward_span(span):
                if free := [made for made in found if made.reward is None]:
                    free[-1].reward = get_reward_value(span)
            elif span.name in (LLM_CALL, "raw_gen_ai_request", "litellm_request"):
                made = triplet(span, "*")
                answer = made.metadata["response_id"]
                if made.prompt["token_ids"] and made.response["token_ids"] and answer not in seen:
                    seen |= {answer} - {None}
                    found.append(made)
        return found


def triplet(span: Span, agent: str) -> Triplet:
    """Return a model call without its reward."""
    held = span.attributes
    response = {
        "token_ids": _ids(held, "response_token_ids", "llm.hosted_vllm.response_token_ids"),
        "raw_content": _read_nested(held, "gen_ai.completion"),
    }
    if isinstance(held.get("logprobs.content"), str):
        response["logprobs"] = json.loads(held["logprobs.content"])
    prompt = {
        "token_ids": _ids(held, "prompt_token_ids", "llm.hosted_vllm.prompt_token_ids"),
        "raw_content": _read_nested(held, "gen_ai.prompt"),
        "image_urls": [],
    }
    more = {
        "request": _read_nested(held, "gen_ai.request"),
        "response": _read_nested(held, "gen_ai.response"),
    }
    name = held.get("gen_ai.response.id") or held.get("llm.hosted_vllm.id")
    return Triplet(
        prompt=prompt,
        response=response,
        metadata={**more, "response_id": name, "agent_name": agent},
    )


def agent_name(span: Span) -> str | None:
    """Return the agent that a span is the work of, if it names one."""
    held = span.attributes
    named = next((str(held[key]) for key in AGENT_KEYS if held.get(key)), None)
    if named is None and held.get("agentops.span.kind") == "agent":
        named = held.get("operation.name")
    if named is None and held.get("type") == "agent":
        named = held.get("agentlightning.operation.input.name")
    return named


def _around(span: Span, above: dict[str, Span]) -> Iterator[Span]:
    """Yield the spans around one, the innermost first; each once, where they form a circle."""
    seen = {span.span_id}
    while (outer := above.get(span.span_id)) is not None and outer.span_id not in seen:
        yield outer
        seen.add(outer.span_id)
        span = outer


def _is_reward(span: Span) -> bool:
    named = span.attributes.get(LightningSpanAttributes.OPERATION_NAME.value)
    return is_reward_span(span) or (span.name == AGL_OPERATION and named == AGL_REWARD)


def _ids(held: dict[str, Any], *keys: str) -> list[int]:
    """Return the token ids under the first of some keys; a proxy writes text, and a list of lists."""
    for key in keys:
        value = held.get(key)
        value = json.loads(value) if isinstance(value, str) else value
        if isinstance(value, list | tuple) and value:
            ids = list(value[0]) if isinstance(value[0], list) else list(value)
            if ids and all(isinstance(id_, int) for id_ in ids):
                return ids
    return []


def _read_nested(held: dict[str, Any], prefix: str) -> Any:
    return filter_and_unflatten_attributes(held, prefix) or None


def _length(span: Span) -> float:
    return (span.end_time or 0.0) - (span.start_time or 0.0)
