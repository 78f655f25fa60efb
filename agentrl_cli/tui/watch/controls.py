"""The controls of a run on the watch screen: each asks first and is written into the store for the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from textual import work

from agentrl_cli.config.renamed import new_key
from agentrl_cli.errors import UsageError
from agentrl_cli.reports.reference import get_setting
from agentrl_cli.reports.run_data import RunData
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.dialogs import Prompt

SETTINGS = {
    "lr": ("train.lr", float),
    "max_grad_norm": ("train.max_grad_norm", float),
    "steps": ("train.steps", int),
    "eval": ("train.eval.every", int),
    "save": ("train.save.every", int),
}
"""The settings that may change during a run, as in `trainer.controls.CHANGEABLE`, and their types."""
DETAILS = {
    "pause": "The trainer stops after this step and waits; p resumes.",
    "resume": "The trainer continues with the next step.",
    "checkpoint": "A checkpoint is written after this step.",
    "evaluate": "An evaluation runs after this step.",
    "stop": "The step is finished, a checkpoint is written, the process ends. `train --resume` continues.",
}


class ControlScreen(AgentScreen):
    """A screen over one run whose keys control it."""

    data: RunData | None = None

    def action_control(self, action: str) -> None:
        """Asks for pause (resume, if the run is paused), checkpoint, evaluate or stop."""
        if action == "pause" and self.data is not None and self.data.paused:
            action = "resume"
        self._confirm(action, {}, DETAILS[action])

    def action_rate(self, factor: float) -> None:
        """Asks for the learning rate times a factor: the setting, of which a schedule makes that of each step."""
        rate = get_setting(self.data.run.config, "train.lr") if self.data is not None else None
        if rate is None:
            self.notify("The learning rate of this run is not known.", severity="warning")
            return
        new = float(f"{rate * factor:.3g}")
        detail = f"train.lr {rate:g} → {new:g} from the next step on."
        self._confirm("set", {"key": "train.lr", "value": new}, detail)

    def action_set(self) -> None:
        """Asks for any setting that may change during a run."""

        def confirm(text: str) -> None:
            values = read_setting(text)
            detail = f"{values['key']} becomes {values['value']:g} from the next step on."
            self._confirm("set", values, detail)

        known = f"one of {', '.join(SETTINGS)}"
        self.ask(Prompt("set a knob", "train.eval=20", help=known, check=read_setting), confirm)

    def action_interrupt(self) -> None:
        """Asks whether to detach or to stop the run; leaves at once if it has ended."""
        if self.data is None or not self.data.run.alive:
            self.action_back()
            return
        ways: dict[str, Callable[[], object]] = {
            "detach: the training goes on": self.action_back,
            "stop after this step, save": lambda: self._send("stop", {}),
            "stop now: --resume repeats the step": lambda: self._send("stop", {"now": True}),
        }
        self.choose(f"{self.data.run.name} is running", ways)

    def _confirm(self, action: str, values: dict[str, Any], detail: str) -> None:
        run = self.data.run if self.data is not None else None
        if run is not None and run.alive:
            self.confirm(f"{action} {run.name}?", detail, lambda: self._send(action, values))
            return
        name = f" `agentrl train --resume {run.name}` continues." if run is not None else ""
        self.notify(f"This run has ended.{name}", severity="warning", markup=False)

    @work(group="control", exit_on_error=False)
    async def _send(self, action: str, values: dict[str, Any]) -> None:
        """Stores a control; an error is shown as that of any worker of the screen."""
        assert self.data is not None
        run = self.data.run.id
        await self.reader.write(lambda store: store.controls.add(run, action, values))
        self._version = None
        self.notify(f"{action}: asked the trainer", markup=False)


def read_setting(text: str) -> dict[str, Any]:
    """Return `train.eval=20` as a control's values: {"key": "train.eval.every", "value": 20}. Raises UsageError."""
    name, equals, value = text.partition("=")
    name, _ = new_key(f"train.{name.strip().removeprefix('train.')}", 0)
    name = name.removeprefix("train.").removesuffix(".every")
    if name not in SETTINGS or not equals:
        raise UsageError(
            f"There is nothing to set in {text!r}.", hint=f"For example {' or '.join(SETTINGS)}=20."
        )
    try:
        key, kind = SETTINGS[name]
        number = kind(value)
        if not math.isfinite(number):
            raise ValueError(value)
        return {"key": key, "value": number}
    except (ValueError, OverflowError):
        raise UsageError(f"{name} needs a number, not {value.strip()!r}.") from None
