"""What the paper's two arms share. ``brorl_n512.py`` and ``prorl_n16.py`` change only what the paper changes.

Tags as in ``brorl_jax/config.py``: [P] BroRL paper, [V1] ProRL, [V2] ProRL v2 post, [NR] NeMo RL, [OR] OpenRLHF,
[TIS] Yao et al. 2025; "ours" marks a value that nobody published for this run. [P] says it keeps ProRL v2's framework
and gives few numbers of its own, so most of the rest is [V2] or a public re-implementation of it.
"""

from brorl_jax.config import default, source
from brorl_jax.rewards.reasoning_gym.categories import CATEGORIES

BASE_SAMPLES = 512 * 16  # [P] samples per step of the N = 16 arm: what the base learning rate belongs to

# [V1] thousands of prompts of each family. Prepare them first, see docs/data.md:
#     for name in deepscaler eurus_code scp116k nemotron_if; do
#         python -m brorl_jax.data.prepare $name --out data/$name --against BENCHMARK_FILES; done
PREPARED = {"deepscaler": 40.0, "eurus_code": 24.0, "scp116k": 25.0, "nemotron_if": 10.0}


def base():
    """The shared recipe; the caller sets prompts_per_step, n and what follows from N."""
    config = default()
    _model_and_hardware(config)
    _data(config)
    _algorithm(config)
    return config


def _model_and_hardware(config):
    config.model.path = "nvidia/Nemotron-Research-Reasoning-Qwen-1.5B"  # [P] licence cc-by-nc-4.0: research only
    config.model.revision = "v2"  # [P] both arms start from ProRL v2's 3,000-step checkpoint
    config.model.compute_dtype = "bfloat16"  # ours
    config.model.param_dtype = "float32"  # ours
    config.model.remat = "full"  # ours
    config.model.attention = "blockwise"  # ours: 16,384 x 17,408 scores of every head would be 13.6 GB in float32
    config.mesh.data = 8  # [P] 64 H100; the split is ours
    config.mesh.fsdp = 8
    config.batch.slots = 64  # ours: one packed row per device
    config.batch.rows = 1
    config.batch.row_tokens = 16_384


def _data(config):
    """[P] names five families (math, code, science, instruction following, logic) and neither mix nor sizes.

    Here: [V1]'s sources of the five, with its counts as shares.
    """
    for name, share in PREPARED.items():
        config.data.train[name] = source("prepared", path=f"data/{name}", weight=share)
    total = sum(map(len, CATEGORIES.values()))
    for category, tasks in CATEGORIES.items():  # [V1] 96 tasks and does not list them; these are [P]'s categories
        # [V1] the task's own continuous score, <answer> tags; the sentence that asks for them is ours
        prompt = "{question}\nGive the final answer within <answer> </answer> tags."
        common = {"verifier": "reasoning_gym:tag", "prompt": prompt}
        share = 37.0 * len(tasks) / total  # [V1] in all; ours: tasks equal
        train = {"seed": 1_000_000, "size": 10_000 * len(tasks), "weight": share}
        config.data.train[category] = source("reasoning_gym_category", category=category, **common, **train)
        heading = f"reasoning_gym/{category}"  # [P] averages tasks, and reports by category
        for task in tasks:  # [V1] 100 items each
            held_out = {"seed": 0, "size": 100, "heading": heading}
            config.data.eval[task] = source("reasoning_gym", task=task, **common, **held_out)
    config.data.max_prompt_tokens = 1024  # [OR] 9,216 - 8,192; of [P]'s 16,384 in all
    config.rollout.max_tokens = 15_360  # the rest of [P]'s 16,384


def _algorithm(config):
    config.rollout.temperature = 1.0  # ours ([V1] 1.2)
    config.rollout.local.rows = 4096  # ours
    config.filter.dynamic = True  # [P] keep 0 < correct < N
    config.filter.max_generation_batches = 10  # [NR]
    config.algo.advantage = "reinforce_pp_baseline"  # [P][V2] group mean, then normalised over the batch
    config.algo.normalise = "tokens"  # [NR][OR] over trained tokens
    config.algo.loss = "ppo_clip"  # [P]
    config.algo.eps_low = 0.2  # [V2]
    config.algo.eps_high = 0.28  # [V2] clip-higher ([NR][OR] 0.27)
    config.algo.aggregation = "token"  # [NR][OR]
    config.algo.updates_per_step = 4  # [P] the same for both arms, number unpublished; [V1] 256 / 64
    config.algo.kl.estimator = "k2"  # [V2]
    config.algo.kl.coef = 1e-4  # [NR][OR]
    config.algo.kl.clamp = 10.0  # [V2]
    config.algo.mismatch.kind = "tis"  # [P]
    config.algo.mismatch.high = 2.0  # [TIS]; [P] unpublished
    config.algo.reference.every = 250  # [V2] 200 to 500; [P] periodic, unpublished
    config.algo.reference.reset_optimiser = False  # [V2]
    config.optim.lr = 1e-6  # [OR]; [P] unpublished, [V1] 2e-6
    config.optim.base_samples = BASE_SAMPLES
    config.optim.lr_rule = "sqrt"  # [P]
    config.optim.weight_decay = 0.0  # ours
    config.optim.clip_norm = 1.0  # ours
    config.eval.every = 20  # ours
    config.eval.samples = 16  # [P]
    config.eval.temperature = 0.6  # [P]
    config.eval.top_p = 0.95  # [P]
    config.checkpoint.every = 10  # ours
