"""Other projects' files as they are: one module each, and no word of them elsewhere."""
