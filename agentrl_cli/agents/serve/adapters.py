"""LoRA adapters on the loaded model, put on and taken off between turns."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.agents.serve.models import ServedModel, SharedEngine
from agentrl_cli.errors import ModelError
from agentrl_cli.models.adapter import ADAPTER_FILE, drop_adapter, put_adapter, use_adapter
from agentrl_cli.models.load import adapter_base, model_folder
from agentrl_cli.policies.load import make_policy

if TYPE_CHECKING:
    from agentrl_cli.config import Config
    from agentrl_cli.inference.policy import LocalPolicy
    from agentrl_cli.policies.load import Loaded
    from agentrl_cli.store import Store


class Adapters:
    """The adapters of one loaded model. Its engine is made again when one is put on or taken off.

    That is because an engine may hold a copy of the model's layers, and an adapter may wrap others than those before.
    """

    def __init__(
        self, loaded: Loaded, policy: LocalPolicy, config: Config, base: Path, store: Store | None
    ) -> None:
        self._model, self._folder, self._name = loaded.model, loaded.folder, loaded.name
        self._decode = loaded.chat.tokenizer.decode
        self._config, self._base, self._store = config, base, store
        self._own = "default" if hasattr(loaded.model, "peft_config") else None
        self._numbers = itertools.count()
        self._policy = policy
        self.engine = SharedEngine(policy, self.activate)

    def activate(self, model: ServedModel) -> None:
        """Compute with a model's weights from here on; no turn may be running."""
        if hasattr(self._model, "peft_config"):
            use_adapter(self._model, model.adapter or self._own)
        self._policy.set_version(model.weights_version)

    async def load(self, spec: str) -> tuple[str, str]:
        """Put the adapter of `RUN@STEP` or a folder on the model; return peft's name for it, and its version.

        Raises ModelError, NotFound.
        """
        if self._config.rollout.cuda_graphs != "off":
            raise ModelError(
                "Adapters are served without CUDA graphs.", hint="--set rollout.cuda_graphs=off"
            )
        folder = model_folder(spec, self._config, base=self._base, store=self._store)
        self._check(spec, folder)
        name = f"adapter{next(self._numbers)}"
        self._model = put_adapter(self._model, folder, name)
        await self._renew()
        return name, self._version(spec, folder)

    async def unload(self, name: str) -> None:
        """Take an adapter off the model."""
        self._model = drop_adapter(self._model, name)
        await self._renew()

    def _check(self, spec: str, folder: Path) -> None:
        """Raise ModelError unless a folder holds an adapter for this very model."""
        if not (folder / ADAPTER_FILE).is_file():
            raise ModelError(f"{spec} is not an adapter: there is no {ADAPTER_FILE} in {folder}.")
        assert self._folder is not None
        mine = self._folder
        if (mine / ADAPTER_FILE).is_file():
            mine = adapter_base(mine, self._config.model, base=self._base)
        under = adapter_base(folder, self._config.model, base=self._base)
        if under.resolve() != mine.resolve():
            raise ModelError(f"The adapter {spec} was trained on {under}, and {mine} is served.")

    def _version(self, spec: str, folder: Path) -> str:
        """Return `RUN@STEP` of a checkpoint, so that the version names the weights whatever `best` means later."""
        run, at, _ = spec.rpartition("@")
        if at and self._store is not None:
            rows = self._store.runs.checkpoints(self._store.runs.get(run).id)
            found = [row for row in rows if Path(row.path) == folder]
            return f"{run}@{found[-1].step}" if found else spec
        return spec

    async def _renew(self) -> None:
        await self._policy.close()
        self._policy = self.engine.policy = make_policy(
            self._model, self._config, self._name, self._decode, False
        )
