"""Open the sinks of a run's record: the event file, the console, wandb and other trackers, Prometheus."""

from dataclasses import asdict
from typing import Any

import torch

from config.load import to_dict
from config.resolved import Resolved
from data.corpora.row_shards import RowShards
from data.text.prepare import Corpus
from modeling.build import count_parameters
from precision.dtypes import DTYPES
from precision.half_on_cpu import multiply_through_fp32
from tracking.console import ConsoleSink
from tracking.environment import environment
from tracking.jsonl import JsonlSink
from tracking.record import Record, Sink
from tracking.run_dir import RunDir
from tracking.trackers.sink import TrackerSink
from tracking.wandb.sink import WandbSink
from training.distributed import World
from training.engine import Engine
from training.engine.ledger import read_ledger, read_start


def open_record(resolved: Resolved, corpus: Corpus, engine: Engine, run_dir: RunDir, world: World) -> Record:
    """Open the record of a run and write the run folder's inputs; on ranks other than 0 it is silent. A collective."""
    ledger = [*read_ledger(engine, reduce=resolved.config.precision.reduce), read_start(engine)]
    if not world.is_main:
        return Record.silent()
    config, train = resolved.config, corpus.train
    # counted like a step's `Batch.tokens`: inputs, whether they have labels or not, without padding
    tokens = train.inputs if isinstance(train, RowShards) else train.label_tokens(config.data.sequence_length)
    facts = environment(
        {
            "accelerator": _accelerator(world),
            "world_size": world.world_size,
            "data": {
                "fingerprint": corpus.fingerprint,
                "folder": str(corpus.folder),
                "vocab_size": corpus.vocab_size,
                "tail_tokens": corpus.tail_tokens,
                "train_tokens": tokens,
                **({"rows": corpus.counts} if corpus.counts else {}),
            },
            "model": type(engine.model).__name__,
            "parameters": count_parameters(engine.model),
            "ledger": [asdict(entry) for entry in ledger],
            "resume_command": resolved.resume_command,
        }
    )
    run_dir.write_inputs(to_dict(config), resolved.deepspeed, facts)
    console = ConsoleSink(config.run.steps, log_every_steps=config.tracking.log_every_steps)
    if engine.world.device.type == "cpu" and DTYPES[engine.compute] in multiply_through_fp32():
        name = engine.compute.upper()
        console.print_line(
            f"this CPU has no {name} instructions: products are computed in FP32 and rounded to {name}, "
            "which shows its numerics and not its speed"
        )
    for entry in ledger:
        size = f" {entry.bytes / 1e6:>10,.1f} MB" if entry.bytes else ""
        console.print_line(f"  {entry.what:<28} {entry.dtype:<10}{size}".rstrip())
    known = {"run": to_dict(config), "deepspeed": resolved.deepspeed, "environment": facts}
    sinks: list[Sink] = [JsonlSink(run_dir.events), console]
    for tracker in dict.fromkeys(config.tracking.sinks):
        if tracker == "wandb":
            sinks.append(WandbSink(run_dir, known, mode=config.tracking.wandb))
        else:
            sinks.append(TrackerSink(tracker, run_dir, known["run"]))
    if config.tracking.prometheus_port is not None:
        from tracking.prometheus.sink import PrometheusSink  # imports prometheus_client, which most runs do not need

        port, address = config.tracking.prometheus_port, config.tracking.prometheus_address
        metrics = PrometheusSink(config.run.name, planned_steps=config.run.steps, port=port, address=address)
        if metrics.url:
            console.print_line(f"metrics for Prometheus: {metrics.url}")
        sinks.append(metrics)
    return Record(sinks)


def _accelerator(world: World) -> dict[str, Any]:
    if world.device.type != "cuda":
        return {"device": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(world.device)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count(),
    }
