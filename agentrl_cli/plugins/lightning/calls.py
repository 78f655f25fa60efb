"""The model calls of an episode as spans: messages, token ids and log-probabilities, as the adapters read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_cli.plugins.lightning.semconv import LLM_CALL
from agentrl_cli.plugins.lightning.spans import SpanCoreFields, TraceStatus
from agentrl_cli.types import Episode, Message, Tokens, Turn
from agentrl_cli.types.branches import path_to


def call_spans(
    turns: Sequence[Turn], tokens: Tokens, model: str, first: int = 0
) -> Iterator[SpanCoreFields]:
    """One span for each sampled turn from index `first` on; `tokens` has the spans of all turns."""
    parents = Episode("", "", turns=tuple(turns)).parents
    for index in range(first, len(turns)):
        turn = turns[index]
        sampled = np.flatnonzero(tokens.trained_mask[turn.start : turn.end]) + turn.start
        if turn.role != "assistant" or not len(sampled):
            continue
        before = [turns[other] for other in path_to(parents, index)[:-1]]
        prompt = [
            *(id_ for other in before for id_ in tokens.ids[other.start : other.end].tolist())
        ]
        prompt += tokens.ids[turn.start : sampled[0]].tolist()
        ids = tokens.ids[sampled].tolist()
        attributes: dict[str, Any] = {
            "gen_ai.request.model": model,
            "gen_ai.response.model": turn.weights_version,
            "gen_ai.response.id": f"turn-{index}-{turn.started:.6f}",
            "prompt_token_ids": prompt,
            "response_token_ids": ids,
            "logprobs.content": json.dumps(
                [{"logprob": value} for value in tokens.logp_sampled[sampled].tolist()]
            ),
        }
        said = [message for other in before for message in other.messages]
        for name, messages in (("prompt", said), ("completion", turn.messages)):
            for number, message in enumerate(messages):
                attributes |= _message(f"gen_ai.{name}.{number}", message)
        reason = turn.stop_reason.value if turn.stop_reason else ""
        attributes["gen_ai.completion.0.finish_reason"] = "tool_calls" if turn.calls else reason
        ended = turn.started + turn.seconds
        ok = TraceStatus(status_code="OK")
        yield SpanCoreFields(
            name=LLM_CALL, attributes=attributes, start_time=turn.started, end_time=ended, status=ok
        )


def _message(prefix: str, message: Message) -> Mapping[str, Any]:
    found = {f"{prefix}.role": message["role"], f"{prefix}.content": message.get("content") or ""}
    if message.get("tool_call_id"):
        found[f"{prefix}.tool_call_id"] = message["tool_call_id"]
    for number, call in enumerate(message.get("tool_calls") or ()):
        function, place = call["function"], f"{prefix}.tool_calls.{number}"
        arguments = function["arguments"]
        text = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        found |= {
            f"{place}.id": call.get("id", ""),
            f"{place}.name": function["name"],
            f"{place}.arguments": text,
        }
    return found
