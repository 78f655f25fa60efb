"""Who taught the model a token: its probability at each checkpoint, and the groups that raised it most."""

OFFERS = {"explanations": {"token": f"{__name__}.trace:explain"}}
