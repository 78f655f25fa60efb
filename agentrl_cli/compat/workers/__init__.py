"""Programs that the interpreter of another project runs (compat/programs.py): they import nothing of this package."""
