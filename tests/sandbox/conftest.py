"""A sandbox with one worker for all tests of a file, and a session in it. A file's `SANDBOX` are its settings."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentrl_cli.sandbox import Sandbox, Session
from tests.helpers.sandbox import open_sandbox


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A sandbox belongs to one event loop, so the tests that share it run in the same one."""
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[dict[str, Sandbox]]:
    """Open sandboxes by level: a runner costs more CPU time to start than most tests here need."""
    opened: dict[str, Sandbox] = {}
    yield opened
    for one in opened.values():
        await one.close()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(
    request: pytest.FixtureRequest, shared: dict[str, Sandbox]
) -> AsyncIterator[Sandbox]:
    """The file's sandbox, its counts empty; its level is a parameter. What the code did was no fault of the sandbox."""
    level = getattr(request, "param", getattr(request.module, "LEVEL", "auto"))
    if level not in shared:
        settings = {"workers": 1, "wall": 2.0, **getattr(request.module, "SANDBOX", {})}
        minimum = "ns" if level == "auto" else level
        shared[level] = await open_sandbox(backend=level, min_level=minimum, **settings)
    opened = shared[level]
    opened.counts.clear()
    opened.limits_hit.clear()
    yield opened
    faults = [name for name in opened.counts if name.startswith("sandbox_")]
    for session in list(opened.sessions):
        await session.close()
    assert faults == [] or level == "docker"


@pytest_asyncio.fixture(loop_scope="module")
async def session(sandbox: Sandbox) -> Session:
    return await sandbox.session()
