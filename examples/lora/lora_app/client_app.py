"""A site: an ordinary training loop over the adapters. The mod is the only line that deals with compression."""

from __future__ import annotations

import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedcams.flower
from fedcams.flower.mod import site_of
from lora_app.adapters import adapters_of, load_adapters_, make_model, site_data

STATE = os.environ.get("FEDCAMS_STATE", "fedcams-state")
BATCH = 8


def rank_of(context: Context) -> int:
    """Return the rank of this site's adapters: its node's own, or the run's."""
    return int(context.node_config.get("rank", context.run_config["rank"]))


def initial(context: Context) -> ArrayRecord:
    """Return the adapters that the server starts from; with `warm=true` in the downlink, it does not send them."""
    return ArrayRecord(adapters_of(make_model(rank_of(context), str(context.run_config["base"]))))


app = ClientApp(mods=[fedcams.flower.uplink(state_dir=STATE, initial=initial)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Load the adapters, train them on this site's text, and return them."""
    model = make_model(rank_of(context), str(context.run_config["base"]))
    load_adapters_(model, message.content.array_records["arrays"].to_torch_state_dict())
    data = site_data(site_of(context)).with_format("torch")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    losses = []
    for batch in data.iter(BATCH):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    metrics = MetricRecord({"num-examples": len(data), "train_loss": sum(losses) / len(losses)})
    return Message(RecordDict({"arrays": ArrayRecord(adapters_of(model)), "metrics": metrics}), reply_to=message)
