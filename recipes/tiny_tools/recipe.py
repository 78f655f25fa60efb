"""Trains tiny-tools from random weights on invented tools and tasks, stopped and resumed between any two steps.

A step's rows follow from the seed and the step alone, so a resumed training ends with the weights of one that was never
stopped (on the same machine, with the same number of threads). Rows of similar length share a step, which keeps the
padding small.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer, Tokenizer
from agentrl_cli.errors import ConfigError, UsageError
from agentrl_cli.models.checkpoint import load_state, load_weights, save_checkpoint, written_whole
from agentrl_cli.models.save import save_model
from agentrl_cli.sft.demonstrations import Schedule
from agentrl_cli.sft.from_nothing import make_model
from agentrl_cli.sft.recipe import RecipeRun
from agentrl_cli.sft.train import optimizers
from agentrl_cli.types import Origin

from .rows import Row
from .stream import drill, row
from .tokenizer import make_tokenizer

BUCKET = 48
"""Steps whose rows are drawn together and sorted by length."""
CHECKPOINT = "checkpoint"
"""The folder, inside the model's, that a stopped training is resumed from."""


@dataclass(frozen=True, kw_only=True)
class Plan(Schedule):
    """Everything that decides the weights: a recipe file without `packs`. In the drills half of the rows only copy."""

    architecture: Mapping[str, Any]
    """Arguments of Qwen3Config."""
    steps: int = 4000
    lr: float = 3e-3
    muon_lr: float = 0.02
    warmup: int = 50
    prompt_weight: float = 0.1
    """Weight in the loss of tokens that the model does not sample; 1 for those that it does."""
    vocabulary: int = 2048
    texts: int = 6000
    longest: int = 1024
    """Conversations are cut to so many tokens."""
    threads: int = 2
    compile: bool = False
    """Whether torch compiles the model: a tenth less CPU time, and a C++ compiler is needed."""
    save_every: int = 200


def make(run: RecipeRun) -> bool:
    """Make the model that the settings describe; False if it was stopped before, which leaves what resumes it."""
    try:
        plan = Plan(**run.settings)
    except TypeError as error:
        raise ConfigError(
            f"{run.path} is not a plan of {Path(__file__).parent.name}: {error}"
        ) from error
    return train(plan, run)


def train(plan: Plan, run: RecipeRun) -> bool:
    """Train what `plan` describes and write it into the run's folder as bfloat16; False if the run was stopped before.

    A training that was stopped or killed leaves FOLDER/checkpoint, which `resume` continues from. Raises UsageError
    if there is none, or if it was made by another plan (only `steps`, `save_every`, `threads` and `compile` may
    differ; the last two change sums of floats), and for `compile` without a compiler.
    """
    folder = run.folder
    if plan.compile:
        _check_compiler(run.path)
    torch.set_num_threads(plan.threads)
    where = folder / CHECKPOINT
    state = _resumable(where, plan) if run.resume else None
    context = int(plan.architecture["max_position_embeddings"])
    tokenizer = (
        Tokenizer.load(where)
        if state
        else make_tokenizer(_texts(plan), plan.vocabulary, context, folder)
    )
    model = make_model(plan.architecture, tokenizer.vocab_size, plan.seed)
    opts = optimizers(model, plan.lr, plan.muon_lr)
    start = 0
    if state is not None:
        load_weights(model, where)
        for opt, kept in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(kept)
        start = int(state["step"])
    forward: Any = torch.compile(model, dynamic=True) if plan.compile else model
    batches = Batches(plan, Chat(tokenizer))

    def save(step: int) -> None:
        kept = {
            "step": step,
            "plan": _identity(plan),
            "optimizers": [opt.state_dict() for opt in opts],
        }
        save_checkpoint(where, model, where if where.is_dir() else folder, kept)

    for step in range(start, plan.steps):
        run.report(step + 1, plan.steps, train_step(forward, opts, batches.at(step), plan, step))
        stopped = run.stopped()
        if stopped or (step + 1) % plan.save_every == 0 or step + 1 == plan.steps:
            save(step + 1)
        if stopped and step + 1 < plan.steps:
            return False
    with written_whole(folder, keep=True) as beside:
        save_model(model.to(torch.bfloat16), where, beside)
    return True


