"""The runs of a project and its episodes."""
