"""Tools over HTTP in verl-tool's format and in a typed one: the server, a client, and verl-tool's action syntax."""

OFFERS = {
    "moved": {
        "chat.parsers.verl_tool": "plugins.verl_tool.parser",
        "servers.tool_server": "plugins.verl_tool",
        "tools.remote": "plugins.verl_tool.client",
    },
    "subcommands": {"tools serve": f"{__name__}.command:serve"},
    "examples": {
        "tools serve": ("agentrl tools serve", "agentrl tools serve --pack code-task --mcp --stdio")
    },
    "settings": {"tool_server": f"{__name__}.settings:ToolServerConfig"},
    "renamed": {
        "rollout.tool_server": "tool_server.url",
        "rollout.tool_server_patience": "tool_server.patience",
    },
    "packs": {"tool_server": f"{__name__}.client:tools_elsewhere"},
    "parsers": {"verl_tool": f"{__name__}.parser:PARSER"},
}
