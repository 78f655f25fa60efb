"""Loading the processor of a vision-language model and attaching it: how it writes an image in a text."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl_cli.chat.images import Images
from agentrl_cli.chat.render import Chat
from agentrl_cli.errors import MissingDependency, ModelError
from agentrl_cli.models.adapter import transformer
from agentrl_cli.models.vision import Reader

_LOG = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

HINT = "pip install 'agentrl-cli[vision]'; some image processors need torchvision, too."


def load_processor(folder: Path, model_type: str) -> Any:
    """Return the processor of a model folder. Its video part needs torchvision; without that it is made without videos.

    Raises MissingDependency if a package is missing, ModelError if it cannot be loaded, or cannot place images.
    """
    import transformers

    auto: Any = transformers
    try:
        try:
            found = auto.AutoProcessor.from_pretrained(folder, local_files_only=True)
        except (
            ImportError,
            ValueError,
            TypeError,
            AttributeError,
        ):  # the last one without torchvision
            found = None
        if getattr(found, "image_processor", None) is None:
            found = _without_videos(folder, model_type)
    except ImportError as error:
        raise MissingDependency(
            f"The images of {folder.name} cannot be read: {error}", hint=HINT
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"The image processor in {folder} cannot be loaded: {error}") from error
    if not hasattr(found, "replace_image_token") or getattr(found, "image_token", None) is None:
        raise ModelError(
            f"The processor of {folder.name} ({type(found).__name__}) has no rule for the tokens of an image.",
            hint="Upgrade transformers; constraints.txt names the release that is tested.",
        )
    return found


def _without_videos(folder: Path, model_type: str) -> Any:
    """Return the processor with its image part and tokenizer alone."""
    import transformers
    from transformers.models.auto import processing_auto

    auto: Any = transformers
    kinds: Any = processing_auto
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    parts = ("image_processor", "video_processor", "tokenizer")
    kind = getattr(
        auto, settings.pop("processor_class", None) or kinds.PROCESSOR_MAPPING_NAMES[model_type]
    )
    images = auto.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    tokenizer = auto.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = kind.__new__(kind)
    with suppress(
        ImportError, TypeError, ValueError, AttributeError
    ):  # raised for the video part, after its own
        kind.__init__(
            found, images, tokenizer, None, **{k: v for k, v in settings.items() if k not in parts}
        )
    found.image_processor, found.tokenizer = images, tokenizer
    return found


def images_of(reader: Reader) -> Images:
    """Return the images' part of a chat."""
    written = str(reader.processor.image_token)
    return Images(reader.token, reader.measure, "" if written == reader.mark else written)


def attach(model: Any, folders: Sequence[Path], chat_of: Callable[[Images], Chat]) -> Chat | None:
    """Return the chat of a model that reads images, whose reader `reader_of` then finds; None for one that reads text
    alone.

    `folders`: the model's own, and its base's where it is an adapter; the first with a processor counts. `chat_of`
    makes a chat with images; one whose template does not show them is skipped, and logged.
    Raises MissingDependency if the processor's packages are missing, ModelError if it cannot be used.
    """
    base = transformer(model)
    token = getattr(base.config, "image_token_id", None) or getattr(
        base.config, "image_token_index", None
    )
    if token is None:
        return None
    folder = next(
        (f for f in folders if any((f / name).is_file() for name in PROCESSOR_FILES)), None
    )
    if folder is None:
        _LOG.warning("%s has no image processor: the model reads text alone here", folders[0])
        return None
    # Videos and image starts are not to be written by a model; one argument of its forward marks images.
    names = inspect.signature(base.forward).parameters
    types = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in names), "")
    others = [getattr(base.config, name, None) for name in ("video_token_id", "boi_token_index")]
    unsaid = [int(id_) for id_ in others if id_ is not None]
    processor = load_processor(folder, base.config.model_type)
    reader = Reader(processor, int(token), unsaid, types)
    chat = chat_of(images_of(reader))
    if not chat.reads_images and not chat.shows_images:
        _LOG.warning(
            "the chat template of %s shows no images: the model reads text alone here", folder
        )
        return None
    base.image_reader = reader
    return chat
