"""Supervised fine-tuning on demonstrations: the cold start before RL, and how the bundled model is made.

`Recipe` says everything, so that a seed gives the same weights on the same machine: the packs and how often each is
drawn, the share of demonstrations that use a tool where one is needed (the others guess), the drills, the steps. A
recipe with `architecture` starts from nothing: it trains a tokenizer on the packs' texts and a model from random
weights, which first copies random tokens (`drills`): a small transformer that can copy learns the tasks several times
faster.

Loss only on what a model would sample, the stop token included; rows that share a system prompt share its computation.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import ByteTokenizer, Tokenizer
from agentrl_cli.config import Config
from agentrl_cli.errors import ConfigError, UsageError
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.optimizers import Muon, hidden_matrices, trainable
from agentrl_cli.learning.packing import Segment, micro_batches, select_segments
from agentrl_cli.models.adapter import name_base, switch_length
from agentrl_cli.models.checkpoint import written_whole
from agentrl_cli.models.processor import attach
from agentrl_cli.models.save import save_model
from agentrl_cli.policies.load import load_policy
from agentrl_cli.registry import load_file
from agentrl_cli.sft.demonstrations import (
    SPECIALS,
    Recipe,
    demonstrations,
    drill,
    encode,
    parse_recipe,
)
from agentrl_cli.sft.from_nothing import make_model, make_seeing_model, train_tokenizer
from agentrl_cli.sft.recipe import RecipeRun
from agentrl_cli.tasks import Pack, load_pack
from agentrl_cli.types.content import content_text

# Words with their leading space, single digits, runs of signs, line breaks: Qwen's split.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# --- a model from nothing --------------------------------------------------------------------------------------------


def make_tokenizer(recipe: Recipe, packs: Mapping[str, Pack], folder: Path) -> Tokenizer:
    """Train a tokenizer on the packs' conversations and write it into `folder`."""
    plain = Chat(ByteTokenizer())
    texts = []
    drawn = demonstrations(recipe, packs, recipe.seed + 1)
    for pack, _, messages in itertools.islice(drawn, recipe.texts):
        said = [{**m, "content": content_text(m.get("content"))} for m in messages]
        texts.append(plain.decode(plain.conversation(said, pack.schemas).ids))
    return train_tokenizer(
        texts,
        folder,
        vocabulary=recipe.vocabulary,
        split=SPLIT,
        specials=SPECIALS,
        context=1024,
        images="vision" in (recipe.architecture or {}),
    )


# --- training --------------------------------------------------------------------------------------------------------


