"""Loading the processor of a vision-language model: its image part, and how it writes an image in a text."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl_cli.errors import MissingDependency, ModelError

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
