"""Every field of an experiment: its default, unit, meaning and where the value comes from.

Tags: [P] BroRL paper (arXiv 2510.01180), [V1] ProRL paper (2505.24864), [V2] ProRL v2 post, [NR] NeMo RL's ProRL v2
recipe, [OR] OpenRLHF's ProRL v2 script, [TIS] truncated importance sampling (Yao et al. 2025); "ours" where nobody
published a value. A config file calls ``default()``, changes what it needs and returns it from ``get_config()``;
``main.py`` applies command-line overrides and calls ``validate`` before anything is loaded. Imports no jax, so that
a wrong config fails at once.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeAlias

from ml_collections import ConfigDict, FrozenConfigDict

from brorl_jax.errors import UserError

Config: TypeAlias = Any  # a ConfigDict or FrozenConfigDict; its fields have no types that a checker could see

ENGINES = ("local", "sglang")
ADVANTAGES = ("reinforce_pp_baseline", "grpo", "dr_grpo", "rloo")
LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce")
KL_ESTIMATORS = ("k1", "k2", "k3")
MISMATCH_KINDS = ("none", "tis", "mask", "sequence_mask")
AGGREGATIONS = ("token", "sequence", "constant")
NORMALISERS = ("tokens", "sequences", "none")
LR_RULES = ("constant", "sqrt", "linear")
NEW_FAMILIES = ("qwen3", "llama")  # not qwen2: transformers would replace the pre-tokenizer of the exported model
DTYPES = ("float32", "bfloat16")
SANDBOXES = ("bwrap", "none")
REMAT = ("none", "full", "dots")
ATTENTIONS = ("xla", "blockwise", "cudnn")
ANSWER_FORMATS = ("boxed", "tag", "hash", "answer_line", "code", "last_line", "whole", "final")
VERIFIERS = (
    *("reasoning_gym", "reasoning_gym_strict", "exact", "numeric", "math", "choice", "code", "code_all"),
    *("ifeval", "ifeval_loose", "ifeval_all"),
)

# Fields of every data source, then those of its kind (defined by brorl_jax.data.sources; repeated here, where importing
# it would cost seconds). The default's type is the type of the field.
SOURCE_FIELDS: dict[str, Any] = {
    "kind": "",  # one of SOURCE_KINDS
    "verifier": "",  # <scorer>[:<answer format>], see VERIFIERS and ANSWER_FORMATS; empty: the kind's usual one
    "weight": 1.0,  # share of the mix, relative to the other sources of the same stage
    "prompt": "{question}",  # user message; {question} is replaced
    "heading": "",  # that evaluations average it under: math, or with a second level reasoning_gym/algebra
}
_TABLE: dict[str, Any] = {
    "preset": "",  # names the fields of a well-known file; empty: none
    "question": "",  # column, or several as "{Body} {Question}"; empty: the preset's, or "question"
    "answer": "",  # column; empty: the preset's, or "answer"
    "gold": "",  # how the gold answer stands in it: empty: all of it, "after:<marker>" or "regex:<pattern>"
    "start": 0,  # first row
    "size": 0,  # rows from there; 0 = all
    "options": "",  # column with the list of options of multiple-choice questions; empty: the preset's, or none
    "tolerance": 0.0,  # largest absolute difference that the numeric and math verifiers accept
    "relative": 0.0,  # the same as a share of the larger number
    "path": "",  # file, or hub dataset
}
SOURCE_KINDS: dict[str, dict[str, Any]] = {
    # registered task, its parameters, number of items; item i is made from seed + i
    "reasoning_gym": {"task": "", "params": {}, "size": 1_000_000, "seed": 0},
    # all tasks of a category in turn, parameters by task; writing tasks with 1 to `most` of IFEval's instructions
    "reasoning_gym_category": {"category": "", "params": {}, "size": 1_000_000, "seed": 0},
    "instructions": {"size": 1_000_000, "seed": 0, "most": 3},
    "prepared": {"path": "", "start": 0, "size": 0},  # directory or file that brorl_jax.data.prepare wrote
    "jsonl": _TABLE,
    "huggingface": {**_TABLE, "name": "", "split": "train", "revision": ""},
}
PROCEDURAL = ("reasoning_gym", "reasoning_gym_category", "instructions")  # kinds that make their items from a seed


class ConfigError(UserError):
    """A config that cannot run: one line naming the field, its value and what to do."""


def source(kind: str, **fields: Any) -> Config:
    """A data source of one kind with every key present, so that each can be overridden on the command line."""
    return ConfigDict({**SOURCE_FIELDS, **SOURCE_KINDS.get(kind, {}), "kind": kind, **fields})


def _section() -> Config:
    return ConfigDict()


def default() -> Config:
    """Every field with its default. Locked: only ``data.{train,eval,warmup}`` take new (source) names."""
    config = _section()
    config.name = "brorl"  # of the run, for logs and the report
    config.seed = 0  # parameters, data order, sampling: everything random is derived from it

    config.model = _section()
    config.model.path = ""  # directory or hub id; empty: build model.new and train its tokenizer
    config.model.revision = ""  # hub branch, tag or commit; empty: the hub's default
    config.model.compute_dtype = "float32"  # of activations and matrix products; ours: float32 is the fast one on CPU
    config.model.param_dtype = "float32"  # of stored parameters; ours
    config.model.head_chunk = 1024  # tokens of a device at a time in the head, which never holds tokens x V; ours
    config.model.remat = "none"  # what the backward pass recomputes: none, full (each layer), dots (keep products)
    config.model.attention = "xla"  # xla (all scores at once), blockwise, cudnn (GPU, bfloat16): docs/scale.md; ours
    config.model.attention_block = 512  # queries and keys at a time in blockwise attention; ours
    config.model.offload_reference = False  # the reference policy waits in the host's memory between scoring passes
    config.model.new = _section()  # architecture built when model.path is empty; ours, sized for two CPU cores
    config.model.new.family = "qwen3"
    config.model.new.hidden = 128  # width D
    config.model.new.layers = 3
    config.model.new.heads = 4  # query heads
    config.model.new.kv_heads = 2  # key/value heads, divides heads
    config.model.new.head_dim = 32  # even (rotary halves)
    config.model.new.ffn = 384  # width of the gated MLP
    config.model.new.vocab_size = 512  # of the tokenizer that is trained with it

    config.data = _section()
    config.data.train = _section()  # named sources of RL prompts
    config.data.eval = _section()  # named sources, held out
    config.data.warmup = _section()  # named sources of (question, answer) pairs for the supervised warm start
    config.data.system_prompt = ""  # system message; empty: none
    config.data.max_prompt_tokens = 256  # tokens; longer prompts are dropped and counted at load (P40)

    config.rollout = _section()
    config.rollout.engine = "local"
    config.rollout.prompts_per_step = 128  # groups trained per step, after filtering; [P]
    config.rollout.n = 512  # rollouts per prompt N; [P]
    config.rollout.temperature = 1.0  # ours ([V1] 1.2, [P] unpublished)
    config.rollout.top_p = 1.0  # training needs the full distribution (P22)
    config.rollout.top_k = -1  # -1 = all; training needs -1
    config.rollout.min_p = 0.0  # training needs 0
    config.rollout.max_tokens = 256  # tokens of a response, stop token included
    config.rollout.stop_ids = ()  # token ids that end a response, beside the model's own
    config.rollout.overlap = False  # draw the next step's rollouts beside this step's updates: one step old; ours
    config.rollout.local = _section()
    config.rollout.local.rows = 64  # responses decoded together; ours
    config.rollout.local.chunk = 16  # tokens decoded between two checks for finished rows; ours

    config.rollout.sglang = _section()  # engine "sglang", see docs/sglang.md; needs one of urls, router, launch.servers
    config.rollout.sglang.urls = ()  # servers that run already, such as ("http://10.0.0.7:30000",)
    config.rollout.sglang.router = ""  # sglang router; it is asked for its servers once, they are then called directly
    config.rollout.sglang.in_flight = 1024  # most requests at one server at a time; ours
    config.rollout.sglang.timeout_s = 1800.0  # s for one response, then it is asked for again elsewhere; ours
    config.rollout.sglang.attempts = 4  # at one sample before it counts as aborted; ours
    config.rollout.sglang.dead_after = 8  # failures in a row after which a server leaves the pool; ours
    config.rollout.sglang.start_timeout_s = 900.0  # s for servers to come up, or back if none is left; ours
    config.rollout.sglang.update_timeout_s = 300.0  # s for one server to load new weights; ours
    config.rollout.sglang.weights_dir = ""  # for published weights, on a path that every server sees; empty: /dev/shm
    config.rollout.sglang.launch = _section()  # servers that the trainer starts on its machine and stops with itself
    config.rollout.sglang.launch.servers = 0  # how many; 0 = none
    config.rollout.sglang.launch.python = ".venv-sglang/bin/python"  # of the environment that sglang is installed in
    config.rollout.sglang.launch.host = "127.0.0.1"  # address to bind
    config.rollout.sglang.launch.port = 30000  # of the first; the others count on from there
    config.rollout.sglang.launch.tp = 1  # GPUs that split one copy of the model
    config.rollout.sglang.launch.dp = 1  # copies behind one port
    config.rollout.sglang.launch.gpus = ()  # device ids, dealt in order, tp * dp each; empty: all that are visible
    config.rollout.sglang.launch.mem_fraction = 0.85  # of a GPU's memory, for weights and cache; ours
    config.rollout.sglang.launch.flags = ()  # more flags of the server, such as ("--chunked-prefill-size=8192",)
    config.rollout.sglang.launch.env = ()  # more environment variables, as "NAME=value"

    config.grading = _section()  # of answers, see brorl_jax.rewards.service
    config.grading.plugins = ()  # modules that register verifiers of one's own, "package.module"
    config.grading.workers = 0  # processes that score answers; 0 = one per core, at most 16
    config.grading.cache = 200_000  # verdicts remembered
    config.grading.memory_gib = 4.0  # GiB, address space of a worker; 0 = no limit; ours
    config.grading.deadline_factor = 1.0  # multiplies every verifier's deadline, for slow machines
    config.grading.sandbox = "bwrap"  # isolation of programs that are judged; "none" is UNSAFE, see docs/sandbox.md
    config.grading.sandbox_packages = ""  # folder of packages for them ("pip install --target"); "" = our numpy

    config.filter = _section()
    config.filter.dynamic = True  # drop groups whose raw rewards are all equal and ask for more; [P][V2]
    config.filter.max_generation_batches = 10  # rounds of generation per step before training on what is there; [NR]
    config.filter.oversample = 1.0  # prompts asked for per group still missing, 1 to 2; surplus is carried; [NR] 1.5
    config.filter.min_valid = 0.5  # least share of a group's N samples with a reward for it to be trained; ours

    config.algo = _section()
    config.algo.advantage = "reinforce_pp_baseline"  # [P][V2]
    # What reinforce_pp_baseline's batch statistics are over, tokens ([NR][OR]) or sequences; the others need "none".
    config.algo.normalise = "tokens"
    config.algo.advantage_clip = 0.0  # |advantage| <= this; 0 = off; ours
    config.algo.loss = "ppo_clip"  # [P][V2]
    config.algo.eps_low = 0.2  # ratio >= 1 - eps_low; [V2]
    config.algo.eps_high = 0.28  # ratio <= 1 + eps_high (clip-higher); [V2]; [NR][OR] 0.27
    config.algo.dual_clip = 0.0  # cap c > 1 of the ratio where the advantage is negative; 0 = off; ours
    config.algo.aggregation = "token"  # sum over tokens / all tokens; [NR][OR]
    config.algo.updates_per_step = 4  # mini-batches, by prompts, one epoch; [V1]
    config.algo.kl = _section()
    config.algo.kl.estimator = "k2"  # (log ratio)^2 / 2 in the loss; [V2]
    config.algo.kl.coef = 1e-4  # beta; 0 = no reference policy at all; [NR][OR]
    config.algo.kl.clamp = 10.0  # nats, |log ratio| <= clamp; [V2]
    config.algo.kl.clamp_output = 0.0  # nats, |KL term of a token| <= clamp_output, 10 in [NR]; 0 = no bound
    config.algo.mismatch = _section()
    config.algo.mismatch.kind = "tis"  # correction for engine/trainer differences; [P]
    config.algo.mismatch.low = 0.0  # masks drop a token or sequence whose weight is below; tis does not use it
    config.algo.mismatch.high = 2.0  # tis cuts weights to it, masks drop above it; [TIS]; [NR] mask [0.5, 5.0]
    config.algo.mismatch.stop_above = 0.0  # nats, mean |logp difference| that stops the run; 0 = never; ours
    config.algo.reference = _section()
    config.algo.reference.every = 0  # steps between resets of the reference policy to the policy; 0 = never
    config.algo.reference.kl_spike = 0.0  # nats of policy/kl_ref that trigger a reset; 0 = off; [V2], rule only
    config.algo.reference.stall = 0  # evaluations without a new best that trigger a reset; 0 = off; [V2], rule only
    config.algo.reference.reset_optimiser = False  # also forget the optimiser's moments; [V2] keeps, [V1] resets

    config.shaping = _section()  # of the rewards that make advantages; filtering uses the raw ones (P17)
    config.shaping.stop_properly = 1.0  # factor on the reward of truncated samples; 1 = off, 0 = none; [NR] 0
    config.shaping.overlong_buffer = 0  # tokens before max_tokens over which the penalty grows; 0 = off; [OR] 6144
    config.shaping.overlong_penalty = 0.0  # reward taken off at max_tokens, linear over the buffer
    config.shaping.cosine_coef = 0.0  # lambda of the cosine length reward; 0 = off; [V2] unpublished value
    config.shaping.cosine_min = 0.0  # length reward at max_tokens
    config.shaping.cosine_max = 1.0  # length reward at length 0
    config.shaping.cosine_on = 100  # steps with the length reward, then; [V2]
    config.shaping.cosine_off = 500  # steps without, in turn; [V2]

    config.optim = _section()
    config.optim.lr = 1e-6  # at base_samples samples per step; [OR]
    config.optim.base_samples = 8192  # samples per step that `lr` belongs to: 512 prompts x 16; [P]
    config.optim.lr_rule = "sqrt"  # lr * (samples per step / base_samples)^(1/2); [P]
    config.optim.warmup_steps = 0  # updates over which the rate rises linearly; ours
    config.optim.b1 = 0.9  # AdamW; ours (usual)
    config.optim.b2 = 0.999
    config.optim.eps = 1e-8
    config.optim.weight_decay = 0.0  # decoupled, on matrices only; ours
    config.optim.moment_dtype = "float32"  # of stored moments; bfloat16 is rounded at random, see docs/scale.md
    config.optim.offload = False  # moments wait in the host's memory between updates
    config.optim.clip_norm = 1.0  # of the global gradient; 0 = off; ours (usual)

    config.batch = _section()  # shape [slots, rows, row_tokens] of a micro-batch, see types.Batch
    config.batch.slots = 1  # prompts whose responses share a micro-batch
    config.batch.rows = 16  # packed rows per slot
    config.batch.row_tokens = 256  # tokens of a row

    config.train = _section()
    config.train.steps = 100  # steps of the loop
    config.train.rehearse = True  # the largest update first, so that too little memory shows at once (P44)
    config.train.stall_timeout_s = 7200.0  # s without any progress after which the run is ended; 0 = off; ours (P42)
    config.train.stop_stalled = 0  # evaluations without a new best after which it ends early; 0 = never; ours

    config.warmup = _section()  # supervised warm start before RL
    config.warmup.steps = 0  # updates; 0 = no warm start
    config.warmup.batch = 256  # examples per update
    config.warmup.lr = 1e-3  # peak
    config.warmup.until = 0.0  # held-out pass@1 at which it ends early; 0 = it runs all its steps
    config.warmup.every = 20  # updates between two looks at that

    config.eval = _section()
    config.eval.every = 0  # steps; 0 = never during training
    config.eval.samples = 16  # responses per prompt; [P]
    config.eval.temperature = 0.6  # [P]; 0 = greedy
    config.eval.top_p = 0.95  # [P]
    config.eval.max_prompts = 0  # per source; 0 = all
    config.eval.before_training = True  # measure the start, too

    config.checkpoint = _section()
    config.checkpoint.every = 10  # steps; 0 = only at the end and on SIGTERM
    config.checkpoint.keep = 2  # last ones kept, beside the best by evaluation

    config.diagnostics = _section()  # of the rollouts, never of what is trained; see docs/diagnostics.md
    config.diagnostics.mass_balance_every = 10  # steps; 0 = never; ours, like the rest of the section
    config.diagnostics.min_visits = 8  # rollouts that must pass a node of a prompt's trie, its root apart
    config.diagnostics.max_depth = 128  # tokens of a response looked at
    config.diagnostics.exact_nodes = 4  # of a prompt, with the full distribution: the root, then the first that branch

    config.log = _section()
    config.log.rollouts = True  # write every sample to workdir/rollouts
    config.log.tensorboard = True
    config.log.wandb_project = ""  # empty: no Weights & Biases
    config.log.every = 1  # steps between two lines on the terminal

    config.processes = _section()  # of a run with several, see docs/scale.md
    config.processes.start_timeout_s = 300.0  # s for all of them to come; ours
    config.processes.lost_after_s = 30.0  # s without a sign of life after which one counts as dead; ours
    config.processes.wait_s = 7200.0  # s, longest wait for one that lives, as at the end of a round's rollouts; ours

    config.mesh = _section()  # over all processes; devices = data * fsdp * context * tensor
    config.mesh.data = 1  # replicas
    config.mesh.fsdp = 1  # shards of parameters and optimiser state; batches are split over data * fsdp
    config.mesh.context = 1  # shards of each row's tokens, for long rows
    config.mesh.tensor = 1  # shards of each matrix product

    config.lock()
    for stage in ("train", "eval", "warmup"):
        config.data[stage].unlock()
    return config


def derived(config: Config) -> dict[str, Any]:
    """Figures that follow from the fields: samples and updates per step, the scaled learning rate, token bounds.

    The learning rate is lr * (samples per step / base_samples)^p with p = 0, 1/2 or 1 for lr_rule constant, sqrt,
    linear ([P]: square root of the effective batch, mini-batches per step unchanged).
    """
    samples = config.rollout.prompts_per_step * config.rollout.n
    power = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}[config.optim.lr_rule]
    scale = math.pow(samples / config.optim.base_samples, power) if power else 1.0
    micro_tokens = config.batch.slots * config.batch.rows * config.batch.row_tokens
    return {
        "samples_per_step": samples,
        "updates_per_step": config.algo.updates_per_step,
        "prompts_per_update": config.rollout.prompts_per_step // config.algo.updates_per_step,
        "samples_per_update": samples // config.algo.updates_per_step,
        "learning_rate_scale": scale,
        "learning_rate": config.optim.lr * scale,
        "max_response_tokens_per_step": samples * config.rollout.max_tokens,
        "max_sequence_tokens": config.data.max_prompt_tokens + config.rollout.max_tokens,
        "micro_batch_tokens": micro_tokens,
        "total_samples": samples * config.train.steps,
        "devices": config.mesh.data * config.mesh.fsdp * config.mesh.context * config.mesh.tensor,
    }


def freeze(config: Config) -> Config:
    """An immutable, hashable copy: what the rooms behind ``train.run`` see."""
    return FrozenConfigDict(config)


def to_json(config: Config) -> str:
    """The resolved config as indented JSON, keys sorted: ``workdir/config.json``."""
    return json.dumps(config.to_dict(), indent=2)


def validate(config: Config, purpose: str = "train") -> None:
    """Raises ``ConfigError`` for the first unknown key, wrong type or impossible combination; touches no model.

    Args:
        purpose: ``train``, or ``evaluate``, for which what only training reads may be anything of its type.
    """
    from brorl_jax import config_checks  # the checks are a room of their own; they import this one

    config_checks.check(config, purpose)
