"""A real trained model in a megabyte: our forward writes the very story that llama2.c publishes for it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import stories

from brorl_jax.models import transformer

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"
BOS, STEPS = 1, 256

# llama2.c, doc/stories260K.md: ./run stories260K.bin -z tok512.bin -t 0.0
PUBLISHED = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to "
    "play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so she said, \"I'm sorry, mom. I didn't know what to do.\" Her mom said, "
    "\"Don't worry, Lily. We can help you.\n"
)


def test_greedy_story_is_the_published_one() -> None:
    if not (MODELS / "stories260K.bin").is_file():
        pytest.skip(f"needs stories260K.bin and tok512.bin in {MODELS}")
    config, params = stories.read_model(MODELS / "stories260K.bin")
    vocabulary = stories.read_vocabulary(MODELS / "tok512.bin")
    assert sum(x.size for x in jax.tree.leaves(params)) == 260_032

    @jax.jit
    def write(params: transformer.Params) -> jax.Array:
        length = STEPS + 1
        positions, ones = jnp.arange(length)[None], jnp.ones((1, length), int)

        def step(t: jax.Array, tokens: jax.Array) -> jax.Array:
            hidden = transformer.forward(params, config, tokens, ones, positions)[0, t]
            return tokens.at[0, t + 1].set(jnp.argmax(hidden @ transformer.unembed(params)))

        return jax.lax.fori_loop(0, STEPS, step, jnp.full((1, length), BOS))[0]

    ids = write(jax.tree.map(jnp.asarray, params)).tolist()[1:]
    text = b"".join(vocabulary[i] for i in ids).decode()
    assert text.strip() == PUBLISHED.strip()
