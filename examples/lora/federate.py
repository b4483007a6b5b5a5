"""Federate LoRA adapters in one process, count what travels, save the adapters and load them again."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

import fedcams
from fedcams.own import History
from lora_app.adapters import adapters_of, make_model, site_data

SITES, COHORT = 8, 4
LOCAL = "adamw(lr=3e-3, epochs=1, batch=8)"
DENSE = fedcams.Method.from_dict({"local": LOCAL, "server": "fedavg(lr=1)"})
LIGHT = fedcams.Method.from_dict(
    {"local": LOCAL, "server": "fedams(lr=0.003, eps=1e-6, beta1=0.5)", "recipe": "lighter"}
)


def federate(model: Any, rounds: int, method: fedcams.Method) -> History:
    """Return the history of a federation over all sites, run to its end; its test set is one more site."""
    clients = {f"site-{site}": site_data(site) for site in range(SITES)}
    test = site_data(SITES + 1)
    return fedcams.simulate(model, clients, test, rounds=rounds, cohort=COHORT, method=method).run()


def bytes_per_client(history: History) -> float:
    """Return the mean size of what one client receives and sends in a round."""
    sent: int = sum(record.wire_up + record.wire_down for record in history.records)
    return sent / sum(len(record.cohort) for record in history.records)


def table(make: Callable[[], Any], light: History) -> str:
    """Return what a client exchanges in a round: the whole model, all adapters, and adapters by the recipe."""
    ways = {
        "the whole model": federate(make().merge_and_unload().requires_grad_(), 1, DENSE),
        "LoRA adapters": federate(make(), 1, DENSE),
        "LoRA adapters, recipe lighter": light,
    }
    sizes = {name: bytes_per_client(history) for name, history in ways.items()}
    most = max(sizes.values())
    lines = [f"| {name} | {size:,.0f} | {most / size:,.0f}x |" for name, size in sizes.items()]
    return "\n".join(["| what travels | bytes per client and round | fewer |", "|---|--:|--:|", *lines])


def main(rounds: int, out: Path, make: Callable[[], Any] = make_model) -> None:
    """Print the losses and the table, write the adapters to a folder, and check that they load."""
    light = federate(make(), rounds, LIGHT)
    for record in light.records:
        print(f"round {record.round}: loss {record.train_loss:.3f}, of the averaged model {record.averaged_loss:.3f}")
    print(table(make, light))
    trained = light.averaged_model
    assert isinstance(trained, PeftModel)
    trained.save_pretrained(out, save_embedding_layers=False)
    again = PeftModel.from_pretrained(make().unload(), out)
    assert all(torch.equal(value, adapters_of(again)[name]) for name, value in adapters_of(trained).items())
    print(f"saved {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("adapters"))
    main(**vars(parser.parse_args()))
