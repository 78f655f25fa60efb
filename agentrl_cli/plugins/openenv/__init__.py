"""OpenEnv both ways: environments behind an address, and packs served as one."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.openenv"
OFFERS = {
    "programs": {"openenv": f"{HERE}.agent:OpenEnv"},
    "flags": {"tools serve openenv": f"{HERE}.wire:flags"},
    "wires": {"openenv": f"{HERE}.wire:serve"},
}
