"""Policies of the tests are closed after each."""

from collections.abc import AsyncIterator

import pytest

from tests.helpers.local import MADE


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    for policy in list(MADE):
        await policy.close()
