"""An app like Flower's quickstart-huggingface, on synthetic text, with two lines changed."""

# ruff: noqa: E402  (whether the libraries are there decides whether the rest is imported)

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for library in ("datasets", "transformers"):
    pytest.importorskip(library, exc_type=ImportError)

import datasets
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

from fedcams.flower import FedCAMS, uplink
from flower_apps import quick
from flower_grid import LocalGrid

__all__ = ["quick"]  # a fixture for these tests
pytestmark = pytest.mark.slow
SITES, EXAMPLES, ROUNDS = 4, 160, 8
GOOD = ["fine", "great", "lovely", "moving", "superb"]
BAD = ["awful", "boring", "dull", "poor", "weak"]
OTHER = ["a", "and", "film", "it", "of", "plot", "story", "that", "the", "was", "with"]


# -- the task, as the quickstart's task.py has it ----------------------------------------------------------------------


@functools.cache
def tokenizer() -> Any:
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


@functools.cache
def reviews() -> Any:
    """Reviews of several lengths; most of their opinions say what the label is, and one may not."""
    rng, texts, labels = np.random.default_rng(0), [], []
    for _ in range((SITES + 2) * EXAMPLES):
        label = int(rng.integers(2))
        mine, theirs = (GOOD, BAD) if label else (BAD, GOOD)
        words = [*rng.choice(mine, 3), *rng.choice(theirs, rng.integers(2)), *rng.choice(OTHER, rng.integers(4, 12))]
        texts.append(" ".join(rng.permutation(words)))
        labels.append(label)
    table = datasets.Dataset.from_dict({"text": texts, "labels": labels})
    return table.map(lambda batch: tokenizer()(batch["text"], truncation=True), batched=True).remove_columns("text")


def loader(part: int, shuffle: bool = False, size: int = EXAMPLES) -> Any:
    chosen = reviews().select(range(part * EXAMPLES, part * EXAMPLES + size))
    draw = torch.Generator().manual_seed(part)
    collate = DataCollatorWithPadding(tokenizer())
    return DataLoader(chosen, batch_size=16, shuffle=shuffle, collate_fn=collate, generator=draw)


def model() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForSequenceClassification(
            BertConfig(vocab_size=len(tokenizer()), max_position_embeddings=32, num_labels=2, **sizes)
        )


def train(net: Any, batches: Any, lr: float) -> float:
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=lr), []
    net.train()
    for batch in batches:
        loss = net(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return float(np.mean(losses))


@torch.no_grad()
def accuracy(net: Any, batches: Any) -> float:
    net.eval()
    right = [(net(**batch).logits.argmax(-1) == batch["labels"]).float() for batch in batches]
    return float(torch.cat(right).mean())


# -- the two apps ------------------------------------------------------------------------------------------------------


def client_app(mods: list[Any]) -> ClientApp:
    app = ClientApp(mods=mods)

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        net, part = model(), int(str(context.node_config["partition-id"]))
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        with torch.random.fork_rng():
            torch.manual_seed(part)
            loss = train(net, loader(part, shuffle=True), float(str(message.content.config_records["config"]["lr"])))
        metrics = MetricRecord({"train_loss": loss, "num-examples": EXAMPLES})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def _evaluate(message: Message, context: Context) -> Message:
        net, part = model(), int(str(context.node_config["partition-id"]))
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        metrics = MetricRecord({"eval_accuracy": accuracy(net, loader(part)), "num-examples": EXAMPLES})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(strategy: FedAvg, mods: list[Any]) -> tuple[float, float]:
    """Run the server app's main; return the last accuracy on the server and on the clients, in percent."""
    nodes = {7 + i: {"partition-id": i} for i in range(SITES)}

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        net = model()
        net.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(net, loader(SITES, size=2 * EXAMPLES))})

    grid = LocalGrid(dict.fromkeys(nodes, client_app(mods)), nodes)
    arrays, config = ArrayRecord(model().state_dict()), ConfigRecord({"lr": 2e-3})
    result = strategy.start(grid, arrays, ROUNDS, train_config=config, evaluate_fn=evaluate)
    on_server = result.evaluate_metrics_serverapp[ROUNDS]["accuracy"]
    on_clients = result.evaluate_metrics_clientapp[ROUNDS]["eval_accuracy"]
    assert isinstance(on_server, float)
    assert isinstance(on_clients, float)
    return 100 * on_server, 100 * on_clients


def test_two_lines_train_a_transformer_as_well_as_fedavg(tmp_path: Path) -> None:
    theirs = run(FedAvg(fraction_evaluate=1.0), [])
    assert min(theirs) > 90
    for spec in ("blockq(bits=2)", "ternary(ratio=1/16)"):
        folder = tmp_path / spec[:4]
        mods = [uplink(spec, state_dir=folder / "sites")]
        ours = run(FedCAMS(checkpoint=folder / "server", fraction_evaluate=1.0), mods)
        assert min(mine - his for mine, his in zip(ours, theirs, strict=True)) > -2, spec
