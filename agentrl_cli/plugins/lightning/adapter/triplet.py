"""Model calls of an attempt as triplets of prompt, response and reward."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from agentrl_cli.plugins.lightning.adapter.base import TraceAdapter
from agentrl_cli.plugins.lightning.emitter import get_reward_value
from agentrl_cli.plugins.lightning.semconv import (
    AGL_OPERATION,
    AGL_REWARD,
    LLM_CALL,
    LightningSpanAttributes,
)
from agentrl_cli.plugins.lightning.spans import Span
from agentrl_cli.plugins.lightning.types import Triplet
from agentrl_cli.plugins.lightning.utils.otel import filter_and_unflatten_attributes

AGENT_KEYS = ("agent.name", "recipient_agent_type", "langchain.chain.type", "executor.id")


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
        self.repair_hierarchy, self.llm_call_match, self.agent_match = (
            repair_hierarchy,
            llm_call_match,
            agent_match,
        )
        self.exclude_llm_call_in_reward, self.reward_match = (
            exclude_llm_call_in_reward,
            RewardMatchPolicy(reward_match),
        )
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
            agent = self._agent(span, above)
            if (
                not re.search(self.llm_call_match, span.name)
                or agent is None
                or self._in_reward(span, above)
            ):
                continue
            made = triplet(span, agent)
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

    def _agent(self, span: Span, above: dict[str, Span]) -> str | None:
        """Return the agent that a call is of: the nearest that is named around it; None if it is not wanted."""
        while (outer := above.get(span.span_id)) is not None:
            if name := agent_name(outer):
                return (
                    name if self.agent_match is None or re.search(self.agent_match, name) else None
                )
            span = outer
        return "*" if self.agent_match is None else None

    def _in_reward(self, span: Span, above: dict[str, Span]) -> bool:
        if not self.exclude_llm_call_in_reward:
            return False
        while (outer := above.get(span.span_id)) is not None:
            named = outer.attributes.get(LightningSpanAttributes.OPERATION_NAME.value)
            if get_reward_value(outer) is not None or (
                outer.name == AGL_OPERATION and named == AGL_REWARD
            ):
                return True
            span = outer
        return False

    def _rewards(
        self, spans: Sequence[Span], calls: Sequence[Span], above: dict[str, Span]
    ) -> dict[str, float]:
        """Span id of a call → its reward."""
        found: dict[str, float] = {}
        for span in spans:
            value = get_reward_value(span)
            if value is None:
                continue
            before = [call for call in calls if (call.end_time or 0) <= (span.start_time or 0)]
            if self.reward_match is RewardMatchPolicy.FIRST_SIBLING:
                before = [
                    call for call in before if above.get(call.span_id) is above.get(span.span_id)
                ]
            free = [call for call in before if call.span_id not in found]
            if free:
                found[free[-1].span_id] = value
        return found


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Triplets from a proxy's spans, in order of their sequence ids: a reward belongs to the last call before it."""

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        """Return the calls whose token ids are known."""
        spans = sorted(source, key=lambda span: (span.sequence_id, span.start_time or 0.0))
        found: list[Triplet] = []
        seen: set[str] = set()
        for span in spans:
            if (value := get_reward_value(span)) is not None:
                last = next(
                    (index for index in reversed(range(len(found))) if found[index].reward is None),
                    None,
                )
                if last is not None:
                    found[last] = found[last].model_copy(update={"reward": value})
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
        "raw_content": _nested(held, "gen_ai.completion"),
    }
    if isinstance(held.get("logprobs.content"), str):
        response["logprobs"] = json.loads(held["logprobs.content"])
    prompt = {
        "token_ids": _ids(held, "prompt_token_ids", "llm.hosted_vllm.prompt_token_ids"),
        "raw_content": _nested(held, "gen_ai.prompt"),
        "image_urls": [],
    }
    more = {
        "request": _nested(held, "gen_ai.request"),
        "response": _nested(held, "gen_ai.response"),
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


def _ids(held: dict[str, Any], *keys: str) -> list[int]:
    """Token ids under the first of some keys; a proxy writes text, and a list of lists."""
    for key in keys:
        value = held.get(key)
        value = json.loads(value) if isinstance(value, str) else value
        value = (
            value[0] if isinstance(value, list) and value and isinstance(value[0], list) else value
        )
        if (
            isinstance(value, (list, tuple))
            and value
            and all(isinstance(id_, int) for id_ in value)
        ):
            return list(value)
    return []


def _nested(held: dict[str, Any], prefix: str) -> Any:
    return filter_and_unflatten_attributes(held, prefix) or None


def _length(span: Span) -> float:
    return (span.end_time or 0.0) - (span.start_time or 0.0)
