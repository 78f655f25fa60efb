"""Better prompts instead of better weights: candidates, their evaluation, and two searches (GEPA, APO)."""
