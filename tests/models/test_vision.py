"""Images that tools answer: into the messages, the ids, the forward of sampling and of training, the store, exports."""

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli import ByteTokenizer, Chat, Config, Pack, Reward, ScriptedPolicy, Store, ToolEnv
from agentrl_cli.chat.images import Images, place_images
from agentrl_cli.chat.media import image_size
from agentrl_cli.errors import EnvError, ModelError, PolicyError, TemplateError
from agentrl_cli.learning.forward import trained_logprobs
from agentrl_cli.learning.packing import Segment, pack
from agentrl_cli.models.checkpoint import load_weights
from agentrl_cli.models.processor import images_of
from agentrl_cli.models.vision import reader_of
from agentrl_cli.policies.load import load_policy
from agentrl_cli.reports.export import export_lines, write_lines
from agentrl_cli.reports.html import export_html
from agentrl_cli.rollout import Job, Rollout
from agentrl_cli.store.display import short_runs
from agentrl_cli.tools import as_tool
from agentrl_cli.tools.base import as_result
from agentrl_cli.trainer.memory_plan import plan
from agentrl_cli.tui.common.layout import result_notes
from agentrl_cli.tui.common.reader import load_view, token_texts
from agentrl_cli.types import Episode, Generation, Origin, Outcome, Sampling, ToolResult
from agentrl_cli.types.content import content_text, data_uri
from tests.helpers.chat import call
from tests.helpers.cli import Cli
from tests.helpers.local import policy_of, tiny
from tests.helpers.session import open_chat
from tests.helpers.train import episodes_of, trainer_of, write_pack
from tests.helpers.vision import CONTROL, FAMILIES, TEMPLATE, byte_tokenizer, png, vision_folder

Image = pytest.importorskip("PIL.Image")
RED, BLUE = png(24, 16), png(32, 32, (0, 0, 255))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder(tmp_path_factory.mktemp("qwen2-vl"))


def PIL(data: bytes) -> Any:
    return Image.open(io.BytesIO(data))


def look(number: int) -> ToolResult:
    """Look at a picture.

    Args:
        number: Which.
    """
    return ToolResult(f"picture {number}", images=(RED, BLUE)[number : number + 1])


PACK = Pack.of(
    "look",
    [{"prompt": "What is there?"}],
    [Reward("r", lambda e, c: float(e.seed % 2))],
    tools=[look],
)


class Directed:
    """A local policy whose first turns are forced, so that random weights call tools; what follows is its own."""

    def __init__(self, policy: Any, chat: Chat, turns: Sequence[str]) -> None:
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
        generation: Generation = await self.policy.generate(key, ids, sampling, **more)
        return generation


def whole(model: Any, ids: Any, images: Sequence[bytes]) -> torch.Tensor:
    """[n, vocabulary] log-probabilities by the model's own forward over everything at once, its processor's pixels."""
    given = torch.tensor([list(ids)])
    reader: Any = reader_of(model)
    base = getattr(model, "get_base_model", lambda: model)()
    base.model.rope_deltas = None
    pixels: dict[str, Any] = {}
    if images:
        pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in images]
        options = getattr(reader.processor, "images_kwargs", {})
        pixels = dict(
            reader.processor.image_processor(images=[pictures], return_tensors="pt", **options)
        )
        for unused in ("rows", "cols", "num_crops"):
            pixels.pop(unused, None)
        if reader.types:
            pixels[reader.types] = (given == reader.token).int()
    logits: torch.Tensor = model(input_ids=given, use_cache=False, **pixels).logits[0]
    return logits.float().log_softmax(-1)


# --- the chat --------------------------------------------------------------------------------------------------------


