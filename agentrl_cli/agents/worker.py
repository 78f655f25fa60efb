"""Runs agents elsewhere: asks a training for tasks, plays each with a function, and says how it ended.

    python -m agentrl_cli.agents.worker HOST:PORT my_agent:solve --at-once 4

HOST:PORT is `agent: {remote: …}` of the pack. This file needs the standard library alone: copied into another
environment, `python worker.py HOST:PORT my_agent.py:solve` does the same. The function, sync or async, takes any of
`task` (a mapping: `id`, `messages`, the row's `fields`), `base_url`, `api_key`, `model` and `event_url`, and returns
the reward, or None if the pack has one. AGENTRL_TOKEN is the bearer token, if there is one. Ctrl-C ends the worker.
"""

import argparse
import asyncio
import contextlib
import importlib
import inspect
import json
import math
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

WAIT = 20
"""Seconds that a request for a task waits; between two tries to reach a training a tenth of it passes."""
GIVEN = ("task", "base_url", "api_key", "model", "event_url")
"""Parameters that the function may have."""
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer; None if there is no content. Raises HTTPError, URLError."""
    headers = {
        "content-type": "application/json",
        "authorization": f"Bearer {os.environ.get('AGENTRL_TOKEN', '')}",
    }
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with _HTTP.open(request, timeout=3 * WAIT) as answer:
        return json.loads(answer.read()) if answer.status != 204 else None


def play(address: str, function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Run the function for a task, with a heartbeat, and report its end."""
    lease, over = f"{address}/tasks/{given['lease']}", threading.Event()

    def beat() -> None:
        while not over.wait(given["lease_seconds"] / 3):
            with contextlib.suppress(
                OSError
            ):  # the lease is over, or the training is: its end shows it
                post(f"{lease}/heartbeat", {})

    threading.Thread(target=beat, daemon=True).start()
    try:
        answer = function(**{name: given[name] for name in inspect.signature(function).parameters})
        answer = asyncio.run(answer) if inspect.iscoroutine(answer) else answer
        end: dict[str, Any] = {} if answer is None else {"reward": float(answer)}
        # A training refuses it, and would wait for another end until the lease is over.
        if not math.isfinite(end.get("reward", 0.0)):
            raise ValueError(f"{answer!r} is not a reward: a finite number is")
    except BaseException as error:  # noqa: BLE001 - an agent may raise anything: it ends its own episode alone
        end = {"error": "\n".join(f"{type(one).__name__}: {one}" for one in causes(error))}
    over.set()
    try:
        post(f"{lease}/end", end)
    except OSError as problem:
        print(f"{given['task']['id']}: {problem}", file=sys.stderr)


def causes(error: BaseException | None) -> list[BaseException]:
    """Return an exception and its causes."""
    if error is None:
        return []
    return [error, *causes(error.__cause__ if error.__suppress_context__ else error.__context__)]


def work(address: str, function: Callable[..., Any]) -> None:
    """Play tasks one after the other, as long as this process runs."""
    while True:
        try:
            given = post(f"{address}/tasks/claim", {"wait": WAIT})
        except urllib.error.HTTPError as error:
            print(f"{address} refused: {error.read().decode()}", file=sys.stderr)
            os._exit(1)
        except OSError:  # no training is at work now
            time.sleep(WAIT / 10)
            continue
        if given is not None:
            play(address, function, given)


def load(name: str) -> Callable[..., Any]:
    """Return the function `module:function`, or `file.py:function`."""
    where, _, attribute = name.partition(":")
    folder, file = os.path.split(where.removesuffix(".py"))
    sys.path.insert(0, os.path.abspath(folder))
    found: Callable[..., Any] = getattr(importlib.import_module(file), attribute)
    if unknown := [name for name in inspect.signature(found).parameters if name not in GIVEN]:
        sys.exit(
            f"{name} has the parameter {unknown[0]!r}, which no task gives: it may take {', '.join(GIVEN)}."
        )
    return found


def main() -> None:
    """Ask for tasks until Ctrl-C."""
    parser = argparse.ArgumentParser(
        description="Plays the tasks of a training with an agent of this environment."
    )
    parser.add_argument("address", help="HOST:PORT of the training: `agent: {remote: HOST:PORT}`")
    parser.add_argument("function", help="module:function or file.py:function")
    parser.add_argument(
        "--at-once", type=int, default=4, help="tasks that are played at the same time (4)"
    )
    given = parser.parse_args()
    address = given.address if "//" in given.address else f"http://{given.address}"
    function = load(given.function)
    for _ in range(given.at_once):
        threading.Thread(target=work, args=(address, function), daemon=True).start()
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("Ended.", file=sys.stderr)


if __name__ == "__main__":
    main()
