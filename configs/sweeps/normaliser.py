"""What advantages are divided by: the batch's spread over tokens or sequences, each group's own, nothing.

[P] writes the statistics per trajectory, its public re-implementations take tokens.
Hardware: that of the base config, once per arm.
Command: python -m experiments.sweep --config=configs/sweeps/normaliser.py --out=runs/sweeps/normaliser
"""

BASE = "configs/brorl_n512.py"


def get_arms(base):
    """Arms by name."""
    return {
        "batch_tokens": {"algo.advantage": "reinforce_pp_baseline", "algo.normalise": "tokens"},
        "batch_sequences": {"algo.advantage": "reinforce_pp_baseline", "algo.normalise": "sequences"},
        "group": {"algo.advantage": "grpo", "algo.normalise": "none"},
        "none": {"algo.advantage": "dr_grpo", "algo.normalise": "none"},
    }
