"""What loading gives: a policy with everything that belongs to it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_cli.chat.render import Chat
from agentrl_cli.models.adapter import copy_trained
from agentrl_cli.models.save import save_model
from agentrl_cli.policies.protocols import Policy


@dataclass(slots=True)
class Loaded:
    """A policy with everything that belongs to it."""

    policy: Policy
    chat: Chat
    model: Any
    """The nn.Module; None for a policy without one (scripted)."""
    name: str
    """For people: `tiny`, `RUN@best`."""
    folder: Path | None
    sampler: Any = None
    """What samples, where that is not `model` itself: its twin, for `rollout.async_staleness` and an engine that
    runs the model's own weights."""

    sync: Path | None = None
    """Where new weights are left for a server that samples."""

    async def publish(self, version: str) -> None:
        """Let the policy sample with the weights as they are now; what the old ones computed is dropped.

        Waits for the turns that are running: they end with the weights they began with.
        """
        policy: Any = self.policy
        if self.sync is not None:
            await self._send(self.sync, version)
        elif self.sampler is None:
            await policy.swap(version, lambda: None)
        else:
            await policy.swap(version, lambda: copy_trained(self.model, self.sampler))

    async def _send(self, sync: Path, version: str) -> None:
        """Write weights, or the adapter, for the server; only the newest stay, which it may have to be given again."""
        name, _, step = version.rpartition("@")
        folder = sync / f"{name}-{step}"
        beside = sync / f".{folder.name}"
        assert self.folder is not None
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_model(self.model, self.folder, beside)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
        policy: Any = self.policy
        await policy.publish(folder, version)
        for old in sync.glob(f"{name}-*"):
            if old != folder and old.name.removeprefix(f"{name}-").isdigit():
                shutil.rmtree(old, ignore_errors=True)

    @property
    def hash(self) -> str:
        """Hash of the tokenizer, under which the store keeps it."""
        return str(self.chat.tokenizer.hash)
