"""Serves an environment class by the package's own server, in the interpreter that has both.

    python host.py MODULE:CLASS FD     FD: a listening socket that it inherits

Its action and observation are those that `step` names. Imports nothing of agentrl.
"""

from __future__ import annotations

import importlib
import os
import sys
import typing

SESSIONS = 256
"""Sessions at once of a class with SUPPORTS_CONCURRENT_SESSIONS."""


def main(name: str, fd: int) -> None:
    """Serve the class until the process ends."""
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    sys.path[0] = os.getcwd()  # in place of this file's folder
    module, _, attribute = name.partition(":")
    made: typing.Any = getattr(importlib.import_module(module), attribute)
    if issubclass(made, MCPEnvironment):
        action, observation = CallToolAction, CallToolObservation
    else:
        hints = typing.get_type_hints(made.step)
        if not {"action", "return"} <= set(hints):
            raise TypeError("annotate it as step(self, action: YourAction) -> YourObservation")
        action, observation = hints["action"], hints["return"]
    most = SESSIONS if made.SUPPORTS_CONCURRENT_SESSIONS else 1
    app = create_app(made, action, observation, env_name=attribute, max_concurrent_envs=most)
    uvicorn.run(app, fd=fd, log_level="warning")


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 - whatever a user's class raises, in a line
        raise SystemExit(f"{sys.argv[1]}: {type(error).__name__}: {error}") from None
