"""Other projects' files as they are: one module each, and no word of them elsewhere."""

from __future__ import annotations

ADAPTERS: dict[str, str] = {
    "modules": "agentrl_cli.compat.verl:Verl",
    "data": "agentrl_cli.compat.verl_data:splits",
    "tool": "agentrl_cli.compat.verl_tool:adapted",
    "table": "agentrl_cli.compat.minimind:table_tools",
    "environment": "agentrl_cli.compat.trl:environment_tools",
    "reward": "agentrl_cli.compat.reward:adapted",
    "program": "agentrl_cli.compat.programs:Foreign",
    "interaction": "agentrl_cli.compat.verl_interaction:adapted",
}
"""Kind to what reads it, for `registry.adapter`.

    modules      context manager (folder): while it is entered, a file may import modules of projects that are missing
    data         (folder, `data` of task.yaml) to one that names a source for each split
    tool         (class, config, schema, where) to a Tool; None for a class that is not another project's
    table        (where, names to functions of a mapping, schemas) to a list of Tools
    reward       (function, keyword arguments) to a function of (episode, ctx); others pass unchanged
    environment  (where, class or classes by name, folder) to a list of Tools
    program      (kind, package, task, python, options, score) to an object with `rows(limit)` and an agent, `solve`
    interaction  (class, config) to a maker of Interactions; None for a class that is not another project's
"""
