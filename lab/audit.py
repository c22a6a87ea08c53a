"""Tries the probe and its audit on other trainers: two CPU ranks, a small Llama, DeepSpeed's own defaults.

    python -m lab.audit --trainer bare,hf --stage 2 --dtype bf16

trains each combination for a few steps with the probe in the loop, audits the recording, and prints its row of
docs/audit.md. --plant MODULE:FUNCTION changes the loop before it starts.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from config.cli import Arguments, entry_point
from config.errors import UserError
from config.machine.processes import free_port
from config.options import comma_separated, positive_int
from lab.benchmark.peers.common import padded, use_deepspeed
from tools.audit.command import finish
from tools.audit.judge import audit_folder
from tools.audit.mantissa_probe import Probe

RANKS, MICRO, VOCABULARY, LENGTH = 2, 2, 256, 32
SECONDS = 300.0
"""Time limit of a loop."""
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}


class Work:
    """Model, rows and DeepSpeed JSON of a loop, and the folder its probe writes into."""

    def __init__(self, options: argparse.Namespace, base: str, folder: Path, stage: int, dtype: str) -> None:
        self.options, self.base, self.folder, self.stage, self.dtype = options, base, folder, stage, dtype
        self.rank = int(os.environ["RANK"])
        self.steps, self.accumulation, self.lr = options.steps, options.accumulation, 1e-3
        self.probed = None if options.without_probe else [1, 2, options.steps]

    def json(self) -> dict[str, Any]:
        """DeepSpeed's config."""
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
        }
        if self.dtype != "fp32":
            found[self.dtype] = {"enabled": True, **({"initial_scale_power": 10} if self.dtype == "fp16" else {})}
        for setting in self.options.set or ():
            key, _, value = setting.partition("=")
            *path, last = key.split(".")
            section = found
            for name in path:
                section = section.setdefault(name, {})
            section[last] = json.loads(value)
        return found

    def model(self) -> Any:
        """The model from its folder, in FP32."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).train()

    def rows(self) -> list[dict[str, list[int]]]:
        """Rows of all ranks in order, drawn with a fixed seed."""
        generator = torch.Generator().manual_seed(7)
        rows = []
        for _ in range(self.steps * self.accumulation * RANKS * MICRO + 8):
            length = int(torch.randint(6, LENGTH + 1, (), generator=generator)) if self.options.unequal else LENGTH
            odds = 1.0 / torch.arange(4, VOCABULARY + 4)
            tokens = torch.multinomial(odds, length, replacement=True, generator=generator).tolist()
            rows.append({"input_ids": tokens, "labels": list(tokens)})
        return rows

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's padded micro-batches; those of both ranks alternate in the rows."""
        rows = self.rows()
        for number in range(self.steps * self.accumulation):
            start = (number * RANKS + self.rank) * MICRO
            yield padded(rows[start : start + MICRO])

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """torch's AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.01)

    def schedule(self, optimizer: Any) -> Any:
        """A learning rate that falls in every step."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / (2 * self.steps))

    def probe(self, engine: Any, **given: Any) -> Any:
        """The loop's probe, unless it runs without one."""
        return Probe(engine, self.folder, self.probed, **given) if self.probed else None


def bare(work: Work) -> Any:
    """The loop of DeepSpeed's documentation."""
    import deepspeed

    model = work.model()
    optimizer = work.optimizer(model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=work.schedule(optimizer), config=work.json()
    )
    work.probe(engine)
    for batch in work.batches():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    return engine


def accelerate(work: Work) -> Any:
    """The loop of Accelerate's documentation; its scheduler is stepped by hand, not prepared."""
    from accelerate import Accelerator, DeepSpeedPlugin

    use_deepspeed(on_cuda=False)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=work.json()),
        mixed_precision="no" if work.dtype == "fp32" else work.dtype,
        gradient_accumulation_steps=work.accumulation,
    )
    model = work.model()
    plain = work.optimizer(model)
    scheduler = work.schedule(plain)
    model, optimizer = accelerator.prepare(model, plain)
    work.probe(model, scheduler=scheduler)
    for batch in work.batches():
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
            scheduler.step()
    return model


def _arguments(work: Work) -> dict[str, Any]:
    """Arguments of `TrainingArguments` and its subclasses."""
    from lab.benchmark.peers.trainer_loop import deepspeed_arguments

    given: dict[str, Any] = {"steps": work.steps, "rate": work.lr, "clipping": 0.5, "on_cuda": False}
    return deepspeed_arguments(f"{work.folder}.out", work.json(), **given) | {"logging_steps": 1}


def _trained(trainer: Any, work: Work) -> Any:
    if work.probed:
        trainer.add_callback(Probe.callback(trainer, work.folder, steps=work.probed))
    trainer.train()
    return trainer.model_wrapped


def hf(work: Work) -> Any:
    """The Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**_arguments(work))
    trainer = Trainer(model=work.model(), args=arguments, data_collator=padded, train_dataset=work.rows())
    return _trained(trainer, work)


def _trl(work: Work, rows: list[dict[str, Any]], kind: str, **more: Any) -> Any:
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<0>")), pad_token="<0>", eos_token="<1>"
    )
    arguments = getattr(trl, f"{kind}Config")(**_arguments(work), gradient_checkpointing=False, max_length=None, **more)
    made = getattr(trl, f"{kind}Trainer")
    data = Dataset.from_list(rows)
    trainer = made(model=work.model(), args=arguments, processing_class=tokenizer, train_dataset=data)
    return _trained(trainer, work)


def sft(work: Work) -> Any:
    """TRL's SFTTrainer on rows of tokens."""
    return _trl(work, work.rows(), "SFT", dataset_kwargs={"skip_prepare_dataset": True})


