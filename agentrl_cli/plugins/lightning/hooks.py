"""`LoggingHook`: one line of the log for each rollout."""

from __future__ import annotations

import logging
from typing import Any

from agentrl_cli.plugins.lightning.types import Hook, Rollout


class LoggingHook(Hook):
    """Logs each rollout at its end, with its reward."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        super().__init__()
        self._log = logger or logging.getLogger("agentlightning")

    def on_rollout_end(self, rollout: Rollout, task: Any) -> None:  # type: ignore[override]
        """One line."""
        reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
        self._log.info(
            "%s (%s): reward %s, task %.80s", rollout.rollout_id, rollout.mode, reward, task
        )


def setup_logging(
    level: int | str = "INFO", *, apply_to: list[str] | None = None, **options: Any
) -> logging.Logger:
    """Print the log of this package, and of the loggers in `apply_to`, to stderr.

    `options` of Agent-Lightning (console, color, propagate, …) have no effect.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] %(name)s: %(message)s"))
    for name in ("agentlightning", "agentrl_cli.plugins.lightning", *(apply_to or ())):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not any(isinstance(known, logging.StreamHandler) for known in logger.handlers):
            logger.addHandler(handler)
        logger.propagate = False
    return logging.getLogger("agentlightning")


def configure_logger(level: int = logging.INFO, name: str = "agentlightning") -> logging.Logger:
    """Return the old name of `setup_logging`."""
    return setup_logging(level, apply_to=[name])
