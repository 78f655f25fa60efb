"""OpenEnv both ways: environments behind an address, and packs served as one."""

OFFERS = {
    "programs": {"openenv": f"{__name__}.agent:OpenEnv"},
    "flags": {"tools serve openenv": f"{__name__}.wire:flags"},
    "wires": {"openenv": f"{__name__}.wire:serve"},
}