def optimizers(model: nn.Module, lr: float, muon_lr: float = 0.0) -> list[torch.optim.Optimizer]:
    """AdamW for all; with `muon_lr` Muon for the hidden matrices (https://kellerjordan.github.io/posts/muon/)."""
    inner, rest = hidden_matrices(model) if muon_lr else ([], trainable(model))
    found: list[torch.optim.Optimizer] = []
    if rest:
        found.append(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    if inner:
        found.append(Muon(inner, lr=muon_lr, weight_decay=0.01))
    return found


def train(
    model: nn.Module,
    chat: Chat,
    packs: Mapping[str, Pack],
    recipe: Recipe,
    report: Callable[[int, float, float], None] | None = None,
    *,
    batches: Iterator[list[list[Segment]]] | None = None,
    budget: int | None = None,
) -> None:
    """Run the recipe on a model in place. `report(step, loss, seconds)` is called after every step.

    `batches` are given in place of the packs' demonstrations (rft.py). With a `budget` a step is cut into micro-batches
    of so many tokens, whose gradients add up to that of the whole.
    """
    digits = [chat.tokenizer.encode(str(d))[0] for d in range(10)]
    rng = random.Random(f"drills {recipe.seed}")
    if batches is None:
        batches = lessons(chat, packs, recipe)
    opts = optimizers(model, recipe.lr, recipe.muon_lr)
    base = [(group, group["lr"]) for opt in opts for group in opt.param_groups]
    model.train()
    started = time.monotonic()
    for step in range(recipe.total):
        factor = recipe.rate(step, recipe.total, 0.05)
        for group, lr in base:
            group["lr"] = factor * lr
        groups = (
            drill(rng, digits, chat.tokenizer.vocab_size, recipe.rows)
            if step < recipe.drills
            else next(batches)
        )
        loss = _backward(model, groups, budget)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        if report is not None:
            report(step + 1, loss, time.monotonic() - started)
    model.eval()


def _backward(model: nn.Module, groups: list[list[Segment]], budget: int | None) -> float:
    """Add the gradient of the mean loss over the trained tokens of all groups; returns that loss."""
    rows = micro_batches(groups, budget or sys.maxsize, switch=switch_length(model))
    parts = [select_segments(groups, row) for row in rows]
    total = sum(int(segment.trained.sum()) for group in groups for segment in group)
    lost = 0.0
    for part in parts:
        _, out = trained_logprobs(model, part)
        loss = -out.logp.mean() if len(parts) == 1 else -out.logp.sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        lost += float(loss.detach())
    return lost


def lessons(chat: Chat, packs: Mapping[str, Pack], recipe: Recipe) -> Iterator[list[list[Segment]]]:
    """Batches of the packs' demonstrations: the lessons in their order, then endless ones of the recipe itself."""
    for number, lesson in enumerate(recipe.lessons):
        part = dataclasses.replace(recipe, tool_rate=lesson.tool_rate)
        stream = demonstrations(part, packs, recipe.seed + 3 + number, lesson.families)
        yield from (_by_pack(chat, stream, recipe.rows) for _ in range(lesson.steps))
    yield from with_demonstrations(itertools.repeat([]), chat, packs, recipe, recipe.rows)


def _by_pack(
    chat: Chat, stream: Iterator[tuple[Pack, dict[str, Any], list[Any]]], rows: int
) -> list[list[Segment]]:
    """Rows of one pack share its system prompt, so they make a group of the packed forward."""
    groups: dict[str, list[Segment]] = {}
    for _ in range(rows):
        pack, _, messages = next(stream)
        groups.setdefault(pack.name, []).append(encode(chat, pack, messages))
    return list(groups.values())


def with_demonstrations(
    stored: Iterator[list[list[Segment]]],
    chat: Chat,
    packs: Mapping[str, Pack],
    recipe: Recipe,
    rows: int,
) -> Iterator[list[list[Segment]]]:
    """Batches of stored episodes (rft.py), each with so many of the packs' demonstrations beside them."""
    stream = demonstrations(recipe, packs, recipe.seed + 2)
    for batch in stored:
        yield [*batch, *_by_pack(chat, stream, rows)]


def use_recipe(run: RecipeRun) -> bool:
    """Make the model of a recipe, by `make` of the recipe.py beside its settings, or from packs if it has none.

    False if it was stopped before. A recipe of packs is made in one go: a stop leaves nothing.
    Raises UsageError, ConfigError.
    """
    code = run.path.with_name("recipe.py")
    if code.is_file():
        own = getattr(load_file(code), "make", None)
        if not callable(own):
            hint = "def make(run: RecipeRun) -> bool: ..."
            raise ConfigError(f"{code} has no function `make`.", hint=hint)
        return bool(own(run))
    if run.resume:
        raise UsageError(f"{run.path} is trained in one go: it cannot be resumed.")
    recipe = parse_recipe(run.settings, run.path)

    def report(step: int, loss: float, seconds: float) -> None:
        run.report(step, recipe.total, loss)
        if run.stopped():
            raise KeyboardInterrupt

    with written_whole(run.folder, keep=True) as folder:
        make(recipe, folder, report)
    return True


def make(
    recipe: Recipe, folder: Path, report: Callable[[int, float, float], None] | None = None
) -> None:
    """Make the model of a recipe and write it into `folder`.

    With `architecture` a model from nothing (bfloat16 safetensors), with `adapter` an adapter of the bundled model
    (float16, and the tokenizer). Raises ConfigError for a recipe with neither.
    """
    if recipe.architecture is None and recipe.adapter is None:
        raise ConfigError(
            "The recipe has neither `architecture` nor `adapter`: it would train all weights of a model that is there.",
            hint="That is: agentrl sft OUT --model MODEL --pack PACK",
        )
    # One thread: the sums of a step then come in the same order on every number of cores.
    torch.set_num_threads(1)
    packs = {name: load_pack(name) for name in recipe.packs}
    if recipe.adapter is not None:
        return _make_adapter(recipe, packs, folder, report)
    tokenizer = make_tokenizer(recipe, packs, folder)
    shape = recipe.architecture or {}
    if "vision" in shape:
        model = make_seeing_model(shape, tokenizer, folder, recipe.seed)
        chat = attach(model, [folder], lambda images: Chat(tokenizer, images=images))
        assert chat is not None
    else:
        model, chat = make_model(shape, tokenizer.vocab_size, recipe.seed), Chat(tokenizer)
    train(model, chat, packs, recipe, report)
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]  # a transformers model


def _make_adapter(recipe: Recipe, packs: Mapping[str, Pack], folder: Path, report: Any) -> None:
    tree = {"adapter": {**(recipe.adapter or {}), "enabled": True}, "seed": recipe.seed}
    config = Config.model_validate({**tree, "model": {"dtype": "float32", "device": "cpu"}})
    loaded = load_policy("tiny", config, base=Path(), trainable=True)
    train(loaded.model, loaded.chat, packs, recipe, report)
    for parameter in loaded.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float16)
    name_base(loaded.model, "tiny", None)
    assert loaded.folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    save_model(loaded.model, loaded.folder, folder)
