"""All sessions of a gateway: which keys are open, which have ended, and what happens to a key that is neither.

A key that ended stays known, so that a straggler of its agent opens nothing. A request without any key belongs to a
session for its conversation's first messages, which is recorded as a trace and never sealed against anyone.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

from agentrl_cli.agents.gateway.messages import canonical
from agentrl_cli.agents.gateway.request import ModelRequest, RequestError
from agentrl_cli.agents.gateway.sampling import episode_ended
from agentrl_cli.agents.gateway.session import Session, Trace, keep

MOST = 4096
"""Sessions that are open at once."""
ENDED = 100_000
"""Keys of ended episodes that are remembered."""
TRACE = "trace-"
"""Beginning of the keys of sessions that no client named."""
LONGEST = 200
"""Characters of a key."""


def new_key() -> str:
    """Return a key that cannot be guessed, for an address and as an API key."""
    return f"ep-{secrets.token_urlsafe(24)}"


class Sessions:
    """Open sessions by key.

    Args:
        make: Opens a session for a key that a client brings; None: only keys that were opened here are served.
        on_end: Called with each session that ended, its trace, and the reward if one was given.
        most: Sessions that may be open at once.
    """

    def __init__(
        self,
        make: Callable[[str], Session] | None = None,
        on_end: Callable[[Session, Trace, float | None], None] | None = None,
        most: int = MOST,
    ) -> None:
        self._make, self._on_end, self._most = make, on_end, most
        self._open: dict[str, Session] = {}
        self._private: set[str] = set()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._replies: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session: Session) -> Session:
        """Serve a session under its key, which alone lets a client in. Raises RequestError if the key was used."""
        if session.key in self._open or session.key in self._ended:
            raise RequestError(f"The episode {session.key} was opened before.", status=409)
        self._room()
        self._private.add(session.key)
        self._open[session.key] = session
        return session

    def admits(self, key: str) -> bool:
        """Whether a key is one that was opened here, ended or not: the client needs no other token."""
        return key in self._private

    def knows(self, key: str) -> bool:
        """Whether a key is open or has ended."""
        return key in self._open or key in self._ended

    def get(self, key: str) -> Session | None:
        return self._open.get(key)

    def find(self, key: str) -> Session:
        """Return the session of a key.

        Raises RequestError: it has ended, or the key is unknown and clients open none.
        """
        if found := self._open.get(key):
            return found
        if key in self._ended:
            raise episode_ended(key)
        if self._make is None:
            raise RequestError(f"Unknown episode {key!r}.", status=404, code="episode_not_found")
        if len(key) > LONGEST or not key.isprintable():
            raise RequestError(f"A session's key has at most {LONGEST} printable characters.")
        return self._add(key)

    def of(self, request: ModelRequest) -> Session:
        """Return the session of a request without a key: that of the answer it continues, or of its first messages."""
        key = self._replies.get(request.previous, "")
        if key in self._open:
            return self._open[key]
        if self._make is None:
            raise RequestError(
                "The request names no episode.",
                status=404,
                code="episode_not_found",
                hint="Use its base_url or key.",
            )
        # Keyed by the messages before the first answer, and the tools.
        first = list(takewhile(lambda message: message["role"] != "assistant", request.messages))
        prompt = request.prompt[:64] if request.prompt else ""
        text = canonical([prompt, first, list(request.tools)]).encode("utf-8", "surrogatepass")
        key = TRACE + hashlib.sha256(text).hexdigest()[:16]
        return self._open.get(key) or self._add(key)

    def remember(self, reply: str, key: str) -> None:
        """Let a later request name an answer in place of its session."""
        keep(self._replies, reply, key, self._most)

    async def end(self, key: str, reward: float | None = None) -> Trace:
        """Seal a session. Raises RequestError if it has ended or was never opened."""
        session = self._open.pop(key, None)
        if session is None:
            if key in self._ended:
                raise episode_ended(key)
            raise RequestError(f"Unknown episode {key!r}.", status=404, code="episode_not_found")
        if not key.startswith(TRACE):
            self._ended[key] = None
            while len(self._ended) > ENDED:
                self._private.discard(self._ended.popitem(last=False)[0])
        trace = await session.seal()
        if self._on_end is not None:
            self._on_end(session, trace, reward)
        return trace

    async def sweep(self, idle: float) -> int:
        """End the sessions that had no call for so many seconds. Returns how many."""
        now = time.monotonic()
        old = [
            key
            for key, session in self._open.items()
            if not session.busy and now - session.used > idle and key not in self._private
        ]
        for key in old:
            if key in self._open:
                await self.end(key)
        return len(old)

    async def close(self) -> None:
        """End all sessions."""
        for key in list(self._open):
            if key in self._open:
                await self.end(key)

    def _add(self, key: str) -> Session:
        assert self._make is not None
        self._room()
        session = self._open[key] = self._make(key)
        return session

    def _room(self) -> None:
        if len(self._open) >= self._most:
            raise RequestError(
                f"{len(self._open)} sessions are open, of at most {self._most}.", status=429
            )
