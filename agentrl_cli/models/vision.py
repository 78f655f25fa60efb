"""Vision-language models: images through the model's own processor, positions by the model's own rule.

A `Reader` stands at the model (`attach`), so that the sampling engine and the training forward hand the same pixels to
the same layers. How many tokens an image takes is the processor's word; the tokens themselves are in the episode's ids.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl_cli.chat.images import Images
from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import EnvError, MissingDependency, ModelError
from agentrl_cli.models.adapter import transformer

_LOG = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
KEPT = 64
"""Images whose pixels are kept ready, the latest ones."""
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
"""What a processor answers beside pixels."""


class Reader:
    """Turns images into what the model's forward takes.

    `processor`: the model's image processor, or its whole processor where the number of tokens is not the patches'.
    """

    def __init__(self, processor: Any, token: int, unsaid: Sequence[int] = ()) -> None:
        """`token`: id of the placeholder; `unsaid`: further tokens that the model must not write (video)."""
        self.processor = processor
        self.token = token
        self.unsaid = (token, *unsaid)
        self._ready: OrderedDict[str, tuple[tuple[int, int, int], dict[str, Tensor]]] = OrderedDict()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        """A copy of a model reads with the same reader: it has no weights."""
        return self

    @property
    def images(self) -> Images:
        """What a chat needs to know."""
        return Images(self.token, self.measure)

    def measure(self, data: bytes) -> tuple[int, int, int]:
        """(width, height, tokens) of an image. Raises EnvError for bytes that are none."""
        return self._read(data)[0]

    def inputs(self, ids: Tensor, images: Sequence[bytes], start: int = 0) -> dict[str, Tensor]:
        """What a forward over ids[start:] takes besides the ids: pixels of its images, on the device of `ids` [n].

        `images`: those of the whole conversation in order; the ones whose tokens are not in `ids` yet are left out.
        Raises EnvError where images and tokens do not fit together.
        """
        here = (ids == self.token).cumsum(0)
        total, before = (int(here[-1]) if len(ids) else 0), int(here[start - 1]) if start else 0
        parts: list[dict[str, Tensor]] = []
        done = 0
        for data in images:
            if done == total:
                break
            (_, _, count), pixels = self._read(data)
            if done >= before:
                parts.append(pixels)
            done += count
        if done != total:
            raise EnvError(f"The images of this episode take {done} tokens, and its ids have {total} for them.")
        names = parts[0] if parts else ()
        return {name: torch.cat([part[name] for part in parts]).to(ids.device) for name in names}

    def _read(self, data: bytes) -> tuple[tuple[int, int, int], dict[str, Tensor]]:
        key = hashlib.sha256(data).hexdigest()
        with self._lock:
            found = self._ready.get(key)
            if found is None:
                found = self._ready[key] = self._processed(data)
                if len(self._ready) > KEPT:
                    self._ready.popitem(last=False)
            self._ready.move_to_end(key)
            return found

    def _processed(self, data: bytes) -> tuple[tuple[int, int, int], dict[str, Tensor]]:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as opened:
                image = opened.convert("RGB")
            whole = hasattr(self.processor, "tokenizer")
            given = {"text": [self.processor.image_token]} if whole else {}
            out = self.processor(images=[image], return_tensors="pt", **given)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise EnvError(f"A tool's image of {len(data)} bytes cannot be read: {error}") from error
        count = int((out["input_ids"] == self.token).sum()) if whole else _patches(out, self.processor)
        pixels = {name: value for name, value in out.items() if name not in _TEXT and isinstance(value, Tensor)}
        return (image.width, image.height, count), pixels


def _patches(out: Mapping[str, Any], processor: Any) -> int:
    """Tokens of an image of the Qwen-VL kind: patches, of which the model merges merge_size² into one."""
    return int(out["image_grid_thw"][0].prod()) // int(processor.merge_size) ** 2


def attach(model: Any, folders: Sequence[Path], chat_of: Callable[[Images], Chat]) -> Chat | None:
    """The chat of a model that reads images, whose reader `reader_of` then finds; None for one that reads text alone.

    `folders`: the model's own, and its base's where it is an adapter; the first with a processor counts. `chat_of`
    makes a chat with images; one whose template does not show them is skipped, and logged.
    Raises MissingDependency where the processor's packages are missing, ModelError where it cannot be used.
    """
    base = transformer(model)
    token = getattr(base.config, "image_token_id", None) or getattr(base.config, "image_token_index", None)
    if token is None:
        return None
    folder = next((f for f in folders if any((f / name).is_file() for name in PROCESSOR_FILES)), None)
    if folder is None:
        _LOG.warning("%s has no image processor: the model reads text alone here", folders[0])
        return None
    video = getattr(base.config, "video_token_id", None)
    reader = Reader(_processor(folder), int(token), () if video is None else (int(video),))
    chat = chat_of(reader.images)
    if not chat.shows_images:
        _LOG.warning("the chat template of %s does not show images of tool answers: it reads text alone here", folder)
        return None
    base.image_reader = reader
    return chat


def reader_of(model: Any) -> Reader | None:
    """The reader that `attach` left at a model (peft-wrapped or not, copied or not), None where it reads text alone."""
    found: Reader | None = getattr(transformer(model), "image_reader", None)
    return found


def _processor(folder: Path) -> Any:
    """The image processor where its patches say how many tokens there are, else the whole processor."""
    import transformers

    auto: Any = transformers
    hint = "pip install 'agentrl-cli[vision]'; some image processors need torchvision, too."
    try:
        images: Any = auto.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        if "image_grid_thw" in getattr(images, "model_input_names", ()) and hasattr(images, "merge_size"):
            return images
        whole: Any = auto.AutoProcessor.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise MissingDependency(f"The images of {folder.name} cannot be read: {error}", hint=hint) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"The image processor in {folder} cannot be loaded: {error}") from error
    if not hasattr(whole, "image_token"):
        raise ModelError(f"The processor of {folder.name} names no image token: images cannot be put into its ids.")
    return whole


def positions(model: Any, ids: Tensor, inputs: Mapping[str, Tensor], token: int) -> Tensor | None:
    """[3, 1, n] positions of a conversation [n] by the model's own rule; None if the model computes them itself.

    `inputs`: of all its images. The model must not continue from its cached positions, which belong to the last
    conversation that it computed.
    """
    rule = getattr(getattr(transformer(model), "model", None), "get_rope_index", None)
    if rule is None:
        return None
    grid = inputs.get("image_grid_thw")
    if grid is None:
        return torch.arange(len(ids), device=ids.device).expand(3, 1, -1)
    found: Tensor = rule(ids[None], mm_token_type_ids=(ids == token).int()[None], image_grid_thw=grid)[0]
    return found
