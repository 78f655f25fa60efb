"""Printing characters that the encoding of a stream lacks."""

from __future__ import annotations

import codecs
import json


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


ESCAPES = "agentrl-escape"
"""For `errors=` of a stream: what its encoding lacks is written as escapes, which JSON reads, too."""
codecs.register_error(ESCAPES, _escape)
