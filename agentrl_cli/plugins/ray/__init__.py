"""Workers: other processes, on this machine or on many, that make the episodes of a run."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.ray"
OFFERS = {
    "moved": {
        "cluster": "plugins.ray",
        "config.cluster": "plugins.ray.settings",
    },
    "settings": {"cluster": f"{HERE}.settings:ClusterConfig"},
    "pools": {"cluster": f"{HERE}.open:open_pool"},
    "spread": {"cluster.kind": ("here", "processes"), "cluster.workers": (1, 2)},
    "doctors": {"cluster": f"{HERE}.doctor:check_workers"},
}
