"""The child process of the chat and what-if screens; it loads the model, so that the screens stay light."""
