"""Better prompts instead of better weights: candidates, their evaluation, and two searches (GEPA, APO)."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.prompts"
OFFERS = {
    "moved": {
        "prompts": "plugins.prompts",
        "store.prompts": "plugins.prompts.store",
    },
    "commands": {
        "optimize": ("Run", f"{HERE}.command:command", "Better prompts instead of better weights")
    },
    "examples": {
        "optimize": (
            "agentrl optimize --reflect-with http://127.0.0.1:8000/v1",
            "agentrl optimize --method apo --reflect-with reflect.py:answer --budget 400 --write",
        )
    },
    "screens": {"optimize": f"{HERE}.screen:PromptsScreen"},
    "tables": {"prompts": f"{HERE}.store:TABLE"},
    "searches": {"apo": f"{HERE}.apo:search"},
}