def test_ids_of_a_conversation_with_images_are_the_processors_own(folder: Path) -> None:
    loaded = load_policy(str(folder), Config(), base=folder)
    chat: Any = loaded.chat
    reader: Any = reader_of(loaded.model)
    assert chat.shows_images
    assert reader.measure(RED) == (24, 16, 6, ()) and reader.measure(BLUE) == (32, 32, 16, ())
    from transformers import Qwen2VLProcessor

    # The whole processor cannot be made without torchvision; its own rule can be asked.
    rule: Any = Qwen2VLProcessor.replace_image_token
    parts = SimpleNamespace(image_processor=reader.processor.image_processor, image_token="#")
    for data in (RED, BLUE):
        grid = {
            "image_grid_thw": reader.inputs(
                torch.tensor([reader.token] * reader.measure(data)[2]), [data]
            )["image_grid_thw"]
        }
        assert rule(parts, grid, 0) == "#" * reader.measure(data)[2]
    said = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "yes"}]
    answers = [
        {"role": "tool", "name": "look", "content": f"it {n}", "tool_call_id": "c"}
        for n in range(2)
    ]
    new, pixels = place_images(
        answers, [ToolResult("", images=(RED,)), ToolResult("", images=(BLUE,))], chat.images
    )
    assert pixels == (RED, BLUE)
    assert content_text(new[0]["content"]).startswith("[image 24x16 ") and "it 0" in content_text(
        new[0]["content"]
    )
    start = chat.prompt(said[:1])
    model = chat.assistant_ids(said[1])
    delta = chat.extend(said, new, last_id=model[-1])
    assert [*start.ids, *model, *delta.ids] == chat.render(
        [*said, *new], add_generation_prompt=True
    ).ids
    origin = np.array(delta.origin)[np.array(delta.ids) == reader.token]
    assert len(origin) == 22 and set(origin.tolist()) == {int(Origin.TOOL)}
    words = [
        t
        for t, o in zip(delta.ids, delta.origin, strict=True)
        if o == Origin.TOOL and t != reader.token
    ]
    assert chat.decode(words) == "it 0it 1"
    # Text that looks like a placeholder stays text, from a tool as from a model.
    fake = chat.extend(
        said, [{"role": "tool", "name": "look", "content": "<|image_pad|>"}], last_id=model[-1]
    )
    assert reader.token not in fake.ids and reader.token not in chat.continuation(
        [{"role": "assistant", "content": "<|image_pad|>"}]
    )
    one = Chat(byte_tokenizer(), images=Images(reader.token, reader.measure))
    with pytest.raises(TemplateError, match="1 places for 0 images"):
        one.assistant_ids("<|image_pad|>")


def test_rows_with_images_and_videos(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    moving = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), (n * 20, 0, 0)) for n in range(10)]
    frames[0].save(moving, format="PNG", save_all=True, append_images=frames[1:])
    (tmp_path / "moves.png").write_bytes(moving.getvalue())
    uri = data_uri(BLUE)
    said = [{"role": "user", "content": "a <image>b<video>"}]
    texts = {"prompt": said, "images": [{"bytes": RED}]}
    rows: list[dict[str, Any]] = [
        {"id": "texts", **texts, "videos": [{"video": "moves.png", "max_frames": 3}]},
        {
            "id": "column",
            "prompt": [{"role": "system", "content": "s"}, {**said[0], "content": "u"}],
            "image": PIL(BLUE),
        },
        {
            "id": "parts",
            "prompt": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}
            ],
        },
        {"id": "path", "prompt": "p", "images": ["red.png"]},
    ]
    pack = replace(Pack.of("p", rows, [Reward("r", lambda e, c: 1.0)]), dir=tmp_path)
    tasks = pack.tasks("train")
    images = Images(7, lambda data: (*image_size(data), 2, ()))
    found = [place_images(task.prompt, (), images, tmp_path) for task in tasks]
    assert [[p["type"] for p in m[-1]["content"]] for m, _ in found] == [
        ["text", "image", "text", "image", "image", "image"], ["image", "text"], ["image"], ["image", "text"],
    ]  # fmt: skip
    reds = [PIL(data).getpixel((1, 1))[0] for data in found[0][1][1:]]
    assert (
        found[0][1][0] == RED
        and reds == [0, 80, 180]
        and [f[1] for f in found[1:]] == [(BLUE,), (BLUE,), (RED,)]
    )
    assert all("images" not in task.data and "image" not in task.data for task in tasks)
    with Store.open(tmp_path / "s.db") as store:
        store.tasks.add(tasks)
        stored = [store.tasks.get(task.id) for task in tasks]
        assert [task.prompt for task in stored if task is not None] == [
            task.prompt for task in tasks
        ]
    with contextlib.closing(sqlite3.connect(tmp_path / "s.db")) as file:
        kept = {row[0] for row in file.execute("SELECT data FROM attachments")}
        assert (
            kept == {RED, BLUE}
            and not file.execute("SELECT 1 FROM tasks WHERE prompt LIKE '%base64%'").fetchall()
        )


