"""The paper's own comparison: N = 16, and N x 32 with a quarter of the prompts [P].

Samples per step grow eightfold and the learning rate by the square root of that, so N, batch and rate change together.
Hardware: 64 H100, once per arm [P].
Command: python -m experiments.sweep --config=configs/sweeps/n_paper.py --out=runs/sweeps/n_paper
"""

BASE = "configs/prorl_n16.py"


def get_arms(base):
    """Arms by name."""
    n, prompts = base.rollout.n, base.rollout.prompts_per_step
    return {
        f"n{n}": {},
        f"n{32 * n}": {"rollout.n": 32 * n, "rollout.prompts_per_step": prompts // 4, "optim.lr_rule": "sqrt"},
    }
