"""The message tree of an episode: turns by their meaning, with the ids that the model really saw.

A request repeats the whole conversation. Its messages are matched against the tree from the root; the path that
matches keeps its ids, and only the rest is rendered: the first prompt as a whole, everything later as a delta after an
assistant turn. Where the history differs the tree forks, at the last turn boundary that matches. Tools belong to the
root, as the template writes them at its start.

`find` changes nothing: a request whose client goes away leaves no trace. `add` records a context with its answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from agentrl_cli.agents.gateway.messages import (
    Key,
    canonical,
    key_of,
    require_room,
    require_short,
    tools_key,
    without_echo,
)
from agentrl_cli.agents.gateway.request import bad, too_long
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.thinking import THINK
from agentrl_cli.types import (
    ROOT,
    Message,
    Origin,
    Tokens,
    ToolCall,
    ToolResult,
    ToolSchema,
    Turn,
)

RAW = "prompt"
"""Key of the root of prompts without messages."""
TAIL = 16
"""Ids at the end of a context that may spell an opened block of thinking."""


@dataclass(frozen=True, slots=True)
class Spoken:
    """An assistant turn as the client was sent it, and may send it back."""

    keys: tuple[Key, ...]
    """The message's key; another one with the stop text that was cut off, which some clients add again."""
    reasoning: str = ""

    def matches(self, message: Message) -> bool:
        """Whether a message means this turn; reasoning counts only if the client sent it."""
        said = message.get("reasoning_content")
        if said and said.strip() != self.reasoning.strip():
            return False
        bare = without_echo(message)
        return key_of(message) in self.keys or (bare is not None and key_of(bare) in self.keys)


@dataclass(frozen=True, slots=True)
class Piece:
    """A turn to be: its place in the episode is not known yet."""

    turn: Turn
    tokens: Tokens
    spoken: Spoken | None = None


def piece_of(role: str, messages: tuple[Message, ...], tokens: Tokens) -> Piece:
    """Return messages of a context as a piece."""
    return Piece(Turn(0, role, messages, 0, len(tokens)), tokens)


@dataclass(eq=False, slots=True)
class Node:
    """A turn in its tree. The root has none and stands for a set of tools and a player."""

    tools: tuple[ToolSchema, ...]
    player: str = ""
    turn: Turn | None = None
    tokens: Tokens = field(default_factory=Tokens.empty)
    parent: Node | None = None
    spoken: Spoken | None = None
    children: list[Node] = field(default_factory=list)
    contexts: dict[tuple[Key, ...], Node] = field(default_factory=dict)
    """Messages that were added after this node, between two assistant turns, to the last node that they became."""

    @property
    def index(self) -> int:
        """Index of its turn; ROOT for a root."""
        return ROOT if self.turn is None else self.turn.index

    @property
    def path(self) -> list[Node]:
        """The nodes from the first turn to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.turn is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def ids(self) -> list[int]:
        """[n] the model's context up to the end of this turn."""
        return [id_ for node in self.path for id_ in node.tokens.ids.tolist()]

    @property
    def sampled(self) -> bool:
        """Whether the model wrote (part of) it."""
        return bool(self.tokens.trained_mask.any())


@dataclass(frozen=True, slots=True)
class Context:
    """Where a request's messages lead: the node that matches, and the new turns after it."""

    at: Node
    pieces: tuple[tuple[tuple[Key, ...], tuple[Piece, ...]], ...]
    """New segments: the keys of their messages, and the turns that they become."""
    ids: tuple[int, ...]
    """[n] the whole context, generation prompt included."""
    known: int
    """How many of them were recorded before."""
    raw: bool = False
    """Whether it is a prompt without messages."""


