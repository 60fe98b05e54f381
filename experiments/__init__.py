"""The paper's figures and tables, reproduced. From the repository's root: ``python -m experiments.NAME``."""
