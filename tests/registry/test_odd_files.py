"""Files of a project with odd names, and errors that come from a library beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl_cli.errors import EnvError
from agentrl_cli.registry import load_file


def test_names_that_differ_in_a_dot_alone_are_two_files(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("NAME = 'underscore'\n")
    (tmp_path / "my.task.py").write_text("NAME = 'dot'\n")
    assert [load_file(tmp_path / name).NAME for name in ("my_task.py", "my.task.py")] == [
        "underscore",
        "dot",
    ]


def test_an_error_in_a_library_is_reported_at_the_users_line(tmp_path: Path) -> None:
    library = tmp_path / ".venv" / "site-packages" / "lib.py"
    library.parent.mkdir(parents=True)
    library.write_text("def fail():\n    raise ValueError('inside')\n")
    code = f"import runpy\n\nfail = runpy.run_path({str(library)!r})['fail']\nfail()\n"
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(EnvError, match=r"mine\.py:4: ValueError: inside"):
        load_file(tmp_path / "mine.py")
