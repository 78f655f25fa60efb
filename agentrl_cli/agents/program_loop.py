"""Runs a worker of another project, in that project's interpreter: `programs.py` starts it and imports nothing of it.

    python program_loop.py WORKER.py CONFIG

The worker's file has `FORKED`, and a class `WORKER` that is made with the configuration: `rows(limit)`,
`async run(request)` and perhaps `serving()` and `rehearse()`. A request is a line of stdin, an answer a line of what
was stdout; the first answer is {"ready": true} or {"error": …}. Requests: {"id", "do": "rows", "limit"},
{"id", "do": "run", "sample", "base_url", "api_key", "model"} and {"id", "do": "cancel"}. Prints go to stderr.

A worker with `open(sample)` in place of `run` offers worlds, which are played here, by `play`:

    prompt      the first messages, as a list
    tools       OpenAI schemas; if absent, the model acts by its text, or, with the option `tool=true`, by a tool `act`
    say(text)   the model's answer without a call: returns (the text that the model reads next, whether it is over)
    call(name, arguments)      one call of a tool that exists, with the arguments that it requires: returns the same
    reward()    the reward so far
    close()     if there is something to close

A game of several has `players` instead of `say`, `call` and `reward`: worlds that are played at once and wait for their
turn in `prompt` (no message: it was over before) and `say`. A player has a `name`, a `model` (of a frozen one; empty:
the trained one) and `leave()`, which ends the game for all; the rewards are those of the trained model's players.
Its configuration has `tool` then, and `worker.model` is the request while an episode is played.
Without `rows` its rows are `open(0)` to `open(size - 1)`; `distinct = True` drops those whose prompt was there before.
`title` is the environment's own name, if the one that it was given is only where it is.
`LookupError(kind, name, names)` means an unknown name. A TypeError for an option that `maker(package)` does not take
means the same, if the worker has that; `own_options` are those that it takes itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import re
import select
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

MOST = 900
"""Characters of an error, so that an answer is written at once, whichever process writes it."""
LOOK = 0.5
"""Seconds until a process that died without an answer is noticed."""
REHEARSAL = 120
"""Seconds that a rehearsal may take."""
SIZE = 320
"""Rows of worlds that have no end, if the worker has no `size`."""
RAW = "_raw_arguments"
"""The only argument of a call that could not be read: its text."""
LIMITS = ("max_turns", "context_length_exceeded")
"""Codes of a refused call that mean the episode's own end."""
OPEN = ("additionalProperties", "allOf", "anyOf", "oneOf", "$ref")
ACT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "act",
        "description": "Take an action in the game.",
        "parameters": {
            "type": "object",
            "properties": {"action": {"type": "string", "description": "The action."}},
            "required": ["action"],
        },
    },
}
"""The tool of a world of texts, with the option `tool=true`."""
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ANSWERS = 1
"""The former stdout."""


def answer(**fields: Any) -> None:
    """Write one line; half of a surrogate pair stays the escape that JSON has for it."""
    data = json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
    while data:
        data = data[os.write(_ANSWERS, data) :]


