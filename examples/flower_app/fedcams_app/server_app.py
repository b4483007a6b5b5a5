"""The server: an ordinary ServerApp with our strategy."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from fedcams.flower import FedCAMS
from fedcams.flower.arrays import ArrayNames
from fedcams.simulation.evaluate import evaluate
from fedcams_app.settings import built, experiment

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or those that are left."""
    config = context.run_config
    what, made = experiment(config), built(config)
    model, arrays = made.simulation.problem.model, ArrayRecord(made.simulation.problem.model.state_dict())
    strategy = FedCAMS(
        what.method,
        checkpoint=Path(str(config["checkpoint"])),
        run=str(config["name"]),
        sampler=what.sampler,
        clients=what.clients,
        seed=what.seed,
        min_available=int(config["min-available"]),
        min_replies=int(config["min-replies"]),
        model=model,
        trackers=[each for each in str(config.get("track", "")).split(" + ") if each],
    )
    names, simulation = ArrayNames.of(arrays, model), made.simulation

    def test(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if simulation.test is None:
            return None
        found = evaluate(simulation.problem, *names.vectors(arrays), simulation.test, simulation.metrics)
        return MetricRecord({f"test_{name}": value for name, value in found.items() if value is not None})

    strategy.start(grid, arrays, what.rounds, timeout=float(config["deadline"]), evaluate_fn=test)
