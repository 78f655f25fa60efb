"""Reading what happened: exports, rescoring, what-if, the memory plan, the check of a pack."""
