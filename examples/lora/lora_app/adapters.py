"""The model with its adapters, a site's text, and what travels. Change `make_model` and `site_text` for your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

LENGTH = 32
"""Tokens per example."""
SUBJECTS = ("the sea", "a quiet house", "the old road", "every bird", "my sister", "the winter", "a red lamp", "rain")
VERBS = ("waits for", "remembers", "sings to", "looks like")


def make_model(rank: int = 8, base: str = "", width: int = 128, layers: int = 4) -> Any:
    """Return a causal model with LoRA adapters of this rank, the same at every call; all other weights are frozen.

    `base` is a folder or name for `from_pretrained`. Without it, a small Llama is made from a config, and nothing is
    downloaded.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the frozen weights must be the same at all sites; real ones come from a file
        model = AutoModelForCausalLM.from_pretrained(base) if base else LlamaForCausalLM(small(width, layers))
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, config)


def small(width: int, layers: int) -> LlamaConfig:
    """Return the config of a Llama over bytes."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaConfig(vocab_size=128, max_position_embeddings=LENGTH, **sizes, **heads)


def site_text(site: int) -> str:
    """Return the text of a site; each site has its own subject."""
    subject = SUBJECTS[site % len(SUBJECTS)]
    return " ".join(f"{subject} {verb} {other}." for other in SUBJECTS for verb in VERBS)


def site_data(site: int) -> Dataset:
    """Return a site's text as examples of `LENGTH` tokens, which are bytes; a real model comes with a tokenizer."""
    tokens = list(site_text(site).encode("ascii"))
    blocks = [tokens[start : start + LENGTH] for start in range(0, len(tokens) - LENGTH + 1, LENGTH)]
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


# -- what travels over Flower ----------------------------------------------------------------------------------------


def adapters_of(model: Any) -> dict[str, Tensor]:
    """Return the adapters by name, as `save_pretrained` writes them."""
    return dict(
        get_peft_model_state_dict(model, save_embedding_layers=False)
    )  # else it asks the hub for the vocabulary


def load_adapters_(model: Any, adapters: Mapping[str, Tensor]) -> None:
    """Write adapters into the model; refuses those of another rank or other layers, naming the first that differs."""
    own = adapters_of(model)
    for name in sorted(own.keys() | adapters.keys()):
        here, there = (list(each[name].shape) if name in each else "missing" for each in (own, adapters))
        if here != there:
            raise ValueError(
                f"the adapter {name!r} is {here} at this site and {there} at the server; give all sites the same "
                "LoraConfig, with the same rank and target_modules"
            )
    set_peft_model_state_dict(model, dict(adapters))
