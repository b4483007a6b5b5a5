"""A site: an ordinary app that trains the whole model. The mod is the only line that deals with compression."""

from __future__ import annotations

import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import fedcams.flower
from fedcams.engines import Problem, engine
from fedcams_app.settings import built

STATE = os.environ.get("FEDCAMS_STATE", "fedcams-state")


def initial(context: Context) -> ArrayRecord:
    """Return the model that the server starts from: with `warm=true` in the downlink, it is not sent to this site."""
    return ArrayRecord(built(context.run_config).simulation.problem.model.state_dict())


app = ClientApp(mods=[fedcams.flower.uplink(state_dir=STATE, initial=initial)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Load the arrays, train on this site's examples, and return the arrays."""
    problem = built(context.run_config).simulation.problem
    problem.model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    config = message.content.config_records["config"]
    client, round, seed = (int(str(config[key])) for key in ("client", "server-round", "seed"))
    rate, shift = float(str(config["local-rate"])), gradient_shift(message, problem)
    update = engine("loop").train(problem, *problem.read(), [client], round, seed, rate=rate, shift=shift)
    metrics = MetricRecord({"num-examples": update.examples[0], "num-steps": update.steps[0]})
    metrics["train_loss"], metrics["shift-applied"] = float(update.loss[0]), int(shift is not None)
    return Message(
        RecordDict({"arrays": ArrayRecord(problem.model.state_dict()), "metrics": metrics}), reply_to=message
    )


def gradient_shift(message: Message, problem: Problem) -> Tensor | None:
    """Return what control variates, such as SCAFFOLD's, add to every gradient `[1, d]`; None without them."""
    if "fedcams.shift" not in message.content.array_records:
        return None
    parts = message.content.array_records["fedcams.shift"].to_torch_state_dict()
    return torch.cat([parts[name].reshape(-1) for name in problem.layout.names])[None]
