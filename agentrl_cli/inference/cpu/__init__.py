"""What is done for float32 on a CPU alone. Without this folder, and its line in policy.py, models run as they are."""
