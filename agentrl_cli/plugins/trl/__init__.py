"""TRL's files as they are, and TRL's GRPOTrainer as the learner of a run (`trainer.kind: trl`)."""

from __future__ import annotations

HERE = "agentrl_cli.plugins.trl"
OFFERS = {
    "moved": {
        "compat.trl": "plugins.trl.files",
        "compat.trl_reward": "plugins.trl.reward",
        "rewards.rules:environment": "plugins.trl.files:environment",
        "trainer.with_trl": "plugins.trl.learner",
    },
    "adapters": {
        "environment": f"{HERE}.files:environment_tools",
        "reward": f"{HERE}.reward:adapt_reward",
    },
    "forms": {"trl": f"{HERE}.files:FORM"},
    "rewards": {"environment": f"{HERE}.files:environment"},
    "settings": {"trainer": f"{HERE}.settings:TrainerConfig"},
    "learners": {"trl": f"{HERE}.learner:make_learner"},
}
