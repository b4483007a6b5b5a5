"""Presets: each one in the package is complete; your own files are read, or refused with the fix."""

from __future__ import annotations

import csv
import dataclasses
import math
import pickle
import tomllib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.experiment.preset import folder_name, load_preset, overridden, presets
from fedcams.experiment.sweep import load_sweep
from fedcams.local import step_count
from fedcams.registry import exact, resolve
from together import together

ADAPTIVITY = {"adaptivity-resnet18": "fig1-resnet18", "adaptivity-shakespeare": "shakespeare-lstm"}
TEXT = [name for name in presets() if "shakespeare" in name]
PAPER = [name for name in presets() if not name.endswith(("demo", "digits")) and name not in {*TEXT, *ADAPTIVITY}]
FULL = ["full-resnet18", "full-convmixer"]
everyone = pytest.mark.parametrize("name", presets())


def write_cifar(folder: Path, sizes: dict[str, int], key: bytes, classes: int) -> None:
    rng = np.random.default_rng(0)
    for name, size in sizes.items():
        images = rng.integers(0, 256, (size, 3 * 32 * 32), dtype=np.uint8)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps({b"data": images, key: [i % classes for i in range(size)]}))


# -- those that are shipped ------------------------------------------------------------------------------------------


@everyone
def test_it_is_described_and_its_runs_have_folders_of_their_own(name: str) -> None:
    preset = load_preset(name)
    assert (preset.name, preset.description) == (name, presets()[name])
    assert preset.description
    assert list(preset.folders.values()) == preset.experiments
    assert len({experiment.label for experiment in preset.experiments}) > 1, "a figure compares"


@everyone
def test_its_experiments_read_back_from_what_they_print(name: str) -> None:
    for experiment in load_preset(name).experiments:
        assert Experiment.from_dict(tomllib.loads(experiment.to_toml())) == experiment


