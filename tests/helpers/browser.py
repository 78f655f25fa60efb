"""A headless Chromium; tests skip without one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

BROWSERS = (
    "chromium",
    "chromium-headless-shell",
    "chromium-browser",
    "google-chrome",
    "chrome-headless-shell",
)


def browser(folder: Path) -> list[str]:
    """The command that starts one without a window, its profile in `folder`; skips the test if none is installed."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return [found, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
