"""Write TensorBoard event files with TensorBoard's own writer, which does not need TensorFlow.

The first section holds the main curves. Besides scalars there are the config and incidents as text, hyperparameters for
the HParams tab, histograms over the layers, and the verdict.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from config.load import to_dict
from config.schema import Config
from config.yaml_text import dump
from tracking.compare.differences import flat
from tracking.events import Event, describe_event
from tracking.trackers.delivery import RUNNING
from tracking.wandb.charts import FIRST, histograms

_NAMES = {row: f"1 training/{name}" for row, name in FIRST.items()}
"""Row of `tracking.wandb.charts` to its name here, if different; TensorBoard sorts sections alphabetically."""
_METRICS = ("train/loss", "eval/loss")
_ALWAYS = ("run.seed", "optimizer.learning_rate")
"""Settings always in the HParams tab; others appear only if they are not at their defaults."""
_TOLD = ("incident", "warning", "corruption", "reexecution")


class TensorBoard:
    """Event files in RUN/tensorboard, one per session."""

    def __init__(self, job: dict[str, Any]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(Path(job["folder"]) / "tensorboard"))
        self._job = job
        self._newest = (0, time.time())  # attempt and time of the newest event

    def log(self, event: Event, numbers: dict[str, float], attempt: int) -> None:
        """Log scalars, telemetry histograms, and text at the start and for incidents and the like."""
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        self._newest = at = (attempt, event["time"])
        for name, value in numbers.items():
            self._add(scalar_pb(_NAMES.get(name, name), value), *at)
        for name, (counts, edges) in histograms(event).items():
            self._add_histogram(name, counts, edges, *at)
        kind = event["event"]
        if kind == "run_start":
            self._add_settings(*at)
            self._add_verdict(RUNNING)
        elif kind in _TOLD:
            replay = f"\n\n    {event['replay']}" if event.get("replay") else ""
            self._add_text("2 incidents", f"step {event['step']}: {describe_event(event)}{replay}", *at)

    def _add_verdict(self, verdict: dict[str, Any]) -> None:
        following = f"\n\nnext:\n\n    {verdict['next_command']}" if verdict["next_command"] else ""
        self._add_text("1 verdict", f"{verdict['verdict_text']}{following}", *self._newest)

    def _add_settings(self, attempt: int, seconds: float) -> None:
        """Add config and hypothesis as text, and non-default settings as hyperparameters."""
        from tensorboard.plugins.hparams.summary_v2 import HParam, Metric, hparams_config_pb, hparams_pb

        config = self._job["config"]
        self._add_text("3 hypothesis", self._job["notes"] or "none", attempt, seconds)
        self._add_text("4 config", "\n".join(f"    {line}" for line in dump(config).splitlines()), attempt, seconds)
        usual = dict(flat(to_dict(Config())))
        found = {key: value for key, value in flat(config) if key in _ALWAYS or value != usual.get(key)}
        settings = {
            key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in found.items()
        }
        metrics = [Metric(_NAMES[name]) for name in _METRICS]
        self._add(hparams_config_pb(hparams=[HParam(key) for key in settings], metrics=metrics), attempt, seconds)
        self._add(hparams_pb(settings, trial_id=self._job["name"], start_time_secs=seconds), attempt, seconds)

    def _add_text(self, name: str, text: str, attempt: int, seconds: float) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb(name, text), attempt, seconds)

    def _add_histogram(self, name: str, counts: Any, edges: Any, attempt: int, seconds: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram import metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        buckets = make_tensor_proto(np.stack([edges[:-1], edges[1:], counts], axis=1).astype(np.float64))
        told = metadata.create_summary_metadata(display_name=None, description=None)
        self._add(Summary(value=[Summary.Value(tag=name, metadata=told, tensor=buckets)]), attempt, seconds)

    def _add(self, summary: Any, attempt: int, seconds: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record

        self._writer.add_event(Record(wall_time=seconds, step=attempt, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, exit_code: int, verdict: dict[str, Any]) -> None:
        """Add the verdict, record in the HParams tab how the run ended, and close the file."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

        if verdict:
            self._add_verdict(verdict)
        status = api_pb2.STATUS_FAILURE if exit_code else api_pb2.STATUS_SUCCESS
        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        told = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
        value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=told, tensor=metadata.NULL_TENSOR)
        self._add(Summary(value=[value]), 0, time.time())
        self._writer.close()
