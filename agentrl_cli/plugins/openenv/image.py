"""Containers of the images that projects name: one for each image, on loopback, removed with this process."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from agentrl_cli.errors import EnvError, NotFound
from agentrl_cli.sandbox.container import connect, own_labels, sweep

PORT = 8000
"""The port on which the package's images listen."""
START = 120.0
"""Seconds in which a container must answer."""
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LOG = logging.getLogger(__name__)
MOST = 3
"""Containers of an image that take the place of one that ended."""
_STARTED: dict[str, list[tuple[Any, str, str]]] = {}
"""By image the engine, id and address of each container, the one that runs last."""
_LOCK = threading.Lock()


def serve_image(image: str) -> str:
    """Return the address of an image's server, started if it is not running. Blocks until it answers.

    Raises SandboxUnavailable without an engine, NotFound for an image that it does not have, EnvError for one whose
    server does not answer, or has ended too often.
    """
    with _LOCK:
        started = _STARTED.setdefault(image, [])
        ended = _why_ended(*started[-1][:2]) if started else "not started"
        if ended and len(started) > MOST:
            raise EnvError(f"The container of {image} has ended {len(started)} times: {ended}.")
        if ended and started:
            _LOG.warning("The container of %s has ended (%s): a new one is started.", image, ended)
            _remove(*started[-1][:2])
        if ended:
            started.append(_start(connect(), image))
        return started[-1][2]


def _why_ended(api: Any, container: str) -> str:
    """Return why a container does not run; empty if it does, or its engine does not say."""
    from docker.errors import DockerException, NotFound

    try:
        state = api.inspect_container(container)["State"]
    except NotFound:
        return "removed"
    except (DockerException, OSError):
        return ""
    return "" if state["Running"] else f"exit code {state['ExitCode']}"


def _start(api: Any, image: str) -> tuple[Any, str, str]:
    from docker.errors import APIError, ImageNotFound

    sweep(api)
    ports = api.create_host_config(port_bindings={PORT: ("127.0.0.1",)}, init=True)
    try:
        made = api.create_container(image, ports=[PORT], host_config=ports, labels=own_labels())
        atexit.register(_remove, api, made["Id"])
        api.start(made["Id"])
        bound = api.port(made["Id"], PORT)  # None if it has ended already
    except ImageNotFound as error:
        raise NotFound(f"The engine has no image {image}.", hint=f"docker pull {image}") from error
    except APIError as error:
        raise EnvError(f"No container of {image} starts: {error.explanation}") from error
    port = int(bound[0]["HostPort"]) if bound else PORT
    _wait(api, made["Id"], image, url := f"http://127.0.0.1:{port}")
    return api, made["Id"], url


def _wait(api: Any, container: str, image: str, url: str) -> None:
    """Wait until the server answers. Raises EnvError if its container ends before, or START is over."""
    until = time.monotonic() + START
    while api.inspect_container(container)["State"]["Running"] and time.monotonic() < until:
        with suppress(OSError, HTTPException), _HTTP.open(f"{url}/schema", timeout=START):
            return
        time.sleep(0.1)
    said = api.logs(container, tail=5).decode(errors="replace").strip()
    _remove(api, container)
    raise EnvError(f"The server in the image {image} does not answer on port {PORT}.", hint=said)


def _remove(api: Any, container: str) -> None:
    from docker.errors import DockerException

    with suppress(DockerException, OSError):
        api.remove_container(container, force=True)
