"""Programs of others as the rollout loop: each gets a task and the address of a model, and is recorded as an episode.

`base.py` has the arguments and results of runners, and runs agents that are functions; `command.py` runs programs, and
ends all that one started, also if this process is killed; `server.py` serves the model on a loopback address,
`policy.py` is the rollout's policy as one episode asks it, and `attempt.py` makes an episode of it all. A kind of agent
is added as a file here and a line in `attempt.RUNNERS`.
"""

from agentrl_cli.agents.runners.attempt import AgentRollout, require_agents

__all__ = ["AgentRollout", "require_agents"]
