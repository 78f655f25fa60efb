"""What must hold before workers make episodes, and the checks of `agentrl doctor --cluster`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl_cli.cluster.protocol import Hello
from agentrl_cli.cluster.service import hello
from agentrl_cli.errors import EnvironmentProblem, StoreError
from agentrl_cli.tasks import Pack

NETWORK = frozenset(
    "nfs nfs4 cifs smb3 smbfs 9p lustre ceph glusterfs afs beegfs gpfs fuse.sshfs".split()
)
"""File systems on which SQLite's locks and its shared memory do not work."""


def differences(packs: Mapping[str, Pack], hellos: Sequence[Hello]) -> list[tuple[str, str]]:
    """(node, how it differs from this process) for each difference that could change an episode."""
    here, found = hello(dict(packs)), []
    for other in hellos:
        if here.python.rpartition(".")[0] != other.python.rpartition(".")[0]:
            found.append((other.node, f"Python {other.python}, and {here.python} here"))
        for name in sorted(here.packages.keys() | other.packages.keys()):
            mine, theirs = here.packages.get(name, "none"), other.packages.get(name, "none")
            if mine != theirs:
                found.append((other.node, f"{name} {theirs}, and {mine} here"))
        for name, digest in here.hashes.items():
            if other.hashes.get(name) != digest:
                found.append((other.node, f"other code of the pack {name}"))
    return found


def require_same(packs: Mapping[str, Pack], hellos: Sequence[Hello]) -> None:
    """Raise EnvironmentProblem if a node has other versions or other code than this process."""
    wrong = differences(packs, hellos)
    if wrong:
        text = "; ".join(dict.fromkeys(f"{node} has {what}" for node, what in wrong))
        raise EnvironmentProblem(
            f"Workers differ from this process: {text}.",
            hint="Install the same versions on every node.",
        )


def network_disk(path: Path, mounts: str | None = None) -> str:
    """Return the kind of network file system that holds a path; empty for a local one or if it is not known."""
    if mounts is None:
        try:
            mounts = Path("/proc/mounts").read_text(encoding="utf-8")
        except OSError:
            return ""
    best, kind = "", ""
    where = os.path.realpath(path)
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        at = fields[1].replace("\\040", " ")
        inside = where == at or where.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best):
            best, kind = at, fields[2]
    return kind if kind in NETWORK else ""


def require_local(path: Path, mounts: str | None = None) -> None:
    """Raise StoreError for a store on a network disk."""
    kind = network_disk(path, mounts)
    if kind:
        raise StoreError(
            f"The store {path} lies on a network disk ({kind}), where SQLite cannot lock it.",
            hint="Put it on a local disk: --db or store.path. Workers need no access to it.",
        )
