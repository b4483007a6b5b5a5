"""Runs in folders: what they write, what they refuse, and that a resumed run equals one that never stopped."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

from fedcams import FedcamsError, models
from fedcams.engines import CohortUpdate, Engine, engine
from fedcams.errors import SpecError, UpdateError
from fedcams.experiment import Experiment, build
from fedcams.rounds.messages import Accepted
from fedcams.runs import Run, RunError, read_run, resume, run
from fedcams.runs.files import end_of, locked
from fedcams.runs.state import pack, restore_
from fedcams.simulation import RoundRecord
from fedcams.simulation.evaluate import evaluate
from fedcams.tasks import TaskData, task

NAMES = ["checkpoint", "environment.json", "experiment.toml", "partition.json", "rounds.jsonl", "timings.jsonl"]
MIXER = {"model": "convmixer(dim=4, depth=1, kernel=3, patch=2)", "local": "sgd(lr=0.1, steps=1)"}
EVERYTHING = {
    "model": MIXER["model"],
    "uplink": "topk(ratio=linear(1/32, 1/4))",
    "local": "sgd(lr=warmup(2, constant(0.1)), steps=2)",
    "server": "fedams(lr=cosine(1, 0.1))",
    "buffers": "blockq",
    "control": "scaffold",
    "average": "ema(0.9)",
}
"""Residuals, also of buffers, control variates, averages and schedules, all of which a checkpoint must bring back."""
KINDS: list[dict[str, Any]] = [
    {"uplink": "sign"},
    {"uplink": "topk(ratio=1/16)", "server": "fedavgm", "probes": "q + gamma + cosine"},
    {"uplink": "randk(ratio=1/4)", "server": "fedyogi", "weighting": "examples"},
    {"uplink": "topk(ratio=1/16)", "server": "fedavg", "feedback": False},
    {"uplink": "identity", "sampler": "bernoulli(p=0.2)", "evaluate_every": 2},  # some cohorts are empty
    {"uplink": "sign", **MIXER},  # batch-norm, so buffers
    {"uplink": "sign", "downlink": "shared(topk(ratio=1/16))"},
    {"uplink": "identity", "downlink": "shared(blockq, warm=true)", "sampler": "bernoulli(p=0.2)"},
    {"uplink": "sign", "downlink": "replica(blockq(bits=2))", **MIXER},
    {"uplink": "topk(ratio=1/16)", "downlink": "replica(sign, warm=true)"},
    {"uplink": "sign", "downlink": "stateless"},
    EVERYTHING,
    {"control": "scaffold", "uplink": "sign", "feedback": False, "transforms": "clip(norm=1)", **MIXER},
    {"uplink": "topk(ratio=1/8)", "average": "ema(0.5)", "aggregate": "trimmed(fraction=1/3)",
     "sampler": "uniform(n=3)", "buffers": "blockq", **MIXER},
    {"local": "adamw(lr=0.003, steps=2)", "downlink": "shared(blockq)", "weighting": "sampler"},
    {"downlink": "shared(topk(ratio=1/8))", "buffers": "topk(ratio=1/4)", **MIXER},
    {"downlink": "replica(sign, warm=true)", "buffers": "blockq", **MIXER},
]  # fmt: skip


def small(**changes: Any) -> Experiment:
    values = {"model": "mlp(hidden=8)", "clients": 6, "sampler": "uniform(n=2)", "local": "sgd(lr=0.1, steps=2)"}
    # `auto` would take this engine too, after a trial at every start and resumption.
    return Experiment.from_dict({**values, "uplink": "sign", "rounds": 7, "engine": "stacked", **changes})


class Stop(Exception):
    pass


def stop_at(round: int) -> Callable[[RoundRecord, dict[str, Any]], None]:
    def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
        if record.round == round:
            raise Stop

    return watch


def stopped(folder: Path, at: int, experiment: Experiment | None = None, every: int = 3) -> Path:
    """The folder of a run that came to an end after round `at`."""
    with pytest.raises(Stop):
        run(experiment or small(), folder, checkpoint_every=every, watch=stop_at(at))
    return folder


def lasting(folder: Path) -> dict[str, bytes]:
    """The files that must not depend on how often a run was stopped."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "timings.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


