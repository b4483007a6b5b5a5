"""MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcams.extras import load
from fedcams.registry import register, text
from fedcams.trackers.base import Tracker, TrackerSpec, scalars

if TYPE_CHECKING:
    from fedcams.runs import Run
    from fedcams.simulation import RoundRecord

FOLDER = "fedcams.folder"
"""The tag by which a resumed run is found."""


@register("mlflow")
@dataclass(frozen=True)
class MLflow(TrackerSpec):
    """Sends every round to MLflow, a server or a local database; needs mlflow."""

    uri: str = text("sqlite:///mlflow.db", doc="where MLflow keeps its runs, such as http://localhost:5000")
    experiment: str = text("fedcams", doc="the experiment that runs appear in")

    examples = ("mlflow", 'mlflow(uri="sqlite:///mine.db", experiment=mine)')
    refused = (("mlflow(url=x)", "mlflow has no key 'url'"),)

    def open(self) -> Tracker:
        return _Run(load("mlflow.tracking", what="the tracker 'mlflow'", extra="mlflow"), self)


class _Run:
    def __init__(self, mlflow: Any, settings: MLflow) -> None:
        self._mlflow, self._settings = mlflow, settings
        self._client: Any = None
        self._id: str | None = None

    def start(self, run: Run) -> None:
        """Begin a run there, or continue the one that this folder began."""
        client = self._client = self._mlflow.MlflowClient(tracking_uri=self._settings.uri)
        name, folder = self._settings.experiment, str(run.path.resolve())
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        quote = '"' if "'" in folder else "'"
        found = client.search_runs([experiment], filter_string=f"tags.`{FOLDER}` = {quote}{folder}{quote}")
        made = found[0] if found else client.create_run(experiment, tags={FOLDER: folder}, run_name=run.name)
        self._id = made.info.run_id
        if found:
            client.update_run(self._id, status="RUNNING")
        else:
            for key, value in run.experiment.to_dict().items():
                client.log_param(self._id, key, value)

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Send every number of the record and the seconds of the round."""
        for name, value in scalars(record, timing):
            self._client.log_metric(self._id, name, float(value), step=record.round)

    def finish(self) -> None:
        """End the run there."""
        self._terminate("FINISHED")

    def abort(self, error: BaseException) -> None:
        """End the run there as failed or, after Ctrl-C, as killed."""
        self._terminate("FAILED" if isinstance(error, Exception) else "KILLED")

    def _terminate(self, status: str) -> None:
        if self._id is not None:
            self._client.set_terminated(self._id, status)
