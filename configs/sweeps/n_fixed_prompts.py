"""N at a fixed number of prompts: cost grows with N, and the learning rate by the base config's rule.

At the paper's size: 128 prompts x 16 to x 1,024.
Hardware: that of the base config, once per arm.
Command: python -m experiments.sweep --config=configs/sweeps/n_fixed_prompts.py --out=runs/sweeps/n_fixed_prompts
"""

BASE = "configs/brorl_n512.py"
N = (16, 64, 128, 256, 512, 1024)


def get_arms(base):
    """Arms by name."""
    return {f"n{n}": {"rollout.n": n} for n in N}
