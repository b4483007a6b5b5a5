"""The parts of docs/reproduction.md that no run changes: settings, and what the paper shows."""

from __future__ import annotations

from fedcams.plan.paper import PRINTED

MODELS = {"resnet18": "ResNet-18", "convmixer": "ConvMixer-256-8"}
"""The models of the paper."""
NAMES = {**MODELS, "lstm": "LSTM", "transformer": "transformer"}
"""These and all other models that were run."""
FURTHER = {
    "epsilon": "The ε of FedAMS, ResNet-18",
    "cohort-resnet18": "Clients per round, ResNet-18",
    "cohort-convmixer": "Clients per round, ConvMixer-256-8",
    "noniid-resnet18": "Two label shards per client, ResNet-18",
    "noniid-convmixer": "Two label shards per client, ConvMixer-256-8",
    "epochs-resnet18": "Local epochs, ResNet-18",
    "epochs-convmixer": "Local epochs, ConvMixer-256-8",
    "fig1-resnet18-cifar100": "Server optimizers on CIFAR-100, ResNet-18",
    "fig1-convmixer-cifar100": "Server optimizers on CIFAR-100, ConvMixer-256-8",
    "compression-resnet18-cifar100": "Compressed updates on CIFAR-100, ResNet-18",
    "compression-convmixer-cifar100": "Compressed updates on CIFAR-100, ConvMixer-256-8",
    "option-2-resnet18": "FedCAMS with Option 2, ResNet-18",
    "option-2-convmixer": "FedCAMS with Option 2, ConvMixer-256-8",
    "full-resnet18": "All 10 clients in every round, ResNet-18",
    "full-convmixer": "All 10 clients in every round, ConvMixer-256-8",
    "two-way-full-resnet18": "Two-way compression with all clients in every round, ResNet-18",
    "two-way-convmixer": "Two-way compression, ConvMixer-256-8",
    "two-way-full-convmixer": "Two-way compression with all clients in every round, ConvMixer-256-8",
}
"""Presets that get a section once they have runs."""
EPSILON = {
    "eps=0.1": "90.45", "eps=0.01": "90.51", "eps=1e-3": "90.94", "eps=1e-4": "90.72", "eps=1e-6": "90.49",
    "eps=1e-8": "90.30",
}  # fmt: skip
EPSILON_RULES = {"": "lr = 1", ", scaled lr": "lr = √(ε/1e-3)"}
"""Endings of labels, and the server's rate for each; the paper does not give its own."""
BOTH_RULES = "eps=1e-3"
"""Where both rules are the same run."""
NOTES = {
    "epsilon": "The paper does not give the server's rate for each ε, so both rules are run: lr = 1, and "
    "lr = √(ε/1e-3),\nwhich keeps the rate lr/√ε of coordinates whose v̂ stays at ε.\n",
    **{
        f"cohort-{model}": "The paper does not name FedCAMS's compressor in this study; we use the scaled sign.\n"
        for model in MODELS
    },
    **{
        f"epochs-{model}": "Runs with 100 local epochs have fewer rounds, and their accuracy is the mean over the last "
        "fifth of\nthese. The picture compares all runs round by round.\n"
        for model in MODELS
    },
    **{
        f"full-{model}": "Each client has ten times as many images as in the other sections, but takes as many local "
        "steps per\nround: 60.\n"
        for model in MODELS
    },
    **{
        f"noniid-{model}": "Labels are sorted and cut into 200 shards, of which every client gets two at random, so "
        "that some\nclients have a single label.\n"
        for model in MODELS
    },
    **{
        f"option-2-{model}": "Option 2 adds ε to the root of v̂ = max(v̂, v), as FedAMSGrad does; we use "
        "FedAMSGrad's rates.\n"
        for model in MODELS
    },
}
"""What to say about a preset before its table."""
PUBLISHED = {
    ("fig1-resnet18", "FedAMS"): "90.94",
    ("compression-resnet18", "FedAMS"): "90.94",
    **{("epsilon", label): value for label, value in EPSILON.items()},
}
"""Final test accuracies that the paper gives as numbers; it shows the others as curves."""
BITS = {
    "FedAMS": PRINTED["identity", "identity"],
    "FedCAMS sign": PRINTED["sign", "identity"],
    **{f"FedCAMS top-k 1/{r}": PRINTED[f"topk(ratio=1/{r})", "identity"] for r in (64, 128, 256)},
}
"""Bits of one client's link in 500 rounds of ResNet-18, as printed in the paper."""