async def test_images_of_tools_follow_in_a_user_message_if_the_template_shows_them_there_alone() -> (
    None
):
    part = '{%- if part.type == "image" %}<|vision_start|>'
    template = TEMPLATE.replace(
        part, '{%- if part.type == "image" and message.role == "tool" %}{%- elif' + part[6:]
    )
    tokenizer = ByteTokenizer(template, control=CONTROL)
    token: Any = tokenizer.id_of("<|image_pad|>")
    chat = Chat(tokenizer, images=Images(token, lambda data: (1, 1, 3, ())))
    assert chat.reads_images and not chat.shows_images
    policy = ScriptedPolicy([call("look", number=0), "a door"], tokenizer)
    rollout = Rollout(
        policy, chat, {"look": PACK}, Config.model_validate({"rollout": {"max_tokens": 4000}})
    )
    episode = await rollout.episode(Job(PACK.tasks("train")[0], 1))
    assert [turn.role for turn in episode.turns] == [
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
    ], episode.error
    assert (
        episode.images == (RED,) and (episode.tokens.ids == token).sum() == 3 and not episode.flags
    )


def test_what_functions_answer_as_pictures() -> None:
    image, uri = Image.new("RGB", (24, 16), (255, 0, 0)), data_uri(RED)
    for same in (
        image,
        RED,
        uri,
        [{"type": "image", "image": RED}],
        [{"type": "image_url", "image_url": {"url": uri}}],
        [{"type": "image", "image": uri}],
    ):
        assert as_result(same) == ToolResult("", images=(RED,))
    left, right = ({"type": "text", "text": text} for text in ("left", "right"))
    blocks = [left, {"type": "image", "image": image}, right]
    assert as_result(blocks) == ToolResult("left\nright", images=(RED,))
    with pytest.raises(EnvError, match="does not exist"):
        as_result(Path("/nowhere/a.png"))
    for other in ([{"type": "image", "url": "http://x"}], [{"type": "door"}], []):
        assert as_result(other) == ToolResult(json.dumps(other), value=other)


# --- sampling and training ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
async def test_batched_sampling_and_training_equal_a_plain_forward(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = vision_folder(tmp_path, family)
    config = Config.model_validate(
        {"rollout": {"max_new_tokens": 200, "max_tokens": 1500, "max_turns": 2}}
    )
    with caplog.at_level(logging.WARNING):
        loaded = load_policy(str(folder), config, base=folder)
    engine: Any = loaded.policy
    assert engine.describe() == "fallback (it reads images)" and loaded.chat.shows_images
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "Is <image> like <image>?", "images": [RED, PIL(BLUE)]},
        {"id": "b", "prompt": "What moves?", "videos": [[BLUE, RED, BLUE]]},
        {"id": "c", "prompt": "Nothing to see."},
    ]
    pack = Pack.of("look", rows, [Reward("r", lambda e, c: 1.0)], tools=[look])
    directed: Any = Directed(loaded.policy, loaded.chat, [call("look", number=0)])
    rollout = Rollout(directed, loaded.chat, {"look": pack}, config)
    tasks = pack.tasks("train")
    made = await rollout.run(
        [Job(t, seed=n, sample=n, group_id=t.id) for t in tasks for n in range(2)]
    )
    shown = {"a": (RED, BLUE), "b": (BLUE, RED, BLUE), "c": ()}
    reader: Any = reader_of(loaded.model)
    for episode in made:
        assert episode.images == (*shown[episode.task_id.removeprefix("look/")], RED), episode.error
        assert (episode.tokens.ids == reader.token).sum() == sum(
            reader.measure(i)[2] for i in episode.images
        )
        with torch.no_grad():
            wanted = whole(loaded.model, episode.tokens.ids, episode.images)
        trained = np.flatnonzero(episode.tokens.trained_mask)
        exact = wanted[trained - 1, episode.tokens.ids[trained]].numpy()
        assert np.abs(episode.tokens.logp_policy[trained] - exact).max() < 1e-4
    assert len({tuple(e.tokens.ids) for e in made}) == 6
    packed, out = trained_logprobs(
        loaded.model, [[Segment.of(e) for e in made[n : n + 2]] for n in (0, 2, 4)]
    )
    assert "one by one" not in caplog.text
    sampled = np.concatenate([e.tokens.logp_policy[e.tokens.trained_mask] for e in made])
    assert np.abs(out.logp.detach().numpy() - sampled).max() < 1e-4 and len(packed.images) == 6
    weights = [w for name, w in loaded.model.named_parameters() if "proj" in name]
    found = torch.autograd.grad(out.logp.sum(), weights, allow_unused=True)
    plain: Any = torch.zeros(())
    for episode in made:
        trained = np.flatnonzero(episode.tokens.trained_mask)
        logp = whole(loaded.model, episode.tokens.ids, episode.images)
        plain = plain + logp[trained - 1, episode.tokens.ids[trained]].sum()
    for got, other in zip(
        found, torch.autograd.grad(plain, weights, allow_unused=True), strict=True
    ):
        assert (got is None) == (other is None)
        if got is not None:
            assert (got - other).abs().max() <= 1e-3 * max(1.0, float(other.abs().max()))
    await loaded.policy.close()


