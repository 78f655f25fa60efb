"""Supervised fine-tuning on demonstrations: the cold start before RL, and how the bundled model is made.

`Recipe` says everything, so that a seed gives the same weights on the same machine: the packs and how often each is
drawn, the share of demonstrations that use a tool where one is needed (the others guess), the drills, the steps. A
recipe with `architecture` starts from nothing: it trains a tokenizer on the packs' texts and a model from random
weights, which first copies random tokens (`drills`): a small transformer that can copy learns the tasks several times
faster.

Loss only on what a model would sample, the stop token included; rows that share a system prompt share its computation.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from agentrl_cli.chat.images import pictured
from agentrl_cli.chat.render import Chat
from agentrl_cli.chat.tokenizer import IMAGE_TOKENS, ByteTokenizer, Tokenizer, tiny_template
from agentrl_cli.config import Config
from agentrl_cli.config.yamlfile import load_yaml
from agentrl_cli.errors import ConfigError
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.packing import Segment, chosen, micro_batches
from agentrl_cli.models.adapter import name_base
from agentrl_cli.models.save import save_model
from agentrl_cli.models.vision import attach
from agentrl_cli.paths import models_dir
from agentrl_cli.policies.load import load_policy
from agentrl_cli.sft.pictures import make_seeing_model
from agentrl_cli.tasks import Pack, load_pack, question
from agentrl_cli.tasks.media import with_media
from agentrl_cli.types import Origin, Task
from agentrl_cli.types.content import content_text

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
# Words with their leading space, single digits, runs of signs, line breaks: Qwen's split.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN = 1000
"""Generated rows in a row that stand in a pack's files, after which its generator is taken to have no others."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What every recipe decides: how long, how fast, how large."""

    steps: int = 200
    rows: int = 16
    """Conversations in a step."""
    lr: float = 3e-4
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.0
    """Peak learning rate of Muon for the matrices of the hidden layers; 0: AdamW for all."""
    warmup: int = 20
    decay: float = 0.4
    """The last share of the steps, over which the rates fall linearly."""
    drills: int = 0
    """First steps in which the model copies random tokens."""
    vocabulary: int = 768
    texts: int = 4000
    """Conversations that the tokenizer is trained on."""
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def rate(self, step: int, total: int, least: float) -> float:
        """Factor on the learning rates: a linear warm-up, level, a linear fall to `least`."""
        falling = (total - step) / max(1.0, self.decay * total)
        return min(1.0, (step + 1) / max(1, self.warmup), max(least, falling))


@dataclass(frozen=True, kw_only=True)
class Recipe(Schedule):
    """Everything that decides the weights. The drills come before the demonstrations."""

    packs: Mapping[str, float]
    """Pack → how often it is drawn, relative to the others."""
    tool_rate: float = 1.0
    """Share of demonstrations that use the tool where one is needed."""
    architecture: Mapping[str, Any] | None = None
    """Arguments of Qwen3Config, or `text`, `vision` and `pixels` (pictures.py); None: fine-tune a given model."""
    adapter: Mapping[str, Any] | None = None
    """Keys of the section `adapter` of the configuration: train a LoRA adapter of the bundled model."""


def load_recipe(path: Path | None = None) -> Recipe:
    """A recipe from YAML, by default the bundled model's. Raises ConfigError for unknown keys."""
    path = path or models_dir() / "tiny-agent.recipe.yaml"
    try:
        return Recipe(**load_yaml(path))
    except TypeError as error:
        raise ConfigError(f"{path} is not a recipe: {error}") from error


# --- demonstrations --------------------------------------------------------------------------------------------------


def demonstrations(recipe: Recipe, packs: Mapping[str, Pack], seed: int) -> Iterator[tuple[Pack, list[Any]]]:
    """Endless (pack, messages): fresh rows of the training families, never one whose question stands in `data/`."""
    for pack, row, messages in drawn(recipe, packs, seed):
        yield pack, [*_task(pack, row).prompt, *messages]


