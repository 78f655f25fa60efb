"""A poker of three cards and one word each: the model plays both players in training, and one of them elsewhere.

There the other one makes random legal moves, so that the share solved is the share of games won against it.
"""

from __future__ import annotations

import random
from typing import Any

import httpx2

MOVES = {"check": "Add nothing.", "bet": "Add a chip.", "fold": "Give up.", "call": "Add a chip."}


def solve(task: Any, base_url: str, api_key: str, model: str, attempt: int) -> dict[str, float]:
    """Play a game; return the chips of each player that the model was."""
    own = (0, 1) if task.split == "train" else (attempt % 2,)
    rng, moves = random.Random(f"{task.id}/{attempt}"), list[str]()
    headers = {"authorization": f"Bearer {api_key}"}
    with httpx2.Client(headers=headers, timeout=None, trust_env=False, verify=False) as client:
        for player in (0, 1):
            legal = ["fold", "call"] if moves == ["bet"] else ["check", "bet"]
            move = rng.choice(legal)
            if player in own:
                body = {"model": f"{model}/player_{player}", "tools": list(map(tool, legal))}
                text = f"Your card is {task['cards'][player]}. {' or '.join(legal).capitalize()}?"
                body["messages"] = [{"role": "user", "content": text}]
                answer = client.post(f"{base_url}/chat/completions", json=body)
                said = answer.raise_for_status().json()["choices"][0]["message"]
                called = said.get("tool_calls") or [{"function": {"name": ""}}]
                move = called[0]["function"]["name"]
            if move not in legal:  # the game is lost, with all that could be bet
                return chips(own, 1 - player, 2)
            moves.append(move)
    if moves[1] == "fold":
        return chips(own, 0, 1)
    winner = max((0, 1), key=lambda one: "JQK".index(task["cards"][one]))
    return chips(own, winner, 1 if moves == ["check", "check"] else 2)


def tool(name: str) -> dict[str, Any]:
    """Return a move as a tool without arguments."""
    given = {"name": name, "description": MOVES[name]}
    return {"type": "function", "function": {**given, "parameters": {"type": "object"}}}


def chips(own: tuple[int, ...], winner: int, won: int) -> dict[str, float]:
    """Return the reward of each player that the model is."""
    return {f"player_{one}": float(won if one == winner else -won) for one in own}
