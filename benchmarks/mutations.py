"""Breaks one line at a time and runs the tests that should notice.

    python benchmarks/mutations.py [--only NAME] [--list]

Each mutation replaces a snippet that occurs once in the package, in a copy, and runs its test files there until the
first failure. A mutation that no test notices, or whose snippet is not there any more, ends the script with status 1.
What was found is written to results/mutations.json, unless only some were run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
FOLDERS = ("agentrl_cli", "sandbox", "tasks", "tests", "benchmarks", "recipes", "docs", "examples")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "constraints.txt", "Makefile")


@dataclass(frozen=True)
class Mutation:
    """A line that is wrong in a way that a reviewer could miss."""

    name: str
    before: str
    after: str
    tests: str
    """Files or node ids, separated by blanks, relative to `tests/`."""


MUTATIONS = (
    Mutation(
        "inference: a shared block is written without a copy",
        "parted = bool(start % BLOCK) and self.pool.users[table[-1]] > 1",
        "parted = False",
        "inference/test_engines.py",
    ),
    Mutation(
        "inference: the prefix cache is off by one",
        "found = min(common(cached.ids, ids), len(ids) - 1)",
        "found = min(common(cached.ids, ids), len(ids) - 2)",
        "inference/test_engines.py inference/test_policy.py",
    ),
    Mutation(
        "inference: the oldest request is preempted",
        "self._preempt(max(self.running, key=lambda r: r.order))",
        "self._preempt(min(self.running, key=lambda r: r.order))",
        "inference/test_engines.py",
    ),
    Mutation(
        "inference: a greedy token keeps the log-probability of a sampled one",
        "sampled = torch.where(greedy, torch.zeros_like(sampled), sampled)",
        "sampled = torch.where(greedy, sampled, sampled)",
        "inference/test_sampler.py inference/test_policy.py",
    ),
    Mutation(
        "inference: every token of a turn uses the same random number",
        "r.uniforms[len(r.out) + n] for r, n in given",
        "r.uniforms[0] for r, n in given",
        "inference/test_sampler.py inference/test_policy.py",
    ),
    Mutation(
        "agents: tools are ignored when a message tree is searched",
        "at = self._roots.get(tools_key(tools) + player) or Node(tuple(tools), player)",
        "at = next(iter(self._roots.values()), None) or Node(tuple(tools), player)",
        "agents/test_session.py",
    ),
    Mutation(
        "agents: a turn that the client wrote is trained",
        "tokens = Tokens.from_ids(written, [int(Origin.FORCED)] * len(written))",
        "tokens = Tokens.from_ids(written, [int(Origin.MODEL)] * len(written))",
        "agents/test_session.py",
    ),
    Mutation(
        "agents: another reasoning counts as the same turn",
        "if said and said.strip() != self.reasoning.strip():",
        "if said and False:",
        "agents/test_session.py",
    ),
    Mutation(
        "agents: a second equal request gets the first one's answer",
        "if retry and digest in self._answers:",
        "if digest in self._answers:",
        "agents/test_session.py agents/test_gateway.py",
    ),
    Mutation(
        "chat: a delta repeats the stop token",
        "ids, offsets = ids[1:], offsets[1:]",
        "ids, offsets = ids[0:], offsets[0:]",
        "chat/test_chat.py chat/test_template.py",
    ),
    Mutation(
        "chat: a malformed call is cut out of the content",
        "content = text if malformed else thinking + found.content",
        "content = thinking + found.content",
        "chat/test_parsers.py chat/test_chat.py",
    ),
    Mutation(
        "chat: thinking ends at its first closing tag",
        "head, mark, tail = text.rpartition(THINK_END)",
        "head, mark, tail = text.partition(THINK_END)",
        "chat/test_parsers.py chat/test_chat.py",
    ),
    Mutation(
        "learning: RLOO without n / (n − 1)",
        "n / np.maximum(n - 1, 1), 0.0) * (r - total / n)",
        "1.0, 0.0) * (r - total / n)",
        "learning/test_advantages.py",
    ),
    Mutation(
        "learning: groups without variance are trained",
        "if drop_zero_variance and size > 1 and max(rewards) - min(rewards) < SAME:",
        "if drop_zero_variance and size > 1 and max(rewards) - min(rewards) < 0:",
        "learning/test_update.py",
    ),
    Mutation(
        "learning: the KL's sign",
        "difference = ref - logp\n    return torch.expm1(difference) - difference",
        "difference = logp - ref\n    return torch.expm1(difference) - difference",
        "learning/test_losses.py",
    ),
    Mutation(
        "learning: GSPO's ratio is not averaged over the sequence",
        "mean = sequence_mean(x.logp.detach() - x.old, x.segment)",
        "mean = sequence_sum(x.logp.detach() - x.old, x.segment)",
        "learning/test_losses.py",
    ),
    Mutation(
        "learning: PPO's clip is optimistic",
        "loss = torch.maximum(-ratio * advantage, -bounded * advantage)",
        "loss = torch.minimum(-ratio * advantage, -bounded * advantage)",
        "learning/test_losses.py",
    ),
    Mutation(
        "learning: tokens of low entropy are not masked",
        "entropy_masked = table.scatter(seen.entropy_masked, rows, entropy < threshold)",
        "entropy_masked = table.scatter(seen.entropy_masked, rows, entropy > threshold)",
        "learning/test_masks.py",
    ),
    Mutation(
        "trainer: the oldest checkpoints stay",
        "for path in [c.path for c in old[: -self.config.save.keep] if c.path != besides]:",
        "for path in [c.path for c in old[self.config.save.keep :] if c.path != besides]:",
        "trainer/test_trainer.py trainer/test_resume.py",
    ),
    Mutation(
        "trainer: a damaged checkpoint is loaded",
        "if why := damage(folder):",
        "if False and (why := damage(folder)):",
        "models/test_checkpoint.py",
    ),
    Mutation(
        "rollout: a forced closing token is trained",
        "given = [Tokens.from_ids(ids, [Origin.FORCED] * len(ids)) for ids in (forced, closing)]",
        "given = [Tokens.from_ids(ids, [Origin.MODEL] * len(ids)) for ids in (forced, closing)]",
        "rollout/test_rollout.py",
    ),
    Mutation(
        "store: a claim is taken from a living process",
        "if claim and holder != me and holder.lives(heartbeat):",
        "if claim and holder != me and not holder.lives(heartbeat):",
        "store/test_claims.py",
    ),
    Mutation(
        "store: an array with one NaN is stored as none",
        "return bool(np.isnan(np.frombuffer(data, _F4)).all())",
        "return bool(np.isnan(np.frombuffer(data, _F4)).any())",
        "store/test_store.py",
    ),
    Mutation(
        "store: an interrupted training episode keeps no fact",
        "fact=iif(kind='train', ?, fact)",
        "fact=iif(kind='eval', ?, fact)",
        "store/test_file.py store/test_claims.py store/test_store.py",
    ),
    Mutation(
        "store: the sets of sampled tokens are cut at the wrong places",
        "parts = np.split(ids, np.cumsum(sizes.clip(min=0))[:-1])",
        "parts = np.split(ids, np.cumsum(sizes.clip(min=1))[:-1])",
        "store/test_store.py",
    ),
)


def place_of(mutation: Mutation, root: Path) -> Path:
    """Return the file whose line a mutation changes. Raises LookupError unless it occurs exactly once."""
    found = [
        path
        for path in sorted((root / "agentrl_cli").rglob("*.py"))
        if mutation.before in path.read_text(encoding="utf-8")
    ]
    count = sum(path.read_text(encoding="utf-8").count(mutation.before) for path in found)
    if count != 1:
        raise LookupError(f"{mutation.name}: its line occurs {count} times")
    return found[0]


def copy_tree(target: Path) -> None:
    """Copy what the tests read."""
    skip = shutil.ignore_patterns("__pycache__", "runs", "results")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=skip)
    for file in FILES:
        shutil.copy(ROOT / file, target / file)


def is_noticed(mutation: Mutation, root: Path) -> bool:
    """Whether a test fails with the mutation. Raises LookupError if its tests could not run."""
    path = place_of(mutation, root)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    tests = [f"tests/{name}" for name in mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise LookupError(f"{mutation.name}: pytest ended with {done.returncode}\n{done.stdout}")
    return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a name")
    parser.add_argument("--list", action="store_true", help="print the names")
    args = parser.parse_args()
    wanted = [mutation for mutation in MUTATIONS if args.only in mutation.name]
    if args.list:
        print("\n".join(mutation.name for mutation in wanted))
        return 0
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="agentrl-mutations-") as folder:
        copy_tree(Path(folder))
        for mutation in wanted:
            try:
                noticed = is_noticed(mutation, Path(folder))
                print(f"{'noticed' if noticed else 'MISSED '}  {mutation.name}", flush=True)
            except LookupError as error:
                noticed = False
                print(f"BROKEN   {error}", flush=True)
            found[mutation.name] = noticed
    print(f"{sum(found.values())} of {len(found)} noticed")
    if not args.only:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
