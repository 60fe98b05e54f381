"""How the learning rate grows with the samples per step: not at all, by the square root [P], in proportion.

Hardware: that of the base config, once per arm.
Command: python -m experiments.sweep --config=configs/sweeps/lr_rule.py --out=runs/sweeps/lr_rule
"""

BASE = "configs/brorl_n512.py"


def get_arms(base):
    """Arms by name."""
    return {rule: {"optim.lr_rule": rule} for rule in ("constant", "sqrt", "linear")}
