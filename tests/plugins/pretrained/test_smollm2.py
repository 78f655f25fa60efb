"""The real model, if its folder is named: SMOLLM2_FOLDER=$(agentrl model get smollm2). Nothing is fetched here."""

import os
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.chat.audit import audit
from agentrl_cli.config import Config
from agentrl_cli.policies.load import load_policy
from agentrl_cli.types import Sampling

FOLDER = os.environ.get("SMOLLM2_FOLDER", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="SMOLLM2_FOLDER=$(agentrl model get smollm2) names the model"
)


async def test_smollm2_in_bfloat16_is_paged_and_its_tokens_are_the_texts(tmp_path: Path) -> None:
    settings = {"model": {"name": FOLDER, "dtype": "bfloat16", "device": "cpu"}}
    loaded = load_policy(None, Config.model_validate(settings), base=tmp_path)
    policy: Any = loaded.policy
    assert policy.engine == "paged", policy.engine_why
    tokenizer = loaded.chat.tokenizer
    for text in ("  two  spaces\n\n\ttab", "4821 * 317", "中文，很好", "🙂👩‍👩‍👧 naïve", "²³ ½ ٣"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("4821")) == 4  # its training cut numbers into digits
    assert audit(loaded.chat).append_only
    prompt = loaded.chat.prompt([{"role": "user", "content": "What is the capital of France?"}], [])
    said = await policy.generate(
        "a", list(prompt.ids), Sampling(max_new_tokens=12, temperature=0.0)
    )
    await policy.close()
    assert "Paris" in tokenizer.decode(list(said.ids))
