"""Arithmetic with a shell, by mini-swe-agent: a program of its own, in the sandbox, as it runs any command."""

from __future__ import annotations

import ctypes
import json
import os

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

END = "Submit with: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo RESULT"
TURNS = 4
OWN = ("AGENTRL_", "AGL_", "ANTHROPIC_", "OPENAI_")
"""The episode's task with its answer, and the keys to its model and its reward."""


def main() -> None:
    """Run the agent on its task; the last line of stdout is the reward."""
    ctypes.CDLL(None).prctl(
        4, 0
    )  # PR_SET_DUMPABLE: the model's commands cannot read this process's environment,
    own = {
        name: os.environ.pop(name) for name in list(os.environ) if name.startswith(OWN)
    }  # nor inherit it
    task = json.loads(own["AGENTRL_TASK"])
    system, question = (message["content"] for message in task["messages"])
    model = LitellmModel(
        model_name=f"openai/{own['AGENTRL_MODEL']}",
        model_kwargs={"api_base": own["OPENAI_BASE_URL"], "api_key": own["OPENAI_API_KEY"]},
        cost_tracking="ignore_errors",
        observation_template="{{output.output}}",
    )
    shell = LocalEnvironment(cwd=os.environ["HOME"], timeout=10)
    templates = {"system_template": f"{system} {END}", "instance_template": "{{task}}"}
    result = DefaultAgent(model, shell, **templates, step_limit=TURNS, cost_limit=0).run(question)
    print(json.dumps({"reward": float(result.get("submission", "").strip() == task["answer"])}))


if __name__ == "__main__":
    main()
