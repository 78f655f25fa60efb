"""Two runs, or two episodes, side by side."""
