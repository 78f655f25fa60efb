"""The processes of a training on several ranks: how they start, meet, are watched and end.

`agentrl train --gpus N` is rank 0 and starts the other ranks of its machine; on further machines `--node K` starts
theirs. The environment that they get is torchrun's (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), so
torchrun can start a training too. It does not by default: it kills its processes on Ctrl-C, and a step would be lost.

Every rank has a thread that reports a heartbeat and watches: rank 0 all others, the others rank 0. A rank that died or
hangs ends the run: rank 0 kills its children, which breaks the connection that it may wait on, and reports which it
was.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli._version import __version__
from agentrl_cli.config import Config
from agentrl_cli.config.records import LearnerSettings, MemorySettings, PolicySettings
from agentrl_cli.errors import ConfigError, EnvironmentProblem, RunFailed
from agentrl_cli.plugins.ranks.processes import (
    RESUME,
    STARTUP,
    Child,
    Place,
    Watch,
    client,
    count_given,
    parse_address,
    require_possible,
    spawn,
    store_at,
)
from agentrl_cli.plugins.ranks.settings import RanksConfig, is_sharded, loading_settings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from agentrl_cli.plugins.ranks.compute import Lead, Ranks, Replica
    from agentrl_cli.policies.load import Loaded

COMPUTING = timedelta(minutes=30)
"""Longest wait for another rank within an update."""
SAMPLING = timedelta(days=30)
"""Longest wait of the other ranks for rank 0's next call."""


class Team:
    """Rank 0's side: the ranks that it started or met."""

    def __init__(
        self, config: Config, place: Place, base: Path, store: Any, children: Sequence[Child]
    ) -> None:
        self.config = loading_settings(config)
        self.place = place
        self.base = base
        self.store = store
        self.children = children
        self.watch: Watch | None = None
        self.ranks: Ranks | None = None

    def compute(self, config: Config, loaded: Loaded) -> Lead:
        """Wait for all ranks, check that they can compute the same, and return the computation of all.

        Raises RunFailed if one does not come, EnvironmentProblem if it has other versions or other weights.
        """
        from agentrl_cli.plugins.ranks.compute import Lead
        from agentrl_cli.trainer.compute import needed_folder
        from agentrl_cli.trainer.memory_plan import update_memory

        folder, model = needed_folder(loaded), loaded.model
        memory = update_memory(MemorySettings.of(config), folder, model)
        options = {name: memory[name] for name in ("checkpoint", "aside")}
        self._await_all()
        device = device_of(config, self.place)
        self.store.set("go", device.type)
        self.watch = Watch(self.place, client(self.place), self.children)
        self.watch.start()
        ranks = self.ranks = connect(self.place, self.store, device)
        settings = config.model_dump(mode="json")
        ranks.send(settings, str(folder), loaded.name, str(self.base), options)
        self._require_same(ranks, fingerprint(model))
        own = model
        if is_sharded(config):
            own = load_trainee(config, "cpu", folder, loaded.name, self.base)
        return Lead(make_replica(config, folder, own, ranks, model, **options), self.fault)

    def _require_same(self, ranks: Ranks, own: str) -> None:
        """Raise EnvironmentProblem unless all ranks have loaded the weights with this fingerprint."""
        try:
            found = ranks.collect((socket.gethostname(), own))
        except RuntimeError as error:
            raise self.fault(3.0) or RunFailed(
                f"The ranks lost their connection: {error}", hint=RESUME
            ) from error
        other = [f"rank {n} on {host}" for n, (host, print_) in enumerate(found) if print_ != own]
        if other:
            raise EnvironmentProblem(
                f"Another model than rank 0's was loaded by {', '.join(other)}.",
                hint="Every machine needs the same files under model.name, or the same revision of a hub model.",
            )

    def fault(self, wait: float = 0.0) -> RunFailed | None:
        """Return the error of a rank that was lost; waits so many seconds for the report."""
        return None if self.watch is None else self.watch.problem(wait)

    def close(self, *, well: bool) -> None:
        """End the other ranks: by a message after a run that ended well, else at once."""
        well = well and self.ranks is not None and self.fault() is None
        if self.watch is not None:
            self.watch.stop()
        if well and self.ranks is not None:
            with contextlib.suppress(RuntimeError):  # one of them has ended before
                self.ranks.send("close")
        for child in self.children:
            child.end(10.0 if well else 0.0)
        leave_groups()

    def _await_all(self) -> None:
        """Wait until every rank has reported its versions, and compare them with this one's."""
        ends = time.monotonic() + STARTUP
        waiting = [f"here/{rank}" for rank in range(1, self.place.size)]
        if far := len(waiting) - len(self.children):
            at = f"{self.place.host}:{self.place.port} (at most {STARTUP:g} s)"
            print(
                f"Waiting for {far} ranks of other machines at {at} …", file=sys.stderr, flush=True
            )
        while waiting:
            lost = next((child for child in self.children if child.ended()), None)
            if lost is not None:
                raise RunFailed(lost.ended(), hint=f"Its log: {lost.log}")
            if time.monotonic() > ends:
                raise RunFailed(
                    f"{len(waiting)} of {self.place.size} ranks did not come within {STARTUP:g} s.",
                    hint="Start `agentrl train --node K` on every machine, with the same --nodes and --rendezvous.",
                )
            waiting = [key for key in waiting if not self.store.check([key])]
            time.sleep(0.05)
        for rank in range(1, self.place.size):
            theirs = json.loads(self.store.get(f"here/{rank}"))
            wrong = [
                f"{name} {theirs.get(name)} in place of {had}"
                for name, had in versions().items()
                if theirs.get(name) != had
            ]
            if wrong:
                raise EnvironmentProblem(
                    f"Rank {rank} on {theirs['host']} has {', '.join(wrong)}.",
                    hint="Install the same versions on all machines.",
                )


