"""Opens a chat's configuration, pack, tools, sandbox, tokenizer and policy, from the child's arguments."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer, Tokenizer
from agentrl_cli.chat_session.conversation import Emit
from agentrl_cli.chat_session.session import Choices, Session
from agentrl_cli.config import Config, SandboxConfig, load_config
from agentrl_cli.envs.tool_env import Env, as_env_error
from agentrl_cli.errors import (
    AgentRLError,
    ConfigError,
    NotFound,
    PolicyError,
    SandboxUnavailable,
    UsageError,
)
from agentrl_cli.paths import PROJECT_FILE, bundled_model, find_project
from agentrl_cli.policies import backend_name
from agentrl_cli.policies.protocols import Policy
from agentrl_cli.policies.remote.http import Endpoint, RemotePolicy
from agentrl_cli.policies.scripted import ScriptedPolicy
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.rollout.world import make_env
from agentrl_cli.sandbox import Sandbox
from agentrl_cli.store import EpisodeRow, Store
from agentrl_cli.store.checkpoint_names import select_checkpoint, split_checkpoint
from agentrl_cli.tasks import Pack, load_pack
from agentrl_cli.tasks.agent import read_agent
from agentrl_cli.tasks.texts import apply_texts
from agentrl_cli.types import Episode, Message, Task
from agentrl_cli.types.plain import parse_json

KEPT = 8
"""Checkpoints of a sandbox session that a chat keeps, so that /undo is immediate."""

NO_PACK = Pack("chat", Path(), "", "", (), (), {}, {}, None, sandbox=False)
"""The pack of a chat outside a project: no tools and no tasks."""

SAID = "This is the scripted model: it repeats the replies it was given and knows nothing."


@dataclass
class Opened:
    """A session, its first event, and the conversation that it continues."""

    session: Session
    ready: dict[str, Any]
    past: Past | None
    """The episode to continue, if any."""
    choices: Choices


@dataclass
class Past:
    """A stored episode with everything needed to continue it."""

    db: Path
    base: Path
    config: Config
    pack: Pack
    task: Task
    episode: Episode
    row: EpisodeRow
    siblings: list[EpisodeRow]
    decode: Callable[[Sequence[int]], str] | None = None
    """Decodes ids without control tokens, as rewards see them; None without a stored tokenizer."""

    def keep(self, children: Sequence[Episode]) -> None:
        """Store episodes as children of this one."""
        with Store.open(self.db) as store:
            store.episodes.add(children, split=self.row.split, tokenizer=self.row.tokenizer)


def open_past(given: argparse.Namespace) -> Past:
    """Return the episode `given.episode` with its pack, its task and the settings of its run.

    Without a model in `given`, that becomes the checkpoint nearest to the weights that sampled the episode.
    Raises NotFound if the episode, pack or task is missing, UsageError if the episode is still running.
    """
    base, config = _settings(given)
    with Store.open(given.db, readonly=True) as store:
        row = store.episodes.row(store.episodes.resolve(given.episode))
        episode, siblings = store.episodes.get(row.id), store.episodes.siblings(row.id)
        task = store.tasks.get(row.task_id, row.pack)
        settings = store.runs.get(row.run_id).config if row.run_id else {}
        kept = store.tokenizers.get(row.tokenizer) if row.tokenizer else None
        given.model = given.model or nearest_checkpoint(store, row)
    if episode.outcome is None:
        raise UsageError(
            f"Episode {row.id} is still running.",
            hint="`agentrl replay` follows it; try again when it has ended.",
        )
    # The run's settings, as far as this version still has them; how code is isolated is this machine's.
    own = settings.get("sandbox") or {}
    repeated = {name: own[name] for name in ("limits", "imports", "seed") if name in own}
    restored = {**settings, "sandbox": {**config.sandbox.model_dump(), **repeated}}
    for section in ("rollout", "model", "rewards", "sandbox"):
        found = restored.get(section)
        if isinstance(found, Mapping):
            kind = type(getattr(config, section))
            made = dict if kind is dict else kind.model_validate
            with contextlib.suppress(ValidationError):
                setattr(config, section, made(dict(found)))
    ran = settings.get("task") or {}
    texts = ran.get("prompts", config.task.prompts)
    (pack,) = apply_texts([_pack_of(row.pack, config.task.packs, base)], texts, base).values()
    if ran.get("agent") is not None:  # of the run, over the pack's own
        pack = replace(pack, agent=read_agent(ran["agent"], base, "task.agent"))
    if task is None:
        rows = (item for split in _splits(pack) for item in pack.tasks(split))
        task = next((item for item in rows if item.id == row.task_id), None)
    if task is None:
        raise NotFound(f"The task {row.task_id} is neither in the store nor in {pack.name}.")
    decode = None
    if kept is not None:
        byte = "byte_tokenizer" in json.loads(kept.tokenizer_json)
        stored = kept.tokenizer_json, kept.chat_template, kept.specials
        decode = ByteTokenizer().plain if byte else Tokenizer(*stored).plain
    return Past(given.db, base, config, pack, task, episode, row, siblings, decode)


def nearest_checkpoint(store: Store, row: EpisodeRow) -> str | None:
    """Return the run's checkpoint nearest to the weights that sampled an episode, and not after its step.

    Of an episode that was made with a checkpoint outside its training: the one that has that name now. None if no
    training's weights sampled it, or if the model that the run started from is nearer.
    """
    run = store.runs.get(row.run_id) if row.run_id else None
    step = row.step
    if run is not None and run.kind == "eval" and run.parent_id:
        run, step = store.runs.get(run.parent_id), run.parent_step
    if run is None or run.kind != "train":
        return _named_checkpoint(store, row)
    if step is None:
        return None
    name, _, number = row.weights_version.rpartition("@")
    sampled = (
        int(number)
        if name in store.runs.names(run.id) and number.isdigit()
        else step
        if name
        else 0
    )
    found = {
        c.step for c in store.runs.checkpoints(run.id) if c.step <= step and Path(c.path).is_dir()
    }
    nearest = min({0, *found}, key=lambda at: (abs(sampled - at), -at))
    return f"{run.name}@{nearest}" if nearest else None


def _named_checkpoint(store: Store, row: EpisodeRow) -> str | None:
    """Return the checkpoint that an episode says it was made with, as `RUN@STEP` or `RUN@base`; None if absent."""
    parts = split_checkpoint(row.weights_version)
    if parts is None:
        return None
    try:
        run = store.runs.get(parts[0])
    except NotFound:  # it was deleted
        return None
    # So was this one, if a longer name begins like it, or a later run has its name.
    if parts[0] not in {run.id, *store.runs.names(run.id)} or 0 < row.started < run.started:
        return None
    if parts[1] == "base":
        return f"{run.name}@base"
    kept = [c for c in store.runs.checkpoints(run.id) if Path(c.path).is_dir()]
    found = select_checkpoint(kept, parts[1])
    return f"{run.name}@{found.step}" if found else None


def _pack_of(name: str, packs: Sequence[str], base: Path) -> Pack:
    """Return the pack of an episode: the project's pack of that name, else the bundled one."""
    for path in packs:
        with contextlib.suppress(NotFound, ConfigError):
            pack = load_pack(path, base=base)
            if pack.name == name:
                return pack
    try:
        return load_pack(name, base=base)
    except NotFound as error:
        raise NotFound(
            f"Nothing of this episode can run again: its pack {name} is not here.",
            hint="Imported and served episodes have none. Else name its project with --project.",
        ) from error


