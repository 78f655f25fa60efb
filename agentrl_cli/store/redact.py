"""Masking what looks like a secret, for exports. Patterns of well-known keys, and values behind telling names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PATTERNS: dict[str, re.Pattern[str]] = {
    "private-key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    "api-key": re.compile(r"\b(?:sk|pk|rk)-(?:[A-Za-z]+-)*[A-Za-z0-9_-]{16,}"),
    "huggingface": re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    "github": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"),
    "gitlab": re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"),
    "aws": re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "google": re.compile(r"\bAIza[A-Za-z0-9_-]{30,}"),
    "slack": re.compile(r"\bxox[abeprs]-[A-Za-z0-9-]{10,}"),
    "jwt": re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"),
    "bearer": re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/-]{16,}=*"),
    "url-password": re.compile(r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"),
}
"""Name → what such a secret looks like."""

_NAME = r"(?:api[_-]?key|secret(?:[_-]?key)?|access[_-]?token|auth[_-]?token|passw(?:or)?d|client[_-]?secret)"
_TOLD = re.compile(rf"(?i)(\b[\w-]*{_NAME}[\"']?\s*[=:]\s*[\"']?)(?!\[masked)([^\s\"',;]{{6,}})")
_TELLING = re.compile(rf"(?i)^[\w-]*{_NAME}$")


def mask_text(text: str) -> str:
    """The text with everything that looks like a secret replaced by `[masked:<kind>]`."""
    for name, pattern in PATTERNS.items():
        text = pattern.sub(f"[masked:{name}]", text)
    return _TOLD.sub(lambda match: f"{match[1]}[masked:named]", text)


def mask(value: Any) -> Any:
    """Mask every text inside a JSON-like value; the same objects come back where nothing was found."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return {
            key: "[masked:named]" if isinstance(item, str) and item and _TELLING.match(str(key)) else mask(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask(item) for item in value]
    return value