@pytest.mark.parametrize("family", ["Qwen3-VL", "Gemma 3", "SmolVLM"])
def test_an_image_is_spelt_as_the_processor_does(family: str, tmp_path: Path) -> None:
    loaded = load_policy(str(vision_folder(tmp_path, family)), Config(), base=tmp_path)
    chat = loaded.chat
    reader: Any = reader_of(loaded.model)
    user = {
        "role": "user",
        "content": [{"type": "image", "image": BLUE}, {"type": "text", "text": "<image> is text"}],
    }
    said, _ = place_images([user], (), chat.images)
    answer = {"role": "assistant", "content": "yes"}
    tools, _ = place_images(
        [{"role": "tool", "content": "it"}], [ToolResult("", images=(RED,))], chat.images
    )
    start, model = chat.prompt(said), chat.assistant_ids(answer)
    delta = chat.extend([*said, answer], tools, last_id=model[-1])
    both = chat.render([*said, answer, *tools], add_generation_prompt=True)
    assert [*start.ids, *model, *delta.ids] == both.ids
    text = both.text.replace("<image> is text", "# is text")
    for image in (BLUE, RED):
        options = getattr(reader.processor, "images_kwargs", {})
        read = reader.processor.image_processor(
            images=[[PIL(image)]], return_tensors="pt", **options
        )
        own = reader.processor.replace_image_token(read, image_idx=0)
        written = images_of(reader).written or reader.mark
        text = text.replace(written, own.replace(written, "§").replace("<image>", "¤"), 1)
    text = text.replace("§", images_of(reader).written or reader.mark).replace("¤", reader.mark)
    wanted = reader.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert loaded.chat.decode(both.ids).replace(
        "<image> is text", "# is text"
    ) == loaded.chat.decode(wanted)
    words = [
        t
        for t, o in zip(start.ids, start.origin, strict=True)
        if o == Origin.USER and t != reader.token
    ]
    assert chat.decode(words) == "<image> is text"


# --- a whole training, the store, replay, exports ---------------------------------------------------------------------

TASK_YAML = """\
name: looks
description: Every answer is met with a picture.
sandbox: false
rewards: {even: {weight: 1.0, primary: true}}
"""
TASK_PY = f"""\
import json
from pathlib import Path

from agentrl_cli.envs.tool_env import Env, Step
from agentrl_cli.types import ToolResult

PICTURES = [bytes.fromhex({RED.hex()!r}), bytes.fromhex({BLUE.hex()!r})]


class Looks(Env):
    async def step(self, turn):
        image = PICTURES[turn.index % 2]
        message = {{"role": "tool", "name": "look", "tool_call_id": "c", "content": f"picture {{turn.index}}"}}
        return Step([message], (ToolResult("", images=(image,)),), terminated=turn.index == 2)


def make_env(task):
    return Looks()


def even(episode, ctx):
    said = episode.tokens.ids[episode.tokens.trained_mask]
    return float((said % 2 == 0).mean())


REWARDS = {{"even": even}}
"""


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Episode]]:
    """A project after two steps over three turns, two of them after pictures: (its folder, its episodes)."""
    project = tmp_path_factory.mktemp("looks")
    write_pack(project, code=TASK_PY)
    (project / "task.yaml").write_text(TASK_YAML)

    async def run() -> list[Episode]:
        limits = {
            "group_size": 4,
            "prompts_per_step": 1,
            "max_new_tokens": 16,
            "max_tokens": 500,
            "max_turns": 3,
        }
        async with trainer_of(
            project, folder, rollout=limits, train={"steps": 2, "checkpointing": "on"}
        ) as trainer:
            directed: Any = Directed(trainer.loaded.policy, trainer.loaded.chat, ["one", "two"])
            trainer.rollout.context = replace(trainer.rollout.context, policy=directed)
            row = await trainer.train()
            assert row.status == "finished", row.error
            gaps = [
                m["sampling/sampling_logp_difference/max"] for m in trainer.store.runs.steps(row.id)
            ]
            assert len(gaps) == 2 and max(gaps) < 1e-4
            return episodes_of(trainer.store, row)

    return project, asyncio.run(run())


