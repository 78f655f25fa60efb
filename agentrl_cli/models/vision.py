"""Vision-language models: images through the model's own processor, positions by the model's own rule.

A `Reader` stands at the model (`attach`), so that the sampling engine and the training forward hand the same pixels to
the same layers. How many tokens an image takes is the processor's rule; the tokens themselves are in the episode's ids.
"""

from __future__ import annotations

import io
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl_cli.errors import EnvError
from agentrl_cli.models.adapter import transformer
from agentrl_cli.types.content import Layout, digest

KEPT = 64
"""Images whose pixels are kept ready, the latest ones."""
UNUSED = {"rows", "cols", "num_crops"}
"""What image processors return for the text alone."""
NESTED = {"pixel_values": 5, "pixel_attention_mask": 4}
"""Dimensions of an image's tensors if the tiles of a conversation are one batch (Idefics 3, SmolVLM)."""
Measured = tuple[int, int, int, Layout]
"""(width, height, tokens, layout); see chat/images.py."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The arguments of a forward over some tokens of several sequences besides their ids."""

    pixels: Mapping[str, Tensor]
    """Of the images among those tokens, in order."""
    marks: tuple[Tensor, ...]
    """[n] of each sequence: whether a token is an image's."""
    places: tuple[Tensor, ...] | None
    """[3, n] positions of each sequence; None: the model counts them."""
    shifts: tuple[int, ...]
    """By sequence: what the position of a later token is ahead of its number."""