def dpo(work: Work) -> Any:
    """TRL's DPOTrainer on pairs of texts, each token a word."""
    tokens = [[f"<{token}>" for token in row["input_ids"]] for row in work.rows()]
    rows = [
        {"prompt": " ".join(row[:3]), "chosen": " " + " ".join(row[3:]), "rejected": " " + " ".join(other[3:])}
        for row, other in zip(tokens, tokens[1:] + tokens[:1], strict=True)
    ]
    return _trl(work, rows, "DPO")


LOOPS: dict[str, Callable[[Work], Any]] = {"bare": bare, "accelerate": accelerate, "hf": hf, "sft": sft, "dpo": dpo}


def _rank(rank: int, port: int, loop: str, given: tuple[Any, ...], log: str) -> None:
    """One forked process: runs the loop, and saves the final weights where that is asked for."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1), os.dup2(sink, 2)
    code = 1
    try:
        import deepspeed

        from training.distributed import allow_fp16_on_cpu, build_no_shared_memory_op

        torch.manual_seed(0)
        build_no_shared_memory_op()
        allow_fp16_on_cpu()
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        work = Work(*given)
        if work.options.plant:
            module, _, name = work.options.plant.partition(":")
            getattr(import_module(module), name)(work)
        engine = LOOPS[loop](work)
        last = {}
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                last[name] = parameter.detach().cpu().clone()
        if rank == 0 and work.options.weights_to:
            torch.save(last, work.options.weights_to)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def train(loop: str, options: argparse.Namespace, base: str, folder: Path, stage: int, dtype: str) -> None:
    """Run both ranks of one loop. Raises RuntimeError with the end of their log."""
    context, port, log = get_context("fork"), free_port(), f"{folder}.log"
    given = (options, base, folder, stage, dtype)
    ranks = [context.Process(target=_rank, args=(rank, port, loop, given, log)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    end = time.monotonic() + SECONDS
    while any(process.is_alive() for process in ranks):
        time.sleep(0.1)
        if time.monotonic() > end or any(process.exitcode for process in ranks):
            time.sleep(1.0)
            for process in ranks:
                process.kill()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(
            f"{loop} ended early; the end of {log}:\n" + Path(log).read_text(encoding="utf-8", errors="replace")[-2000:]
        )


def _base(options: argparse.Namespace, folder: Path) -> str:
    """The model that loops start from: like most checkpoints with 16-bit values, unless FP32 weights are kept."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False, initializer_range=0.05))
    if not options.fp32_weights:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)
    return str(folder)


@entry_point()
def main(arguments: list[str] | None = None) -> int:
    """Train, audit, and print a row for each combination."""
    parser = Arguments("python -m lab.audit", __doc__)
    parser.add_argument("--trainer", type=comma_separated(str), default=["bare"], help=", ".join(LOOPS))
    parser.add_argument("--stage", type=comma_separated(int), default=[2])
    parser.add_argument("--dtype", type=comma_separated(str), default=["bf16"], help="fp32, bf16, fp16")
    parser.add_argument("--steps", type=positive_int, default=4)
    parser.add_argument("--accumulation", type=positive_int, default=2)
    parser.add_argument("--unequal", action="store_true", help="rows of 6 to 32 tokens, where all have 32")
    parser.add_argument("--fp32-weights", action="store_true", help="start from weights that 16 bits do not hold")
    parser.add_argument("--set", nargs="*", metavar="key.sub=JSON", help="of DeepSpeed's config")
    parser.add_argument("--model", help="another model folder than the small Llama's")
    parser.add_argument("--plant", metavar="MODULE:FUNCTION", help="called with the work before the loop")
    parser.add_argument("--out", type=Path, help="keep the probes' folders and pages here")
    parser.add_argument("--without-probe", action="store_true")
    parser.add_argument("--weights-to", type=Path, help="save the weights that the loop ends with")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.trainer) - LOOPS.keys()):
        raise UserError(f"command line: --trainer {unknown[0]} is not one of {', '.join(LOOPS)}")
    torch.set_num_threads(1)
    code = 0
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        base = options.model or _base(options, Path(scratch) / "base")
        for loop, stage, dtype in itertools.product(options.trainer, options.stage, options.dtype):
            folder = out / f"{loop}-{stage}-{dtype}"
            try:
                train(loop, options, base, folder, stage, dtype)
                if options.without_probe:
                    continue
                audit = audit_folder(folder, base, base)
                files = argparse.Namespace(json=Path(f"{folder}.json"), page=Path(f"{folder}.html"))
                code, signs = max(code, finish(files, audit)), {"wrong": "", "note": "note: "}
                rows = (f"{signs[each['severity']]}{each['says']} ({each['size']:.2g})" for each in audit.told)
                told = "; ".join(rows) or "sound"
            except RuntimeError as error:
                told, code = f"does not run: {str(error).splitlines()[-1][:120]}", 1
                print(error)
            print(f"| {loop} | {stage} | {dtype} | {told} |", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
