"""Texts without secrets: patterns of well-known keys, and values of names like `password`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    """Mask every text inside a JSON-like value, keys too; a string without a match comes back unchanged."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        made: dict[Any, Any] = {}
        for key, item in value.items():
            name = mask_text(key) if isinstance(key, str) else key
            while name in made:  # two keys that are secrets of one kind
                name = f"{name}#{len(made)}"
            hides = isinstance(item, str) and item and _NAME_ALONE.search(str(key))
            made[name] = "[masked:named]" if hides else mask(item)
        return made
    if isinstance(value, list | tuple):
        return [mask(item) for item in value]
    return value
