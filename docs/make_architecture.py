"""Writes docs/architecture.md from the code: the rooms in their order, and four walks through them.

    PYTHONPATH=. python docs/make_architecture.py

A walk lists functions. Their texts are the first sentences of their docstrings, and tests/guards/test_docs.py
checks that a real run calls them in this order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.guards.test_layers import ORDER

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agentrl_cli"
PAGE = ROOT / "docs" / "architecture.md"
PUBLIC = "agentrl_cli/__init__.py"


@dataclass(frozen=True)
class Walk:
    """Functions that something passes, as `file:qualified.name`, in the order in which they are called."""

    title: str
    text: str
    steps: tuple[str, ...]


WALKS = (
    Walk(
        "A token",
        "From the model's logits to its gradient, its place in the store, and the next step's weights.",
        (
            "rollout/loop.py:LoopAttempt.generate",
            "inference/policy.py:LocalPolicy.generate",
            "inference/serving_loop.py:ServingLoop.add",
            "inference/engine.py:PagedEngine.step",
            "inference/engine.py:Scheduler.begin",
            "inference/model_runner.py:ModelRunner.prefill",
            "inference/attention.py:PrefillView.attend",
            "inference/sampler.py:sample",
            "inference/request.py:Request.take",
            "types/tokens.py:Tokens.from_generation",
            "rollout/transcript.py:Transcript.record",
            "store/episodes.py:Episodes.add_turn",
            "learning/dispositions.py:decide",
            "learning/update.py:Learner.update",
            "learning/step_table.py:StepTable.of",
            "learning/advantages.py:grpo",
            "learning/packing.py:micro_batches",
            "learning/compute.py:Compute.step",
            "learning/packing.py:pack",
            "learning/forward.py:logprobs",
            "learning/objective.py:objective",
            "learning/losses.py:ppo_clip",
            "learning/step_table.py:StepTable.record",
            "inference/policy.py:LocalPolicy.publish",
            "store/marks.py:Signals.add",
        ),
    ),
    Walk(
        "An episode",
        "From a row of a pack to its reward, its flags and its rows in the store.",
        (
            "trainer/sampler.py:Collector.sample",
            "trainer/sampler.py:Collector.jobs",
            "rollout/run.py:Rollout.run",
            "rollout/run.py:Rollout.episode",
            "rollout/attempt.py:Attempt.run",
            "rollout/loop.py:LoopAttempt.play",
            "envs/tool_env.py:ToolEnv.reset",
            "rollout/loop.py:LoopAttempt.open",
            "rollout/loop.py:LoopAttempt.generate",
            "chat/render.py:Chat.parse",
            "envs/tool_env.py:ToolEnv.step",
            "rollout/loop.py:LoopAttempt.observe",
            "rollout/transcript.py:Transcript.check",
            "rollout/attempt.py:Attempt.grade",
            "rewards/__init__.py:score",
            "rollout/transcript.py:Transcript.finish",
            "rollout/flags.py:find_flags",
            "store/episodes.py:Episodes.finish",
        ),
    ),
    Walk(
        "A setting",
        "From agentrl.yaml to the record that uses it: `train.lr` in this case.",
        (
            "commands/train.py:command",
            "commands/common.py:open_project",
            "config/load.py:load_config",
            "config/yamlfile.py:read_yaml",
            "runtime.py:run_training",
            "runtime.py:open_runtime",
            "trainer/build.py:build_trainer",
            "learning/update.py:Learner.__init__",
            "trainer/loop.py:Trainer.train",
            "learning/update.py:Learner.learning_rate",
            "learning/optimizers.py:learning_rate",
            "learning/compute.py:Compute.begin",
        ),
    ),
    Walk(
        "A foreign request",
        "From an agent's HTTP call to its answer, with the sampled ids kept.",
        (
            "agents/gateway/dialects/chat.py:parse",
            "agents/gateway/session.py:Session.complete",
            "agents/gateway/tree.py:MessageTree.find",
            "chat/render.py:Chat.prompt",
            "agents/gateway/sampling.py:read_answer",
            "agents/gateway/tree.py:MessageTree.add",
        ),
    ),
)


@cache
def read_tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    line = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:;]) (?=[A-Z`—])", line)[0].rstrip(".;:").replace("|", "\\|")


def text_of(step: str) -> str:
    """Return the first sentence of a function's docstring, or of the method that it overrides, or of its class.

    Raises LookupError if there is no such function.
    """
    file, _, name = step.partition(":")
    tree = read_tree(PACKAGE / file)
    owner, _, function = name.rpartition(".")
    found = _members(tree, owner).get(function)
    if found is None:
        raise LookupError(f"{step}: there is no such function")
    if text := ast.get_docstring(found):
        return first_sentence(text)
    kind = _classes(tree)[owner]
    if function == "__init__":
        return first_sentence(ast.get_docstring(kind) or "")
    overridden = [_members(tree, ast.unparse(base)).get(function) for base in kind.bases]
    texts = (ast.get_docstring(one) for one in overridden if one is not None)
    return first_sentence(next((text for text in texts if text), ""))


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _members(tree: ast.Module, owner: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions of a class in the file, or of the file itself; none for a class from elsewhere."""
    node = _classes(tree).get(owner) if owner else tree
    body = [] if node is None else node.body
    return {
        one.name: one for one in body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def rooms() -> list[tuple[str, str]]:
    """Return each room, from the ground up, with the first sentence of its docstring."""
    found = []
    for name in ORDER:
        path = PACKAGE / name / "__init__.py"
        path = path if path.is_file() else PACKAGE / f"{name}.py"
        if not name.startswith("_"):
            found.append((name, first_sentence(ast.get_docstring(read_tree(path)) or "")))
    return found


def plugin_names() -> list[tuple[str, str]]:
    """Return each plugin with the first sentence of its docstring."""
    folders = sorted(path.parent for path in (PACKAGE / "plugins").glob("*/__init__.py"))
    texts = (ast.get_docstring(read_tree(folder / "__init__.py")) or "" for folder in folders)
    return [
        (folder.name, first_sentence(text)) for folder, text in zip(folders, texts, strict=True)
    ]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    """Return the page."""
    parts = [
        "# Architecture",
        "*Made from the code by `docs/make_architecture.py`; a test follows the walks in a real run.*",
        "## The house\nEach room imports only rooms above it in this table, in its files too; no circle"
        " is hidden by a late import. The core can be read alone: it imports no plugin, and names no other project.",
        table(("room", "what it is"), [(f"`{name}`", text) for name, text in rooms()]),
        "Plugins stand beside it. Each is a folder that can be deleted with its line in `registry/plugins.py`, and is"
        " reached as a stranger's package is, by name:",
        table(("plugin", "what it brings"), [(f"`{name}`", text) for name, text in plugin_names()]),
    ]
    for walk in WALKS:
        rows = [
            (
                str(number),
                f"`{step.partition(':')[0]}`",
                f"`{step.partition(':')[2]}`",
                text_of(step),
            )
            for number, step in enumerate(walk.steps, 1)
        ]
        parts += [
            f"## {walk.title}\n{walk.text}",
            table(("", "file", "function", "what it does"), rows),
        ]
    names = ast.literal_eval(
        next(
            node.value
            for node in read_tree(ROOT / PUBLIC).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        )
    )
    exported = ", ".join(f"`{name}`" for name in names)
    parts.append(
        "## A loop in one file\n[`examples/loop.py`](../examples/loop.py) is GRPO from top to bottom: sample,"
        " advantages, loss, update, publish, evaluate. `agentrl train` with the same settings ends with the same"
        " weights, byte for byte."
    )
    parts.append(
        "## What may change\nPublic, and changed with a line in the changelog and the old name for one release: the"
        " commands with their options and `--json`, the settings, the views and columns of the store, the kinds of"
        f" offers in `registry/plugins.py`, what `agentrl_cli` itself exports, {exported}, and the parts of"
        f" which `examples/loop.py` makes a loop: {', '.join(_loop_parts())}."
        " Everything else may change without notice."
    )
    return "\n\n".join(parts) + "\n"


def _loop_parts() -> list[str]:
    """Return the names that the example imports from the rooms of the package."""
    tree = ast.parse((ROOT / "examples" / "loop.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [
        f"`{node.module}.{alias.name}`"
        for node in imports
        if node.module and node.module.startswith("agentrl_cli.")
        for alias in node.names
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
