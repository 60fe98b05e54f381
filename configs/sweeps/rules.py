"""ProRL's rules one by one: the KL penalty, the resets of its reference, the cosine length reward.

The paper keeps "the same framework" and publishes no ablation. Coefficient and interval of the length reward are ours
([V2] gives 100 updates on and 500 off, without the coefficient).
Hardware: that of the base config, once per arm.
Command: python -m experiments.sweep --config=configs/sweeps/rules.py --out=runs/sweeps/rules
"""

BASE = "configs/brorl_n512.py"

KL = {"algo.kl.coef": 1e-4}
NO_KL = {"algo.kl.coef": 0.0, "algo.reference.every": 0}
RESET = {"algo.reference.every": 250}
NO_RESET = {"algo.reference.every": 0}
LENGTH = {"shaping.cosine_coef": 0.1}
NO_LENGTH = {"shaping.cosine_coef": 0.0}


def get_arms(base):
    """Arms by name; without KL there is no reference to reset."""
    return {
        "kl_reset_length": {**KL, **RESET, **LENGTH},
        "kl_reset": {**KL, **RESET, **NO_LENGTH},
        "kl_length": {**KL, **NO_RESET, **LENGTH},
        "kl": {**KL, **NO_RESET, **NO_LENGTH},
        "length": {**NO_KL, **LENGTH},
        "none": {**NO_KL, **NO_LENGTH},
    }
