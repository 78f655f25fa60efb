"""Reading requests beside the event loop, so that a long one keeps no other client waiting.

One thread for all sessions: requests are read in the order in which they came, and the memory that a long one takes is
taken once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_READER = ThreadPoolExecutor(1, thread_name_prefix="gateway-reader")


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function in the reading thread and return its result."""
    return await asyncio.get_running_loop().run_in_executor(
        _READER, partial(function, *args, **kwargs)
    )