def drawn(recipe: Recipe, packs: Mapping[str, Pack], seed: int) -> Iterator[tuple[Pack, dict[str, Any], list[Any]]]:
    """Endless (pack, row, what its demonstration says after the prompt)."""
    rng = random.Random(f"demonstrations {seed}")
    names, weights = list(recipe.packs), list(recipe.packs.values())
    rows = {name: _fresh(pack, 1000 + seed) for name, pack in packs.items()}
    while True:
        name = rng.choices(names, weights)[0]
        pack = packs[name]
        row = next(rows[name])
        if hasattr(pack.module, "demonstrate"):
            yield pack, row, pack.module.demonstrate(row, rng, recipe.tool_rate)
        else:
            yield pack, row, pack.module.solve(row)


def _fresh(pack: Pack, seed: int) -> Iterator[dict[str, Any]]:
    """Endless rows for demonstrations: the pack's generated ones that are not in its files.

    Without a generator, or once it gives nothing new, the rows of the training split in turn.
    """
    if hasattr(pack.module, "generate"):
        taken, known = _questions(pack), 0
        for row in pack.module.generate(seed):
            new = _question(pack, _task(pack, row)) not in taken
            known = 0 if new else known + 1
            if new:
                yield row
            elif known >= KNOWN:
                break
    rows = [{"prompt": list(task.prompt), **task.data} for task in pack.tasks("train")]
    while True:
        yield from random.Random(seed).sample(rows, len(rows))
        seed += 1


def _task(pack: Pack, row: Mapping[str, Any]) -> Task:
    return pack.task(with_media({"id": "demo", **row}), "demo")


def _question(pack: Pack, task: Task) -> str:
    return question(task.prompt, task.data, getattr(pack.module, "WORLD", ()))


def _questions(pack: Pack) -> set[str]:
    """The questions of the pack's own files."""
    splits = [split for split in pack.splits() if split not in pack.sources]
    return {_question(pack, task) for split in splits for task in pack.read(split)[0]}


def encode(chat: Chat, pack: Pack, messages: Sequence[Any]) -> Segment:
    """A demonstration as the forward sees it: ids, and which of them the model would have sampled."""
    shown, images = pictured(messages, (), chat.images, pack.dir)
    rendered = chat.conversation(shown, pack.schemas)
    origin = np.asarray(rendered.origin)
    return Segment(np.asarray(rendered.ids, np.int32), origin == Origin.MODEL, images)


def drill(rng: random.Random, digits: Sequence[int], vocabulary: int, rows: int) -> list[list[Segment]]:
    """Rows of random tokens that stand there twice; the second time is trained.

    Some are drawn from all tokens, some from a few, some mostly from the digits, so that a copy has to look at what
    came before and not at single tokens.
    """
    first, start, end = len(SPECIALS), 1, 2
    out = []
    for _ in range(rows):
        kind, count = rng.random(), rng.randint(8, 48)
        few = [rng.randrange(first, vocabulary) for _ in range(rng.randint(6, 20))]
        if kind < 0.4:
            text = [rng.randrange(first, vocabulary) for _ in range(count)]
        elif kind < 0.7:
            text = [rng.choice(few) for _ in range(count)]
        else:
            text = [rng.choice(digits) if rng.random() < 0.75 else rng.choice(few) for _ in range(count)]
        before, between = (
            [rng.randrange(first, vocabulary) for _ in range(rng.randint(0, 20))],
            [rng.randrange(first, vocabulary) for _ in range(rng.randint(0, 20))],
        )
        given = [start, *before, start, *text, end, *between, start]
        ids = np.asarray([*given, *text, end], np.int32)
        out.append([Segment(ids, np.arange(len(ids)) >= len(given))])
    return out


# --- a model from nothing --------------------------------------------------------------------------------------------


