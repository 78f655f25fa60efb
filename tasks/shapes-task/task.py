"""Four shapes in the corners of a picture. It is shown small; a tool crops a shape, whose dots show then."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agentrl_cli.tasks import draw_splits
from agentrl_cli.tools import ToolContext, tool

Row = dict[str, Any]
Scene = list[list[Any]]
"""[shape, colour, dots] of the corners, from top left to bottom right. No two share a shape or a colour."""

SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 50),
}
Colour = Literal["red", "green", "blue", "yellow"]
SIDE = 64
"""Pixels of a corner; the picture is shown at a quarter of its size, a cropped corner at half."""


def draw(scene: Scene) -> Any:
    """The whole picture [128, 128, 3]."""
    corners = [_corner(*one) for one in scene]
    return np.vstack([np.hstack(corners[:2]), np.hstack(corners[2:])])


def _corner(shape: str, colour: str, dots: int) -> Any:
    y, x = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    inside = {
        "circle": x**2 + y**2 < 25**2,
        "square": (abs(x) < 23) & (abs(y) < 23),
        "triangle": (y < 24) & (abs(x) < (y + 26) / 2),
        "cross": (np.minimum(abs(x), abs(y)) < 10) & (np.maximum(abs(x), abs(y)) < 26),
    }[shape]
    out = np.full((SIDE, SIDE, 3), 255, np.uint8)
    out[inside] = COLOURS[colour]
    for number in range(dots):
        left, top = 17 + 16 * (number % 2), 17 + 16 * (number // 2)
        rows, columns = np.mgrid[top : top + 13, left : left + 13]
        fine = (rows % 4 != 2) | (columns % 4 != 2)  # the pixels that the small picture leaves out
        out[rows[fine], columns[fine]] = 0
    return out


def small(scene: Scene) -> Any:
    """The picture as the question shows it [32, 32, 3]."""
    return draw(scene)[2::4, 2::4]


@tool(pure=True)
def crop(colour: Colour, context: ToolContext) -> Any:
    """Shows the shape of a colour larger.

    Args:
        colour: Of the shape.
    """
    from PIL import Image

    assert context.task is not None
    return Image.fromarray(
        _larger(next(one for one in context.task.data["scene"] if one[1] == colour))
    )


def _larger(one: list[Any]) -> Any:
    """A corner as the tool shows it [32, 32, 3]."""
    return _corner(*one)[1::2, 1::2]


TOOLS = [crop]


def png(pixels: Any) -> str:
    """A picture as a data: URL."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


Ask = Callable[[random.Random, Scene, int], tuple[str, str]]
"""A question about a corner, and its answer."""


def _colour(rng: random.Random, scene: Scene, corner: int) -> tuple[str, str]:
    shape, colour, _ = scene[corner]
    return f"What colour is the {shape}?", colour


def _dots(rng: random.Random, scene: Scene, corner: int) -> tuple[str, str]:
    shape, _, dots = scene[corner]
    return f"How many dots are on the {shape}?", str(dots)


def _paint(rng: random.Random, scene: Scene, corner: int) -> tuple[str, str]:
    _, colour, dots = scene[corner]
    return f"How many dots are on the {colour} shape?", str(dots)


FAMILIES: dict[str, tuple[Ask, int]] = {
    "colour": (_colour, 1),
    "dots": (_dots, 3),
    "paint": (_paint, 0),
}
"""Family → (question, its weight in training and test; 0: held out)."""

WORLD = ("scene",)
"""Fields that make two rows with the same prompt different tasks."""

HELDOUT = [name for name, (_, weight) in FAMILIES.items() if not weight]
SPLITS = {"train": 160, "test": 80, "heldout": 40, "validation": 24}


def generate(seed: int, families: list[str] | None = None) -> Iterator[Row]:
    """Yields endless rows without ids; deterministic in the seed."""
    rng = random.Random(f"shapes-task {seed}")
    names = families or [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    while True:
        family, corner, shapes, colours = (
            *(rng.choice(names), rng.randrange(4)),
            *(rng.sample(SHAPES, 4), rng.sample(list(COLOURS), 4)),
        )
        scene = [
            [shape, colour, rng.randint(1, 4)]
            for shape, colour in zip(shapes, colours, strict=True)
        ]
        prompt, answer = FAMILIES[family][0](rng, scene, corner)
        row = {"family": family, "prompt": prompt, "images": [png(small(scene))]}
        yield {**row, "scene": scene, "corner": corner, "answer": answer}


def build() -> dict[str, list[Row]]:
    """The rows checked into `data/`: no question about the same picture is in two splits."""

    def rows_of(split: str, number: int) -> Iterator[Row]:
        return generate(number, HELDOUT if split == "heldout" else None)

    return draw_splits(SPLITS, rows_of, world=WORLD)


def solve(row: Row) -> list[dict[str, Any]]:
    """Messages of a full solution."""
    said: list[dict[str, Any]] = []
    if row["family"] != "colour":
        wanted = row["scene"][row["corner"]]
        function = {"name": "crop", "arguments": {"colour": wanted[1]}}
        picture = {"type": "image", "image": png(_larger(wanted))}
        said += [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            }
        ]
        said += [{"role": "tool", "name": "crop", "content": [picture]}]
    return [*said, {"role": "assistant", "content": row["answer"]}]


def demonstrate(row: Row, rng: random.Random, tool_rate: float = 1.0) -> list[dict[str, Any]]:
    """The solver; of the questions about dots a share `1 - tool_rate` is guessed from the small picture."""
    if row["family"] != "colour" and rng.random() >= tool_rate:
        return [{"role": "assistant", "content": str(rng.randint(1, 4))}]
    return solve(row)


def right(episode: Any, ctx: Any) -> Any:
    """1 if the last turn is the answer (primary)."""
    said, wanted = ctx.final_text.strip().rstrip(".").lower(), ctx.task.data["answer"]
    return ctx.part(float(said == wanted), f"said {said[:40]!r}, expected {wanted!r}")


def tool_errors(episode: Any, ctx: Any) -> float:
    """-1 if a call failed."""
    return -float(episode.tool_errors > 0)


REWARDS = {"right": right, "tool_errors": tool_errors}


def write(folder: str) -> None:
    """Write `build()` into `folder`/data: `python task.py` makes the data again."""
    for split, rows in build().items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = Path(folder) / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(str(Path(__file__).parent))