@contextlib.contextmanager
def open_team(config: Config, base: Path, logs: Path) -> Iterator[Team | None]:
    """Yield rank 0 with the other ranks starting; None for a training in one process.

    Raises ConfigError or EnvironmentProblem before anything is started, if `ranks` cannot be had.
    """
    given = Place.given(os.environ)
    if given is not None:
        count_given(config, given)
    require_possible(config)
    ranks = config.section(RanksConfig)
    if ranks.size == 1:
        yield None
        return
    if given is not None:
        place, store = given, store_at(given.host, given.port, is_master=not given.joined)
    else:
        place, store = listen(ranks)
    here = 0 if given else ranks.here
    children = spawn([replace(place, rank=n, local=n) for n in range(1, here)], logs, here)
    team, well = Team(config, place, base, store, children), False
    try:
        yield team
        well = True
    finally:
        team.close(well=well)


def listen(ranks: RanksConfig) -> tuple[Place, Any]:
    """Return rank 0's place and the store where the ranks meet. On one machine it listens on the loopback alone."""
    host, port = ("127.0.0.1", 0) if ranks.nodes == 1 else parse_address(ranks.rendezvous)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host if ranks.nodes == 1 else "", port))
    except OSError as error:
        raise EnvironmentProblem(
            f"{host}:{port} cannot be listened on: {error.strerror}."
        ) from error
    listening.listen(1024)
    port = listening.getsockname()[1]
    store = store_at(host, port, is_master=True, master_listen_fd=listening.detach())
    return Place(0, 0, ranks.size, host, port), store


def make_replica(
    config: Config,
    folder: Path,
    own: nn.Module,
    ranks: Ranks,
    whole: nn.Module | None = None,
    *,
    checkpoint: bool,
    aside: bool,
) -> Replica:
    """Return a rank's part: `own` is the model that it trains, `whole` rank 0's, which samples and is saved."""
    import torch

    from agentrl_cli.trainer.compute import frozen_reference

    torch.manual_seed(config.seed)
    reference = frozen_reference(MemorySettings.of(config), folder, own)
    if is_sharded(config):
        from agentrl_cli.plugins.ranks.sharded import Sharded

        return Sharded(own, config, reference, ranks, whole=whole, checkpoint=checkpoint)
    from agentrl_cli.plugins.ranks.compute import Replica

    return Replica(
        own, LearnerSettings.of(config), reference, ranks, checkpoint=checkpoint, aside=aside
    )


def load_trainee(config: Config, device: str, folder: Path, name: str, base: Path) -> nn.Module:
    """Return the model that is trained, loaded to a device."""
    from agentrl_cli.policies.load import load_weights

    return load_weights(
        folder, name, PolicySettings.of(loading_settings(config, device)), base=base, trainable=True
    )


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all machines."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "agentrl": __version__,
    }


