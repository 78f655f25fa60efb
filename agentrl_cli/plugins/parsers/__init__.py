"""Tool-call syntaxes of rarer model families, which `model.chat.parser: auto` finds as it finds those of the core."""

LISTS = ("apertus", "cohere", "command_r", "functools", "nemotron_v2", "tool_calls")
TABLES = (
    *("functionary_v31", "gigachat3", "gigachat3_1", "hunyuan"),
    *("minicpm", "muse_glimmer", "seed_oss", "solar"),
)
OFFERS = {
    "moved": {
        "chat.parsers.functionary_v32": "plugins.parsers.functionary",
        "chat.parsers.json_lists": "plugins.parsers.json_lists",
    },
    "syntaxes": {
        "functionary_v32": f"{__name__}.functionary:PARSER",
        **{name: f"{__name__}.json_lists:{name.upper()}" for name in LISTS},
        **{name: f"{__name__}.tables:{name.upper()}" for name in TABLES},
    },
}
