"""The candidates of a prompt optimisation."""
