"""The results of a training: exports, comparisons, new scores, reports."""
