"""LoRA adapters of a causal language model, trained by a federation: only the adapters travel."""