def check_tokenizer(past: Past, chat: Chat) -> None:
    """Raises UsageError if the model's tokenizer is not the episode's."""
    if past.row.tokenizer and chat.tokenizer.hash != past.row.tokenizer:
        raise UsageError(
            "This model's tokenizer differs from the episode's: the token ids would mean something else.",
            hint="Use a checkpoint of the same run, or its base model.",
        )


@contextlib.asynccontextmanager
async def open_session(given: argparse.Namespace, emit: Emit) -> AsyncIterator[Opened]:
    """Open everything behind a chat, closed with it. Raises an AgentRLError that names a missing part."""
    past = open_past(given) if given.episode else None
    if past is not None:
        base, config, pack, task = past.base, past.config, past.pack, past.task
    else:
        if len(given.pack) > 1:
            raise UsageError("A chat is about one pack.", hint="Name one with --pack.")
        base, config = _settings(given)
        names = given.pack or (config.task.packs if (base / PROJECT_FILE).is_file() else ())
        named = [load_pack(name, base=base) for name in names[:1]]
        pack = next(iter(apply_texts(named, config.task.prompts, base).values()), NO_PACK)
        task = _with_system(_task(given, pack), given.system)
    await reachable(given.model, config)
    policy, chat = open_policy(
        given.model, config, given.db, base=base, script=given.script, past=past
    )
    job = Job(task, given.seed, kind="chat")

    async def open_env(task: Task) -> Env:
        # A chat without a task has no world of its own and no simulated user: the task holds the user's goal.
        own = pack if task.data else replace(pack, module=None, interactions={})
        try:
            return await make_env(config.rollout, own, replace(job, task=task), sandbox, keep=KEPT)
        except Exception as error:
            raise as_env_error(error) from error

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(policy.close)
        if past is not None:
            check_tokenizer(past, chat)
        sandbox, note = await _sandbox(config.sandbox, pack)
        if sandbox is not None:
            await stack.enter_async_context(sandbox)
        packs, temperature = {pack.name: pack}, given.temperature
        rollout = Rollout(policy, chat, packs, config, sandbox=sandbox, temperature=temperature)
        env = await open_env(task)
        session = Session(rollout.context, pack, job, env, emit, open_env)
        # by name: /task puts another conversation in its place
        stack.push_async_callback(lambda: session.talk.close())  # noqa: PLW0108
        choices = Choices([_with_system(task, given.system) for task in _rows(pack)])
        first = _ready(session, given.model or config.model.name, note)
        first["task"] = task.id if given.task or past is not None else None
        if not (given.task or given.episode):
            first["tasks"] = choices.offer()
        yield Opened(session, first, past, choices)


