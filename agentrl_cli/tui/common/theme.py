"""The light theme: the dark one with the lightness of every colour inverted, where the terminal is light.

The terminal is asked for its background (OSC 11) before the screens start, together with a question that every terminal
answers, so that nothing waits for one that does not know the first.
"""

from __future__ import annotations

import colorsys
import os
import re
import select
import sys
from collections.abc import Mapping
from functools import lru_cache

from rich.color import Color as RichColor
from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

WAIT = 0.3
"""Seconds for the terminal's answer."""
DARKEST = 0.06
"""Lightness of the dark theme's background, which becomes white."""
_END = re.compile(rb"\x1b\[\?[0-9;]*c")
_REPLY = re.compile(rb"\x1b\]11;rgb:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)")


class Light(LineFilter):
    """Paints every line in light colours."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments with the lightness of their colours inverted."""
        return [
            Segment(text, _light(style) if style else style, control)
            for text, style, control in segments
        ]


@lru_cache(maxsize=4096)
def _light(style: Style) -> Style:
    fore, back = style.color, style.bgcolor
    colors = Style.from_color(invert(fore) if fore else None, invert(back) if back else None)
    return style + colors


@lru_cache(maxsize=4096)
def invert(color: RichColor) -> RichColor:
    """Return a colour of the same hue, as dark as it was light; the terminal's own default stays."""
    if color.is_default:
        return color
    red, green, blue = (part / 255 for part in color.get_truecolor())
    hue, light, strength = colorsys.rgb_to_hls(red, green, blue)
    share = min(max((light - DARKEST) / (1 - DARKEST), 0.0), 1.0)
    new = colorsys.hls_to_rgb(hue, 1 - share, strength)
    return RichColor.from_rgb(*(round(part * 255) for part in new))


def is_light(theme: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to paint light: by the setting, else by COLORFGBG, else as the terminal answers; dark if unknown."""
    if theme in ("dark", "light"):
        return theme == "light"
    last = environ.get("COLORFGBG", "").rpartition(";")[2]
    if last.isdigit():
        return int(last) in (7, 15)
    answer = _ask()
    return light_background(answer) if answer else False


def light_background(answer: bytes) -> bool:
    """Whether an answer to OSC 11 names a colour of more than half the luminance."""
    found = _REPLY.search(answer)
    if found is None:
        return False
    red, green, blue = (int(part, 16) / float(16 ** len(part) - 1) for part in found.groups())
    return bool(0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5)


def _ask() -> bytes:
    """Return the terminal's answers to OSC 11 and DA1; empty without a terminal, or if it does not answer in time."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        return b""
    try:
        import termios
        import tty
    except ImportError:  # not a Unix terminal
        return b""
    source, answer = sys.stdin.fileno(), b""
    before = termios.tcgetattr(source)
    try:
        tty.setcbreak(source)
        os.write(sys.stdout.fileno(), b"\x1b]11;?\x1b\\\x1b[c")
        while not _END.search(answer) and select.select([source], [], [], WAIT)[0]:
            part = os.read(source, 256)
            if not part:
                break
            answer += part
    except (OSError, termios.error):
        return b""
    finally:
        termios.tcsetattr(source, termios.TCSADRAIN, before)
    return answer