@functools.cache
def digits() -> TaskData:
    return task("digits").load()


@pytest.fixture(autouse=True)
def _digits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the data is most of the time of so short a run."""
    monkeypatch.setattr(type(task("digits")), "load", lambda self, folder=None, data=digits(): data)  # noqa: B008


@pytest.fixture(autouse=True)
def _quick_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk is most of the rest, and no machine fails here; `test_rows_disk` counts the syncs."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


# -- a run and its folder ----------------------------------------------------------------------------------------------


class Whole(NamedTuple):
    """A run that nothing stopped, and what its watcher saw."""

    run: Run
    seen: list[tuple[RoundRecord, dict[str, Any]]]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Whole]:
    """Runs an experiment once for all tests that look at it."""
    made: dict[str, Whole] = {}

    def whole(kind: dict[str, Any]) -> Whole:
        if str(kind) not in made:
            folder, seen = tmp_path_factory.mktemp("whole") / "run", []
            made[str(kind)] = Whole(run(small(**kind), folder, watch=lambda *round: seen.append(round)), seen)
        return made[str(kind)]

    return whole


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_run_is_the_simulation_and_its_folder_tells_all(
    kind: dict[str, Any], whole_run: Callable[[dict[str, Any]], Whole]
) -> None:
    experiment, (made, seen) = small(**kind), whole_run(kind)
    folder, built = made.path, build(experiment)
    state, records = built.state, []
    for _ in range(experiment.rounds):
        state, record = built.simulation.advance_(state)
        records.append(record)
    assert made == read_run(folder) == Run(folder, experiment, records, *_rest(made))
    assert seen == list(zip(made.records, made.timings, strict=True))
    assert made.finished
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    assert made.histogram == built.histogram.tolist()
    assert (folder / "rounds.jsonl").read_text() == "".join(f"{record.to_json()}\n" for record in records)


def _rest(made: Run) -> tuple[list[dict[str, Any]], dict[str, Any], list[list[int]]]:
    return made.timings, made.environment, made.histogram


def test_timings_and_environment_say_where_the_time_went_and_on_what(folder: Path) -> None:
    made = run(small(rounds=2), folder)
    for round, timing in enumerate(made.timings, start=1):
        assert timing["round"] == round
        assert 0 < sum(timing["phases"].values()) <= timing["seconds"]
        assert timing["peak_memory"] > 50e6
        assert timing["peak_device_memory"] is None
    assert made.environment["torch"] == torch.__version__
    assert {"fedcams", "numpy", "numba", "python", "platform", "cpu", "cores", "threads"} < made.environment.keys()
    assert made.environment["device"] == "cpu"
    assert made.environment["engine"] == "stacked"
    commit = made.environment["commit"]
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


@pytest.mark.parametrize("kind", [{}, MIXER], ids=str)
def test_the_last_checkpoint_is_a_model_that_anybody_can_load(folder: Path, kind: dict[str, Any]) -> None:
    experiment = small(**kind)
    made = run(experiment, folder)
    tensors = safetensors.torch.load_file(folder / "checkpoint" / "7.safetensors")
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    data = experiment.task.load()
    model = models.build(experiment.model, data.shape, data.classes, seed=0)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    problem = build(experiment).simulation.problem
    travelling = problem.buffer_layout
    x, buffers = problem.layout.read(model), None if travelling is None else travelling.read(model)
    found = evaluate(problem, x, buffers, (data.test_x, data.test_y), {"accuracy": data.metric})
    assert found == {"loss": made.records[-1].test_loss, "accuracy": made.records[-1].test_accuracy}
    assert sorted(p.name for p in (folder / "checkpoint").iterdir()) == ["7.safetensors", "state.json"]  # no residuals


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_stopped_anywhere_and_resumed_is_never_stopped(
    tmp_path: Path, kind: dict[str, Any], whole_run: Callable[[dict[str, Any]], Whole]
) -> None:
    experiment, whole = small(**kind), lasting(whole_run(kind).run.path)
    for at in (1, 3, 5, 6, 7) if kind == KINDS[0] else (5,):
        folder = stopped(tmp_path / str(at), at, experiment)
        assert [record.round for record in read_run(folder).records] == list(range(1, at + 1))
        seen: list[int] = []
        made = resume(folder, watch=lambda record, timing, seen=seen: seen.append(record.round))  # type: ignore[misc]
        assert seen == ([] if at == 7 else list(range(at - at % 3 + 1, 8)))
        assert [timing["round"] for timing in made.timings] == list(range(1, 8))
        assert lasting(folder) == whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [{"uplink": "sign"}, {"uplink": "topk(ratio=1/16)", **MIXER}], ids=str)
def test_resumed_on_a_gpu_is_never_stopped(tmp_path: Path, kind: dict[str, Any]) -> None:
    run(small(**kind), tmp_path / "whole", device="cuda")
    with pytest.raises(Stop):
        run(small(**kind), tmp_path / "run", device="cuda", checkpoint_every=3, watch=stop_at(5))
    made = resume(tmp_path / "run", device="cuda")
    assert made.timings[-1]["peak_device_memory"] > 0
    assert lasting(tmp_path / "run") == lasting(tmp_path / "whole")


def test_stopped_many_times_is_never_stopped(tmp_path: Path) -> None:
    experiment = small(rounds=12)
    run(experiment, tmp_path / "whole", checkpoint_every=5)
    folder = stopped(tmp_path / "run", 3, experiment, every=2)
    for at in (4, 8, 9):
        with pytest.raises(Stop):
            resume(folder, checkpoint_every=at - 1, watch=stop_at(at))
    resume(folder)
    assert lasting(folder) == lasting(tmp_path / "whole")


def test_what_follows_the_checkpoint_in_the_lines_may_be_anything(tmp_path: Path) -> None:
    run(small(), tmp_path / "whole")
    folder = stopped(tmp_path / "run", 5)
    with (folder / "rounds.jsonl").open("ab") as rounds, (folder / "timings.jsonl").open("ab") as timings:
        rounds.write(b'{"round": 6, "coh')
        timings.write(b"\0" * 100 + b"\n")  # so do some file systems end a file after a power failure
    resume(folder)
    assert lasting(folder) == lasting(tmp_path / "whole")


def test_a_line_cut_short_does_not_count(folder: Path) -> None:
    stopped(folder, 5)
    with (folder / "rounds.jsonl").open("ab") as rounds:
        rounds.write(b'{"round": 6, "coh')
    made = read_run(folder)
    assert len(made.records) == 5
    assert not made.finished


def test_only_rows_that_changed_are_written(folder: Path) -> None:
    seen: dict[str, int] = {}
    kept = 0

    def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
        nonlocal kept
        rows = {p.name: p.stat().st_mtime_ns for p in (folder / "checkpoint" / "rows").glob("*.rows")}
        assert {name for name in rows if name not in seen} == {f"{i}-{record.round}.rows" for i in record.cohort}
        kept += sum(seen[name] == rows[name] for name in rows.keys() & seen.keys())
        seen.update(rows)
        if record.round == 6:
            raise Stop

    with pytest.raises(Stop):
        run(small(), folder, checkpoint_every=1, watch=watch)
    assert kept > 5


def test_a_finished_run_is_returned_as_it_is(folder: Path) -> None:
    made = run(small(), folder)
    before = everything(folder)
    assert resume(folder, watch=stop_at(7)) == made
    assert everything(folder) == before
    shutil.rmtree(folder / "checkpoint")  # to save space
    assert resume(folder, watch=stop_at(7)) == made


def test_another_machine_is_noted(folder: Path) -> None:
    environment = stopped(folder, 5) / "environment.json"
    here = json.loads(environment.read_text())
    environment.write_text(json.dumps({**here, "cpu": "another"}))
    assert resume(folder).environment == {**here, "cpu": "another", "resumed": [{"round": 3, **here}]}


class Held(NamedTuple):
    """What a downlink may come to remember."""

    model: torch.Tensor
    versions: dict[int, Any]
    last: Accepted | None
    note: str


@pytest.mark.parametrize("kind", [{}, MIXER], ids=str)
def test_every_part_of_a_servers_state_comes_back(kind: dict[str, Any]) -> None:
    built = build(small(**kind))
    server, start = built.simulation.server, built.state
    memory = Held(start.x, {3: torch.arange(4), 2**40: 1.5}, None, "é")
    state = start._replace(round=4, downlink=memory, accepted={7: Accepted(3, bytes(range(16)))})
    saved, tensors = pack(state, server)
    like = build(small(**kind)).state._replace(downlink=memory._replace(model=start.x.clone()))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    found = restore_(4, json.loads(json.dumps(saved)), tensors, tensors.__getitem__, server, like)
    assert pack(found, server)[0] == saved
    assert found.accepted == state.accepted
    assert type(found.downlink) is Held
    assert {*found.downlink.versions} == {3, 2**40}
    for name, tensor in pack(found, server)[1].items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.data_ptr() != tensors[name].data_ptr()


def test_state_that_a_checkpoint_cannot_hold_is_refused() -> None:
    built = build(small())
    with pytest.raises(RunError, match=r"downlink\.a is a set, which a checkpoint cannot hold; build the state"):
        pack(built.state._replace(downlink={"a": {1}}), built.simulation.server)


# -- failures of the run -----------------------------------------------------------------------------------------------


def spoil_round_5(patch: pytest.MonkeyPatch, spoil: Callable[[CohortUpdate], None]) -> None:
    """Does something to what local training gives in the fifth round, and in no other."""
    cls = type(engine("loop"))
    train = cls.train

    def spoilt(
        self: Engine, problem: Any, start: Any, buffers: Any, cohort: Any, round: int, *rest: Any, **by: Any
    ) -> Any:
        update = train(self, problem, start, buffers, cohort, round, *rest, **by)
        if round == 5:
            spoil(update)
        return update

    patch.setattr(cls, "train", spoilt)


def test_a_round_that_fails_leaves_a_run_that_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(small(engine="loop"), tmp_path / "whole")
    folder = tmp_path / "run"

    def fail(update: CohortUpdate) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        spoil_round_5(patch, fail)
        for begun in (False, True):
            with pytest.raises(MemoryError):
                resume(folder) if begun else run(small(engine="loop"), folder, checkpoint_every=3)
            assert len(read_run(folder).records) == 4
            assert json.loads((folder / "checkpoint" / "state.json").read_text())["round"] == 3
    resume(folder)
    assert lasting(folder) == lasting(tmp_path / "whole")


@pytest.mark.parametrize("kind", [{}, {"control": "scaffold", "average": "ema(0.9)"}], ids=str)
def test_a_client_that_is_not_finite_is_recorded_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    def spoil(update: CohortUpdate) -> None:
        update.delta[1, 2] = torch.nan

    spoil_round_5(monkeypatch, spoil)
    experiment = small(engine="loop", sampler="uniform(n=3)", **kind)
    made = run(experiment, tmp_path / "whole")
    refused = [dict(record.refused) for record in made.records]
    assert refused == [{}] * 4 + [{made.records[4].cohort[1]: refused[4].get(made.records[4].cohort[1])}] + [{}] * 2
    assert "not finite" in str(refused[4])
    resume(stopped(tmp_path / "run", 5, experiment))
    assert lasting(tmp_path / "run") == lasting(tmp_path / "whole")


def test_a_loss_without_end_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(UpdateError, match=r"round 1: test_loss is (inf|nan); lower the learning rates"):
        run(small(server="fedavg(lr=1e30)", uplink="identity"), folder)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["experiment.toml", "rounds.jsonl", "checkpoint"])
def test_a_folder_that_holds_a_run_is_refused_untouched(folder: Path, name: str) -> None:
    folder.mkdir()
    (folder / name).touch()
    with pytest.raises(RunError, match=rf"already holds a run \({name} is there\); resume it, or name another folder"):
        run(small(), folder)
    assert [path.name for path in folder.iterdir()] == [name]


def test_what_cannot_be_built_leaves_no_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FedcamsError, match="cifar"):
        run(small(task="cifar10", model="cnn"), folder, data=tmp_path)
    assert not folder.exists()


def test_a_folder_without_a_run_cannot_be_resumed(folder: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run: experiment\.toml is missing; name the folder"):
        resume(folder)


@pytest.mark.parametrize(
    "start", [lambda f: run(small(), f, checkpoint_every=0), lambda f: resume(f, checkpoint_every=0)]
)
def test_an_impossible_interval_is_refused(folder: Path, start: Callable[[Path], Run]) -> None:
    with pytest.raises(SpecError, match="checkpoint_every=0; allowed: 1 or more"):
        start(folder)


def test_two_processes_cannot_be_at_one_run(folder: Path) -> None:
    stopped(folder, 4)
    with (
        locked(folder),
        pytest.raises(RunError, match="another process is using this run; let it finish, or end it first"),
    ):
        resume(folder)
    assert resume(folder).finished


def test_without_file_locks_a_folder_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(RunError, match="need the file locks of Linux or macOS; on Windows, use WSL"), locked(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o500)
    with pytest.raises(RunError, match=r"cannot write .*environment\.json: Permission denied; free space or make"):
        run(small(), folder)


@pytest.mark.skipif(sys.platform != "linux", reason="no /sys, where no folder can be made")
def test_a_file_system_that_takes_nothing_is_refused() -> None:
    with pytest.raises(RunError, match=r"cannot make /sys/run: .*; free space, or name a folder"):
        run(small(), Path("/sys/run"))


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot make .*/file/run: Not a directory; free space, or name a folder"):
        run(small(), tmp_path / "file" / "run")


@pytest.mark.parametrize("lost", [lambda path: path.unlink(), lambda path: os.truncate(path, path.stat().st_size - 2)])
def test_a_finished_run_that_lost_records_is_not_taken_for_whole(folder: Path, lost: Callable[[Path], None]) -> None:
    """The checkpoint of the last round says that all was recorded; those lines cannot be made again."""
    run(small(), folder)
    lost(folder / "rounds.jsonl")
    with pytest.raises(
        RunError, match=r"rounds\.jsonl.*; restore the file, or delete the folder and start the run again"
    ):
        resume(folder)


def test_lines_with_gaps_end_before_one_that_does_not_rise(tmp_path: Path) -> None:
    lines = [f'{{"round": {round}}}\n' for round in (1, 3, 3, 4)]
    (tmp_path / "theory.jsonl").write_text("".join(lines))
    for count, whole in ((0, 0), (2, 1), (3, 2), (9, 2)):
        assert end_of(tmp_path / "theory.jsonl", count, gaps=True) == sum(map(len, lines[:whole]))


@pytest.mark.parametrize("place", ["experiment.toml", "checkpoint/3.safetensors", "checkpoint/rows/0-1.rows"])
def test_a_folder_with_a_link_in_place_of_its_files_is_not_opened(tmp_path: Path, place: str) -> None:
    link = tmp_path / "run" / place
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{place} is a symbolic link, and nothing outside"), locked(tmp_path / "run"):
        pass


def test_a_run_past_the_end_of_its_experiment_is_refused(folder: Path) -> None:
    """As when its file was changed to fewer rounds after the run."""
    run(small(rounds=3), folder)
    (folder / "experiment.toml").write_text(small(rounds=2).to_toml())
    with pytest.raises(RunError, match="its checkpoint is of round 3, after rounds=2; restore it, or delete"):
        resume(folder)


def test_a_length_that_a_schedule_follows_cannot_change(folder: Path) -> None:
    experiment = small(rounds=4, server="fedavg(lr=linear(1, 0.5))")
    with pytest.raises(Stop):
        run(experiment, folder, watch=stop_at(2), checkpoint_every=1)
    longer = Experiment.from_dict({**experiment.to_dict(), "rounds": 6})
    (folder / "experiment.toml").write_text(longer.to_toml())
    with pytest.raises(RunError, match="a checkpoint of another run: rounds is 4 there and 6 here"):
        resume(folder)


@pytest.mark.parametrize("name", ["rounds.jsonl", "environment.json"])
def test_what_cannot_be_read_is_named(folder: Path, name: str) -> None:
    run(small(), folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(RunError, match=rf"cannot read .*{name}: Is a directory; make it a readable file"):
        read_run(folder)


@pytest.mark.parametrize("line", [b"{}\n", b'{"round": 1, "extra": 2}\n', b"\xff\n", b"{\n"])
def test_lines_that_are_no_rounds_are_refused(folder: Path, line: bytes) -> None:
    stopped(folder, 1)
    (folder / "rounds.jsonl").write_bytes(line)
    with pytest.raises(RunError, match=r"rounds\.jsonl: damaged .*; resume the run"):
        read_run(folder)