class Reader:
    """Turns images into arguments of the model's forward."""

    def __init__(
        self, processor: Any, token: int, unsaid: Sequence[int] = (), types: str = ""
    ) -> None:
        """`processor`: the model's own, `token`: id of the placeholder, `types`: the forward's argument that marks it.

        `unsaid`: further tokens that the model must not write (video, the start of an image).
        """
        self.processor = processor
        self.token = token
        self.types = types
        self.unsaid = (token, *unsaid)
        self.mark = str(processor.tokenizer.convert_ids_to_tokens(token))
        self._ready: OrderedDict[str, tuple[Measured, dict[str, Tensor]]] = OrderedDict()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        """Return the same reader for a copy of a model: it has no weights."""
        return self

    def measure(self, data: bytes) -> Measured:
        """Return size, tokens and layout of an image. Raises EnvError for bytes that are none."""
        return self._read(data)[0]

    def inputs(self, ids: Tensor, images: Sequence[bytes], start: int = 0) -> dict[str, Tensor]:
        """Return the pixels of the images in ids[start:], on the device of `ids` [n].

        `images`: those of the whole conversation in order; the ones whose tokens are not in `ids` yet are left out.
        Raises EnvError if images and tokens do not match.
        """
        here = (ids == self.token).cumsum(0)
        total, before = (int(here[-1]) if len(ids) else 0), int(here[start - 1]) if start else 0
        parts: list[dict[str, Tensor]] = []
        done = 0
        for data in images:
            if done == total:
                break
            (_, _, count, _), pixels = self._read(data)
            if done >= before:
                parts.append(pixels)
            done += count
        if done != total:
            raise EnvError(
                f"The images of this episode take {done} tokens, and its ids have {total} for them."
            )
        return {name: value.to(ids.device) for name, value in together(parts).items()}

    def gather(
        self,
        model: Any,
        contexts: Sequence[Tensor],
        images: Sequence[Sequence[bytes]],
        starts: Sequence[int],
    ) -> Seen:
        """Return the arguments of a forward over context[start:] of several conversations.

        Raises EnvError as `inputs` does.
        """
        parts, marks, places, shifts = [], [], [], []
        for ids, own, start in zip(contexts, images, starts, strict=True):
            whole = self.inputs(ids, own)
            where = positions(model, ids, whole, self.token)
            parts.append(self.inputs(ids, own, start) if start else whole)
            marks.append(ids[start:] == self.token)
            if where is not None:
                places.append(where[:, 0, start:])
            shifts.append(0 if where is None else int(where.max()) + 1 - len(ids))
        return Seen(together(parts), tuple(marks), tuple(places) if places else None, tuple(shifts))

    def arguments(
        self, seen: Seen, left: Sequence[int], width: int, held: int = 0
    ) -> dict[str, Tensor]:
        """Return the arguments of a forward over `width` new tokens, `left` of each sequence's being padding on the
        left.

        `held`: columns of the cache.
        """
        given = dict(seen.pixels)
        if seen.places is not None:
            places = [_pad(where, n, width) for where, n in zip(seen.places, left, strict=True)]
            given["position_ids"] = torch.stack(places, 1)
        if self.types and seen.pixels:
            marks = torch.stack(
                [_pad(m.long(), n, width) for m, n in zip(seen.marks, left, strict=True)]
            )
            given[self.types] = torch.nn.functional.pad(marks, (held, 0))
        return given

    def _read(self, data: bytes) -> tuple[Measured, dict[str, Tensor]]:
        key = digest(data)
        with self._lock:
            found = self._ready.get(key)
            if found is None:
                found = self._ready[key] = self._process(data)
                if len(self._ready) > KEPT:
                    self._ready.popitem(last=False)
            self._ready.move_to_end(key)
            return found

    def _process(self, data: bytes) -> tuple[Measured, dict[str, Tensor]]:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as opened:
                image = opened.convert("RGB")
            given = dict(getattr(self.processor, "images_kwargs", None) or {})
            out = self.processor.image_processor(images=[[image]], return_tensors="pt", **given)
            text = self.processor.replace_image_token(out, image_idx=0)
        except (
            OSError,
            ValueError,
            SyntaxError,
            ZeroDivisionError,
            Image.DecompressionBombError,
        ) as error:
            raise EnvError(f"An image of {len(data)} bytes cannot be read: {error}") from error
        unused = UNUSED | set(getattr(self.processor, "unused_input_names", ()))
        pixels = {
            name: value
            for name, value in out.items()
            if name not in unused and isinstance(value, Tensor)
        }
        return (image.width, image.height, *self._layout(text)), pixels

    def _layout(self, text: str) -> tuple[int, Layout]:
        """Return the tokens of an image, and the texts between them if there are any."""
        pieces = re.split(f"((?:{re.escape(self.mark)})+)", text)
        runs = [len(run) // len(self.mark) for run in pieces[1::2]] + [0]
        layout = [
            (words, count) for words, count in zip(pieces[::2], runs, strict=True) if words or count
        ]
        return sum(runs), () if len(layout) == 1 and not layout[0][0] else layout


def _pad(values: Tensor, left: int, width: int) -> Tensor:
    """Return the last dimension with zeros on the left, and on the right up to `width`."""
    return torch.nn.functional.pad(values, (left, width - left - values.shape[-1]))


def together(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the pixels of several images or sequences, in order: forwards take them as one batch of images."""
    every = [part for part in parts if part]
    names = every[0] if every else ()
    nested = bool(every) and "pixel_attention_mask" in names
    return {
        name: torch.cat([part[name] for part in every], int(nested and name in NESTED))
        for name in names
    }


def reader_of(model: Any) -> Reader | None:
    """Return the reader that `attach` left at a model (peft-wrapped or not, copied or not); None for a model of text
    alone.
    """
    found: Reader | None = getattr(transformer(model), "image_reader", None)
    return found


def positions(model: Any, ids: Tensor, inputs: Mapping[str, Tensor], token: int) -> Tensor | None:
    """Return the [3, 1, n] positions of a conversation [n] by the model's own rule; None if the model computes them
    itself.

    `inputs`: of all its images. The model must not continue from its cached positions, which belong to the last
    conversation that it computed.
    """
    rule = getattr(getattr(transformer(model), "model", None), "get_rope_index", None)
    if rule is None:
        return None
    grid = inputs.get("image_grid_thw")
    if grid is None:
        return torch.arange(len(ids), device=ids.device).expand(3, 1, -1)
    found: Tensor = rule(
        ids[None], mm_token_type_ids=(ids == token).int()[None], image_grid_thw=grid
    )[0]
    return found


def plain_logits(model: Any, reader: Reader, ids: Tensor, images: Sequence[bytes]) -> Tensor:
    """Return the logits [n, V] of the model's own forward over one conversation [n], as transformers calls it."""
    inner: Any = getattr(transformer(model), "model", None)
    if hasattr(inner, "rope_deltas"):
        inner.rope_deltas = None
    given = reader.inputs(ids, images)
    if reader.types and given:
        given[reader.types] = (ids == reader.token).long()[None]
    logits: Tensor = model(input_ids=ids[None], use_cache=False, **given).logits[0]
    return logits


def trial(
    reader: Reader, vocabulary: int, device: torch.device
) -> list[tuple[Tensor, tuple[bytes, ...]]]:
    """Return two conversations of random tokens, with one image and with two, that a model is tried with."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    images = []
    for width, height in ((40, 24), (24, 40)):
        values = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        out = io.BytesIO()
        Image.fromarray(values.numpy()).save(out, format="PNG")
        images.append(out.getvalue())

    def words(count: int) -> list[int]:
        drawn = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
        return [0 if token in reader.unsaid else token for token in drawn]

    places = [[reader.token] * reader.measure(image)[2] for image in images]
    texts = [
        [*words(5), *places[0], *words(6)],
        [*words(9), *places[1], *words(3), *places[0], *words(4)],
    ]
    ids = [torch.tensor(text, device=device) for text in texts]
    return [(ids[0], (images[0],)), (ids[1], (images[1], images[0]))]
