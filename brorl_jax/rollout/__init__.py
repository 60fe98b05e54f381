"""Rollout engines: what generates the samples. ``api`` says what an engine is, ``local`` is the embedded JAX engine."""
