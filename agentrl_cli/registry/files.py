"""Imports the Python files of a project by their paths, with the files that lie beside them.

Each folder is a package of its own name. A file's `import db` finds `db.py` or `db/` beside it, when it is loaded and
in every later call, and gets the copy that all files of its folder share; another folder's `db.py` is another module.
Nothing is put on `sys.path`: the files have an `__import__` of their own.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import itertools
import re
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from agentrl_cli.errors import EnvError, NotFound

PREFIX = "agentrl_files_"
CALL = "__call__"
PIP = {
    "agents": "openai-agents",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python",
    "dotenv": "python-dotenv",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Modules whose package has another name."""


@dataclass
class _Folder:
    """The package of a folder's files, until one of them changes."""

    path: Path
    name: str
    stamps: dict[Path, int] = field(default_factory=dict)
    """Its files that were loaded, and when each was changed last."""

    @property
    def current(self) -> bool:
        return all(_stamp(path) == stamp for path, stamp in self.stamps.items())

    def has(self, module: str) -> bool:
        """Whether a module or a package of that name lies in the folder."""
        return (self.path / f"{module}.py").is_file() or (
            self.path / module / "__init__.py"
        ).is_file()

    def import_(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Return the `__import__` of the folder's files."""
        top = name.partition(".")[0]
        if level or not self.has(top):
            try:
                return builtins.__import__(name, globals, locals, fromlist or (), level)
            except ModuleNotFoundError as error:
                if level or error.name != top or not (self.path / top).is_dir():
                    raise
        found = builtins.__import__(
            f"{self.name}.{name}", globals, locals, fromlist or ("__name__",), 0
        )
        return found if fromlist else sys.modules[f"{self.name}.{top}"]


_FOLDERS: dict[str, _Folder] = {}
"""By the package's name."""
_NEWEST: dict[Path, _Folder] = {}


class _Loader(SourceFileLoader):
    """Runs a file's code with the `__import__` of its folder."""

    def exec_module(self, module: ModuleType) -> None:
        folder = _FOLDERS[self.name.partition(".")[0]]
        path = Path(self.path)
        folder.stamps[path] = _stamp(path)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": folder.import_}
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source every time: bytecode is found by size and second, and an edit can keep both."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder:
    """Finds the modules of the folders' packages."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(PREFIX) or "." not in name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def load_file(path: Path) -> ModuleType:
    """Import a Python file by its path, once until it or an imported file beside it changes.

    Raises NotFound if the file is missing, EnvError if its code fails or would end the process (file and line).
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        siblings = [item.name for item in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise NotFound.of("file", str(path), siblings)
    stem = path.stem if "." not in path.stem else f"{path.stem.replace('.', '_')}_dotted"
    name = f"{_folder_of(path).name}.{stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
    if spec is None or spec.loader is None or path.suffix != ".py":
        raise NotFound(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if from_outside(error):
            raise
        raise EnvError(_failure(path, error), hint=_hint(path, error)) from error
    return module


def from_outside(error: BaseException) -> bool:
    """Whether the user's Ctrl-C or a cancellation of the running task raised this, not the code itself."""
    if isinstance(error, Exception):
        return False
    import asyncio  # late: it costs every command a part of its start

    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop, so nothing was cancelled
            return False
        return task is None or task.cancelling() > 0
    if not isinstance(error, KeyboardInterrupt):
        return False
    handler = signal.getsignal(signal.SIGINT)
    code = code_of(handler)
    if code is None:  # Python's own handler leaves no frame
        return handler is signal.default_int_handler
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def code_of(function: Any) -> CodeType | None:
    """Return the code of a Python function, None for anything else."""
    while isinstance(function, partial):
        function = function.func
    function = function if hasattr(function, "__code__") else getattr(type(function), CALL, None)
    return getattr(function, "__code__", None)


def pip_line(module: str) -> str:
    """Return the command that installs the package of a module."""
    top = module.partition(".")[0]
    return f"pip install {PIP.get(top, top)}"


def _folder_of(path: Path) -> _Folder:
    """Return the package of a file's folder; a new one after a change, since running code keeps its modules."""
    folder = _NEWEST.get(path.parent)
    if folder is None or not folder.current:
        digest = hashlib.sha256(str(path.parent).encode("utf-8", "surrogateescape")).hexdigest()
        base = f"{PREFIX}{digest[:12]}"
        names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(1)))
        folder = _Folder(path.parent, next(name for name in names if name not in _FOLDERS))
        package = ModuleType(folder.name)
        package.__path__ = [str(path.parent)]
        sys.modules[folder.name] = package
        _FOLDERS[folder.name] = _NEWEST[path.parent] = folder
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)
    return folder


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0


def _failure(path: Path, error: BaseException) -> str:
    """`file:line: what happened`, at the last line of the folder's own code."""
    file, line = str(path), getattr(error, "lineno", None)
    for frame, number in traceback.walk_tb(error.__traceback__):
        where = Path(frame.f_code.co_filename)
        if where.is_relative_to(path.parent) and "site-packages" not in where.parts:
            file, line = frame.f_code.co_filename, number
    if isinstance(error, SyntaxError) and error.filename:
        file, line = error.filename, error.lineno
    return f"{file}:{line or 1}: {type(error).__name__}: {_plain(str(error))}"


def _hint(path: Path, error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return "Fix the file: it is imported unchanged."
    name = _plain(error.name)
    top = name.partition(".")[0]
    for folder in (Path.cwd(), *path.parents[1:3]):
        if (folder / f"{top}.py").is_file():
            return f"{folder / top}.py must lie beside {path.name}."
    if name != error.name:
        return f"{path.parent} has no {name.replace('.', '/')}.py."
    return f"`{pip_line(top)}` if it is a package; a file of your own, {top}.py, must lie beside {path.name}."


def _plain(text: str) -> str:
    """Return a text without the names of our packages."""
    return re.sub(rf"{PREFIX}\w+\.", "", text)
