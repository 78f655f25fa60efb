"""The child process behind the chat and what-if screens: it loads the model, so the screens need not."""
