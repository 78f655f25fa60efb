"""The model that the tests of updates start from."""

from typing import Any

import pytest

from tests.helpers.train import write_model


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random model. Tests train copies of it."""
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path_factory.mktemp("start") / "random")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    return loaded.eval()
