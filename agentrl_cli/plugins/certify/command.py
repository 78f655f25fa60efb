"""`agentrl certify`: whether a deployed model is the one that was trained."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl_cli.commands import completion
from agentrl_cli.commands.common import (
    Context,
    JsonOption,
    RunOption,
    announce_loading,
    data_stdout,
    echo,
    echo_json,
    narrate,
    warn_unsafe,
)
from agentrl_cli.commands.options import WorkOptions
from agentrl_cli.commands.progress import Progress
from agentrl_cli.errors import GateNotMet, MissingDependency, UsageError
from agentrl_cli.paths import list_places

if TYPE_CHECKING:
    from agentrl_cli.config import Config
    from agentrl_cli.plugins.certify.replay import Check

ADDRESS = re.compile(r"(?:(.*?)@)?(https?://.*)")
"""A name, and the address behind it, which may have `user:password@` itself."""


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(help="RUN@best, best, last, a step.", autocompletion=completion.checkpoints),
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A model folder, a GGUF file, or NAME@URL.")
    ],
    run: RunOption = None,
    contexts: Annotated[int, typer.Option(min=1, help="Stored turns to replay.")] = 16,
    tasks: Annotated[
        int, typer.Option(min=0, help="Tasks for pass@1, an attempt at each; 0: none.")
    ] = 40,
    nats: Annotated[
        float, typer.Option(min=0, help="Largest mean gap of log-probabilities.")
    ] = 0.05,
    as_json: JsonOption = False,
    *,
    where: WorkOptions,
) -> None:
    """Certify that a deployed model is the checkpoint: stored contexts are replayed through both.

    Compared are the tokens of raw texts (tokenizer, BOS), the text of conversations (template), log-probabilities
    (adapter missing, adapter scale, quantisation), greedy calls, and pass@1 with its interval. The first fault is the
    verdict; exits with 4 if there is one. A GGUF file needs llama-cpp-python, or llama-server and its address.

    JSON: {"certified", "verdict", "reference", "target", "checks": [{"name", "ok": true | false | null, "text",
    "value", "fault", "episode"}]}
    """
    from agentrl_cli.store import Store
    from agentrl_cli.store.checkpoint_names import full_name, trained_by
    from agentrl_cli.types.masking import mask

    with data_stdout():
        context = where.open()
        with Store.open(context.db) as store:
            full = full_name(store, checkpoint, run) or ""
            origin = trained_by(store, full)
        if origin is None:
            hint = "Name it: agentrl certify RUN@best TARGET."
            raise UsageError(f"{checkpoint} is not a checkpoint of a run.", hint=hint)
        config, spec = _settings_of(context, target)
        announce_loading(full)
        limits = (contexts, tasks, nats)
        with Progress("certify"):
            checks = asyncio.run(_certify(context, full, config, spec, limits))
        _report(checks, full, mask(target), as_json)


def _settings_of(context: Context, target: str) -> tuple[Config, str | None]:
    """Return the settings that mean a target, and its folder if it is one. Raises UsageError if it is not there."""
    there: dict[str, Any] = {"backend": {"name": "openai", "mode": "chat"}}
    if address := ADDRESS.fullmatch(target):
        there |= {"url": address[2], "model": address[1] or "model"}
    else:
        places = list_places(target, context.project)
        path = next((place.absolute() for place in places if place.exists()), None)
        if path is None:
            hint = "Write a model folder, a .gguf file, or NAME@http://HOST:PORT/v1."
            raise UsageError(f"No target {target}: no such folder or file.", hint=hint)
        if path.is_dir():
            return context.config, str(path)
        if find_spec("llama_cpp") is None:
            hint = "pip install llama-cpp-python; or name the address of `llama-server -m FILE --jinja`."
            raise MissingDependency(
                "A file is run by llama-cpp-python, which is not installed.", hint=hint
            )
        there = {"backend": {"name": "llama_cpp"}, "model": str(path)}
    return context.config.replace(remote={**context.config.remote.model_dump(), **there}), None


async def _certify(
    context: Context, full: str, config: Config, spec: str | None, limits: tuple[int, int, float]
) -> list[Check]:
    """Replay contexts through both, the reference first. Every check is made, whatever the others found."""
    from agentrl_cli.evaluate.run import evaluate_policy, pick_tasks
    from agentrl_cli.models.load import load_model, model_folder
    from agentrl_cli.models.merge import merge, merge_adapter
    from agentrl_cli.plugins.certify import replay
    from agentrl_cli.plugins.certify.subjects import Here, subject_of
    from agentrl_cli.runtime import Runtime, open_runtime
    from agentrl_cli.store import Store

    own, base, run = context.config, context.project, full.rpartition("@")[0]
    wide, most = own.model.replace(dtype="float32"), own.rollout.max_new_tokens

    async def attempt(runtime: Runtime) -> Any:
        tasks = pick_tasks(runtime.packs, [own.eval.split], limit=limits[1] or 1)
        narrate(f"{runtime.loaded.name}: {limits[1]} attempts, {limits[0]} stored turns")
        rollout = runtime.rollout().with_(temperature=own.eval.temperature)
        return await evaluate_policy(rollout, tasks, 1, own.seed, run_id=None, step=None)

    with tempfile.TemporaryDirectory(prefix="agentrl-certify-") as place:
        reference = Path(place) / run
        with Store.open(context.db) as store:
            merge(full, reference, own.model, base=base, store=store, dtype="float32")
            began = model_folder(f"{run}@base", wide, base=base, store=store)
            under = merge_adapter(load_model(began, wide, base=base))
            row = store.runs.get(run)
        async with open_runtime(own, base=base, db=context.db, spec=str(reference)) as here:
            warn_unsafe(here.sandbox)
            ours = Here(here.loaded)
            contexts = replay.read_contexts(here.store, row.id, here.packs, limits[0])
            said = await replay.answers(ours, ours.chat, contexts, most)
            before = await attempt(here) if limits[1] else None
        config = config if spec else config.replace(model={"name": str(reference)})
        async with open_runtime(config, base=base, db=context.db, spec=spec) as there:
            subject = subject_of(there.loaded)
            found = [await replay.check_tokens(ours, subject, contexts)]
            found.append(await replay.check_template(ours, subject, contexts))
            found.append(await replay.check_weights(ours, under, subject, contexts, limits[2]))
            theirs = await replay.answers(subject, ours.chat, contexts, most)
            found.append(replay.check_calls(said, theirs, contexts))
            if before is not None:
                found.append(replay.check_pass(before, await attempt(there)))
    return found


def _report(checks: Sequence[Check], full: str, target: str, as_json: bool) -> None:
    """Print every check and the verdict, the same in both forms; raise GateNotMet for a fault."""
    fault = next((check for check in checks if check.ok is False), None)
    unknown = [check.name for check in checks if check.ok is None]
    verdict = f"Certified: {target} is {full}" + f" (not compared: {', '.join(unknown)})" * bool(
        unknown
    )
    if fault is not None:
        verdict = f"Not certified: {fault.fault}. {fault.name}: {fault.text}"
    if as_json:
        facts = {
            "certified": fault is None,
            "verdict": verdict,
            "reference": full,
            "target": target,
        }
        echo_json({**facts, "checks": [asdict(check) for check in checks]})
    else:
        for one in checks:
            mark = "-" if one.ok is None else "ok" if one.ok else "FAULT"
            echo(f"{mark:5}  {one.name:8}  {one.text}" + f"  ({one.episode})" * bool(one.episode))
        echo(verdict)
    if fault is not None:
        raise GateNotMet(
            f"{target} is not {full}: {fault.fault}.", hint=f"agentrl replay {fault.episode}"
        )
