"""`make demo` and `make test` from a bare machine: what is missing is installed where that is allowed, else named."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.helpers.template import ROOT, NotFetched, fetch
from tests.helpers.train import spawn_code

TOOLS = ("sh", "make", "env", "echo", "true", "touch", "chmod")
LINE = "sudo apt-get install -y bubblewrap"
APT = """\
[ "$1" = install ] || exit 0
[ -e "$PLACE/broken" ] && exit 100
echo '#!/bin/sh' > "$PLACE/bin/bwrap"
chmod +x "$PLACE/bin/bwrap"
"""


class Machine:
    """A PATH of its own, whose `sudo`, `apt-get`, `id` and Python write down how they are called."""

    def __init__(self, place: Path, user: int, sudo: bool) -> None:
        self.place = place
        (place / "bin").mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            if found is None:
                pytest.skip(f"{tool} is not installed")
            (place / "bin" / tool).symlink_to(found)
        self.program("bin/id", f"echo {user}", quiet=True)
        self.program("bin/apt-get", APT)
        self.program("bin/sudo", 'shift; exec "$@"' if sudo else "exit 1")
        self.program("bin/python3", "exit 0", quiet=True)

    def program(self, name: str, body: str, quiet: bool = False) -> None:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        note = "" if quiet else f'echo "{path.name} $*" >> "$PLACE/calls"\n'
        path.write_text(f"#!/bin/sh\n{note}{body}\n")
        path.chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.place / "bin"), "PLACE": str(self.place), "HOME": str(self.place)}
        return subprocess.run(
            command, cwd=self.place, env=env, capture_output=True, text=True, check=False
        )

    @property
    def calls(self) -> list[str]:
        path = self.place / "calls"
        return path.read_text().splitlines() if path.is_file() else []

    def checkout(self) -> None:
        """The Makefile with an installed environment, whose programs are fakes."""
        shutil.copy(ROOT / "Makefile", self.place)
        for name in (".ci/need", "tests/helpers/template.py"):
            (self.place / name).parent.mkdir(parents=True)
            shutil.copy(ROOT / name, self.place / name)
        for name in ("pyproject.toml", "constraints.txt"):
            (self.place / name).touch()
        self.program(
            ".venv/bin/agentrl",
            '[ "$1" != demo ] || [ ! -e "$PLACE/weak" ] || [ -n "$3" ] || exit 7',
        )
        self.program(
            ".venv/bin/python", '[ "$2" != tests.helpers.template ] || [ ! -e "$PLACE/offline" ]'
        )
        for name in (".venv/.base", ".venv/.dev"):
            (self.place / name).touch()


NEED = str(ROOT / ".ci" / "need")


APT_GET = ["apt-get install -y -qq --no-install-recommends bubblewrap"]


@pytest.mark.parametrize(
    ("user", "sudo", "state", "code", "said", "calls"),
    [
        (1000, True, "nothing is missing", 0, "", []),
        (0, False, "", 0, "Missing: bubblewrap. Installing with", APT_GET),
        (1000, True, "", 0, "Missing: bubblewrap. Installing with", ["sudo -n true", *APT_GET]),
        (1000, False, "", 1, f"Missing: bubblewrap. To install: {LINE}\n", ["sudo -n true"]),
        (0, False, "broken", 1, f"Still missing: bubblewrap. To install: {LINE}\n", APT_GET),
        (0, False, "no apt-get", 1, "There is no apt-get here", []),
    ],
)
def test_what_is_missing_is_installed_by_who_may_or_named(
    tmp_path: Path, user: int, sudo: bool, state: str, code: int, said: str, calls: list[str]
) -> None:
    machine = Machine(tmp_path, user, sudo)
    if state == "nothing is missing":
        machine.program("bin/bwrap", "exit 0", quiet=True)
    elif state == "broken":
        (tmp_path / "broken").touch()
    elif state:
        (tmp_path / "bin" / "apt-get").unlink()
    done = machine.run(NEED, "python3", "python3-venv", "bubblewrap")
    assert (done.returncode, done.stdout) == (code, "") and said in done.stderr
    assert [call for call in machine.calls if call in ("sudo -n true", *APT_GET)] == calls
    assert bool(done.stderr) == bool(said)


@pytest.mark.parametrize(
    ("user", "weak", "code", "text"),
    [
        (0, False, 0, "Installing"),
        (1000, False, 0, LINE),  # it continues without: the level is strong enough
        (1000, True, 2, LINE),
    ],
)
def test_the_demo_installs_what_it_misses_or_names_it(
    tmp_path: Path, user: int, weak: bool, code: int, text: str
) -> None:
    machine = Machine(tmp_path, user, sudo=False)
    machine.checkout()
    if weak:
        (tmp_path / "weak").touch()
    done = machine.run("make", "demo")
    assert done.returncode == code and text in done.stderr
    assert [call for call in machine.calls if call.startswith("agentrl")] == ["agentrl demo demo"]
    assert "WEAK" not in done.stderr, "agentrl names it, where it is the isolation that is missing"
    if weak:
        assert "Error 7" in done.stderr and machine.run("make", "demo", "WEAK=1").returncode == 0
        assert machine.calls[-1] == "agentrl demo demo --yes"


def test_the_installation_draws_pip_s_own_bar(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, sudo=False)
    machine.checkout()
    (tmp_path / ".venv" / ".base").unlink()
    assert machine.run("make", "demo").returncode == 0
    (line,) = [call for call in machine.calls if call.startswith("python -m pip install")]
    assert line.endswith("-e .") and not {"-q", "--quiet", "--progress-bar"} & set(line.split())


def test_tests_run_with_and_without_what_could_be_fetched(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, sudo=False)
    machine.checkout()
    (tmp_path / "offline").touch()
    (tmp_path / ".cache" / "templates").mkdir(parents=True)
    suite = "python -m pytest -q -n 4 --dist worksteal -m not ray and not classes"
    fetching = "python -m tests.helpers.template"
    for offline in (True, False, False):
        if not offline:
            (tmp_path / "offline").unlink(missing_ok=True)
        done = machine.run("make", "test", "JOBS=4")
        assert (
            done.returncode == 0
            and "The strong sandbox is not tested." in done.stderr
            and LINE in done.stderr
        )
    python = [call.strip() for call in machine.calls if call.startswith("python")]
    assert python == [fetching, suite, fetching, suite, suite], (
        "fetched once, and tried again where that failed"
    )


def test_templates_are_fetched_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, kept = tmp_path / "links", tmp_path / "kept"
    links.mkdir()
    for name, value in (
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(links)),
        ("PIP_CONFIG_FILE", os.devnull),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(NotFetched, match="No matching distribution"):
        fetch("trl", kept)
    with zipfile.ZipFile(links / "trl-1.16.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "trl-1.16.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: trl\nVersion: 1.16.0\n"
        )
        wheel.writestr("trl-1.16.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    with pytest.raises(NotFetched, match="SHA-256"):
        fetch("trl", kept)
    assert list(kept.iterdir()) == []


def test_nothing_is_fetched_or_written_by_collecting(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    code = "import os, sys, pytest\nos.chdir(sys.argv[1])\nos.environ.update(HOME=sys.argv[2], PIP_NO_INDEX='1')\n"
    code += "sys.exit(pytest.main(sys.argv[3:]))"
    words = "--collect-only -q -p no:cacheprovider tests/chat/test_template_sweep.py".split()
    status, printed = spawn_code(tmp_path, code, str(ROOT), str(home), *words)
    assert status == 0 and "no tests" not in printed, printed
    assert printed.count("test_calls_come_back") == 141 and list(home.iterdir()) == []
