"""These two read runs; tests/experiments/test_miniature.py makes some and executes both."""

collect_ignore = ["04_n_scaling.ipynb", "05_paper_tables.ipynb"]
