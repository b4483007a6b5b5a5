"""A site: an ordinary app that trains the whole model. The mod is the only line that knows of compression."""

from __future__ import annotations

import os

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedcams.flower
from fedcams.engines import engine
from fedcams_app.settings import built

STATE = os.environ.get("FEDCAMS_STATE", "fedcams-state")
app = ClientApp(mods=[fedcams.flower.uplink(state_dir=STATE)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Loads the arrays, trains on this site's examples, returns the arrays."""
    problem = built(context.run_config).simulation.problem
    problem.model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    config = message.content.config_records["config"]
    client, round, seed = (int(str(config[key])) for key in ("client", "server-round", "seed"))
    x = problem.layout.read(problem.model)
    buffers = None if problem.buffer_layout is None else problem.buffer_layout.read(problem.model)
    update = engine("loop").train(problem, x, buffers, [client], round, seed)
    metrics = MetricRecord({"num-examples": update.examples[0], "train_loss": float(update.loss[0])})
    return Message(
        RecordDict({"arrays": ArrayRecord(problem.model.state_dict()), "metrics": metrics}), reply_to=message
    )