INTRO = """\
# Reproduction

This page repeats the CIFAR-10 experiments of [Communication-Efficient Adaptive Federated
Learning](https://arxiv.org/abs/2205.02719) at full length with fedcams, figure by figure and table by table, and
compares them with what the paper reports. `make reproduction` writes this page, its numbers and its pictures from the
runs in [results/](../results).

## In short
"""
HEADLINE = """\
These are runs on CIFAR-10 over 500 rounds, with 10 of 100 clients per round. *Accuracy* is the mean test accuracy over
the last 100 rounds, in percent. *Fewer bytes* compares uploads with dense updates; if the model is compressed too, it
compares all bytes, up and down, with those of FedCAMS sign, which sends dense models. Of the runs that compress both
ways and end at most {loss} points below FedCAMS sign, the table shows the one with the fewest bytes; its time per round
is left out, because the GPU was not idle.
"""
SETTING = """\
## How it was run

Unless a section says otherwise, runs have 500 rounds, 10 of 100 clients per round, 3 local epochs, batches of 20, local
SGD with learning rate 0.01, IID shards, random crops and flips, and the paper's learning rates and ε for the server
optimizers. The following choices apply where the paper and its published code differ or are silent, or where we deviate
from them:

- **Accuracy** is the mean over the last 100 rounds, or over the last fifth of a run with fewer than 500 rounds, because
  single rounds vary by a point. Only rounds that were tested count. The tables also give the last and the best round;
  the best is lower where fewer rounds were tested. The paper gives final accuracies.
- **Bias correction** is on, as in the published code; the algorithms in the paper have none. FedAMS without it is a
  separate run.
- **80% rule**: every client trains on the first 80% of its shard, 400 of 500 images, as in the published code. This
  gives 60 local steps per round.
- **Precision**: bfloat16 activations and matrix products with float32 master weights, in the engine `graphs`.
- **Seeds**: every table names them; seed 1 was chosen in advance. With several seeds, accuracies are means, followed
  by the lowest and the highest seed, and comparisons use the seeds that both methods have. Runs that also average
  models count too, because averaging does not change training.
- **Batch-norm buffers** are averaged and travel uncompressed, as in the published code. All byte counts include them.

*Up* and *down* are the bytes of all clients' messages in all rounds, including headers and buffers. *Smaller* says how
many times fewer bytes go up than without compression. *Seconds* are the median over rounds, including evaluation;
*minutes* are for the whole run. With several seeds, both come from the fastest run, since others may have shared the
GPU.

The command in each section starts all of its runs; add `--only LABEL` for just one method. You need a GPU and a folder
with CIFAR-10; the [last section](#run-it-yourself) lists the minutes that each preset takes.
"""
REPEATABILITY = """\
**Repeatability**: the engine computes all sums in a fixed order, so a run repeats bit for bit with the same seed,
device and versions, including the version of fedcams. The engine now splits its sums over two lanes, so it cannot
repeat runs whose `environment.json` names commit d95d06e or an earlier one. Before that change, 30 rounds of one of
those runs repeated exactly on another machine ([record](../benchmarks/records/2026-11-15_graphs)).\
"""
OPTIMIZERS = """\
## Server optimizers

The paper's first figure shows FedAvg, FedAdam, FedYogi, FedAMSGrad and FedAMS as curves. The paper gives one number, in
its study of ε: FedAMS reaches 90.94% with ε = 0.001. It does not name the model of that study; we assume ResNet-18.
"""
COMPRESSORS = """\
## Compressed updates

The paper's figure on compression shows FedCAMS with the scaled sign and with top-k at 1/64, 1/128 and 1/256 against
FedAMS, as curves.
"""
GAMMA = """\
## Dissimilarity γ

The theorem on full participation assumes that compressing every client's update and compressing their mean give
similar results: γ = ‖C(mean h) − mean C(h)‖ / ‖mean Δ‖, with means over all clients, must be bounded. The theorem on
partial participation does not use γ. Our records contain γ with means over the cohort.

The paper plots γ for the sign and for top-k 1/64. `fedcams run gamma-resnet18` and `fedcams run gamma-convmixer` repeat
that; the table uses the runs of the section above.
"""
COMMUNICATION = """\
## Communication

The paper's table covers 500 rounds of ResNet-18 with compressed updates and dense models. It gives the bits on one
client's link by a rule that counts 64 bits per top-k coordinate and ignores headers and buffers. On the wire, positions
are entropy-coded and everything counts: the last column is what a client that takes part in every round would send and
receive. `fedcams plan --paper` prints both of the paper's tables without any run; `fedcams run communication` counts
real messages, with a single local step per round.
"""
TWO_WAY = """\
## Two-way compression

The paper compresses only updates and leaves open how to compress the model under partial participation. These runs
compress both ([how](two-way.md)), with 10 of 100 clients per round. The first model that a client receives is dense,
and all bytes count. *Fewer* compares all bytes, up and down, with FedCAMS sign, which compresses only updates, and with
no compression. *Accuracy* is that of the server's model. *Lost* is how many points this is below FedCAMS sign, over
the seeds that both have. *Held* is the accuracy of the common model that all clients hold with `shared`: they train
from it, and use its batch-norm statistics.
"""
