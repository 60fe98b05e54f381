"""TRL's GRPOTrainer on PyTorch: generation by `transformers`, one group per step.

Set to its advantage where it makes no difference to the work: no activation checkpointing (its default recomputes the
forward pass), no reference model, no logging. End of sequence is forbidden by ``min_new_tokens``.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.contenders import work as shared
from benchmarks.contenders.work import Work


def model(work: Work) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=work.vocab,
            hidden_size=work.width,
            intermediate_size=work.ffn,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            num_key_value_heads=work.kv_heads,
            max_position_embeddings=work.prompt_tokens + work.response_tokens,
            tie_word_embeddings=True,
        )
    )


def settings(work: Work, directory: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=work.rows,
        gradient_accumulation_steps=work.samples // work.rows,
        num_generations=work.n,
        max_completion_length=work.response_tokens,
        generation_kwargs={"min_new_tokens": work.response_tokens},
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",  # token mean over the whole batch
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=work.clip_norm,
        max_steps=work.steps + 1,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_steps=1000,
        report_to=[],
        disable_tqdm=True,
    )


class Clock(TrainerCallback):
    """Begins and ends the meter's steps."""

    def __init__(self, meter: shared.Meter) -> None:
        self.meter = meter

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.end()


class Measured(GRPOTrainer):
    """The trainer, with its tokens counted."""

    meter: shared.Meter

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        result = self.meter.generation(super()._generate_single_turn)(*args, **kwargs)
        self.meter.generated(sum(len(ids) for ids in result[0]))
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self.meter.trained(inputs["completion_mask"].sum(), inputs["prompt_mask"].sum())
        return super()._compute_loss(model, inputs)


def run(work: Work) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    meter, network = shared.Meter(), model(work)
    before = [p.detach().clone() for p in network.parameters()]
    # The sampler draws without replacement, so each step gets a prompt of its own.
    texts = [shared.words(work.prompt(step, 0)) for step in range(work.steps + 1)]
    with tempfile.TemporaryDirectory() as directory:
        trainer = Measured(
            model=network,
            reward_funcs=lambda completions, **_: shared.text_rewards(completions),
            args=settings(work, directory),
            train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
            processing_class=shared.word_tokenizer(work.vocab),
            callbacks=[Clock(meter)],
        )
        trainer.meter = meter
        trainer.train()
    after = [p.detach() for p in network.parameters()]
    moved = max(float((a - b).abs().max()) for a, b in zip(before, after, strict=True))
    shared.report(
        "TRL GRPOTrainer",
        ("trl", "torch", "transformers"),
        parameters=sum(p.numel() for p in network.parameters()),
        threads=torch.get_num_threads(),
        steps=meter.steps,
        moved=moved,
    )


if __name__ == "__main__":
    run(shared.from_argv())
