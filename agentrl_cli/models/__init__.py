"""Models: loading, adapters, quantisation, checkpoints, merging, images. Importing this imports no torch."""
