"""Images that tools answer: into the messages, the ids, the forward of sampling and of training, the store, exports."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.chat.images import Images, pictured
from agentrl_cli.chat.render import Chat
from agentrl_cli.config import Config
from agentrl_cli.errors import EnvError, PolicyError, TemplateError
from agentrl_cli.policies.forward import Segment, pack, trained_logprobs
from agentrl_cli.policies.local import LocalPolicy
from agentrl_cli.policies.local_load import load_policy
from agentrl_cli.policies.local_vision import Reader, positions, reader_of
from agentrl_cli.rewards import Reward
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store import Store
from agentrl_cli.tasks import Pack
from agentrl_cli.types import Episode, Generation, Origin, Outcome, Sampling, ToolResult
from agentrl_cli.types.content import content_text
from tests.vision_helpers import byte_tokenizer, png, vision_folder

pytest.importorskip("PIL")
RED, BLUE = png(24, 16), png(32, 32, (0, 0, 255))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("qwen2-vl"))


def look(number: int) -> ToolResult:
    """Look at a picture.

    Args:
        number: Which.
    """
    return ToolResult(f"picture {number}", images=(RED, BLUE)[number : number + 1])


def call(*numbers: int) -> str:
    said = [json.dumps({"name": "look", "arguments": {"number": n}}) for n in numbers]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in said)


PACK = Pack.of("look", [{"prompt": "What is there?"}], [Reward("r", lambda e, c: float(e.seed % 2))], tools=[look])


class Directed:
    """A local policy whose first turns are forced, so that random weights call tools; what follows is its own."""

    def __init__(self, policy: LocalPolicy, chat: Chat, turns: Sequence[str]) -> None:
        self.policy, self.chat, self.turns = policy, chat, turns
        self.seen: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    async def generate(self, key: str, ids: Any, sampling: Sampling, **more: Any) -> Generation:
        number = self.seen[key] = self.seen.get(key, -1) + 1
        if number < len(self.turns):
            wanted = [*self.chat.tokenizer.encode(self.turns[number]), self.chat.stop_ids[0]]
            sampling = replace(sampling, allow=lambda out: wanted[len(out) : len(out) + 1])
        else:
            sampling = replace(sampling, max_new_tokens=12)
        return await self.policy.generate(key, ids, sampling, **more)


def whole(model: Any, ids: Sequence[int], images: Sequence[bytes]) -> torch.Tensor:
    """[n, vocabulary] log-probabilities by the model's own forward over everything at once."""
    given = torch.tensor([list(ids)])
    reader = reader_of(model)
    assert reader is not None
    base = getattr(model, "get_base_model", lambda: model)()
    base.model.rope_deltas = None
    pixels = reader.inputs(given[0], images)
    with torch.no_grad():
        out = model(input_ids=given, mm_token_type_ids=(given == reader.token).int(), use_cache=False, **pixels)
    return out.logits[0].float().log_softmax(-1)


async def episodes(loaded: Any, turns: Sequence[str], count: int = 2, **more: Any) -> list[Episode]:
    config = Config.model_validate({"rollout": {"max_new_tokens": 200, "max_tokens": 900, "max_turns": 3}})
    directed: Any = Directed(loaded.policy, loaded.chat, turns)
    rollout = Rollout(directed, loaded.chat, {"look": PACK}, config, **more)
    task = PACK.tasks("train")[0]
    return await rollout.run([Job(task, seed=n, sample=n, group_id="g") for n in range(count)])


# --- the chat --------------------------------------------------------------------------------------------------------


def test_ids_of_a_conversation_with_images_are_the_processors_own(folder: Path) -> None:
    """Placeholders become as many tokens as the processor makes patches; the delta is what a full rendering has."""
    loaded = load_policy(str(folder), Config(), base=folder)
    chat, reader = loaded.chat, reader_of(loaded.model)
    assert chat.images is not None and reader is not None
    assert reader.measure(RED) == (24, 16, 6) and reader.measure(BLUE) == (32, 32, 16)
    said = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "yes"}]
    answers = [{"role": "tool", "name": "look", "content": f"it {n}", "tool_call_id": "c"} for n in range(2)]
    new, pixels = pictured(answers, [ToolResult("", images=(RED,)), ToolResult("", images=(BLUE,))], chat.images)
    assert pixels == (RED, BLUE)
    assert content_text(new[0]["content"]).startswith("[image 24x16 ") and "it 0" in content_text(new[0]["content"])
    start = chat.prompt(said[:1])
    model = chat.assistant_ids(said[1])
    delta = chat.extend(said, new, last_id=model[-1])
    assert [*start.ids, *model, *delta.ids] == chat.render([*said, *new], add_generation_prompt=True).ids
    origin = np.array(delta.origin)[np.array(delta.ids) == reader.token]
    assert len(origin) == 22 and set(origin.tolist()) == {int(Origin.TOOL)}
    words = [t for t, o in zip(delta.ids, delta.origin, strict=True) if o == Origin.TOOL and t != reader.token]
    assert chat.decode(words) == "it 0it 1"
    # Text that looks like a placeholder stays text, from a tool as from a model.
    fake = chat.extend(said, [{"role": "tool", "name": "look", "content": "<|image_pad|>"}], last_id=model[-1])
    assert reader.token not in fake.ids and reader.token not in chat.continuation(
        [{"role": "assistant", "content": "<|image_pad|>"}]
    )
    one = Chat(byte_tokenizer(), images=Images(reader.token, reader.measure))
    with pytest.raises(TemplateError, match="1 places for 0 images"):
        one.assistant_ids("<|image_pad|>")


# --- sampling and training ------------------------------------------------------------------------------------------


async def test_what_is_sampled_after_an_image_is_what_training_computes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"adapter": {"enabled": True, "r": 2}})
    with caplog.at_level(logging.WARNING):
        loaded = load_policy(str(folder), config, base=folder, trainable=True)
    engine: Any = loaded.policy
    assert engine.engine == "plain" and "reads images" in caplog.text and "one by one" in caplog.text
    with torch.no_grad():
        for name, weights in loaded.model.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=0.2)
    made = await episodes(loaded, [call(0), call(1, 0)], count=3)
    for episode in made:
        assert episode.images == (RED, BLUE, RED) and episode.trained_tokens == 12
        wanted = whole(loaded.model, episode.tokens.ids, episode.images)
        trained = np.flatnonzero(episode.tokens.trained_mask)
        exact = wanted[trained - 1, episode.tokens.ids[trained]].numpy()
        assert np.abs(episode.tokens.logp_policy[trained] - exact).max() < 1e-4
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        packed, out = trained_logprobs(loaded.model, [[Segment.of(e) for e in made]])
    assert "one episode at a time" in caplog.text
    sampled = np.concatenate([e.tokens.logp_policy[e.tokens.trained_mask] for e in made])
    assert np.abs(out.logp.detach().numpy() - sampled).max() < 1e-4
    out.logp.sum().backward()
    grads = {name: w.grad for name, w in loaded.model.named_parameters() if w.requires_grad}
    assert any(g is not None and g.abs().sum() > 0 for name, g in grads.items() if "visual" in name)
    await loaded.policy.close()
