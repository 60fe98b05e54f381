"""Public training sets in one schema, cleaned and filtered: ``python -m brorl_jax.data.prepare NAME --out DIR``.

``families`` says what each set's rows become, ``similar`` finds repeats and benchmark questions, ``passrates`` reads
how hard prompts were, ``pipeline`` puts them together. The schema is in :mod:`brorl_jax.data.files`. Imports no jax.
"""
