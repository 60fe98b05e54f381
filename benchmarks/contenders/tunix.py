"""tunix's GRPOLearner with its own ("vanilla") rollout, one group per step.

A group is one micro-batch: its micro-batches are counted in prompts. Nothing ends a rollout early, since the end id
does not exist; but tunix masks tokens by value, so the few sampled padding ids are generated, run through the model and
left out of the loss.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from benchmarks.contenders import work as shared
from benchmarks.contenders.work import Work

NEVER = -1


def model(work: Work) -> qwen2.Qwen2:
    cfg = qwen2.ModelConfig(
        num_layers=work.layers,
        vocab_size=work.vocab,
        embed_dim=work.width,
        hidden_dim=work.ffn,
        num_heads=work.heads,
        head_dim=work.width // work.heads,
        num_kv_heads=work.kv_heads,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    actor = qwen2.Qwen2(cfg, rngs=nnx.Rngs(0))
    # Its embedding is drawn with deviation 1, and tied: the new model would repeat the prompt's last token for ever,
    # all rewards of a group would be equal and every gradient 0. The others draw with 0.02.
    embedding = actor.embedder.input_embedding
    embedding.value = embedding.value * 0.02
    return actor


def cluster(work: Work, actor: qwen2.Qwen2, mesh: Mesh) -> rl_cluster.RLCluster:
    role = rl_cluster.Role
    length = work.prompt_tokens + work.response_tokens
    return rl_cluster.RLCluster(
        actor=actor,
        reference=None,
        tokenizer=shared.word_tokenizer(work.vocab),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(work.clip_norm), optax.adamw(work.learning_rate, weight_decay=0.0)
                ),
                eval_every_n_steps=1000,
                max_steps=work.steps + 1,
                mini_batch_size=1,
                train_micro_batch_size=1,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=work.response_tokens,
                max_prompt_length=work.prompt_tokens,
                kv_cache_size=length,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[NEVER],
            ),
        ),
    )


def measure(cl: Any, meter: shared.Meter) -> None:
    """Puts the meter around the two halves of a step."""
    sample, update = meter.generation(cl.generate), cl.update_actor

    def generate(prompts: Any, **kwargs: Any) -> Any:
        meter.begin()
        output = sample([str(p) for p in prompts], **kwargs)
        meter.generated(sum(len(tokens) for tokens in output.tokens))
        return output

    def update_actor(train_ds: Any, *args: Any, **kwargs: Any) -> None:
        update(train_ds, *args, **kwargs)
        jax.block_until_ready(nnx.state(cl.actor_trainer.model))
        for example in train_ds:
            meter.trained(example.completion_mask.sum(), example.prompt_mask.sum())
        meter.end()

    cl.generate, cl.update_actor = generate, update_actor


def run(work: Work) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    meter = shared.Meter()
    with mesh:
        actor = model(work)
        before = [np.array(x) for x in jax.tree.leaves(nnx.state(actor, nnx.Param))]
        cl = cluster(work, actor, mesh)
        measure(cl, meter)
        learner = grpo_learner.GRPOLearner(
            rl_cluster=cl,
            reward_fns=lambda prompts, completions, **_: shared.text_rewards(completions),
            algo_config=grpo_learner.GRPOConfig(
                num_generations=work.n, num_iterations=1, beta=0.0, epsilon=0.2, loss_agg_mode="token-mean"
            ),
        )
        learner.train([{"prompts": np.array([shared.words(work.prompt(step, 0))])} for step in range(work.steps + 1)])
    after = jax.tree.leaves(nnx.state(cl.actor_trainer.model, nnx.Param))  # the cluster made a copy
    shared.report(
        "tunix GRPOLearner",
        ("google-tunix", "jax", "jaxlib", "flax"),
        parameters=sum(x.size for x in before),
        steps=meter.steps,
        moved=max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)),
    )


if __name__ == "__main__":
    run(shared.from_argv())
