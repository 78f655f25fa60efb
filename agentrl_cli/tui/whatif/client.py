"""The text of a what-if as arguments of the child process; no textual, no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from agentrl_cli.errors import AgentRLError, UsageError
from agentrl_cli.tui.chat.client import ChatClient

MODULE = "agentrl_cli.chat_session.whatif"
KEYS = {
    "turn": "--turn",
    "n": "--samples",
    "t": "--temperature",
    "seed": "--seed",
    "model": "--model",
}
EXAMPLE = (
    "For example: rerun, or turn=2 n=4 T=1.0 seed=0 model=my-run@best, and edit=TEXT at the end."
)


def whatif_arguments(text: str) -> list[str]:
    """Parse `rerun`, or `turn=2 n=4 T=1.0 seed=0 model=RUN@best edit=…` (the edit goes last). Raises UsageError."""
    words, mark, edit = text.strip().partition("edit=")
    if words.strip() == "rerun":
        return ["--rerun"]
    out: list[str] = []
    for word in words.split():
        key, equals, value = word.partition("=")
        option = KEYS.get(key.lower())
        if option is None or not equals or not value:
            raise UsageError(f"A what-if cannot be read: {word!r}.", hint=EXAMPLE)
        if key.lower() != "model" and not _is_number(value, whole=key.lower() != "t"):
            raise UsageError(f"{key}= needs a number, not {value!r}.", hint=EXAMPLE)
        out += [option, value]
    if "--turn" not in out:
        raise UsageError("From which turn?", hint=EXAMPLE)
    return [*out, "--edit", _unescape(edit)] if mark else out


def _is_number(text: str, *, whole: bool) -> bool:
    return text.isdigit() if whole else text.replace(".", "", 1).isdigit()


def _unescape(text: str) -> str:
    """Return `\\n` as a newline, `\\\\` as a backslash."""
    return "\\".join(part.replace("\\n", "\n") for part in text.split("\\\\"))


async def stream_events(arguments: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a what-if's process, which ends with the loop. Raises AgentRLError for a fatal one."""
    client = ChatClient(arguments, MODULE)
    try:
        await client.start()
        async for event in client.events():
            if event["ev"] == "fatal":
                error = AgentRLError(event["message"], hint=event["hint"])
                error.exit_code = event["code"]
                raise error
            yield event
    finally:
        await client.kill()