def test_a_training_on_pictures(trained: tuple[Path, list[Episode]], folder: Path) -> None:
    project, made = trained
    assert len(made) == 8 and {e.outcome for e in made} == {Outcome.TRUNCATED_TOKENS}, made[0].error
    assert {e.fact for e in made} == {"trained"} and {e.images for e in made} == {(RED, BLUE)}
    assert {e.trained_tokens for e in made} == {12} and not any("DRIFT" in e.flags for e in made)
    # What was trained goes on reading pictures: the checkpoint has the processor.
    (last,) = (project / "runs").glob("*/checkpoints/last")
    again = load_policy(str(last), Config(), base=project)
    assert again.chat.images is not None and again.chat.images.measure(BLUE) == (32, 32, 16, ())
    # A resume loads it, though the files name the weights otherwise than the model; a plan counts its weights.
    begun = load_policy(str(folder), Config(), base=project).model
    load_weights(begun, last)
    wanted = again.model.state_dict()
    assert all(torch.equal(weights, wanted[name]) for name, weights in begun.state_dict().items())
    assert plan(Config(), folder).parameters == sum(
        weights.numel() for weights in begun.parameters()
    )
    asyncio.run(again.policy.close())


def test_pictures_are_kept_once_and_shown(
    trained: tuple[Path, list[Episode]], tmp_path: Path, cli: Cli
) -> None:
    project, made = trained
    with contextlib.closing(sqlite3.connect(project / "runs" / "agentrl.db")) as file:
        kept = file.execute(
            "SELECT media_type, data FROM attachments ORDER BY length(data)"
        ).fetchall()
    assert kept == [("image/png", data) for data in sorted((RED, BLUE), key=len)]
    with Store.open(project / "runs" / "agentrl.db", readonly=True) as store:
        view = load_view(store, made[0].id)
        notes = [text for turn in made[0].turns for _, text in result_notes(turn, view.images)]
        line = next(text for text in notes if "▣" in text)
        assert (
            f"image 24x16  {len(RED)} bytes  sha256 {hashlib.sha256(RED).hexdigest()[:8]}" in line
        )
        assert Path(line.split()[-1]).read_bytes() == RED
        start = view.texts.index("<|image_pad|>")
        assert (
            view.texts[start + 1 : start + 6] == ["<|image_pad|>"] * 5
        )  # six are still listed one by one
        write_lines(export_lines(store, [made[0].id]), tmp_path / "e.jsonl")
        export_html(store, [made[0].id], tmp_path / "e.html", token_texts)
    row = json.loads((tmp_path / "e.jsonl").read_text())
    shown = [turn for turn in row["turns"] if turn["role"] == "tool"]
    assert (
        base64.b64decode(shown[0]["results"][0]["images"][0]) == RED and row["tokens"] is not None
    )
    part = shown[0]["messages"][0]["content"][0]
    assert part["image"] == f"sha256:{hashlib.sha256(RED).hexdigest()}" and part["tokens"] == 6
    page = (tmp_path / "e.html").read_text()
    assert (
        f"data:image/png;base64,{base64.b64encode(RED).decode()}" in page
        and "img.src = src" in page
    )
    said = cli("show", made[0].id, "--db", str(project / "runs" / "agentrl.db"))
    assert f"▣ image  {len(RED)} bytes" in said
    few = ["a", "<|image_pad|>", *["▪"] * 8, "b", "b"]
    assert short_runs(["a", *["<|image_pad|>"] * 9, "b", "b"], [1, *[2] * 9, 3, 3]) == few


# --- chat and what-if ------------------------------------------------------------------------------------------------


async def test_a_chat_whose_tool_answers_with_a_picture(folder: Path) -> None:
    loaded = load_policy(str(folder), Config(), base=folder)
    directed: Any = Directed(loaded.policy, loaded.chat, [call("look", number=0)])
    session, _ = open_chat(directed, ToolEnv([as_tool(look)]), chat=loaded.chat)
    await session.begin()
    await session.user("Look.")
    assert [turn.role for turn in session.turns] == ["user", "assistant", "tool", "assistant"]
    episode = session.talk.episode()
    assert episode.images == (RED,)
    wanted = whole(loaded.model, episode.tokens.ids, episode.images)
    trained = np.flatnonzero(episode.tokens.trained_mask)
    exact = wanted[trained - 1, episode.tokens.ids[trained]].detach().numpy()
    assert len(trained) == 12 and np.abs(episode.tokens.logp_policy[trained] - exact).max() < 1e-4
    # A what-if goes on from the stored ids, and the picture is there again.
    other, _ = open_chat(directed, ToolEnv([as_tool(look)]), chat=loaded.chat)
    world = await other.talk.resume(episode, 3)
    assert [again.same for again in world.reruns] == [True] and other.talk.episode().images == (
        RED,
    )
    await other.talk.close()
    await session.talk.close()
    await loaded.policy.close()


