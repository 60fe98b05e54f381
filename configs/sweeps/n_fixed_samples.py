"""N at a fixed number of samples per step: more rollouts of fewer prompts. No arm of the paper does this.

At the paper's size: 65,536 samples a step, 4,096 prompts x 16 to 64 x 1,024. The learning rate is the same for all.
Hardware: that of the base config, once per arm.
Command: python -m experiments.sweep --config=configs/sweeps/n_fixed_samples.py --out=runs/sweeps/n_fixed_samples
"""

BASE = "configs/brorl_n512.py"
N = (16, 64, 128, 256, 512, 1024)


def get_arms(base):
    """Arms by name; those whose prompts would not fill the step's updates are left out."""
    samples, updates = base.rollout.prompts_per_step * base.rollout.n, base.algo.updates_per_step
    whole = [n for n in N if samples % n == 0 and (samples // n) % updates == 0 and samples // n]
    return {f"n{n}": {"rollout.n": n, "rollout.prompts_per_step": samples // n} for n in whole}
