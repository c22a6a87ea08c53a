"""Stability envelope: the largest learning rate that stays within parity with FP32, by depth, batch and precision.

    python -m lab.envelope [--config FILE] [--out DIR] [--depths 2,4] [--batches 8,16]
        [--precisions fp32,control,bf16,fp16] [--policies deepspeed,adaptive] [--rates LOW:HIGH:COUNT | A,B,C]
        [--steps N] [--processes N] [key.sub=value ...]

One job runs all trials, which are kept in DIR/trials.jsonl: a restart runs only those missing there. DIR gets
envelope.md, envelope.png and envelope.json; docs/envelope.md says more. Exit code 0; 3 if FP32 is stable at no rate
anywhere; 2 for a wrong argument.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from config.batch import refuse_sharing
from config.cli import REPOSITORY, Arguments, entry_point
from config.deepspeed.choice import find_deepspeed_json
from config.deepspeed.document import in_fp32, read_document, zero_stage
from config.errors import UserError
from config.files import write_atomically
from config.load import load_config
from config.options import comma_separated, positive_int
from config.schema import Config, LossScaleSection
from config.task import ENCODER_TASKS
from lab.benchmark.harness import SHARES
from lab.detection.made_of import made_of
from lab.envelope.page import write_results
from lab.envelope.search import CONTROL, Setting
from lab.envelope.trials import Missing, Study, explore_finished, work
from launch.job import add_processes_option, default_processes, error_line_of, launch
from tracking.file_lock import exclusive_lock
from training.tasks.shape import shape_of_model
from training.tasks.task import prepare

NOTHING_STABLE = 3
STEPS, RATES = 40, "0.002:0.256:8"
PRECISIONS = ("fp32", CONTROL, "bf16", "fp16")
SMALL = (
    "model.config={hidden_size: 64, intermediate_size: 160, num_attention_heads: 4, num_key_value_heads: 4,"
    " tie_word_embeddings: true}",
    "model.activation_checkpointing=none",
    "data.tokenizer=bytes",
    "data.sequence_length=64",
    "evaluate.batches=4",
)
"""Overrides of the demo recipe if no --config is given: about a second per trial on two cores."""
_OPTION_OF = {
    "run.steps": "--steps",
    "batch.global_size": "--batches",
    "optimizer.learning_rate": "--rates",
    "precision.compute": "--precisions",
    "precision.path": "--precisions",
    "precision.loss_scale.policy": "--policies",
}


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError if it is wrong."""
    parser = Arguments("python -m lab.envelope", __doc__, allow_abbrev=False)
    parser.add_argument("--config", help="run config; the demo recipe made small when left out")
    parser.add_argument("--out", type=Path, default=Path("runs/envelope"), help="folder of trials and results")
    counts = comma_separated(positive_int)
    parser.add_argument("--depths", type=counts, default="2,4", help="[layers] list")
    parser.add_argument("--batches", type=counts, default="8,16", help="[sequences] list of global batches")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help=f"list of {', '.join(PRECISIONS)}")
    parser.add_argument("--policies", default="deepspeed,adaptive", help="list of loss-scale policies, for fp16")
    parser.add_argument("--rates", default=RATES, help="LOW:HIGH:COUNT, evenly spaced by factors, or a list")
    parser.add_argument("--steps", type=positive_int, default=STEPS, help="optimizer steps of a trial")
    add_processes_option(parser)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # one process of the job
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    options = parser.parse_intermixed_args(arguments)
    options.depths, options.batches = sorted(set(options.depths)), sorted(set(options.batches))
    options.processes = options.processes or default_processes()
    options.rates = read_rates(options.rates)
    options.precisions = choices("--precisions", options.precisions, PRECISIONS)
    policies = get_args(get_type_hints(LossScaleSection)["policy"])
    options.policies = choices("--policies", options.policies, policies)
    for text in options.overrides:
        key = text.partition("=")[0]
        if key in _OPTION_OF:
            raise UserError(f"command line: {text} is varied or set by the envelope; use {_OPTION_OF[key]}")
    return options