# --- what is refused ------------------------------------------------------------------------------------------------


async def test_what_cannot_be_seen_is_refused(folder: Path) -> None:
    loaded = load_policy(str(folder), Config(), base=folder)
    reader: Any = reader_of(loaded.model)
    for bad in (b"", b"no image", RED[:40]):
        with pytest.raises(EnvError, match="cannot be read"):
            reader.measure(bad)
    ids = torch.tensor([1, reader.token, 2])
    with pytest.raises(EnvError, match="take 6 tokens, and its ids have 1"):
        reader.inputs(ids, [RED])
    with pytest.raises(PolicyError, match="this model reads text alone"):
        place_images([{"role": "user", "content": [{"type": "image", "image": RED}]}], (), None)
    picture = ToolResult("", images=(RED,))
    refused: list[tuple[Any, list[ToolResult], str]] = [
        ([{"type": "audio"}], [], "of the kind 'audio'"),
        ([{"type": "image", "image": "no.png"}], [], "does not"),
        ("x", [picture], "no tool message"),
    ]
    for content, results, words in refused:
        with pytest.raises(EnvError, match=words):
            place_images([{"role": "user", "content": content}], results, loaded.chat.images)
    small = Config.model_validate({"rollout": {"max_tokens": 40, "max_new_tokens": 8}})
    pack = Pack.of(
        "look", [{"prompt": "x", "images": [BLUE, BLUE]}], [Reward("r", lambda e, c: 1.0)]
    )
    rollout = Rollout(loaded.policy, loaded.chat, {"look": pack}, small)
    long = await rollout.episode(Job(pack.tasks("train")[0], 1))
    assert (
        long.outcome is Outcome.TOO_LONG
        and "(32 of them for 2 images) does not fit into 40, rollout.max_tokens; more: --set"
        in long.error
    )
    await loaded.policy.close()
    blind = policy_of(tiny())
    with pytest.raises(PolicyError, match="reads no images"):
        await blind.generate("a", [1, 2], Sampling(max_new_tokens=2), images=(RED,))
    await blind.close()
    segment = Segment(np.arange(6, dtype=np.int32), np.array([0, 0, 0, 0, 1, 1], bool), (RED,))
    with pytest.raises(ModelError, match="reads text alone"):
        trained_logprobs(tiny(), [[segment]])


async def test_a_template_that_drops_pictures_is_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dropping = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    images = Images(7, lambda data: (1, 1, 4, ()))
    for template in (dropping, None):  # the second one cannot join a list to a text
        chat = Chat(ByteTokenizer(template), images=images)
        assert not chat.shows_images
        policy = ScriptedPolicy([call("look", number=0), "a door"], chat.tokenizer)
        config = Config.model_validate({"rollout": {"max_tokens": 4000}})
        episode = await Rollout(policy, chat, {"look": PACK}, config).episode(
            Job(PACK.tasks("train")[0], 1)
        )
        assert episode.outcome is Outcome.ENV_ERROR and "chat template" in episode.error
    (folder / "dropping.jinja").write_text(dropping)
    config = Config.model_validate({"model": {"chat_template": "dropping.jinja"}})
    with caplog.at_level(logging.WARNING):
        loaded = load_policy(str(folder), config, base=folder)
    assert (
        loaded.chat.images is None
        and reader_of(loaded.model) is None
        and "reads text alone here" in caplog.text
    )
    said = await loaded.policy.generate(
        "t", loaded.chat.prompt([{"role": "user", "content": "hi"}]).ids, Sampling()
    )
    assert len(said.ids)
    await loaded.policy.close()


def test_prefixes_with_pictures_are_not_shared() -> None:
    ids, trained = np.arange(8, dtype=np.int32), np.arange(8) > 5
    assert pack([[Segment(ids, trained)] * 2]).tokens == 7
    row = pack([[Segment(ids, trained, (RED,)), Segment(ids, trained, (BLUE,))]])
    assert row.tokens == 14 and row.images == ((RED,), (BLUE,))
