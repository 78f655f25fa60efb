"""What a training came to: exports, comparisons, new scores, reports."""
