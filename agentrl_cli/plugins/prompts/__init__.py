"""Better prompts instead of better weights: candidates, their evaluation, and two searches (GEPA, APO)."""

OFFERS = {
    "moved": {
        "prompts": "plugins.prompts",
        "store.prompts": "plugins.prompts.store",
    },
    "commands": {
        "optimize": (
            "Run",
            f"{__name__}.command:command",
            "Better prompts instead of better weights",
        )
    },
    "examples": {
        "optimize": (
            "agentrl optimize --reflect-with http://127.0.0.1:8000/v1 --reflect-model NAME",
            "agentrl optimize --method apo --reflect-with reflect.py:answer --budget 400 --write",
        )
    },
    "screens": {"optimize": f"{__name__}.screen:PromptsScreen"},
    "tables": {"prompts": f"{__name__}.store:TABLE"},
    "searches": {"apo": f"{__name__}.apo:search"},
}
