"""The core alone: a copy of the checkout without plugins and without their tests.

    python -m tests.helpers.core FOLDER [ARGUMENTS]      makes it in a new folder, and runs its suite there by pytest

Left out are also the guards, which compare the documentation with all commands and settings.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "agentrl_cli" / "plugins"
FOLDERS = sorted(path.name for path in PLUGINS.iterdir() if (path / "__init__.py").is_file())
COPIED = "agentrl_cli tasks sandbox tests recipes benchmarks examples docs pyproject.toml constraints.txt README.md"
IGNORED = shutil.ignore_patterns("__pycache__", ".pytest_cache", "*.db")


def delete_plugins(root: Path, names: Sequence[str]) -> None:
    registry = root / "agentrl_cli" / "registry" / "plugins.py"
    lines = registry.read_text(encoding="utf-8").splitlines(keepends=True)
    for name in names:
        shutil.rmtree(root / "agentrl_cli" / "plugins" / name)
        lines = [line for line in lines if f'"agentrl_cli.plugins.{name}:OFFERS"' not in line]
    registry.write_text("".join(lines), encoding="utf-8")


def copy_core(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in COPIED.split():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
        else:
            shutil.copy(ROOT / name, folder / name)
    delete_plugins(folder, FOLDERS)
    shutil.rmtree(folder / "tests" / "plugins")
    shutil.rmtree(folder / "tests" / "guards")
    cached = ROOT / ".cache"
    if cached.is_dir():
        (folder / ".cache").symlink_to(cached)


def main(folder: str, *arguments: str) -> int:
    root = Path(folder).resolve()
    copy_core(root)
    command = [sys.executable, "-m", "pytest", *(arguments or ("-q",))]
    around = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=around, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
