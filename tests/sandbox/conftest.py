"""A sandbox with one worker, and a session in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentrl_cli.sandbox import Sandbox, Session
from tests.helpers.sandbox import open_sandbox


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with await open_sandbox(workers=1, wall=2.0) as opened:
        yield opened


@pytest.fixture
async def session(sandbox: Sandbox) -> Session:
    return await sandbox.session()