def device_of(config: Config, place: Place) -> torch.device:
    """Return the device of a rank: its GPU, or the CPU."""
    import torch

    return (
        torch.device("cpu")
        if config.section(RanksConfig).gpus is None
        else torch.device("cuda", place.local)
    )


def connect(place: Place, store: Any, device: torch.device) -> Ranks:
    """Join the process groups: NCCL between GPUs, gloo between CPUs and for everything that is not a tensor."""
    import torch
    import torch.distributed as dist

    from agentrl_cli.plugins.ranks.compute import Ranks

    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.size, timeout=COMPUTING
    )
    return Ranks(dist.new_group(backend="gloo", timeout=SAMPLING), device)


def leave_groups() -> None:
    """Leave the process groups, if this process is in any."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def fingerprint(model: Any) -> str:
    """Return a hash of the names, the shapes and the first numbers of all weights."""
    import hashlib

    found = hashlib.sha256()
    for name, weights in model.named_parameters():
        found.update(f"{name} {tuple(weights.shape)}".encode())
        found.update(weights.detach().reshape(-1)[:64].float().cpu().numpy().tobytes())
    return found.hexdigest()


def join(config: Config, base: Path, db: Path) -> bool:
    """Be a rank other than 0 if torchrun or --node made this process one. Returns whether it was; the run has ended."""
    given, node = Place.given(os.environ), config.section(RanksConfig).node
    if given is not None and given.rank:
        join_as(given, (base, db))
        return True
    if given is None and node:
        join_from(node, config, base, db)
        return True
    return False


def join_as(place: Place, found: Sequence[Path] = (), children: Sequence[Child] = ()) -> None:
    """Be a rank other than 0 until the training ends; `children` are further ranks of this machine.

    `found`: the project and the store here, if rank 0 is on another machine.
    """
    import torch

    from agentrl_cli.models.load import configured_folder
    from agentrl_cli.plugins.ranks.compute import follow

    store = client(place)
    store.set(f"here/{place.rank}", json.dumps({"host": socket.gethostname(), **versions()}))
    kind = store.get("go").decode()
    watch = Watch(place, client(place), children)
    watch.start()
    device = torch.device("cuda", place.local) if kind == "cuda" else torch.device("cpu")
    ranks = connect(place, store, device)
    settings, given, name, project, options = ranks.receive()
    config, folder = Config.model_validate(settings), Path(given)
    base = Path(project)
    if found and not folder.is_dir():  # another machine, whose project or cache is elsewhere
        base, db = found
        folder = configured_folder(config.model, base, db)
    own = load_trainee(config, "cpu" if is_sharded(config) else str(device), folder, name, base)
    ranks.collect((socket.gethostname(), fingerprint(own)))
    follow(make_replica(config, folder, own, ranks, **options))
    watch.stop()


def join_from(node: int, config: Config, base: Path, db: Path) -> None:
    """Be the ranks of a further machine, this process the first of them. Raises RunFailed if one of them fails."""
    ranks = config.section(RanksConfig)
    if node >= ranks.nodes:
        raise ConfigError(
            f"--node {node} is not one of {ranks.nodes} machines.", hint="They count from 0."
        )
    require_possible(config)
    host, port = parse_address(ranks.rendezvous)
    await_rank_0(host, port)
    here = range(ranks.here)
    places = [Place(node * ranks.here + n, n, ranks.size, host, port) for n in here]
    children = spawn(places[1:], db.parent / "logs", ranks.here, (base, db))
    try:
        join_as(places[0], (base, db), children)
    finally:
        for child in children:
            child.end(10.0)


def await_rank_0(host: str, port: int, patience: float = STARTUP) -> None:
    """Wait until the first machine listens. Raises EnvironmentProblem if it does not."""
    ends, waiting = time.monotonic() + patience, False
    while True:
        try:
            socket.create_connection((host, port), 5.0).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > ends:
            text = f"No rank 0 answers at {host}:{port} after {patience:g} s: {reason}."
            raise EnvironmentProblem(
                text, hint="Start the training on the first machine, with the same --rendezvous."
            )
        if not waiting:
            print(
                f"Waiting for rank 0 at {host}:{port} (at most {patience:g} s) …",
                file=sys.stderr,
                flush=True,
            )
            waiting = True
        time.sleep(1.0)


def main() -> None:
    """Be a rank that rank 0, or `--node`, started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    place = Place.given(os.environ)
    assert place is not None
    join_as(place, [Path(one) for one in sys.argv[1:]])


if __name__ == "__main__":
    main()
