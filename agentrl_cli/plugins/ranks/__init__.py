"""One training on several GPUs and machines: torch.distributed, with weights replicated or sharded (FSDP2)."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.ranks"
OFFERS = {
    "moved": {
        "learning.ranked": "plugins.ranks.compute",
        "learning.sharded": "plugins.ranks.sharded",
        "trainer.rank_processes": "plugins.ranks.processes",
        "trainer.rank_settings": "plugins.ranks.places",
        "trainer.ranks": "plugins.ranks.team",
    },
    "settings": {"ranks": f"{HERE}.settings:RanksConfig"},
    "checks": {"ranks": f"{HERE}.settings:check"},
    "flags": {"train ranks": f"{HERE}.flags:settings_of"},
    "teams": {"ranks": f"{HERE}.team:open_team"},
    "joins": {"ranks": f"{HERE}.team:join"},
    "renamed": {
        "cluster.gpus": "ranks.gpus",
        "cluster.ranks": "ranks.processes",
        "cluster.nodes": "ranks.nodes",
        "cluster.rendezvous": "ranks.rendezvous",
        "cluster.shard": "ranks.shard",
    },
}
