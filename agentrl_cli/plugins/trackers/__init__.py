"""Loggers of metrics into TensorBoard, W&B, trackio and MLflow."""

NAMES = {"tensorboard": "TensorBoard", "wandb": "Wandb", "trackio": "Trackio", "mlflow": "MLflow"}
OFFERS = {
    "moved": {f"hooks.loggers:{one}": f"plugins.trackers.loggers:{one}" for one in NAMES.values()},
    "loggers": {name: f"{__name__}.loggers:{one}" for name, one in NAMES.items()},
}
