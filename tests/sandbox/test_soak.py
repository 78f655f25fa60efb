"""Two thousand executions in a row leave no more processes, descriptors and memory than the first hundred."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from agentrl_cli.errors import SandboxUnavailable


def benchmark() -> ModuleType:
    path = Path(__file__).parent.parent.parent / "benchmarks" / "sandbox.py"
    spec = importlib.util.spec_from_file_location("benchmarks_sandbox", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
async def test_many_executions_in_a_row_do_not_grow() -> None:
    try:
        before, after = await benchmark().soak("ns", 2000)
    except SandboxUnavailable as problem:
        pytest.skip(f"{problem.message} {problem.hint}")
    assert after["processes"] == before["processes"]
    assert after["descriptors"] == before["descriptors"]
    assert after["memory_kib"] < before["memory_kib"] + 4096