@together("name", PAPER)
def test_the_papers_common_setting(name: str) -> None:
    for experiment in load_preset(name).experiments:
        shorter = {"FedAMS E=100", "FedCAMS sign E=100"}
        rounds = {"epochs-resnet18": 75, "epochs-convmixer": 60}[name] if experiment.label in shorter else 500
        assert (experiment.clients, experiment.rounds) == (10 if name in FULL else 100, rounds)
        assert experiment.seed in ((1, 2, 3, 4) if name.startswith("bytes") else (1,))
        assert experiment.train_fraction == Fraction(4, 5)
        assert (experiment.local.lr, experiment.local.batch) == (Fraction(1, 100), 20)
        assert experiment.local.momentum == 0
        partition = {"noniid": "shards", "bytes-noniid": "dirichlet"}.get(name.rpartition("-")[0], "iid")
        assert str(experiment.partition) == partition
        assert (experiment.uplink.name != "identity") == experiment.label.startswith("FedCAMS")
        assert str(experiment.task) == ("cifar100" if name.endswith("cifar100") else "cifar10")
        if not name.startswith("cohort"):
            assert str(experiment.sampler) == ("full" if name in FULL or "-full-" in name else "uniform")
        assert (experiment.downlink.name != "none") <= name.startswith(("two-way", "bytes"))
        if not name.startswith(("epochs", "communication")):
            assert step_count(experiment.local, 50_000 * 4 // 5 // experiment.clients) == 60


@pytest.mark.parametrize("name", TEXT)
def test_the_setting_of_adaptive_federated_optimization(name: str) -> None:
    """715 clients, ten a round, one epoch of batches of four, 1200 rounds, sequences of 80."""
    for experiment in load_preset(name).experiments:
        assert (str(experiment.task), str(experiment.partition)) == ("shakespeare(roles=715)", "natural")
        assert (experiment.clients, str(experiment.sampler), experiment.rounds) == (715, "uniform", 1200)
        assert (experiment.local.batch, experiment.local.epochs or 1) == (4, 1)
        assert str(experiment.model) == ADAPTIVITY.get(name, name).removeprefix("shakespeare-")
        assert experiment.average is not None


@pytest.mark.parametrize("name", ADAPTIVITY)
def test_the_runs_off_the_floor_differ_from_their_figure_in_the_server(name: str) -> None:
    """Those on CIFAR-10 are shorter too, with a seed of their own."""
    apart = {"label", "server", *(("rounds", "seed", "evaluate_every") if name.endswith("resnet18") else ())}
    figure = load_preset(ADAPTIVITY[name]).experiments[0].to_dict()
    for experiment in load_preset(name).experiments:
        changed = {key for key, value in experiment.to_dict().items() if value != figure[key]}
        assert changed <= apart


@pytest.mark.parametrize("name", ADAPTIVITY)
def test_their_labels_name_the_floor_and_the_rate_there(name: str) -> None:
    """The rate is lr/√ε, ten times that of the FedAvgM which the run would be if it never left the floor."""
    for experiment in load_preset(name).experiments:
        family, _, rate = experiment.label.partition(", rate ")
        server = experiment.server if family == "FedAvgM" else experiment.server.twin()
        settled = server.at(10_000, 10_000).lr  # type: ignore[union-attr]
        assert float(settled) == pytest.approx(float(rate) / 10, rel=2e-3)
        assert family == "FedAvgM" or float(experiment.server.eps) == float(family.removeprefix("eps="))


BYTES = [name for name in presets() if name.startswith("bytes")]


@pytest.mark.parametrize("name", BYTES)
def test_what_is_compared_by_bytes_is_averaged_and_tested_alike(name: str) -> None:
    """The last hundred rounds, whose mean counts, hold ten tests each."""
    for experiment in load_preset(name).experiments:
        assert (str(experiment.average), experiment.evaluate_every) == ("ema(decay=0.985)", 10)
        assert (experiment.buffers.name != "identity") == experiment.label.startswith("FedCAMS")
        own = experiment.downlink.name != "none" or experiment.label.endswith("lower falling rate")
        if name == "bytes-noniid-resnet18":
            wanted = (1 if experiment.label == "FedAMS" else 0.4, True)
        else:
            wanted = (0.4, True) if own else (1, False)
        rate = experiment.server.at(400, 500).lr
        assert (float(rate), experiment.server.at(500, 500).lr < 0.01) == wanted


RATES = {
    "resnet18": {"FedAvg": "1", "FedAdam": "0.1", "FedYogi": "1", "FedAMSGrad": "0.1", "FedAMS": "1"},
    "convmixer": {"FedAvg": "1", "FedAdam": "1", "FedYogi": "1", "FedAMSGrad": "1", "FedAMS": "1"},
}


@pytest.mark.parametrize("suffix", ["", "-cifar100"])
@pytest.mark.parametrize("model", RATES)
def test_the_papers_table_of_hyperparameters(model: str, suffix: str) -> None:
    servers = {experiment.label: experiment.server for experiment in load_preset(f"fig1-{model}{suffix}").experiments}
    assert str(servers.pop("FedAMS without bias correction")) == "fedams"
    twins = {label: servers.pop(label) for label in list(servers) if "twin of" in label}
    assert len(twins) == (0 if suffix else 3)
    for label, twin in twins.items():
        assert twin == servers[label.rpartition(" ")[2]].twin(digits=7), "it is what the method is on its floor"
    assert servers["FedAdam"].twin() == servers["FedAMSGrad"].twin()
    assert servers.keys() == RATES[model].keys()
    for label, lr in RATES[model].items():
        eps = {"FedAvg": "", "FedAMS": ", eps=1e-3, bias_correction=true"}.get(label, ", eps=0.1, bias_correction=true")
        assert servers[label] == resolve("server", f"{label.lower()}(lr={lr}{eps})")


@together(
    ("name", "key", "values"),
    [
        ("epsilon", "server.eps", [0.1, 0.01, 1e-3, 1e-4, 1e-6, 1e-8, 0.1, 0.01, 1e-4, 1e-6, 1e-8]),
        ("cohort-resnet18", "sampler.n", [5, 10, 20] * 2),
        ("cohort-convmixer", "sampler.n", [5, 10, 20] * 2),
        ("epochs-resnet18", "local.epochs", [3, 10, 30, 100] * 2),
        ("compression-resnet18", "uplink.name", ["identity", "sign", *["topk"] * 3]),
        ("compression-resnet18-cifar100", "uplink.name", ["identity", "sign", *["topk"] * 3, "ternary"]),
        ("compression-convmixer-cifar100", "uplink.name", ["identity", "sign", *["topk"] * 3, "ternary"]),
        ("option-2-resnet18", "server.name", [*["fedamsgrad"] * 3, *["fedams"] * 2]),
        ("option-2-convmixer", "uplink.name", ["identity", *["sign", "topk"] * 2]),
        ("full-convmixer", "uplink.name", [*["identity"] * 5, "sign", "topk"]),
        ("gamma-convmixer", "uplink.name", ["sign", "topk"]),
    ],
)
def test_what_the_papers_studies_vary(name: str, key: str, values: list[object]) -> None:
    piece, _, field = key.partition(".")
    found = [getattr(getattr(experiment, piece), field) for experiment in load_preset(name).experiments]
    assert found == [exact(value) if isinstance(value, float) else value for value in values]


@pytest.mark.parametrize("model", RATES)
@pytest.mark.parametrize("study", ["noniid", "full", "option-2"])
def test_other_studies_have_the_servers_of_the_first_figure(study: str, model: str) -> None:
    known = {experiment.label: experiment.server for experiment in load_preset(f"fig1-{model}").experiments}
    for experiment in load_preset(f"{study}-{model}").experiments:
        compressed = "FedAMSGrad" if "Option 2" in experiment.label else "FedAMS"
        assert experiment.server == known[compressed if experiment.label.startswith("FedCAMS") else experiment.label]


def test_with_all_clients_gamma_is_measured() -> None:
    for name in FULL:
        for experiment in load_preset(name).experiments:
            measured = any(probe.name == "gamma" for probe in experiment.probes)
            assert measured == experiment.label.startswith("FedCAMS")


def test_epsilon_has_both_rules_for_the_rate() -> None:
    """lr = 1, and lr/√ε as at ε = 1e-3."""
    for experiment in load_preset("epsilon").experiments:
        scaled = experiment.label.endswith("scaled lr")
        lr = math.sqrt(float(experiment.server.eps) / 1e-3) if scaled else 1.0  # type: ignore[attr-defined]
        assert float(experiment.server.lr) == pytest.approx(lr, rel=1e-6)  # type: ignore[attr-defined]


# -- your own files ---------------------------------------------------------------------------------------------------

OWN = """
description = "mine"
seeds = [1, 2]
rounds = 7

[[run]]
label = "A"

[[run]]
label = "B"
rounds = 8
uplink = "sign"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def test_a_run_wins_over_the_base_and_meets_every_seed(tmp_path: Path) -> None:
    preset = load_preset(written(tmp_path, OWN))
    assert (preset.name, preset.description) == ("own", "mine")
    assert list(preset.folders) == ["a-s1", "a-s2", "b-s1", "b-s2"]
    assert [experiment.rounds for experiment in preset.experiments] == [7, 7, 8, 8]
    assert str(preset.experiments[3].uplink) == "sign"


def test_the_file_of_one_experiment_is_a_preset_too(tmp_path: Path) -> None:
    experiment = Experiment(label="alone", rounds=3, seed=9)
    assert load_preset(written(tmp_path, experiment.to_toml())).experiments == [experiment]


@pytest.mark.parametrize(
    ("label", "folder"),
    [("FedCAMS top-k 1/64", "fedcams-top-k-1-64-s1"), ("eps=0.01", "eps-0.01-s1"), ("../γ", "run-s1")],
)
def test_folders_are_named_after_labels(label: str, folder: str) -> None:
    assert folder_name(Experiment(label=label)) == folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ronds = 3", r"own.toml, top level: no key 'ronds' \(did you mean 'rounds'\?\); known: label"),
        ("[[run]]\nlabel = 'A'\nuplnk = 'sign'", r"own.toml, \[\[run\]\] 1 \(A\): no key 'uplnk' \(did you mean 'upl"),
        ("[[run]]\n[[run]]\nrounds = 0", r"own.toml, \[\[run\]\] 2: experiment: rounds=0: out of range"),
        ("[[run]]\nseeds = [1]", r"\[\[run\]\] 1: no key 'seeds'"),
        ("[run]\nlabel = 'A'", r"run=\{'label': 'A'\}; begin each run with a line \[\[run\]\], in two brackets"),
        ("run = []", r"run=\[\]; begin each run with a line \[\[run\]\]"),
        ("description = 3", "description=3; description must be a string"),
        ("seeds = []", "own.toml: seeds=.*; give a list"),
        ("seeds = ['x']", "seed=x: 'x' is not a number"),
        ("seeds = [1, 2, 1]", r"own.toml: seeds=\[1, 2, 1\]; give each seed once"),
        ("seeds = [1]\nseed = 2", "own.toml: seed=2 and seeds are both given; give only one"),
        ("seeds = [1]\n[[run]]\nseed = 2", r"\[\[run\]\] 1: seed=2 and seeds are both given"),
        (
            "[[run]]\nlabel = 'A b'\n[[run]]\nlabel = 'a-b'",
            "'a-b' with seed 1 would share the folder 'a-b-s1'",
        ),
        (
            "server = 'fedasm'",
            r"\[\[run\]\] 1: experiment: server: no server is named 'fedasm' \(did you mean 'fedams'\?\)",
        ),
        ("measure_gamma = 1", "measure_gamma=1; allowed: true or false, or probes = 'q . gamma'"),
        ("rounds = ", "own.toml: not a TOML file"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_preset(written(tmp_path, text))


def test_the_mark_that_some_editors_put_first_is_read_over(tmp_path: Path) -> None:
    path = written(tmp_path, "rounds = 3")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_preset(path).experiments[0].rounds == 3
    path.write_bytes("rounds = 3".encode("utf-16"))
    with pytest.raises(SpecError, match=r"not a TOML file .*; save it as UTF-8"):
        load_preset(path)


def test_what_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no preset is named 'dmeo' \(did you mean 'demo'\?\); known: adaptivity-"):
        load_preset("dmeo")
    with pytest.raises(SpecError, match=r"none.toml: cannot be read \(No such file"):
        load_preset(tmp_path / "none.toml")
    with pytest.raises(SpecError, match=rf"{tmp_path} is a folder; name a preset or a TOML file"):
        load_preset(tmp_path)


def test_labels_without_letters_for_a_folder_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[[run]]\nlabel = '日本'\n[[run]]\nlabel = '中国'\n", "utf-8")
    with pytest.raises(
        SpecError, match=r"share the folder 'run-s1', which keeps only the letters a-z, digits and dots"
    ):
        load_preset(tmp_path / "own.toml")


# -- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_hold_for_every_run(tmp_path: Path) -> None:
    settings = {"rounds": "5", "uplink": "topk(ratio=1/64)", "feedback": "false", "train_fraction": "1/3"}
    for experiment in overridden(load_preset(written(tmp_path, OWN)), settings).experiments:
        assert (experiment.rounds, str(experiment.uplink), experiment.feedback) == (5, "topk(ratio=1/64)", False)
        assert experiment.train_fraction == Fraction(1, 3)


def test_seeds_can_be_set_and_equal_runs_are_kept_once(tmp_path: Path) -> None:
    preset = load_preset(written(tmp_path, OWN))
    assert list(overridden(preset, {"seed": "5"}).folders) == ["a-s5", "b-s5"]
    assert list(overridden(preset, {"seeds": "[3, 4]"}).folders) == ["a-s3", "a-s4", "b-s3", "b-s4"]


@pytest.mark.parametrize("value", ["2026", '"2026"'])
def test_a_label_may_be_a_number(value: str) -> None:
    preset = load_preset("demo")
    one = dataclasses.replace(preset, experiments=preset.experiments[:1])
    assert list(overridden(one, {"label": value}).folders) == ["2026-s1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ronds": "5"}, r"-s: no key 'ronds' \(did you mean 'rounds'\?\)"),
        ({"label": "x"}, "label=x: cannot give 8 runs the same label; pick one run with --only"),
        ({"rounds": "many"}, "rounds=many: 'many' is not a number"),
        ({"rounds": "5\nseed = 3"}, "is not a number"),
        ({"seed": "1", "seeds": "[1]"}, "give only one of them"),
    ],
)
def test_bad_overrides_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        overridden(load_preset("demo"), settings)


def test_the_demos_hyperparameters_are_those_that_its_sweep_found_best() -> None:
    folder = Path(__file__).resolve().parents[1] / "sweeps" / "demo"
    with (folder / "leaderboard.csv").open() as file:
        rows = list(csv.DictReader(file))
    best = {row["label"]: row["setting"] for row in reversed(rows)}  # the best of each label stands first
    tried = load_sweep(folder / "sweep.toml")
    servers = {trial.label: trial.experiments[0].server for trial in tried if trial.setting == best[trial.label]}
    assert {experiment.label: experiment.server for experiment in load_preset("demo").experiments} == servers
    assert not {e.seed for trial in tried for e in trial.experiments} & {
        e.seed for e in load_preset("demo").experiments
    }
