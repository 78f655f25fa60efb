"""The teacher that `algo.advantage: distill` names: a model, an adapter, a server, or the trained model itself."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from agentrl_cli.chat.tokenizer import BaseTokenizer
from agentrl_cli.config.estimators import Distill
from agentrl_cli.config.records import TrainerSettings
from agentrl_cli.errors import BadAnswer, ConfigError, ModelError
from agentrl_cli.learning.distill import Teacher
from agentrl_cli.learning.packing import Segment
from agentrl_cli.models.adapter import transformer
from agentrl_cli.models.load import load_model, load_tokenizer, model_folder
from agentrl_cli.policies.load import Loaded
from agentrl_cli.policies.remote.checked import choice_of, items, log_probabilities, part
from agentrl_cli.policies.remote.http import Endpoint
from agentrl_cli.store import Store
from agentrl_cli.types import Episode, Float32, Int32, Task

PROBE = "The quick brown fox: 1 + 2 = 3. 你好。"
"""A text that shows whether a server's tokenizer has the same ids."""


def find_teacher(
    config: TrainerSettings, loaded: Loaded, tasks: Sequence[Task], store: Store, base: Path
) -> Teacher | None:
    """Return the configured teacher; None if the estimator needs none.

    Raises ConfigError if its tokenizer is another or a hint cannot be filled in, ModelError or PolicyError if it
    cannot be had.
    """
    options = config.algo.advantage
    if not isinstance(options, Distill):
        return None
    teacher = Teacher(options)
    if options.hint:
        teacher.hint = _hints(options.hint, tasks, loaded.chat.tokenizer)
    elif options.teacher == "self":
        raise ConfigError(
            "algo.advantage.teacher is self: the trained model as its own teacher learns nothing without a hint.",
            hint='Name a teacher, or give it more to see: algo.advantage.hint: "The answer is {answer}."',
        )
    if options.teacher.startswith(("http://", "https://")):
        if options.form != "sampled" or config.rollout.temperature != 1.0:
            raise ConfigError(
                "A server gives the sampled token's log-probability at temperature 1 only.",
                hint="Set algo.advantage.form: sampled and rollout.temperature: 1, or name a local teacher.",
            )
        teacher.server = Server(options, loaded)
    elif options.teacher != "self":
        teacher.model = _local(options.teacher, config, loaded, store, base)
    return teacher


def _local(
    name: str, config: TrainerSettings, loaded: Loaded, store: Store, base: Path
) -> nn.Module:
    folder = model_folder(name, config.model, base=base, store=store)
    own = load_tokenizer(folder, config.model, base)
    require_same_tokenizer(name, own, loaded.chat.tokenizer)
    model = load_model(folder, config.model, base=base).requires_grad_(False).eval()
    share(model, loaded.model)
    return model


def require_same_tokenizer(name: str, teacher: BaseTokenizer, student: BaseTokenizer) -> None:
    """Raise ConfigError unless both give the same ids to the same text; chat templates may differ."""
    if teacher.json == student.json:
        return
    try:
        mine, other = (json.loads(each.json) for each in (student, teacher))
    except ValueError:
        mine, other = {}, {"model": None}
    same = all(mine.get(key) == other.get(key) for key in ("model", "normalizer", "pre_tokenizer"))
    if not same or {t.id: t.text for t in teacher.added} != {t.id: t.text for t in student.added}:
        raise ConfigError(
            f"The teacher {name} has another tokenizer than the student, so it cannot score the student's tokens.",
            hint="Take a teacher of the same family, or `agentrl sft warm --from-store outcome:solved`.",
        )


def share(teacher: nn.Module, student: nn.Module) -> None:
    """Let the teacher use the student's frozen weights where they are equal: an adapter's base is loaded once."""
    own = {
        name.replace(".base_layer.", "."): weight
        for name, weight in transformer(student).named_parameters()
        if not weight.requires_grad
    }
    for name, weight in transformer(teacher).named_parameters():
        found = own.get(name.replace(".base_layer.", "."))
        if (
            found is not None
            and found.shape == weight.shape
            and found.dtype == weight.dtype
            and found.equal(weight)
        ):
            weight.data = found.data


