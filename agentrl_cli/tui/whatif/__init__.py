"""What-if: results as they arrive."""
