"""What the tests of training share: a tiny random model folder, a bandit pack without tools, a run over both."""

from __future__ import annotations

import asyncio
import atexit
import json
import multiprocessing
import os
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli import Config, Episode
from agentrl_cli.chat.tiny_template import tiny_template
from agentrl_cli.runtime import open_runtime
from agentrl_cli.store import RunRow, Store
from agentrl_cli.store.new_run import new_run
from tests.helpers.processes import comes

if TYPE_CHECKING:
    from agentrl_cli.trainer import Trainer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
PAD, STOP = 0, 2
VOCABULARY = len(SPECIALS) + 256


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    """One token a byte, and the special ones; `template` "" leaves the chat template out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: n for n, text in enumerate([*SPECIALS, *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    data = json.loads(backend.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template != "":
        (folder / "chat_template.jinja").write_text(template or tiny_template())


def write_model(
    folder: Path,
    *,
    layers: int = 1,
    only: int | None = None,
    template: str | None = None,
    head_dim: int = 16,
    hidden: int = 32,
) -> Path:
    """A random Qwen3; with `only` one that says nothing but this token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    write_tokenizer(folder, template)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=STOP,
        pad_token_id=PAD,
    )
    model = Qwen3ForCausalLM(config)
    if only is not None:
        with torch.no_grad():
            for weights in model.parameters():
                weights.zero_()
            model.model.embed_tokens.weight.fill_(1.0)
            model.model.norm.weight.fill_(1.0)
            model.lm_head.weight[only] = 1.0
    model.save_pretrained(folder)
    return folder


TASK_YAML = """\
name: bandit
description: Say tokens with even ids.
sandbox: false
rewards:
  even: {weight: 1.0, primary: true}
  length: {weight: 0.0}
"""

TASK_PY = """\
def even(episode, ctx):
    said = episode.tokens.ids[episode.tokens.trained_mask]
    return ctx.part(float((said % 2 == 0).mean()), f"{len(said)} tokens")


def length(episode, ctx):
    return episode.trained_tokens


REWARDS = {"even": even, "length": length}
"""


