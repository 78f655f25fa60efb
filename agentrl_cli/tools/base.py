"""The Tool class: an OpenAI schema, and state per episode with the lifecycle `create → execute* → reward? → release`.

A failing tool is an observation: `Tool.call` turns bad arguments, exceptions and timeouts into a `ToolResult` with an
error class, and the episode continues. Only infrastructure errors (`SandboxFault`, `EnvError`) pass through.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
import typing
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

from agentrl_cli.chat.media import NAMES, image_bytes, is_image
from agentrl_cli.chat.parse import validate_arguments
from agentrl_cli.errors import AgentRLError, ConfigError, EnvError
from agentrl_cli.hooks.threads import OwnTime, call, contain
from agentrl_cli.registry.old_modules import keep_old_names
from agentrl_cli.sandbox.results import USED
from agentrl_cli.tools.schema import is_context, tool_schema
from agentrl_cli.types import Task, ToolCall, ToolResult, ToolSchema
from agentrl_cli.types.old_names import OldAttribute, adopt_override

MAX_ERROR = 500
"""Maximum characters of an exception's text that the model sees."""


@dataclass
class ToolContext:
    """A tool's view of its episode. One per episode, shared by its tools."""

    task: Task | None = None
    session_factory: Callable[[], Awaitable[Any]] | None = None
    """Opens the episode's sandbox session; called at most once, on first use."""
    seed: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    """Shared between an episode's tools, and visible to its rewards (`submit` puts `answer` here)."""
    opening: list[str] = field(default_factory=list)
    """Text that a tool's `create` adds to the task; it follows the last user message."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)
    """Held by a tool during a read-modify-write of the session: calls of one turn run concurrently."""
    remote: Any = None
    """The episode's trajectory at a tool server, if its tools run there."""
    _session: Any = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    async def session(self) -> Any:
        """Return the episode's sandbox session, opened at the first call. Raises ConfigError without a sandbox."""
        async with self._lock:
            if self._session is None:
                if self.session_factory is None:
                    raise ConfigError(
                        "This tool needs a sandbox, and none was given.",
                        hint="Pass session_factory.",
                    )
                self._session = await self.session_factory()
        return self._session

    @property
    def opened(self) -> Any:
        """The session if one was opened, else None."""
        return self._session

    async def close(self) -> None:
        """Close the session, if one was opened."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


class Tool:
    """A named action with a schema. Subclasses define `execute`, and the other three methods if they keep state.

    `timeout`: seconds of one call. `concurrency`: calls at once over all episodes (None: no limit). `rate`: calls a
    second over all episodes (None: no limit). `pure`: same arguments, same answer, no effect; only such a tool may be
    cached. `external`: has outside effects that cannot be undone or repeated. `own_timeout`: limits the time of each
    call itself, so no outer timeout applies; waiting for a slot inside is then not counted either. `rewinds`: all its
    effects are in the sandbox session and in the context's `state`, so an episode can roll back past a call.
    `imports`: packages that its episodes' sandbox sessions need, besides the standard library.
    """

    name: str = ""
    schema: ToolSchema
    timeout: float | None = None
    concurrency: int | None = None
    rate: float | None = None
    pure: bool = False
    external: bool = False
    own_timeout: bool = False
    rewinds: bool = False
    opens: bool = False
    """True if `create` may add text to the task (`ToolContext.opening`), which may be all of it."""
    owns_rows: bool = False
    """True if the pack may have no rows: the tool's environment gives every task."""
    own_rewards: Mapping[str, Any] = MappingProxyType({})
    """`rewards:` of a pack whose task.yaml has none."""
    imports: tuple[str, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = ()
    """Working arguments: shown by `agentrl tools show`, run by the tests."""

    def own_limits(self) -> dict[str, Any]:
        """Return the tool's own limits, as shown by `agentrl tools show`: seconds of a call, rows, characters."""
        return {}

    def at(self, folder: Path) -> Tool:
        """Return the tool for a pack in this folder, to resolve relative paths."""
        return self

    def for_task(self, task: Task) -> Tool | None:
        """Return the tool as a task's row shows it; None if the row does not have it."""
        return self

    def wrong(self, row: Mapping[str, Any]) -> str:
        """Return the error in a row for this tool, as a sentence for its author; empty if valid."""
        return ""

    offered = OldAttribute("offer")

    def __init_subclass__(cls) -> None:
        adopt_override(cls, "offered", "offer")

    def offer(self, task: Task) -> list[Tool]:
        """Return the tools that it offers for a task: the result of `for_task`, none, or several."""
        shown = self.for_task(task)
        return [] if shown is None else [shown]

    async def create(self, ctx: ToolContext) -> Any:
        """Returns the state for one episode. By default the context itself."""
        return ctx

    async def execute(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        """Runs one call with validated arguments."""
        raise NotImplementedError

    async def reward(self, state: Any) -> float | None:
        """Return the tool's own reward for the episode, the part `tool:<name>`; None for no part."""
        return None

    async def release(self, state: Any) -> None:
        """Free the resources of `create`. Called exactly once, also after errors."""

    async def call(
        self, state: Any, arguments: dict[str, Any], *, timeout: float | None = None
    ) -> ToolResult:
        """Runs `execute` with validated arguments, limits and timing; errors become results.

        `timeout` (seconds) applies if the tool has none of its own; waiting for a free slot is not counted, nor
        processor time that other programs take.
        A synchronous function cannot be stopped: after its timeout it keeps running in its thread, and its result is
        dropped. Raises EnvError if the tool raises SystemExit or the like, which must not end the process.
        """
        problem = validate_arguments(self.schema, arguments)
        if problem:
            return ToolResult(f"Bad tool call: {problem}.", error="bad_arguments")
        limit = None if self.own_timeout else self.timeout if self.timeout is not None else timeout
        gate = self._gate()
        await gate.pace(self.rate)
        async with gate.places:
            started = time.perf_counter()
            levels: set[str] = set()
            mark = USED.set(levels)
            try:
                async with OwnTime(limit) as deadline:
                    with contain(f"The tool {self.name}"):
                        result = await self.execute(state, arguments)
            except AgentRLError:
                raise
            except TimeoutError as error:
                if not deadline.expired():
                    result = ToolResult(_exception_text(error), error="exception")
                else:
                    result = ToolResult(
                        f"Error: {self.name} took longer than {limit:g} s.", error="timeout"
                    )
            except Exception as error:  # noqa: BLE001 - a failing tool is an observation
                result = ToolResult(_exception_text(error), error="exception")
            finally:
                USED.reset(mark)
        seconds = result.seconds or time.perf_counter() - started
        return replace(result, seconds=seconds, level=result.level or ",".join(sorted(levels)))

    def _gate(self) -> _Gate:
        """Return the rate limit and the slots, which belong to the running loop."""
        loop = asyncio.get_running_loop()
        gate: _Gate | None = self.__dict__.get("_gate_of_loop")
        if gate is None or gate.loop is not loop:
            gate = self.__dict__["_gate_of_loop"] = _Gate(
                loop, asyncio.Semaphore(self.concurrency) if self.concurrency else nullcontext()
            )
        return gate


@dataclass
class _Gate:
    loop: asyncio.AbstractEventLoop
    places: asyncio.Semaphore | nullcontext[None]
    next_start: float = 0.0

    async def pace(self, rate: float | None) -> None:
        """Space calls 1/rate seconds apart."""
        if rate:
            now = self.loop.time()
            start = max(now, self.next_start)
            self.next_start = start + 1 / rate
            await asyncio.sleep(start - now)


class FunctionTool(Tool):
    """A plain function as a tool; sync functions run in a thread, async ones in the loop.

    A parameter of type `ToolContext` receives the episode's context and is not shown to the model. The function may
    return a ToolResult, a text, or anything JSON can carry.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        timeout: float | None = None,
        concurrency: int | None = None,
        rate: float | None = None,
        pure: bool = False,
        external: bool = False,
        examples: tuple[Mapping[str, Any], ...] = (),
    ) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", "tool")
        self.schema = tool_schema(function, name=self.name)
        self.timeout, self.concurrency, self.rate = timeout, concurrency, rate
        self.pure, self.external, self.examples = pure, external, examples
        hints = typing.get_type_hints(function)
        self._context = next(
            (parameter for parameter, hint in hints.items() if is_context(hint)), None
        )

    async def execute(self, state: Any, arguments: dict[str, Any]) -> ToolResult:
        given = {**arguments, self._context: state} if self._context else arguments
        return as_result(await call(self.function, **given))


@overload
def tool(function: Callable[..., Any]) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str = "",
    timeout: float | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    pure: bool = False,
    external: bool = False,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(function: Callable[..., Any] | None = None, **limits: Any) -> Any:
    """Makes a typed function a tool: `@tool` or `@tool(timeout=5)`. Only wraps it; nothing is registered.

    Plain functions are accepted wherever tools are, so this is only for limits and names.
    """
    return partial(FunctionTool, **limits) if function is None else FunctionTool(function, **limits)


def as_result(value: Any) -> ToolResult:
    """Return a tool function's return value as a ToolResult: texts unchanged, None as empty, the rest as JSON.

    An image is a PIL image, the bytes of one, the `Path` of its file, a `data:image/` URL, or a block `{"type":
    "image", "image": …}` in a list of content blocks. Raises EnvError if it cannot be read,
    TypeError if the value has no text form: the model is not shown an object's address.
    """
    if isinstance(value, ToolResult):
        return value
    if value is None:
        return ToolResult("")
    uri = isinstance(value, str) and value.startswith("data:image/")
    if uri or isinstance(value, bytes | Path) or is_image(value):
        return ToolResult("", images=(image_bytes(value),))
    if isinstance(value, list) and value and all(map(_is_block, value)):
        texts = [str(block["text"]) for block in value if block["type"] == "text"]
        return ToolResult(
            "\n".join(texts), images=tuple(_of_block(b) for b in value if b["type"] != "text")
        )
    text = (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    )
    return ToolResult(text, value=value if isinstance(value, list) else None)


def _of_block(block: Mapping[str, Any]) -> bytes:
    """Return the image of a content block. A path as text is refused: a tool's answer may come from outside."""
    given = next((block[name] for name in reversed(NAMES) if block.get(name) is not None), None)
    given = given.get("url") if isinstance(given, Mapping) and "url" in given else given
    if isinstance(given, str) and not given.startswith("data:image/"):
        raise EnvError(
            "An image in a tool's answer is bytes, a data: URL, a PIL image or a Path; a text is refused."
        )
    return image_bytes(given)


def _plain(value: Any) -> Any:
    """Converts values that JSON cannot carry: dataclasses and pydantic models to their fields, others to text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return dump(mode="json")
    text = str(value)
    if re.fullmatch(r"(?s)<.+ at 0x[0-9a-fA-F]+>+", text):  # Python's default repr
        kind = type(value)
        raise TypeError(
            f"it returned {kind.__module__}.{kind.__qualname__}, which has no text form;"
            " return a text, a number, a list, a dict or a dataclass, or give the class a __str__"
        )
    return text


def _is_block(value: Any) -> bool:
    """Whether a value is a content block: a text, or an image that needs no download."""
    if not isinstance(value, Mapping):
        return False
    image = value.get(str(value.get("type")))
    url = image.get("url") if isinstance(image, Mapping) else image
    known = (
        isinstance(image, bytes | Path)
        or is_image(image)
        or (isinstance(url, str) and "://" not in url)
    )
    return (value.get("type") == "text" and "text" in value) or (
        value.get("type") in ("image", "image_url") and known
    )


def refuse(call: ToolCall, names: Mapping[str, Any]) -> ToolResult:
    """Return the observation for a call that carries an error: `malformed_call`, `unknown_tool` or `bad_arguments`."""
    known = "bad_arguments" if call.name in names else "unknown_tool"
    kind = "malformed_call" if call.arguments is None else known
    return ToolResult(call.error or f'Bad tool call: there is no tool "{call.name}".', error=kind)


def _exception_text(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"Error: {text[:MAX_ERROR]}"


keep_old_names(__name__)
