"""Watch: a training as it runs."""
