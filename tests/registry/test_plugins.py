"""Plugins of outsiders: found by an entry point and used as the shipped ones; a broken one is never in the way."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
from pydantic import Field
from agentrl_cli.types.section import Section


class Colours(Section):
    '''Colours of a screen.'''

    main: str = Field(default="red", description="the first one")


def paint() -> None:
    '''Paint.'''
    print("painted")
"""
OFFERS = """
OFFERS = {
    "commands": {"paint": ("Look", "stranger_code:paint", "Paint a screen")},
    "settings": {"colours": "stranger_code:Colours", "train": "stranger_code:Colours", "lost": "no_such_module:X"},
    "renamed": {"train.colour": "colours.main"},
}
"""
POINTS = "[agentrl.plugins]\nstranger = stranger_offers:OFFERS\nbroken = no_such_package:OFFERS\n"


def install(folder: Path) -> None:
    """Write a distribution with two plugins, one of which cannot be imported."""
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (folder / "stranger_offers.py").write_text(OFFERS)
    (folder / "stranger_code.py").write_text(CODE)


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r})\nfrom agentrl_cli.commands import main\n"
    )
    command = [sys.executable, "-c", f"{code}sys.exit(main({list(args)!r}))"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_an_outsiders_plugin_is_used_and_a_broken_one_is_reported(tmp_path: Path) -> None:
    install(tmp_path)
    page = run(tmp_path, "--help")
    assert "paint" in page.stdout and "Paint a screen" in page.stdout, page.stderr
    assert "The plugin broken could not be loaded: ModuleNotFoundError" in page.stderr
    assert run(tmp_path, "paint").stdout == "painted\n"
    shown = run(tmp_path, "config", "show", "--all", "--set", "train.colour=blue")
    assert shown.returncode == 0, shown.stderr
    assert "colours.main" in shown.stdout and "blue" in shown.stdout and "train.lr" in shown.stdout
    assert "train.colour is now colours.main" in shown.stderr
    assert "The section train of a plugin is left out: the core has a section train" in shown.stderr
    assert "The section lost of a plugin is left out" in shown.stderr
