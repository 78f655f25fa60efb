"""One total import order, between packages and inside them. Heavy packages stay where they belong."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.helpers.source import nodes, parsed

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "agentrl_cli"

# Every package and top-level module; each imports only what stands to its left. DESIGN 2 says what
# each is for.
ORDER = (
    "_version types errors paths registry config hooks store chat models inference learning policies sandbox "
    "tools rewards envs tasks rollout agents evaluate reports sft trainer runtime doctor "
    "chat_session tui commands plugins __init__ __main__"
).split()

HEAVY = {"torch", "transformers", "peft", "accelerate", "safetensors"}
MAY_BE_HEAVY = (
    *("policies/load", "models/", "inference/", "plugins/taught/weights"),
    *(
        "learning/packing",
        "learning/compute",
        "learning/forward",
        "learning/padded_forward",
        "learning/attention",
        "learning/logprobs",
        "doctor/device_trial",
        "learning/fused_",
        "learning/losses",
        "learning/objective",
        "learning/moving_reference",
    ),
    *(
        "learning/coefficients",
        "learning/batch",
        "learning/optimizers",
        "learning/update",
        "learning/distill",
        "learning/value",
    ),
    *("rewards/model", "sft/", "trainer/"),
    *("plugins/ranks/compute", "plugins/ranks/sharded", "plugins/trl/learner"),
)

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
FILES = [file for file in FILES if not file.match("plugins/*/tasks/*/*")]  # packs, loaded by path


def dotted(file: Path) -> str:
    """The module's name without the package's: `store.schema`, `store` for its __init__, '' for the package."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(file): file for file in FILES}


def imports(among: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import among nodes; a module is named itself, not what is taken from it."""
    for found in among:
        if isinstance(found, ast.Import):
            yield from ((found.lineno, alias.name) for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            assert not found.level and found.module, f"line {found.lineno}: imports are absolute"
            below = found.module.removeprefix("agentrl_cli").lstrip(".")
            for alias in found.names:
                inner = f"{below}.{alias.name}".lstrip(".")
                is_module = found.module.startswith("agentrl_cli") and inner in MODULES
                yield found.lineno, f"agentrl_cli.{inner}" if is_module else found.module


@cache
def own_imports(file: Path) -> list[tuple[int, str]]:
    """(line, module of this project without the package's name), late and type-only imports included."""
    found = [(line, *name.partition(".")) for line, name in imports(nodes(PACKAGE / file))]
    return [(line, name) for line, package, _, name in found if package == "agentrl_cli"]


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import, those under `if TYPE_CHECKING` excepted."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_a_package_imports_only_what_stands_to_its_left() -> None:
    rooms = {file.parts[0].removesuffix(".py") for file in FILES}
    assert rooms == set(ORDER), (
        "give a new package its place in ORDER, and say in DESIGN 2 what it is for"
    )
    wrong = []
    for file in FILES:
        mine = file.parts[0].removesuffix(".py")
        wrong += [
            f"{file}:{line} imports {name}, which stands to the right of {mine}"
            for line, name in own_imports(file)
            if ORDER.index(name.split(".")[0] or "__init__") > ORDER.index(mine)
        ]
    assert not wrong, "\n".join(wrong)


def test_there_are_no_circles() -> None:
    """Neither at import nor hidden by an import inside a function or under TYPE_CHECKING."""
    graph = {
        module: ({name for _, name in own_imports(file)} & MODULES.keys()) - {module}
        for module, file in MODULES.items()
    }
    graph.pop("")
    TopologicalSorter(graph).prepare()  # names a circle


def follow(new: set[str], below: Callable[[Path], Iterable[str]]) -> set[str]:
    """Return modules with all that they import, directly or not; `below` are the imports of a file."""
    reached: set[str] = set()
    while new:
        reached |= new
        found = {name for module in new for name in below(MODULES[module])}
        new = (found & MODULES.keys()) - reached
    return reached


def test_learning_reaches_no_chat() -> None:
    learning = {module for module in MODULES if module.startswith("learning.")}
    reached = follow(learning, lambda file: (name for _, name in own_imports(file)))
    assert not [module for module in reached if module.split(".")[0] == "chat"]


def test_the_training_loop_loads_at_most_150_files() -> None:
    def loaded(file: Path) -> Iterator[str]:
        for _, name in imports(top_level(parsed(PACKAGE / file))):
            yield name.removeprefix("agentrl_cli").lstrip(".")

    assert 100 < len(follow({"trainer.loop"}, loaded)) <= 150


# What has a parameter or a field `Config`; the others get a section or a record of
# `config.records`.
SEES_ALL_SETTINGS = (
    *(
        "config/",
        "commands/",
        "runtime",
        "plugins/",
        "store/new_run",
        "trainer/build",
        "trainer/compute",
    ),
    *(
        "trainer/resume",
        "rollout/parts",
        "rollout/run",
        "rollout/context",
        "evaluate/",
        "chat_session/open",
    ),
    *("doctor/", "agents/serve/server", "reports/score_sets", "sft/fine_tune"),
)


def test_rooms_get_their_part_of_the_settings() -> None:
    found = set()
    for file in FILES:
        for node in nodes(PACKAGE / file):
            said = node.annotation if isinstance(node, (ast.arg, ast.AnnAssign)) else None
            first = said.left if isinstance(said, ast.BinOp) else said  # Config, Config | None
            if isinstance(first, ast.Name) and first.id == "Config":
                found.add(file.with_suffix("").as_posix())
    assert {name for name in found if not name.startswith(SEES_ALL_SETTINGS)} == set()


def test_heavy_packages_are_imported_inside_functions() -> None:
    wrong = []
    for file in FILES:
        found = [
            (line, name.split(".")[0])
            for node in top_level(parsed(PACKAGE / file))
            for line, name in imports(ast.walk(node))
        ]
        tops = [node for node in parsed(PACKAGE / file).body if isinstance(node, ast.ImportFrom)]
        if any(node.module == "transformers" for node in tops):  # a part of it may be imported
            wrong.append(f"{file} imports all of transformers")
        heavy = set() if str(file).startswith(MAY_BE_HEAVY) else HEAVY
        screens = set() if file.parts[0] in ("tui", "plugins") else {"textual"}
        wrong += [
            f"{file}:{line} imports {name}" for line, name in found if name in heavy | screens
        ]
    assert not wrong


def test_what_runs_in_the_sandbox_uses_the_standard_library_alone() -> None:
    for path in (ROOT / "sandbox").rglob("*.py"):
        siblings = {other.stem for other in (ROOT / "sandbox").rglob("*")}
        named = {name.split(".")[0] for _, name in imports(nodes(path))}
        assert named - siblings <= set(sys.stdlib_module_names) | {"__future__", "sandbox"}, path
