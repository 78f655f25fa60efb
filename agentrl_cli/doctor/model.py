"""A model: its chat template, and its abilities before any training."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.doctor import Check
from agentrl_cli.errors import ModelError
from agentrl_cli.reports.diagnosis import RULES

if TYPE_CHECKING:
    from agentrl_cli.chat.audit import AuditReport
    from agentrl_cli.config import Config
    from agentrl_cli.evaluate.abilities import Found
    from agentrl_cli.policies.load import Loaded


def audit_template(folder: Path) -> AuditReport:
    """Audit a model folder's chat template: can turns be appended, is the stop token trained, are messages skipped?

    Raises ModelError, TemplateError if the folder, tokenizer or template is missing.
    """
    from agentrl_cli.chat.audit import append_only_without, audit
    from agentrl_cli.chat.render import Chat
    from agentrl_cli.chat.tokenizer import Tokenizer
    from agentrl_cli.rollout.rehearse import rehearse

    if not folder.is_dir():
        hint = "Name a local folder with a tokenizer.json."
        raise ModelError(f"No model folder {folder}.", hint=hint)
    chat = Chat(Tokenizer.load(folder), "auto")
    found = tuple(map(str, asyncio.run(rehearse(chat))))
    return replace(audit(chat), append_only_without=append_only_without(chat), would_skip=found)


def check_abilities(loaded: Loaded, config: Config) -> list[Check]:
    """Sample for 30 seconds: often is ok, sometimes a warning, never a failure. The last check is the verdict."""
    from agentrl_cli.evaluate.abilities import OFTEN, measure, verdict

    async def attempt() -> list[Found]:
        try:
            return await measure(loaded, config)
        finally:
            await loaded.policy.close()

    found = asyncio.run(attempt())
    checks = []
    for one in found:
        text = f"{one.shown} of {one.attempts} attempts"
        status = "ok" if (one.share or 0.0) >= OFTEN else "warn"
        checks.append(Check(one.name, status, text if one.attempts else "no time for an attempt"))
    text = verdict(found)
    known = any(one.attempts for one in found)
    status = ("ok" if text.startswith("RL can begin") else "fail") if known else "warn"
    (rule,) = (rule for rule in RULES if rule.name == "all_failed")
    return [*checks, Check("verdict", status, text, rule.advice if status == "fail" else "")]