def _hints(
    text: str, tasks: Sequence[Task], tokenizer: BaseTokenizer
) -> Callable[[Episode], Int32]:
    """Return the hint of each episode's task, as token ids."""
    found: dict[tuple[str, str], Int32] = {}
    for task in tasks:
        try:
            fields = {
                key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                for key, value in task.data.items()
            }
            filled = text.format_map(fields)
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            known = ", ".join(sorted(task.data)) or "none"
            raise ConfigError(
                f"algo.advantage.hint cannot be filled in for task {task.id}: {error!r}.",
                hint=f"Fields of its row: {known}. A brace itself is written twice.",
            ) from error
        ids, _ = tokenizer.encode_offsets("\n" + filled, [(0, len(filled) + 1)])
        found[task.pack, task.id] = np.asarray(ids, np.int32)
    return lambda episode: found[episode.pack, episode.task_id]


class Server:
    """A server that gives log-probabilities of given ids, in OpenAI's form of /completions with `echo`."""

    def __init__(self, options: Distill, loaded: Loaded) -> None:
        """Asks it about one text. Raises ConfigError for another tokenizer, PolicyError if it cannot answer."""
        self.options = options
        self.model = options.server_model or loaded.name
        ids = loaded.chat.tokenizer.encode(PROBE)
        (answer,) = self._ask([ids], lambda answer: part(choice_of(answer), "logprobs"))
        self._read(ids, answer)
        spelled = "".join(str(text) for text in items(answer.get("tokens"), "tokens")[: len(ids)])
        plain, wanted = (text.encode("ascii", "ignore") for text in (spelled, PROBE))
        if not spelled.startswith("token_id:") and plain != wanted:
            raise ConfigError(
                f"The teacher at {options.teacher} has another tokenizer than the student: it reads {spelled[:60]!r}"
                f" where the student wrote {PROBE[:60]!r}.",
                hint="Serve a model of the same family.",
            )

    def __call__(self, segments: Sequence[Segment]) -> list[Float32]:
        """[n] log-probabilities of the trained tokens of each sequence. Raises ConfigError for one with images."""
        if any(segment.images for segment in segments):
            raise ConfigError(
                "A server's teacher reads text alone, and an episode of this step has images.",
                hint="Name a local teacher: algo.advantage.teacher.",
            )
        ids = [segment.ids.tolist() for segment in segments]
        answers = self._ask(ids, lambda answer: part(choice_of(answer), "logprobs"))
        pairs = zip(segments, ids, answers, strict=True)
        return [self._read(each, answer)[segment.trained] for segment, each, answer in pairs]

    def _read(self, ids: Sequence[int], answer: Mapping[str, Any]) -> Float32:
        """[n] of all ids; the first, which nothing precedes, has 0."""
        found = items(answer.get("token_logprobs"), "token_logprobs")[: len(ids)]
        if len(found) < len(ids):
            raise ModelError(
                f"The teacher at {self.options.teacher} gives no log-probabilities of given ids"
                f" ({len(found)} for {len(ids)}).",
                hint="vLLM does, and servers with `echo` and `logprobs` in /completions; most hosted models do not.",
            )
        try:
            return log_probabilities([0.0, *found[1:]], len(ids))
        except BadAnswer as error:
            raise ModelError(f"The teacher at {self.options.teacher} {error.message}.") from error

    def _ask(self, prompts: Sequence[Sequence[int]], read: Any) -> list[Any]:
        """One answer for each prompt. Runs in a loop of its own: an update is not asynchronous."""

        async def all_of() -> list[Any]:
            key = os.environ.get(self.options.api_key_env, "") if self.options.api_key_env else ""
            endpoint = Endpoint(self.options.teacher, api_key=key)
            more = {
                "model": self.model,
                "max_tokens": 1,
                "temperature": 1.0,
                "echo": True,
                "logprobs": 1,
            }
            try:
                asked = [
                    endpoint.ask("/completions", {"prompt": list(p), **more}, read) for p in prompts
                ]
                return await asyncio.gather(*asked)
            finally:
                await endpoint.close()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, all_of()).result()