def choices(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The listed words, in the order of `known`."""
    given = text.split(",")
    for word in given:
        if word not in known:
            raise UserError(f"command line: {option} {text}: '{word}' is not one of {', '.join(known)}")
    return [word for word in known if word in given]


def read_rates(text: str) -> list[float]:
    """Ascending learning rates from "LOW:HIGH:COUNT" (geometrically spaced, six digits) or "A,B,C"."""
    wrong = UserError(f"command line: --rates {text}: write LOW:HIGH:COUNT, such as {RATES}, or a list above 0")
    try:
        if ":" in text:
            low, high, count = (part(item) for part, item in zip((float, float, int), text.split(":"), strict=True))
            if not (0 < low < high < float("inf") and count > 1):
                raise wrong
            return [float(f"{low * (high / low) ** (index / (count - 1)):.6g}") for index in range(int(count))]
        rates = sorted({float(item) for item in text.split(",")})
    except ValueError as error:
        raise wrong from error
    if not 0 < rates[0] <= rates[-1] < float("inf"):
        raise wrong
    return rates


def make_study(options: argparse.Namespace) -> Study:
    """Write the study's DeepSpeed JSONs and return it. Raises UserError if a setting cannot be trained."""
    path = Path(options.config or REPOSITORY / "config/recipes/demo.yaml")
    given = [*(() if options.config else SMALL), *options.overrides]
    uniform = ["precision.path=cast", "precision.manifest=null"]
    config = load_config(path, [*given, *uniform], None)
    warmup = round(config.schedule.warmup_steps * min(1.0, options.steps / (config.run.steps or options.steps)))
    shortened = [f"run.steps={options.steps}", f"schedule.warmup_steps={warmup}", "guard.spike_sigmas=0"]
    settings = tuple(
        Setting(depth, batch, precision, policy)
        for depth in options.depths
        for batch in options.batches
        for precision in options.precisions
        for policy in (options.policies if precision == "fp16" else [None])
    )
    folder = options.out.resolve()
    json_path = find_deepspeed_json(config.deepspeed.config, path)
    study = Study(
        folder=folder,
        config=path.resolve(),
        overrides=(*uniform, *shortened, *given),
        models={depth: model_of_depth(config, depth) for depth in options.depths},
        documents=write_documents(json_path, folder / "ds_configs", {"fp32", *(each.compute for each in settings)}),
        settings=settings,
        rates=tuple(options.rates),
        bounds=config.parity,
        processes=options.processes,
        code=made_of(folders=["lab/envelope"]),
    )
    for setting in dict.fromkeys([*settings, *(setting.reference for setting in settings)]):
        refuse_sharing(study.resolve(setting, study.rates[0]).batch, but=SHARES)
    return study


def model_of_depth(config: Config, depth: int) -> dict[str, Any]:
    """model.config with `depth` layers, under the architecture's own name for them.

    Raises UserError if the architecture has no such key, or the model is a saved one with another depth.
    """
    from modeling.build import model_config

    if config.task in ENCODER_TASKS:
        raise UserError(f"task = {config.task}: only causal language models are measured here; remove it")
    saved, given = config.model.name_or_path, config.model.config
    shape = model_config(config.model, vocab_size=2, sequence_length=2)
    key = shape.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if key not in shape.to_dict():
        problem = f"a {shape.model_type} config has no num_hidden_layers at its top level"
        raise UserError(f"--depths {depth}: {problem}; use another model.architecture")
    if saved is not None and getattr(shape, key) != depth:
        problem = f"model.name_or_path = {saved} has {getattr(shape, key)} layers"
        raise UserError(f"--depths {depth}: {problem}, and no other depth; use model.architecture to vary it")
    return given if saved else {**{k: v for k, v in given.items() if k != "num_hidden_layers"}, key: depth}


def check_data_and_model(study: Study) -> None:
    """Prepare the corpus, and raise UserError if data and model do not fit each other."""
    for setting in {setting.depth: setting for setting in study.settings}.values():
        config = study.resolve(setting, study.rates[0]).config
        corpus = prepare(config, progress=True)
        shape_of_model(config, corpus)


def write_documents(path: Path, folder: Path, precisions: set[str]) -> dict[str, Path]:
    """Write the DeepSpeed JSON at `path` once per precision, with only its section. Returns paths by precision."""
    document = read_document(path)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for precision in sorted(precisions):
        section = {} if precision == "fp32" else {precision: {"enabled": True}}
        paths[precision] = folder / f"zero{zero_stage(document)}_{precision}.json"
        text = json.dumps({**in_fp32(document), **section}, indent=2) + "\n"
        write_atomically(paths[precision], text.encode())  # by every process
    return paths


def work_in_process(study: Study) -> int:
    """One process of the job."""
    from training import distributed

    first = study.first(os.environ)
    corpus = prepare(first.config, progress=False)
    world = distributed.start(rank=first.rank, world_size=first.world_size, local_rank=first.local_rank)
    try:
        work(study, corpus, world, log=lambda text: print(text, flush=True))
    finally:
        distributed.stop()
    return 0


def run_study(study: Study, given: Sequence[str]) -> None:
    """Launch the job of this command line. Raises UserError or RuntimeError with the job's error line."""
    log = study.folder / "log.txt"
    print(f"running trials; tail -f {log}", flush=True)
    code = launch(["-m", "lab.envelope", "--worker", *given], processes=study.processes, log=log)
    if code:
        line = error_line_of(log)
        if line.startswith("error: "):
            raise UserError(line.removeprefix("error: "))
        raise RuntimeError(f"the trials ended with exit code {code}: {line} (see {log}); start again to resume")


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study and write its results, or be one of its processes."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = read_arguments(given)
    if options.worker:
        return work_in_process(make_study(options))
    study = make_study(options)
    check_data_and_model(study)
    with exclusive_lock(options.out / ".lock", 0) as acquired:
        if not acquired:
            raise UserError(f"--out {options.out}: another envelope writes there; wait for it or choose another folder")
        try:
            explore_finished(study)
        except Missing:
            run_study(study, given)
        rows = write_results(study, command=["python", "-m", "lab.envelope", *given])
    print(f"{options.out}/envelope.md")
    return 0 if any(row["fp32"] for row in rows) else NOTHING_STABLE