def make_tokenizer(recipe: Recipe, packs: Mapping[str, Pack], folder: Path) -> Tokenizer:
    """Train a byte-level BPE on the packs' conversations and write it into `folder` in Hugging Face's form."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    plain = Chat(ByteTokenizer())
    texts = []
    for _, (pack, messages) in zip(range(recipe.texts), demonstrations(recipe, packs, recipe.seed + 1), strict=False):
        said = [{**message, "content": content_text(message.get("content"))} for message in messages]
        texts.append(plain.decode(plain.conversation(said, pack.schemas).ids))
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[*SPECIALS, *(IMAGE_TOKENS if _sees(recipe) else ())],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    # The markers of tools are ordinary text that happens to be one token: they stay visible when decoded.
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(tiny_template(_sees(recipe)), encoding="utf-8")
    return Tokenizer.load(folder)


def _sees(recipe: Recipe) -> bool:
    return "vision" in (recipe.architecture or {})


def make_model(recipe: Recipe, vocabulary: int) -> nn.Module:
    """A Qwen3-shaped model with random weights from the recipe's seed."""
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    config = Qwen3Config(
        vocab_size=vocabulary, eos_token_id=2, pad_token_id=0, bos_token_id=None, **(recipe.architecture or {})
    )
    model: nn.Module = Qwen3ForCausalLM(config)
    return model


# --- training --------------------------------------------------------------------------------------------------------


def optimizers(model: nn.Module, lr: float, muon_lr: float = 0.0) -> list[torch.optim.Optimizer]:
    """AdamW for all; with `muon_lr` Muon for the hidden matrices (https://kellerjordan.github.io/posts/muon/)."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = [p for name, p in trained if muon_lr and p.ndim == 2 and "embed" not in name and "head" not in name]
    chosen = {id(p) for p in inner}
    rest = [p for _, p in trained if id(p) not in chosen]
    found: list[torch.optim.Optimizer] = []
    if rest:
        found.append(torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
    if inner:
        found.append(torch.optim.Muon(inner, lr=muon_lr, weight_decay=0.01, momentum=0.95))
    return found


def rate(recipe: Recipe, step: int) -> float:
    """Factor on the learning rate, which falls to a twentieth."""
    return recipe.rate(step, recipe.drills + recipe.steps, 0.05)


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
        stream = demonstrations(recipe, packs, recipe.seed + 2)
        batches = (_by_pack(chat, stream, recipe.rows) for _ in itertools.count())
    opts = optimizers(model, recipe.lr, recipe.muon_lr)
    base = [[group["lr"] for group in opt.param_groups] for opt in opts]
    model.train()
    started = time.monotonic()
    for step in range(recipe.drills + recipe.steps):
        for opt, rates in zip(opts, base, strict=True):
            for group, lr in zip(opt.param_groups, rates, strict=True):
                group["lr"] = lr * rate(recipe, step)
        groups = drill(rng, digits, chat.tokenizer.vocab_size, recipe.rows) if step < recipe.drills else next(batches)
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
    parts = [groups] if budget is None else [chosen(groups, row) for row in micro_batches(groups, budget)]
    total = sum(int(segment.trained.sum()) for group in groups for segment in group)
    lost = 0.0
    for part in parts:
        _, out = trained_logprobs(model, part)
        loss = -out.logp.mean() if len(parts) == 1 else -out.logp.sum() / total
        loss.backward()  # type: ignore[no-untyped-call]
        lost += float(loss.detach())
    return lost


def _by_pack(chat: Chat, stream: Iterator[tuple[Pack, list[Any]]], rows: int) -> list[list[Segment]]:
    """Rows of one pack share its system prompt, so they make a group of the packed forward."""
    groups: dict[str, list[Segment]] = {}
    for _ in range(rows):
        pack, messages = next(stream)
        groups.setdefault(pack.name, []).append(encode(chat, pack, messages))
    return list(groups.values())


def with_demonstrations(
    stored: Iterator[list[list[Segment]]], chat: Chat, packs: Mapping[str, Pack], recipe: Recipe, rows: int
) -> Iterator[list[list[Segment]]]:
    """Batches of stored episodes (rft.py), each with so many of the packs' demonstrations beside them."""
    stream = demonstrations(recipe, packs, recipe.seed + 2)
    for batch in stored:
        yield [*batch, *_by_pack(chat, stream, rows)]


def make(recipe: Recipe, folder: Path, report: Callable[[int, float, float], None] | None = None) -> None:
    """Make what a recipe describes and write it into `folder`.

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
    if _sees(recipe):
        model = make_seeing_model(recipe.architecture or {}, tokenizer, folder, recipe.seed)
        chat = attach(model, [folder], lambda images: Chat(tokenizer, images=images))
        assert chat is not None
    else:
        model, chat = make_model(recipe, tokenizer.vocab_size), Chat(tokenizer)
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