def write_pack(
    folder: Path, *, rows: int = 6, code: str = TASK_PY, prompt: str = "Go {n}."
) -> Path:
    """The bandit: half of all tokens have even ids, so a random model gets about one half."""
    (folder / "data").mkdir(parents=True)
    (folder / "task.yaml").write_text(TASK_YAML)
    (folder / "task.py").write_text(code)
    for split in ("train", "test"):
        lines = [
            json.dumps({"id": f"{split}{n}", "family": "even", "prompt": prompt.format(n=n)})
            for n in range(rows)
        ]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """A configuration as a mapping: small and quick; `sections` go over it."""
    base: dict[str, dict[str, Any]] = {
        "model": {"name": str(folder), "device": "cpu", "dtype": "float32"},
        "task": {"packs": ["."]},
        "rollout": {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 4, "max_tokens": 96},
        "train": {"steps": 2, "lr": 1e-3, "warmup_steps": 0, "save_every": 50},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return base


def write_project(folder: Path, model: Path, **sections: Any) -> Path:
    """A pack with an agentrl.yaml: what `agentrl init` makes."""
    if not (folder / "task.yaml").is_file():
        write_pack(folder)
    (folder / "agentrl.yaml").write_text(json.dumps(settings(model, **sections)))  # JSON is YAML
    return folder


@asynccontextmanager
async def trainer_of(
    project: Path,
    folder: Path,
    hooks: Sequence[object] = (),
    run: RunRow | None = None,
    **sections: Any,
) -> AsyncIterator[Trainer]:
    from agentrl_cli.trainer import build_trainer
    from agentrl_cli.trainer.compute import find_learner

    if not (project / "task.yaml").is_file():
        write_pack(project)
    config = Config.model_validate(settings(folder, **sections))
    db = project / "runs" / "agentrl.db"
    async with open_runtime(config, base=project, db=db, trainable=True, hooks=hooks) as runtime:
        row = run or new_run(
            config,
            runtime.store,
            kind="train",
            packs=list(runtime.packs),
            tokenizer=runtime.loaded.hash,
        )
        maker = find_learner(config)
        yield build_trainer(config, row, runtime.loaded, runtime.rollout(), maker=maker)


@asynccontextmanager
async def after_training(
    project: Path,
    folder: Path,
    hooks: Sequence[object] = (),
    run: RunRow | None = None,
    **sections: Any,
) -> AsyncIterator[tuple[Trainer, RunRow]]:
    """As `trainer_of`, with the run once it has been trained."""
    async with trainer_of(project, folder, hooks, run, **sections) as trainer:
        yield trainer, await trainer.train()


def train_here(project: Path, folder: Path, **sections: Any) -> RunRow:
    """Train in this process; the run as it ended."""

    async def train() -> RunRow:
        async with after_training(project, folder, **sections) as (_, run):
            return run

    return asyncio.run(train())


def episodes_of(store: Store, run: RunRow, step: int | None = None) -> list[Episode]:
    where = "kind:train" + (f" step:{step}" if step is not None else "")
    rows = store.episodes.rows(store.episodes.ids(where, "time", run=run.id))
    return [store.episodes.get(row.id) for row in rows]


# --- the command line in a process of its own ------------------------------------------------------------------------


PRELOADED = [
    "tests.helpers.train",
    "agentrl_cli.trainer",
    "agentrl_cli.commands.train",
    "agentrl_cli.trainer.resume",
    "agentrl_cli.sandbox",
    "agentrl_cli.agents.runners",
    "peft",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "tests.helpers.train_warm",
]


def spawn(project: Path, *args: str, before: Callable[[], None] | None = None) -> tuple[int, str]:
    """`agentrl ARGS` in a process of its own, in `project`: its exit code (minus the signal's number where one killed
    it) and what it wrote. The heavy imports are made once, in a server that the processes are forked from.
    `before` is called in the new process first."""
    return start(project, *args, before=before).end()


def spawn_well(project: Path, *args: str, before: Callable[[], None] | None = None) -> str:
    """As `spawn`, for a command that ends well: what it wrote."""
    code, output = spawn(project, *args, before=before)
    assert code == 0, output
    return output


@dataclass
class Started:
    process: Any
    log: Path

    def line(self, begins: str) -> str:
        """Wait for a line of its output that begins so."""

        def found() -> list[str]:
            text = self.log.read_text() if self.log.is_file() else ""
            whole = text.rpartition("\n")[0].splitlines()
            return [line for line in whole if line.startswith(begins)]

        assert comes(lambda: bool(found()), self.process.is_alive), self.end()
        return found()[0]

    def end(self) -> tuple[int, str]:
        try:
            self.process.join()
        except BaseException:  # the suite's limit
            self.process.kill()
            print(self.log.read_text())
            raise
        return self.process.exitcode, self.log.read_text()


def start(
    project: Path, *args: str, log: str = "output.txt", before: Callable[[], None] | None = None
) -> Started:
    """As `spawn`, without waiting; `log` is the file in `project` that takes what it writes."""
    return _start(project / log, agentrl_process, str(project), str(project / log), [*args], before)


def _start(log: Path, target: Callable[..., None], *given: object) -> Started:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    log.unlink(missing_ok=True)
    started = Started(context.Process(target=target, args=given), log)
    started.process.start()
    return started


def spawn_code(folder: Path, code: str, *args: str) -> tuple[int, str]:
    """As `spawn`, a program in Python instead of a command."""
    return start_code(folder, code, *args).end()


def start_code(folder: Path, code: str, *args: str, log: str = "output.txt") -> Started:
    """As `start`, a program in Python instead of a command."""
    return _start(folder / log, code_process, str(folder), str(folder / log), code, [*args])


def set_environment(**values: str) -> None:
    os.environ.update(values)


@contextmanager
def serving(project: Path, *args: str, **environment: str) -> Iterator[str]:
    """Yield the address that a command prints, which runs until SIGTERM."""
    before = partial(set_environment, **environment)
    server = start(project, *args, log=f"{project.name}.served", before=before)
    try:
        yield server.line("http")
    finally:
        server.process.terminate()
        server.end()


def agentrl_process(
    project: str, log: str, args: list[str], before: Callable[[], None] | None = None
) -> None:
    import torch

    from agentrl_cli.commands import main

    torch.set_num_threads(1)
    _enter(project, log)
    if before is not None:
        before()
    sys.argv[1:] = args  # what a command starts again
    with as_program():
        sys.exit(main(args))


def code_process(folder: str, log: str, code: str, args: list[str]) -> None:
    _enter(folder, log)
    sys.argv[1:] = args
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    with as_program():
        exec(code, vars(main))


def _enter(folder: str, log: str) -> None:
    os.chdir(folder)
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


@contextmanager
def as_program() -> Iterator[None]:
    """Run what is registered to run at the end of a program, which multiprocessing leaves out."""
    atexit._clear()  # of the process that this one was forked from
    try:
        yield
    finally:
        atexit._run_exitfuncs()


def as_bytes(value: Any) -> Any:
    """Nested dicts and lists with every tensor as its bytes, to be compared."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: as_bytes(item) for key, item in value.items()}
    return [as_bytes(item) for item in value] if isinstance(value, (list, tuple)) else value
