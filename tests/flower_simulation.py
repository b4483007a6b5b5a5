"""The example's app in Flower's own simulation (Ray), as a script: `flower_simulation.py checkpoint config`."""

from __future__ import annotations

import json
import os
import sys

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedcams.flower import uplink
from fedcams_app import client_app, server_app

CONFIG = json.loads(sys.argv[2])


def main() -> None:
    clients, server = ClientApp(mods=[uplink(state_dir=os.environ["FEDCAMS_STATE"])]), ServerApp()

    @clients.train()
    def train(message: Message, context: Context) -> Message:
        own = Context(context.run_id, context.node_id, context.node_config, context.state, CONFIG)
        return client_app.train(message, own)

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        config = {**CONFIG, "checkpoint": sys.argv[1]}
        server_app.main(grid, Context(context.run_id, context.node_id, {}, context.state, config))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, clients, CONFIG["clients"], backend_config=resources)


if __name__ == "__main__":
    main()