def text_of(error: BaseException) -> str:
    """Return an error in a line; of a group, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:MOST]


def main(place: str, config: str) -> None:
    """Answer requests until stdin ends.

    With `FORKED`, each run has a process of its own, whose memory begins as this one's; the imports of a run are then
    made here, once, if the worker has a `rehearse()` that makes one.
    """
    global _ANSWERS
    _ANSWERS = os.dup(1)
    os.dup2(2, 1)
    del sys.path[0]  # this file's folder
    try:
        module: Any = None
        spec = spec_from_file_location("worker", place)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        given, forked = json.loads(config), module.FORKED
        if hasattr(module.WORKER, "open"):
            given["tool"] = bool(given["options"].pop("tool", False))
        worker = module.WORKER(given)
        worker.tool = given.get("tool", False)
        if forked and hasattr(worker, "rehearse"):
            _import_as(worker.rehearse)
    except Exception as error:
        missing = error.name if isinstance(error, ImportError) else None
        unknown = (
            error.args if type(error) is LookupError else _unknown_option(error, module, config)
        )
        answer(error=text_of(error), missing=missing, unknown=unknown)
        raise SystemExit(1) from error
    answer(ready=True, notes=[*_other_versions(given.get("tested", {}))])
    if forked:
        _serve_forked(worker)
    else:
        asyncio.run(_serve(worker))


def _unknown_option(
    error: Exception, module: Any, config: str
) -> tuple[str, str, list[str]] | None:
    """Return the kind, the name and the known names of an option that an environment's class does not take."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if not found or not hasattr(module, "WORKER") or not hasattr(module.WORKER, "maker"):
        return None
    package = json.loads(config)["package"]
    if (made := module.WORKER.maker(package)) is None:
        return None
    if isinstance(made, str):
        place, _, name = made.partition(":")
        made = getattr(importlib.import_module(place), name)
    # of a class those of its bases, too: they get its **kwargs
    places = made.__mro__[:-1] if isinstance(made, type) else [made]
    taken = [each for one in places for each in inspect.signature(one).parameters.values()]
    named = [one.name for one in taken if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return f"option of {package}", found[1], [*dict.fromkeys([*named, *module.WORKER.own_options])]


def _other_versions(tested: Mapping[str, str]) -> Iterator[str]:
    for package, version in tested.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            if (found := metadata.version(package)) != version:
                yield f"{package} is {found} here; {version} was tested."


def _import_as(rehearse: Callable[[], None]) -> None:
    """Import the modules that a rehearsal imports, which runs in another process: it leaves no thread in this one."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        signal.alarm(REHEARSAL)  # which ends it: then the runs import for themselves
        try:
            rehearse()
        finally:
            os.write(write, "\n".join([*sys.modules]).encode())
            os.killpg(0, signal.SIGKILL)
    os.close(write)
    with open(read, encoding="utf-8") as names:
        wanted = names.read().split("\n")
    os.waitpid(child, 0)
    for name in wanted:
        if name and name not in sys.modules:
            with contextlib.suppress(Exception):  # a module that only a run has
                importlib.import_module(name)


async def _answer_to(request: dict[str, Any], worker: Any) -> None:
    try:
        if request["do"] == "rows":
            rows = _rows(worker, request["limit"])
            answer(id=request["id"], rows=rows, title=getattr(worker, "title", ""))
        elif hasattr(worker, "open"):
            answer(id=request["id"], reward=play(worker, request))
        else:
            answer(id=request["id"], **await worker.run(request))
    except Exception as error:  # noqa: BLE001 - an answer, too
        answer(id=request["id"], error=text_of(error))


def _rows(worker: Any, limit: int) -> list[dict[str, Any]]:
    if hasattr(worker, "rows"):
        return list(worker.rows(limit))
    rows, seen = [], []
    for sample in range(min(limit, getattr(worker, "size", SIZE))):
        with _open_world(worker, sample) as world:
            if world.prompt not in seen:
                rows.append({"id": f"{sample}", "prompt": world.prompt, "sample": sample})
                rows[-1] |= {"players": len(world.players)} if hasattr(world, "players") else {}
            seen += [world.prompt] * getattr(worker, "distinct", False)
    return rows


@contextlib.contextmanager
def _open_world(worker: Any, sample: Any) -> Iterator[Any]:
    world = worker.open(sample)
    try:
        yield world
    finally:
        if hasattr(world, "close"):
            world.close()


def play(worker: Any, request: Mapping[str, Any]) -> float | dict[str, float]:
    """Play an episode until the world is over or the server refuses another call; return its reward or the players'."""
    worker.model = request
    with _open_world(worker, request["sample"]) as world:
        if not hasattr(world, "players"):
            converse(worker, request, world)
            return float(world.reward())
        with ThreadPoolExecutor(len(world.players)) as pool:
            for player in world.players:
                model = f"{player.model or request['model']}/{player.name}"
                player.played = pool.submit(converse, worker, {**request, "model": model}, player)
        for player in world.players:
            player.played.result()
        return {player.name: float(player.reward()) for player in world.players if not player.model}


def converse(worker: Any, request: Mapping[str, Any], world: Any) -> None:
    """Hold the conversation of a world, or of one player of it, to its end."""
    try:
        messages = [*world.prompt]
        over, tools = not messages, _tools(worker, world)
        while not over and (said := ask(request, messages, tools)) is not None:
            replies, over = react(world, said, tools)
            messages += [said, *replies]
            tools = _tools(worker, world)
    finally:
        if hasattr(world, "leave"):
            world.leave()


def _tools(worker: Any, world: Any) -> list[dict[str, Any]]:
    return list(getattr(world, "tools", [ACT] * worker.tool))


def ask(
    request: Mapping[str, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the model's answer; None if a limit of the episode refuses it."""
    body = {"model": request["model"], "messages": messages} | ({"tools": tools} if tools else {})
    head = {
        "authorization": f"Bearer {request['api_key']}",
        "content-type": "application/json",
    }
    url = f"{request['base_url']}/chat/completions"
    try:
        with _HTTP.open(urllib.request.Request(url, json.dumps(body).encode(), head)) as read:
            said: dict[str, Any] = json.load(read)["choices"][0]["message"]
            return said
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError):
            if json.loads(text)["error"]["code"] in LIMITS:
                return None
        raise RuntimeError(f"the model answered {error.code}: {text}") from error


def react(
    world: Any, said: Mapping[str, Any], tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages with which a world answers a turn, and whether it is over."""
    calls = said.get("tool_calls") or []
    if not calls:
        text, over = world.say(said.get("content") or "")
        return [{"role": "user", "content": text}], over
    replies, over = [], False
    for call in calls:
        text = "It is over."
        if not over:
            text, over = _call(world, call["function"], tools)
        replies.append({"role": "tool", "tool_call_id": call["id"], "content": text})
    return replies, over


def _call(world: Any, function: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return a world's answer to a call; one that cannot be carried out is answered here."""
    name, given = function["name"], json.loads(function["arguments"])
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    if name not in schemas:
        return f"Error: there is no tool {name}. Tools: {', '.join(schemas)}.", False
    if RAW in given:
        return f"Error: the arguments of {name} are not JSON.", False
    known, needed = schemas[name].get("properties", {}), schemas[name].get("required", ())
    free = any(schemas[name].get(word) for word in OPEN)  # then others may be right, too
    if wrong := [key for key in needed if key not in given] + [
        key for key in given if key not in known and not free
    ]:
        has = ", ".join(known) or "none"
        return f"Error: {name} has the arguments {has}; check {', '.join(wrong)}.", False
    acts = tools[0] is ACT
    answered: tuple[str, bool] = (
        world.say(str(given["action"])) if acts else world.call(name, given)
    )
    return answered


async def _serve(worker: Any) -> None:
    tasks: dict[int, asyncio.Task[None]] = {}
    async with worker.serving() if hasattr(worker, "serving") else contextlib.nullcontext():
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            number = request["id"]
            if request["do"] == "cancel":
                if task := tasks.pop(number, None):
                    task.cancel()
            else:
                tasks[number] = asyncio.create_task(_answer_to(request, worker))
                tasks[number].add_done_callback(partial(tasks.pop, number))
        for task in tasks.values():
            task.cancel()


def _serve_forked(worker: Any) -> None:
    children: dict[int, int] = {}
    for line in _lines():
        for number, child in [*children.items()]:
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                del children[number]
                answer(id=number, error="its process died")  # ignored if it had answered
        if not line:
            continue
        request = json.loads(line)
        if request["do"] == "cancel":
            if request["id"] in children:
                _kill(children[request["id"]])
        elif request["do"] == "rows":
            asyncio.run(_answer_to(request, worker))
        elif child := os.fork():
            with contextlib.suppress(OSError):
                os.setpgid(child, child)  # as the child does: whichever comes first
            children[request["id"]] = child
        else:
            _child(worker, request)
    for child in children.values():
        _kill(child)


def _lines() -> Iterator[bytes]:
    """Yield the lines of stdin until its end; an empty one when none has come for a while."""
    rest = b""
    while True:
        if not select.select([0], [], [], LOOK)[0]:
            yield b""
            continue
        read = os.read(0, 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from filter(None, lines)


def _child(worker: Any, request: dict[str, Any]) -> None:
    """Make one run, and end with everything that it started."""
    os.setpgid(0, 0)
    try:
        asyncio.run(_answer_to(request, worker))
    finally:
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