class MessageTree:
    """The turns of one episode in the order in which they were made, and how they continue each other."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.nodes: list[Node] = []
        self._roots: dict[str, Node] = {}
        self._length = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns with their parents."""
        return tuple(node.turn for node in self.nodes if node.turn is not None)

    @property
    def tokens(self) -> Tokens:
        """The spans of the turns, in turn order."""
        return Tokens.concat([node.tokens for node in self.nodes])

    @property
    def contexts(self) -> dict[int, Sequence[ToolSchema] | None]:
        """The tools of each context that the chat template wrote, by the index of its first turn."""
        roots = [root for key, root in self._roots.items() if key != RAW]
        return {first.index: root.tools or None for root in roots for first in root.children}

    @property
    def forks(self) -> int:
        """Branches beyond the first."""
        return max(sum(not node.children for node in self.nodes) - 1, 0)

    def find(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], most: int, player: str = ""
    ) -> Context:
        """Return the context of a request. It may exceed `most` tokens, but not by many times.

        Raises RequestError if it is too long or cannot be continued, TemplateError if not rendered.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise bad("The last message is an assistant's: there is nothing to answer.", "messages")
        at = self._roots.get(tools_key(tools) + player) or Node(tuple(tools), player)
        rest = list(_segments(messages))
        while rest and (found := _match(at, rest[0])) is not None:
            at = found
            rest.pop(0)
        ids, before = at.ids, None if at.turn is None else at.turn.messages[-1]
        known = len(ids)
        pieces = []
        for segment in rest:
            if len(ids) >= most:
                raise too_long(most, "more")
            require_room(
                self.chat.tokenizer, segment, () if ids else at.tools, most - len(ids), most
            )
            made = self._render(segment, before, ids, at.tools)
            pieces.append((tuple(map(key_of, segment)), made))
            ids.extend(id_ for piece in made for id_ in piece.tokens.ids.tolist())
            before = segment[-1]
        return Context(at, tuple(pieces), tuple(ids), known)

    def find_prompt(self, prompt: str | Sequence[int], most: int) -> Context:
        """Return the context of a raw prompt, text or ids: recorded turns that it repeats keep their ids.

        Raises RequestError as `find` does.
        """
        at = self._roots.get(RAW) or Node(())
        rest = prompt if isinstance(prompt, str) else [int(id_) for id_ in prompt]
        while found := [
            (child, own)
            for child in at.children
            if rest[: len(own := self._raw(rest, child))] == own
        ]:
            at, own = found[-1]
            rest = rest[len(own) :]
        ids = at.ids
        if isinstance(rest, str):
            require_short(self.chat.tokenizer, [rest], max(most - len(ids), 0), most, "prompt")
        elif len(ids) + len(rest) > most:
            raise too_long(most, f"{len(ids) + len(rest)}", "prompt")
        elif (highest := max(rest, default=0)) >= (known := self.chat.tokenizer.vocab_size):
            raise bad(f"prompt has token {highest}, and the tokenizer has {known}.", "prompt")
        new = self.chat.tokenizer.encode(rest) if isinstance(rest, str) else list(rest)
        if not ids and not new:
            raise bad("The prompt is empty.", "prompt")
        text = rest if isinstance(rest, str) else self.chat.decode(rest)
        tokens = Tokens.from_ids(new, [int(Origin.USER)] * len(new))
        piece = piece_of("user", ({"role": "user", "content": text},), tokens)
        return Context(at, (((), (piece,)),) if new else (), (*ids, *new), len(ids), raw=True)

    def _raw(self, like: str | list[int], node: Node) -> str | list[int]:
        ids = [int(id_) for id_ in node.tokens.ids]
        return self.chat.decode(ids) if isinstance(like, str) else ids

    def add(self, context: Context, answers: Sequence[Piece]) -> list[Node]:
        """Record a context and its answers, each as a turn after it. Returns the new nodes of the context and answers.

        Another request may have recorded the same context meanwhile: its turns are shared.
        """
        before = len(self.nodes)
        at = context.at
        if at.turn is None:  # a new root, which the tree may have by now
            key = RAW if context.raw else tools_key(at.tools) + at.player
            at = self._roots.setdefault(key, at)
        for keys, made in context.pieces:
            start = at
            for piece in made:
                at = self._same(at, piece) or self._put(at, piece)
            if keys:
                start.contexts[keys] = at
        for answer in answers:
            self._put(at, answer)
        return self.nodes[before:]

    def _render(
        self,
        segment: Sequence[Message],
        before: Message | None,
        ids: Sequence[int],
        tools: Sequence[ToolSchema],
    ) -> tuple[Piece, ...]:
        """Return the turns of a segment that follows `before`, the last message, and `ids`."""
        if before is None:
            rendered = self.chat.prompt(list(segment), list(tools) or None)
        elif segment[0]["role"] == "assistant":
            return (self._foreign(segment[0], ids, tools),)
        else:
            rendered = self.chat.extend(
                [before], list(segment), list(tools) or None, last_id=ids[-1]
            )
        return tuple(piece_of(*one[:3]) for one in rendered.by_role(segment))

    def _foreign(self, message: Message, ids: Sequence[int], tools: Sequence[ToolSchema]) -> Piece:
        """Return an assistant message that this episode's model did not write as it stands: context, never trained."""
        opened = self.chat.decode(ids[-TAIL:]).rstrip().endswith(THINK)
        written = self.chat.assistant_ids(message, list(tools) or None, thinking=opened)
        tokens = Tokens.from_ids(written, [int(Origin.FORCED)] * len(written))
        spoken = Spoken((key_of(message),), message.get("reasoning_content") or "")
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
        calls = tuple(
            ToolCall(id_, each["name"], each["arguments"], canonical(each["arguments"]))
            for id_, each in functions
        )
        return Piece(Turn(0, "assistant", (message,), 0, len(tokens), calls=calls), tokens, spoken)

    @staticmethod
    def _same(at: Node, piece: Piece) -> Node | None:
        """Return a child that is the same context."""
        for child in at.children:
            turn = child.turn
            alike = turn is not None and turn.role == piece.turn.role and not child.sampled
            if alike and np.array_equal(child.tokens.ids, piece.tokens.ids):
                return child
        return None

    def _put(self, at: Node, piece: Piece) -> Node:
        index, start = len(self.nodes), self._length
        calls = at.turn.calls if at.turn is not None else ()
        places = {call.id: place for place, call in enumerate(calls)}
        answers = piece.turn.messages if piece.turn.role == "tool" else ()
        # In the order of the calls, whichever tool was the first to answer.
        results = sorted(answers, key=lambda one: places.get(one["tool_call_id"], len(places)))
        turn = replace(
            piece.turn,
            index=index,
            start=start,
            end=start + len(piece.tokens),
            results=tuple(ToolResult(message["content"]) for message in results),
            started=piece.turn.started or time.time(),
            parent=None if at.index == index - 1 else at.index,
            player=at.player,
        )
        node = Node(at.tools, at.player, turn, piece.tokens, at, piece.spoken)
        at.children.append(node)
        self.nodes.append(node)
        self._length = turn.end
        return node


def _segments(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield assistant messages and the runs between them; a leading assistant message belongs to the prompt."""
    parts = [
        list(part)
        for _, part in groupby(messages, lambda message: bool(message["role"] == "assistant"))
    ]
    if len(parts) > 1 and parts[0][0]["role"] == "assistant":
        parts[:2] = [parts[0] + parts[1]]
    yield from parts


def _match(at: Node, segment: Sequence[Message]) -> Node | None:
    """Return the node that a segment means after `at`; of several equal answers the newest."""
    if at.turn is not None and segment[0]["role"] == "assistant":
        for child in reversed(at.children):
            if child.spoken is not None and child.spoken.matches(segment[0]):
                return child
        return None
    return at.contexts.get(tuple(map(key_of, segment)))
