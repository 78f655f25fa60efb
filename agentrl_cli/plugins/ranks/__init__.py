"""One training on several GPUs and machines: torch.distributed, with weights replicated or sharded (FSDP2)."""

OFFERS = {
    "moved": {
        "learning.ranked": "plugins.ranks.compute",
        "learning.sharded": "plugins.ranks.sharded",
        "trainer.rank_processes": "plugins.ranks.processes",
        "trainer.rank_settings": "plugins.ranks.processes",
        "trainer.ranks": "plugins.ranks.team",
    },
    "settings": {"ranks": f"{__name__}.settings:RanksConfig"},
    "checks": {"ranks": f"{__name__}.settings:check"},
    "flags": {"train ranks": f"{__name__}.flags:settings_of"},
    "teams": {"ranks": f"{__name__}.team:open_team"},
    "joins": {"ranks": f"{__name__}.team:join"},
    "renamed": {
        "cluster.gpus": "ranks.gpus",
        "cluster.ranks": "ranks.processes",
        "cluster.nodes": "ranks.nodes",
        "cluster.rendezvous": "ranks.rendezvous",
        "cluster.shard": "ranks.shard",
    },
}
