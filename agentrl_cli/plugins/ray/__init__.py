"""Workers: other processes, on this machine or on many, that make the episodes of a run."""

OFFERS = {
    "moved": {
        "cluster": "plugins.ray",
        "config.cluster": "plugins.ray.settings",
    },
    "settings": {"cluster": f"{__name__}.settings:ClusterConfig"},
    "pools": {"cluster": f"{__name__}.open:open_pool"},
    "spread": {"cluster.kind": ("here", "processes"), "cluster.workers": (1, 2)},
    "doctors": {"cluster": f"{__name__}.open:check_workers"},
}
