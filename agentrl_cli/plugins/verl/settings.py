"""Accepts verl's multi-turn settings by their names: each becomes a setting here; `config show` names the original.

| verl                          | ours                            |                                             |
| ----------------------------- | ------------------------------- | ------------------------------------------- |
| `max_assistant_turns`         | `rollout.max_turns`             |                                             |
| `max_user_turns`              | `rollout.max_user_turns`        | tool results count as user turns            |
| `max_parallel_calls`          | `rollout.max_parallel_calls`    | more are refused with a text, not dropped   |
| `max_tool_response_length`    | `rollout.observation.chars`     | characters; overrides the limit in tokens   |
| `tool_response_truncate_side` | `rollout.observation.cut`       | verl names the side that stays, we the other |
| `response_length`             | `rollout.response_tokens`       | everything after the prompt                 |

They may be at the top level, under `rollout`, `rollout.multi_turn` or `data`, and under verl's `actor_rollout_ref`.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl_cli.config.yamlfile import Value

NAMES = {
    "max_assistant_turns": "rollout.max_turns",
    "max_user_turns": "rollout.max_user_turns",
    "max_parallel_calls": "rollout.max_parallel_calls",
    "max_tool_response_length": "rollout.observation.chars",
    "tool_response_truncate_side": "rollout.observation.cut",
    "response_length": "rollout.response_tokens",
    "max_response_length": "rollout.response_tokens",
}
PLACES = ("", "rollout", "rollout.multi_turn", "data")
ROOT = "actor_rollout_ref."
OTHER_SIDE = {"left": "right", "right": "left"}


def translate(layer: Mapping[str, Value]) -> dict[str, Value]:
    """Return a layer with verl's keys renamed to AgentRL's; if both are given, AgentRL's key wins."""
    out: dict[str, Value] = {}
    lifted: dict[str, Value] = {}
    for key, value in layer.items():
        place, _, leaf = key.removeprefix(ROOT).rpartition(".")
        ours = NAMES.get(leaf)
        if ours is None or place not in PLACES or key == ours:
            out[key] = value
            continue
        moved = value._replace(
            source=f"{value.source} (verl: {leaf})", place=value.place or value.source
        )
        if leaf == "tool_response_truncate_side":
            moved = moved._replace(value=OTHER_SIDE.get(str(value.value), value.value))
        if (
            leaf == "max_tool_response_length"
        ):  # a token is nearly always a character or more: only that limit cuts
            lifted["rollout.observation.tokens"] = moved
        lifted[ours] = moved
    return {**lifted, **out}
