"""Hugging Face datasets and models, passed to `simulate` unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedcams
from test_own_batches import PLAIN, WithLoss, flat, linear, run


def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    clients = [
        datasets.Dataset.from_dict({"left": x[:, :1].tolist(), "right": x[:, 1:].tolist(), "labels": y.tolist()})
        for x, y in PLAIN
    ]
    history = run(WithLoss(), clients, clients[0])
    torch.testing.assert_close(flat(history), flat(run(linear(), PLAIN, engine="loop")), rtol=1e-5, atol=1e-6)


def test_a_model_of_transformers_with_padded_text() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(config)
    rng = np.random.default_rng(0)
    clients = [
        [{"input_ids": rng.integers(1, 20, 2 + i % 4).tolist(), "labels": i % 2} for i in range(5)] for _ in range(3)
    ]

    def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence([torch.tensor(each["input_ids"]) for each in examples], batch_first=True)
        return {"input_ids": ids, "attention_mask": ids.ne(0), "labels": torch.tensor([e["labels"] for e in examples])}

    def correct(outputs: Any, batch: Any) -> Tensor:
        return (outputs.logits.argmax(-1) == batch["labels"]).float()

    metrics = {"correct": correct, "all": fedcams.over_test_set(lambda o, b: float(correct(o, b).mean()))}
    history = run(
        model, clients, clients[0], collate=collate, local="adamw(lr=0.01, epochs=3, batch=2)", metric=metrics
    )
    losses = [record.test_loss for record in history.records]
    assert losses[-1] < losses[0]
    assert history.records[-1].get("test_all") == pytest.approx(history.records[-1].test_accuracy)
    assert type(history.model) is type(model)