def _check_compiler(path: Path) -> None:
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX", usual)  # as torch finds it
    if shutil.which(compiler) is None:
        raise UsageError(
            f"{path} asks for torch.compile, and there is no C++ compiler {compiler} here.",
            hint="Install one (apt-get install g++), or write `compile: false` there: a tenth more CPU time.",
        )


def train_step(
    model: Any, opts: list[torch.optim.Optimizer], batch: Batch, plan: Plan, step: int
) -> float:
    """Update the model in place; returns the weighted loss."""
    for opt in opts:
        for group in opt.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * plan.rate(step, plan.steps, 0.02)
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(targets.shape)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt in opts:
        opt.step()
        opt.zero_grad(set_to_none=True)
    return float(loss.detach())


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded rows [B, T]: ids, and each token's weight in the loss (0 for padding)."""

    ids: Tensor
    weights: Tensor


class Batches:
    """The plan's rows as padded batches, a few steps of similar lengths drawn at once."""

    def __init__(self, plan: Plan, chat: Chat) -> None:
        self.plan, self.chat = plan, chat
        self._bucket = -1
        self._steps: list[Batch] = []

    def at(self, step: int) -> Batch:
        """The batch of a step."""
        if step // BUCKET != self._bucket:
            self._bucket = step // BUCKET
            self._steps = self._draw(self._bucket)
        return self._steps[step % BUCKET]

    def _draw(self, bucket: int) -> list[Batch]:
        count, first = self.plan.rows, bucket * BUCKET * self.plan.rows
        drawn = [self._encode(self._row(first + number)) for number in range(BUCKET * count)]
        drawn.sort(key=lambda pair: len(pair[0]))
        steps = [drawn[at : at + count] for at in range(0, len(drawn), count)]
        random.Random(f"order {self.plan.seed} {bucket}").shuffle(steps)
        return [_padded(each) for each in steps]

    def _row(self, number: int) -> Row:
        early = number < self.plan.drills * self.plan.rows
        return (
            drill(self.plan.seed, number) if early and number % 2 else row(self.plan.seed, number)
        )

    def _encode(self, one: Row) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return encode(self.chat, one, self.plan.prompt_weight, self.plan.longest)


def encode(
    chat: Chat, one: Row, prompt_weight: float, longest: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(ids [n], weights [n]) of a row: 1 for what the model samples, `prompt_weight` for all else and muted turns."""
    rendered = chat.conversation(list(one.messages), list(one.tools))
    sampled = np.asarray(rendered.origin) == Origin.MODEL
    if one.muted:
        turn = np.cumsum(np.diff(sampled.astype(np.int8), prepend=0) == 1) - 1
        sampled &= ~np.isin(turn, list(one.muted))
    weights = np.where(sampled, 1.0, prompt_weight).astype(np.float32)
    return np.asarray(rendered.ids, np.int64)[:longest], weights[:longest]


def _padded(rows: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> Batch:
    longest = max(len(ids) for ids, _ in rows)
    ids, weights = (
        torch.zeros(len(rows), longest, dtype=torch.long),
        torch.zeros(len(rows), longest),
    )
    for at, (own, weight) in enumerate(rows):
        ids[at, : len(own)], weights[at, : len(own)] = (
            torch.from_numpy(own),
            torch.from_numpy(weight),
        )
    return Batch(ids, weights)


def _texts(plan: Plan) -> list[str]:
    plain = Chat(ByteTokenizer())
    drawn = (row(plan.seed + 1, number) for number in range(plan.texts))
    return [
        plain.decode(plain.conversation(list(one.messages), list(one.tools)).ids) for one in drawn
    ]


def _identity(plan: Plan) -> dict[str, Any]:
    """What a resumed training must have in common with the one that was stopped."""
    return {
        key: value
        for key, value in asdict(plan).items()
        if key not in ("steps", "save_every", "threads", "compile", "extra")
    }


def _resumable(where: Path, plan: Plan) -> dict[str, Any]:
    if not where.is_dir():
        raise UsageError(
            f"No stopped training in {where.parent}.", hint="Leave --resume away to start one."
        )
    state = load_state(where)
    old, new = dict(state["plan"]), _identity(plan)
    if changed := sorted(key for key in new if old.get(key) != new[key]):
        raise UsageError(
            f"The training in {where.parent} was started with another {', '.join(changed)}.",
            hint="Only the number of steps may change; or start a new one in another folder.",
        )
    return state
