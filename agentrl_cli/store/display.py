"""Episodes outside of the store: texts with masked secrets, and images.

Secrets are found by patterns of well-known keys, and as values of names like `password`. An image is shown as a line
that names it, a file to open, and a short text for its many tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.types.content import digest, media_type

PATTERNS: dict[str, re.Pattern[str]] = {
    "private-key": re.compile(
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
        re.S,
    ),
    "api-key": re.compile(r"\b(?:sk|pk|rk)(?:-|_(?:live|test)_)[A-Za-z0-9_-]{16,}"),
    "huggingface": re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    "github": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"),
    "gitlab": re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"),
    "npm": re.compile(r"\bnpm_[A-Za-z0-9]{16,}"),
    "pypi": re.compile(r"\bpypi-[A-Za-z0-9_-]{16,}"),
    "aws": re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "google": re.compile(r"\b(?:AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,})"),
    "slack": re.compile(r"\bxox[a-eprs]-[A-Za-z0-9-]{10,}"),
    "grafana": re.compile(r"\bglsa_[A-Za-z0-9_]{16,}"),
    "digitalocean": re.compile(r"\bdo[por]_v1_[A-Za-z0-9]{16,}"),
    # A key of an episode is an address and an API key at once; words have no capitals.
    "episode-key": re.compile(r"\bep-(?=[\w-]{0,31}[A-Z])[\w-]{32}(?![\w-])"),
    "web-hook": re.compile(
        r"(?:(?<=hooks\.slack\.com/)|(?<=webhook\.office\.com/)|(?<=hooks\.zapier\.com/hooks/)|(?<=/api/webhooks/))"
        r"[\w@/-]{16,}"
    ),
    "signature": re.compile(r"(?<=[?&;]sig=)[A-Za-z0-9%+/_-]{16,}=*"),
    "jwt": re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+"),
    "bearer": re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/-]{16,}=*"),
    "url-password": re.compile(r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"),
}
"""Name → what such a secret looks like. Every pattern takes time in proportion to the text: none starts with a
repetition, and none can start again inside a failed match."""

_NAME = (
    r"(?:(?:api|private|secret|account|shared[_-]?access|(?:secret[_-]?)?access)[_-]?key|(?:client[_-]?)?secret|passw(?:or)?d|passphrase"
    r"|(?:access|auth|refresh|session)[_-]?token)"
)
_PAT = r"(?:GITHUB|GITLAB|GH|GL|AZURE(?:_DEVOPS)?|ADO|DEVOPS)_PAT"
_ASSIGNS = r"[\"']?\s{0,40}[=:]\s{0,40}[\"']?"
_VALUE = r"(?!\[masked)([^\s\"',;]{6,})"
_NAMED = (
    re.compile(rf"(?i)({_NAME}{_ASSIGNS}){_VALUE}"),
    # As in an environment: AGENTRL_TOKEN=, DB_PASS=, OPENAI_KEY=
    re.compile(rf"((?<=[A-Z0-9]_)(?:TOKEN|PASS|PWD|KEY){_ASSIGNS}){_VALUE}"),
    re.compile(rf"({_PAT}{_ASSIGNS}){_VALUE}"),
    # Short ones, but neither a folder nor code: PWD=/home, pwd=os.getcwd(), passwd=None
    re.compile(
        r"(?i)((?<![a-z0-9])(?:pwd|passw(?:or)?d)=[\"']?)(?!\[masked|none\b|true\b|false\b|null\b|self\b)"
        r"([^\s\"',;&/~$.<>(){}\[\]][^\s\"',;&<>(){}\[\]]{4,}+)(?![(\[{])"
    ),
    re.compile(
        r"(?i)(\b(?:set-)?cookie[\"']?:\s{0,8}[\"']?)(?!\[masked)([\w.-]{1,64}+=[^\r\n\"']{6,})"
    ),
    re.compile(rf"(?i)(authorization{_ASSIGNS}(?:basic|token)\s{{1,4}}){_VALUE}"),
    # `token: …` and `token="…"`, but not the code `token = next(tokens)`
    re.compile(
        r"(?i)((?<![a-z0-9])token(?:[\"']?\s{0,8}:\s{0,8}[\"']?|\s{0,8}=\s{0,8}[\"']))"
        r"(?!\[masked)([a-z0-9_./+~=-]{8,})(?![\w(\[])"
    ),
)
_NAME_ALONE = re.compile(
    rf"(?i:{_NAME}$)|(?<=[A-Z0-9]_)(?:TOKEN|PASS|PWD|KEY)$|^(?i:token|(?:set-)?cookie)$|^{_PAT}$"
)


def mask_text(text: str) -> str:
    """Return the text with everything that looks like a secret replaced by `[masked:<kind>]`."""
    for name, pattern in PATTERNS.items():
        text = pattern.sub(f"[masked:{name}]", text)
    for pattern in _NAMED:
        text = pattern.sub(lambda match: f"{match[1]}[masked:named]", text)
    return text


def mask(value: Any) -> Any:
    """Mask every text inside a JSON-like value; a string without a match comes back unchanged."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return {
            key: "[masked:named]"
            if isinstance(item, str) and item and _NAME_ALONE.search(str(key))
            else mask(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask(item) for item in value]
    return value


RUN = 8
"""This many equal control tokens in a row are an image's, and shortened."""
PATCH = "▪"


def image_file(folder: Path, data: bytes) -> Path | None:
    """Return the image as a file in a folder, named by its hash, written if absent; None if it cannot be written."""
    path = folder / f"{digest(data)}.{media_type(data).partition('/')[2]}"
    part = path.with_name(f".{path.name}.part")
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            part.replace(path)
    except OSError:
        return None
    return path


def image_line(data: bytes, size: str = "", folder: Path | None = None) -> str:
    """Return `image 24x16  83 bytes  sha256 9f86d081…`, and the file to open if a folder is given."""
    path = image_file(folder, data) if folder is not None else None
    parts = [f"image {size}".rstrip(), f"{len(data)} bytes", f"sha256 {digest(data)[:8]}…"]
    return "  ".join([*parts, *([str(path)] if path is not None else [])])


def short_runs(texts: Sequence[str], ids: Sequence[int]) -> list[str]:
    """Return texts of tokens; an image's placeholders after the first are a small square each."""
    out = list(texts)
    start = 0
    for at in range(1, len(out) + 1):
        if at < len(out) and ids[at] == ids[start]:
            continue
        if at - start >= RUN and out[start].startswith("<|"):
            out[start + 1 : at] = [PATCH] * (at - start - 1)
        start = at
    return out
