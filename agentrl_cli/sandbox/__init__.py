"""Where the model's code runs, and how strongly it is held. The other side is the folder `sandbox/`."""

from agentrl_cli.sandbox.pool import STRENGTH, Sandbox
from agentrl_cli.sandbox.results import Entry, ExecResult, GradeResult, Limits, Status
from agentrl_cli.sandbox.session import Diverged, Session

__all__ = ["STRENGTH", "Diverged", "Entry", "ExecResult", "GradeResult", "Limits", "Sandbox", "Session", "Status"]
