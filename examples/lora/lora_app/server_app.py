"""The server: an ordinary ServerApp with our strategy, which starts from the adapters and saves them at the end."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedcams.flower import FedCAMS
from lora_app.adapters import adapters_of, load_adapters_, make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or those that are left, and save the adapters with `save_pretrained`."""
    config = context.run_config
    model = make_model(int(config["rank"]), str(config["base"]))
    strategy = FedCAMS(
        checkpoint=str(config["checkpoint"]),
        run=str(config["name"]),
        recipe=str(config["recipe"]),
        server=str(config["server"]),
        min_available=int(config["sites"]),
    )
    arrays = ArrayRecord(adapters_of(model))
    result = strategy.start(grid, arrays, int(config["rounds"]), timeout=float(config["deadline"]))
    load_adapters_(model, (strategy.averaged_arrays or result.arrays).to_torch_state_dict())
    model.save_pretrained(str(config["adapters"]), save_embedding_layers=False)
