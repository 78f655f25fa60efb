"""The suite writes under pytest's temporary folders alone: home, caches, settings and TMPDIR are a folder of its own,
which is removed at the end. So it runs with an empty home, and a user's own settings change no test.
"""

import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.models.openmp import limit_openmp

# What would lead past HOME.
HOMES = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "XDG_STATE_HOME",
    "HF_HOME",
    "AGENTRL_SCREENS",
)


def pytest_configure(config: pytest.Config) -> None:
    """Before any module of the tests is read: some libraries look for their folders when they are imported."""
    gc.set_threshold(0)  # what collection imports stays
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job ignores Ctrl-C, and so would every program that a test interrupts and waits for.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        return  # a worker of xdist has its environment from the process that started it
    os.environ.setdefault(
        "PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()
    )  # tmp_path stays where pytest keeps it
    folder = Path(tempfile.mkdtemp(prefix="agentrl-tests-"))
    # At the very end: multiprocessing removes its own folder in TMPDIR at -100.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)
    for name, part in (("HOME", "home"), ("TMPDIR", "tmp")):
        (folder / part).mkdir()
        os.environ[name] = str(folder / part)
    limit_openmp()  # as every command does: threads of four workers that spin for each other cost several times the CPU
    folder.chmod(
        0o711
    )  # the sandbox's runner becomes another user, who makes folders in TMPDIR as in /tmp
    (folder / "tmp").chmod(0o1777)
    for name in HOMES:
        os.environ.pop(name, None)
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub
    tempfile.tempdir = None  # read TMPDIR again
    if "popen" in config.getoption("tx", []):  # with `-n`: a worker is a process of this machine
        from tests.helpers.workers import fork_workers

        given = {"popen": f"popen//python={fork_workers(str(folder))}"}
        config.option.tx = [given.get(spec, spec) for spec in config.option.tx]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput") and config.args_source is config.ArgsSource.TESTPATHS:
        from tests.helpers.workers import import_share

        number = int(config.workerinput["workerid"].removeprefix("gw"))
        import_share(config.rootpath, number, config.workerinput["workercount"])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # a tenth of a test's time went into looking for garbage


@pytest.hookimpl(trylast=True)  # the workers end first
def pytest_sessionfinish() -> None:
    """Kill what failed tests have left: the interpreter would wait for it, and a stopped process never ends."""
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model. No test writes into it."""
    from tests.helpers.train import write_model

    return write_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Any:
    """How a training ends that nothing interrupts: tests/trainer/test_resume.py."""
    from tests.helpers.train import spawn_well
    from tests.trainer.test_resume import ending, project_of

    project = project_of(tmp_path_factory.mktemp("whole") / "project", model)
    spawn_well(project, "train")
    return ending(project)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """An empty store. A file's own `store` adds to it."""
    from agentrl_cli.store import Store

    with Store.open(tmp_path / "runs" / "agentrl.db") as opened:
        yield opened


@pytest.fixture
async def sandbox() -> Any:
    """A sandbox with one worker; tests/sandbox has its own."""
    from tests.helpers.sandbox import open_sandbox

    async with await open_sandbox(workers=1) as opened:
        yield opened


@pytest.fixture
def cli(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs commands in `tmp_path`, or where its `folder` says; see tests/helpers/cli.py."""
    from tests.helpers.cli import Cli

    return Cli(capfd, tmp_path)
