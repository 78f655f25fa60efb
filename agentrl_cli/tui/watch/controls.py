"""The controls of a run on the watch screen: each asks first and is written into the store for the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl_cli.config.renamed import new_key
from agentrl_cli.errors import UsageError
from agentrl_cli.reports.run_data import RunData
from agentrl_cli.tui.common.agent_screen import AgentScreen
from agentrl_cli.tui.common.dialogs import Choose, Prompt

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


class Controls:
    """The questions and the writing, for one screen; `sent` is called after a control was stored."""

    def __init__(self, screen: AgentScreen, sent: Callable[[], None]) -> None:
        self.screen, self.sent = screen, sent

    def control(self, data: RunData | None, action: str) -> None:
        """Asks for pause (resume, if the run is paused), checkpoint, evaluate or stop."""
        if action == "pause" and data is not None and data.paused:
            action = "resume"
        self._confirm(data, action, {}, DETAILS[action])

    def rate(self, data: RunData | None, factor: float) -> None:
        """Asks for the learning rate times a factor."""
        rate = data.learning_rate if data is not None else None
        if rate is None:
            self.screen.notify("The learning rate of this run is not known.", severity="warning")
            return
        new = float(f"{rate * factor:.3g}")
        detail = f"Learning rate {rate:g} → {new:g} from the next step on."
        self._confirm(data, "set", {"key": "train.lr", "value": new}, detail)

    def set(self, data: RunData | None) -> None:
        """Asks for any setting that may change during a run."""

        def confirm(text: str) -> None:
            if text:
                values = read_setting(text)
                detail = f"{values['key']} becomes {values['value']:g} from the next step on."
                self._confirm(data, "set", values, detail)

        known = f"one of {', '.join(SETTINGS)}"
        prompt = Prompt("set a knob", "train.eval=20", help=known, check=read_setting)
        self.screen.ask(prompt, confirm)

    def leave(self, data: RunData | None) -> None:
        """Asks whether to detach or to stop the run; leaves at once if it has ended."""
        if data is None or not data.run.alive:
            self.screen.action_back()
            return
        run = data.run.id
        ways: dict[str, Callable[[], object]] = {
            "detach: the training goes on": self.screen.action_back,
            "stop after this step, save": lambda: self._send(run, "stop", {}),
            "stop now: --resume repeats the step": lambda: self._send(run, "stop", {"now": True}),
        }
        choose = Choose(f"{data.run.name} is running", list(ways))
        self.screen.ask(choose, lambda choice: list(ways.values())[choice]())

    def _confirm(
        self, data: RunData | None, action: str, values: dict[str, Any], detail: str
    ) -> None:
        if data is not None and data.run.alive:
            run, send = data.run, self._send
            self.screen.confirm(
                f"{action} {run.name}?", detail, lambda: send(run.id, action, values)
            )
            return
        name = f" `agentrl train --resume {data.run.name}` continues." if data is not None else ""
        self.screen.notify(f"This run has ended.{name}", severity="warning", markup=False)

    def _send(self, run_id: str, action: str, values: dict[str, Any]) -> None:
        work = self._store(run_id, action, values)
        self.screen.run_worker(work, group="control", exit_on_error=False)

    async def _store(self, run_id: str, action: str, values: dict[str, Any]) -> None:
        """Stores a control; an error is shown as that of any worker of the screen."""
        await self.screen.reader.write(lambda store: store.controls.add(run_id, action, values))
        self.sent()
        self.screen.notify(f"{action}: asked the trainer", markup=False)


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
        return {"key": key, "value": kind(value)}
    except ValueError:
        raise UsageError(f"{name} needs a number, not {value.strip()!r}.") from None
