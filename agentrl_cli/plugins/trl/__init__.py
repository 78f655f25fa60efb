"""TRL's files as they are, and TRL's GRPOTrainer as the learner of a run (`trainer.kind: trl`)."""

OFFERS = {
    "moved": {
        "compat.trl": "plugins.trl.files",
        "compat.trl_reward": "plugins.trl.files",
        "rewards.rules:environment": "plugins.trl.files:environment",
        "trainer.with_trl": "plugins.trl.learner",
    },
    "adapters": {
        "environment": f"{__name__}.files:environment_tools",
        "reward": f"{__name__}.files:adapt_reward",
    },
    "forms": {"trl": f"{__name__}.files:FORM"},
    "rewards": {"environment": f"{__name__}.files:environment"},
    "settings": {"trainer": f"{__name__}.settings:TrainerConfig"},
    "learners": {"trl": f"{__name__}.learner:make_learner"},
}
