"""Names to objects."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agentrl_cli.errors import EnvError, NotFound
from agentrl_cli.registry import load_file, names, resolve

TABLE: dict[str, str | object] = {"root": "math:sqrt", "five": 5}


def test_table_entries_are_objects_or_loaded_when_asked() -> None:
    assert resolve("tools", TABLE, "root") is math.sqrt
    assert resolve("tools", TABLE, "five") == 5
    assert names("tools", TABLE) == ["five", "root"]


def test_paths_to_modules_and_files(tmp_path: Path) -> None:
    assert resolve("tools", {}, "os:path.join")("a", "b") == "a/b"
    (tmp_path / "mine.py").write_text("class Box:\n    value = 7\n")
    assert resolve("tools", {}, "mine.py:Box.value", base=tmp_path) == 7


def test_a_file_is_imported_once_and_again_after_a_change(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("value = 1\n")
    assert load_file(file) is load_file(file)
    file.write_text("value = 23\n")
    import os

    os.utime(file, ns=(1, 1))
    assert load_file(file).value == 23


def test_unknown_names_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="No tool named 'rot'") as caught:
        resolve("tools", TABLE, "rot")
    assert "root" in caught.value.hint
    with pytest.raises(NotFound) as caught:
        resolve("tools", TABLE, "math:sqr")
    assert "sqrt" in caught.value.hint
    with pytest.raises(NotFound, match="no_such_module_here"):
        resolve("tools", TABLE, "no_such_module_here:thing")
    (tmp_path / "mine.py").touch()
    with pytest.raises(NotFound) as caught:
        resolve("tools", TABLE, "mime.py:thing", base=tmp_path)
    assert "mine.py" in caught.value.hint or "mine.py" in caught.value.message


def test_code_that_fails_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(EnvError, match=r"bad\.py:2: ZeroDivisionError"):
        load_file(tmp_path / "bad.py")
    (tmp_path / "worse.py").write_text("x = 1\n\ndef f(:\n")
    with pytest.raises(EnvError, match=r"worse\.py:3: SyntaxError"):
        load_file(tmp_path / "worse.py")


@pytest.mark.parametrize("line", ["raise SystemExit(3)", "import asyncio; raise asyncio.CancelledError"])
def test_a_file_that_would_end_the_process_is_an_error_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """As a script without `if __name__ == "__main__":` does; the command ended with that status and no word."""
    (tmp_path / "script_that_ends.py").write_text(f"x = 1\n{line}\n")
    with pytest.raises(EnvError, match=r"script_that_ends\.py:2: (SystemExit: 3|CancelledError)"):
        load_file(tmp_path / "script_that_ends.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvError, match="script_that_ends ended its import by"):
        resolve("rewards", {}, "script_that_ends:x")
