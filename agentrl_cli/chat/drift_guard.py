"""The drift guard of a running episode: every turn as soon as it was answered, the whole conversation at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from agentrl_cli.chat.audit import audit
from agentrl_cli.chat.drift import check_delta, check_episode
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.template_probe import assistant, user
from agentrl_cli.chat.template_syntax import Tools
from agentrl_cli.errors import TemplateError
from agentrl_cli.types import Drift, Episode, Message


class DriftGuard:
    """Collects the drifts of one episode.

    If the user accepted a template that cannot be extended by appending (`model.chat.append_only`), differences that
    follow from that are `by_design`: those of the whole conversation, and those of a turn if `exact_turns` is false.
    """

    def __init__(self, chat: Chat, tools: Tools = None) -> None:
        self.chat = chat
        self.tools = tools
        self.found: list[Drift] = []

    def turn(
        self,
        turn_ids: Sequence[int],
        delta_ids: Sequence[int],
        messages: Sequence[Message],
        turn: int,
        position: int,
    ) -> list[Drift]:
        """Check assistant turn number `turn`, which begins at `position`, and the delta after it.

        `messages` are the parsed assistant message and the new ones. Returns new drifts and adds them to `found`.
        """
        found = check_delta(
            self.chat,
            turn_ids,
            delta_ids,
            messages[0],
            messages[1:],
            self.tools,
            turn=turn,
            position=position,
        )
        end = position + len(turn_ids)
        found = [
            replace(drift, turn=turn + 1) if drift.position >= end else drift for drift in found
        ]
        if self.chat.append_only and not self.exact_turns:
            found = [_accept(drift) for drift in found]
        self.found += found
        return found

    @cached_property
    def exact_turns(self) -> bool:
        """True if the template writes a turn and its delta as the model samples the one and Chat appends the other."""
        turn, answer = assistant("x"), user("u")
        try:
            ids = self.chat.assistant_ids(turn)
            delta = self.chat.extend([turn], [answer], last_id=ids[-1])
            found = check_delta(self.chat, ids, delta.ids, turn, [answer])
        except TemplateError:  # turns that do not begin as the generation prompt does
            return False
        return all(drift.kind != "structural" for drift in found)

    def end(self, episode: Episode, contexts: Mapping[int, Tools] | None = None) -> list[Drift]:
        """Check the whole episode. Returns drifts that no turn had, and adds them to `found`; `contexts`: see
        `check_episode`.
        """
        known = {(drift.kind, drift.turn) for drift in self.found}
        found = check_episode(episode, self.chat, self.tools, contexts=contexts)
        if self.chat.append_only and not audit(self.chat).append_only:
            found = [_accept(drift) for drift in found]
        found = [drift for drift in found if (drift.kind, drift.turn) not in known]
        self.found += found
        return found


def _accept(drift: Drift) -> Drift:
    return replace(drift, kind="by_design") if drift.kind == "structural" else drift
