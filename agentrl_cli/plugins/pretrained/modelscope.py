"""Models of ModelScope, downloaded by its own package: `modelscope:ORG/NAME`."""

from __future__ import annotations

from pathlib import Path

from agentrl_cli.config import ModelConfig
from agentrl_cli.errors import MissingDependency, ModelError
from agentrl_cli.models.adapter import short

PREFIX = "modelscope:"
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "tokenizer*"]


def find_model(name: str, config: ModelConfig, base: Path) -> Path | None:
    """Return the folder of a ModelScope model in its package's cache, downloaded first. None for other names."""
    if not name.startswith(PREFIX):
        return None
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        hint = "pip install modelscope"
        raise MissingDependency(f"{name} needs the package modelscope.", hint=hint) from error
    try:
        found = snapshot_download(
            name.removeprefix(PREFIX),
            revision=config.revision,
            local_files_only=config.offline,
            allow_patterns=[*WANTED, *(["*.py"] * config.trust_remote_code)],
        )
    except Exception as error:  # its errors have no common base
        raise ModelError(
            f"{name} could not be downloaded: {short(error)}",
            hint="Mind the spelling: modelscope:ORG/NAME; or use a local folder.",
        ) from error
    return Path(found)