def _ready(session: Session, model: str, note: str) -> dict[str, Any]:
    """Return the first event: model, pack, tools and settings."""
    context, env, pack = session.talk.context, session.talk.env, session.talk.pack
    policy, tokenizer = context.policy, context.chat.tokenizer
    return {
        "ev": "ready",
        "model": model,
        "weights": policy.weights_version,
        "context": policy.context_length,
        "tools": sorted(str(schema["function"]["name"]) for schema in env.schemas),
        "user": env.talks,
        "note": note,
        "tokenizer": tokenizer.json,
        "template": tokenizer.chat_template or "",
        "pack": "" if pack is NO_PACK else pack.name,
        "sandbox": getattr(context.sandbox, "level", None),
    }


def _settings(given: argparse.Namespace) -> tuple[Path, Config]:
    """Return the project's folder, or the current one, and its settings with those that were given."""
    project = find_project(override=given.project)
    base = project or Path.cwd()
    files = ([project / PROJECT_FILE] if project else []) + list(getattr(given, "config", ()))
    config, _ = load_config(files, getattr(given, "sets", ()), os.environ, {}, base=base)
    return base, config


def _task(given: argparse.Namespace, pack: Pack) -> Task:
    """Return the given task, or one without data whose prompt is the pack's system message alone."""
    if not given.task:
        prompt: tuple[Message, ...] = ({"role": "system", "content": pack.system},)
        return Task(f"{pack.name}/chat", pack.name, "", "chat", prompt if pack.system else ())
    if pack is NO_PACK:
        raise NotFound("A task needs a pack.", hint="Name it with --pack NAME.")
    return Choices([task for split in _splits(pack) for task in pack.tasks(split)]).find(given.task)


def _with_system(task: Task, system: str | None) -> Task:
    """Return a task with this system message in the place of its own; the task as it is for None."""
    if system is None:
        return task
    first: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
    return replace(task, prompt=(*first, *(m for m in task.prompt if m["role"] != "system")))


def _rows(pack: Pack) -> list[Task]:
    """Return the valid tasks of a pack; none if its data cannot be read, as a chat needs none."""
    if pack is NO_PACK:
        return []
    try:
        return [task for split in _splits(pack) for task in pack.read(split)[0]]
    except AgentRLError:
        return []


def _splits(pack: Pack) -> list[str]:
    return sorted(pack.splits())


async def _sandbox(settings: SandboxConfig, pack: Pack) -> tuple[Sandbox | None, str]:
    """Return the sandbox for the pack's tools, and a warning if none starts: the chat works without one."""
    if not pack.sandbox:
        return None, ""
    try:
        sandbox = await Sandbox.open(settings)
        return sandbox, sandbox.warning
    except SandboxUnavailable as error:
        return None, f"no sandbox: {error.message} {error.hint}"


def open_policy(
    name: str | None,
    config: Config,
    db: Path,
    *,
    base: Path,
    script: Path | None = None,
    past: Past | None = None,
) -> tuple[Policy, Chat]:
    """Return a policy and its chat: `scripted`, `tiny`, a folder, a Hugging Face id, or RUN@best, RUN@last, RUN@STEP.

    `script` is a file with the scripted model's replies, a JSON list of texts.
    """
    if (name or config.model.name) != "scripted":
        from agentrl_cli.policies.load import load_policy  # imports torch, only in this process

        opened = Store.open(db, readonly=True) if db.is_file() else contextlib.nullcontext()
        with opened as store:
            loaded = load_policy(name, config, base=base, store=store)
        if isinstance(loaded.policy, RemotePolicy):
            loaded.policy.endpoint.watch()
        return loaded.policy, loaded.chat
    folder = bundled_model()
    byte = ByteTokenizer()
    bundled = (folder / "tokenizer.json").is_file() and (
        past is None or past.row.tokenizer != byte.hash
    )
    tokenizer = Tokenizer.load(folder) if bundled else byte
    replies = (lambda key, ids: SAID) if script is None else _replies(script)
    return ScriptedPolicy(replies, tokenizer), Chat(tokenizer, "hermes", append_only=True)


def _replies(script: Path) -> list[str]:
    try:
        replies = parse_json(script.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{script} cannot be read as JSON: {error}.") from error
    if not isinstance(replies, list) or not all(isinstance(reply, str) for reply in replies):
        raise UsageError(f"{script} must hold a JSON list of texts, one per reply.")
    return replies


async def reachable(name: str | None, config: Config) -> None:
    """Ask the server that will sample, if any, whether it is there, before anything loads. Raises PolicyError."""
    if backend_name(name, config.model.name, config.remote) == "local" or not config.remote.url:
        return
    endpoint = Endpoint(config.remote.address)
    try:
        await endpoint.reach()
    except PolicyError as error:
        hint = f"{error.hint} remote.url names the server; --model tiny is the bundled model, without a server."
        raise PolicyError(error.message, hint=hint) from error
    finally:
        await endpoint.close()
