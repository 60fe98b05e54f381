"""Prompts: sources, tokenizer, the resumable stream, packing."""
