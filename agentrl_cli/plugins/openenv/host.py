"""Serves an environment class by the package's own server, in the interpreter that has both.

    python host.py MODULE:CLASS FOLDER LISTENING FAILED     a socket, and a pipe for the reason if there is one

Its action and observation are those that `step` names; without one, any observation. Imports nothing of agentrl.
"""

from __future__ import annotations

import importlib
import os
import sys
import typing

SESSIONS = 256
"""Sessions at once of a class with SUPPORTS_CONCURRENT_SESSIONS."""


def main(name: str, folder: str, listening: int, failed: int) -> None:
    """Serve the class until the process ends. A module that is not installed is looked for in the folder."""
    import uvicorn

    sys.path[0] = folder or os.getcwd()  # in place of this file's folder
    try:
        app = make_app(name)
    except Exception as error:
        os.write(failed, f"{type(error).__name__}: {error}".encode())
        raise SystemExit(1) from error
    os.close(failed)
    uvicorn.run(app, fd=listening, log_level="warning")


def make_app(name: str) -> typing.Any:
    """Return the package's server of a class."""
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation

    module, _, attribute = name.partition(":")
    made: typing.Any = getattr(importlib.import_module(module), attribute)
    action, observation = CallToolAction, CallToolObservation
    if not issubclass(made, MCPEnvironment):
        hints = typing.get_type_hints(made.step)
        if "action" not in hints:
            raise TypeError("annotate it as step(self, action: YourAction) -> YourObservation")
        action, observation = hints["action"], hints.get("return", Observation)
    most = SESSIONS if made.SUPPORTS_CONCURRENT_SESSIONS else 1
    return create_app(made, action, observation, env_name=attribute, max_concurrent_envs=most)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
