"""The host's side of the sandbox, where the model's code runs. The guest's side is the top-level folder `sandbox/`."""

from agentrl_cli.config.models import LimitsConfig as Limits
from agentrl_cli.sandbox.grading import grade
from agentrl_cli.sandbox.results import Entry, ExecResult, GradeResult, Status
from agentrl_cli.sandbox.sandbox import STRENGTH, Sandbox
from agentrl_cli.sandbox.session import Diverged, Session

__all__ = [
    "STRENGTH",
    "Diverged",
    "Entry",
    "ExecResult",
    "GradeResult",
    "Limits",
    "Sandbox",
    "Session",
    "Status",
    "grade",
]
