"""Parts shared by the loops: the work as tensors, the optimizer, and the measurements."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from config.machine import op_builds
from config.machine.processes import free_port
from config.schema import AdapterSection, OptimizerSection
from data.batches.loader import IGNORED_LABEL
from lab.benchmark.spec import Result, Spec
from training.engine.work_time import peak_memory_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Job:
    """One contestant's process: its work and its measurements.

    DeepSpeed and transformers' models are imported by the methods that need them, so that torchtitan's start-up time
    does not include them.
    """

    def __init__(self, arguments: Sequence[str] | None = None) -> None:
        """Reads the command line, and fills in the environment if no launcher has set it: one process."""
        op_builds.use_own_folder()
        parser = argparse.ArgumentParser()
        parser.add_argument("spec", type=Path)
        parser.add_argument("result", type=Path)
        parser.add_argument("--compile", action="store_true", help="compile what the library compiles")
        options = parser.parse_args(arguments)
        self.spec, self._result, self.compiled = Spec.read(options.spec), options.result, options.compile
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.on_cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if self.on_cuda else "cpu")
        if self.on_cuda:
            torch.cuda.set_device(self.device)
        # ranks that share matrices have the same sequences and the same dropout
        self.data_rank, self.data_ranks = self.rank // self.spec.tensor, self.world_size // self.spec.tensor
        torch.manual_seed(self.spec.seed + self.data_rank)
        self._losses: list[torch.Tensor] = []
        self._stamps: list[float] = []
        self._memory = 0

    @property
    def sequence_length(self) -> int:
        """[tokens] Length of a window, not counting the last label."""
        return Windows(self.spec).length

    def load_model(self) -> PreTrainedModel:
        """The initial weights in FP32, with the work's activation checkpointing, and its adapter as peft's."""
        from transformers import AutoModelForCausalLM

        from modeling.activation_checkpointing import apply_activation_checkpointing

        spec = self.spec
        options = {"dtype": torch.float32, "attn_implementation": spec.attention}
        model = AutoModelForCausalLM.from_pretrained(spec.model, **options)
        model.config.use_cache = False
        mode: Any = spec.activation_checkpointing
        apply_activation_checkpointing(model, mode, reentrant=spec.reentrant)
        if spec.adapter is not None:
            from modeling.adapter import wrapped_with_adapter

            model = wrapped_with_adapter(model, AdapterSection(**_tuples(spec.adapter)), seed=spec.seed)
        self.model = model.train()
        return self.model

    def optimizer(self, model: PreTrainedModel) -> torch.optim.Optimizer:
        """The config's optimizer, which does not decay norms, biases and embeddings."""
        from training.engine.optimizer import build_optimizer

        section = OptimizerSection(**_tuples(self.spec.optimizer))
        return build_optimizer(model, section, offload=self.spec.offload != "none", device=self.device)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """The learning rate schedule, to be stepped once per optimizer step."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate_of_peak)

    def rate_of_peak(self, step: int) -> float:
        """Learning rate of a step, from 0, relative to the optimizer's; past the end, that of the last step."""
        rates = self.spec.learning_rates
        return rates[min(step, len(rates) - 1)] / self.spec.optimizer["learning_rate"]

    def loader(self) -> torch.utils.data.DataLoader:
        """This rank's micro-batches in order: input_ids, labels and shift_labels, (micro, sequence) int64 each."""
        micro, ranks = self.spec.micro_size, self.data_ranks
        # the ranks' n-th micro-batches are adjacent in the sample order, as in data.corpora.sampler
        starts = [(n * ranks + self.data_rank) * micro for n in range(self.spec.steps * self.spec.accumulation)]
        batches = [list(range(start, start + micro)) for start in starts]
        return torch.utils.data.DataLoader(Windows(self.spec), batch_sampler=batches, pin_memory=self.on_cuda)

    def samples(self) -> Any:
        """The samples of all steps in order: windows, or a `datasets.Dataset` of rows or pairs."""
        if self.spec.task == "pretrain":
            return Windows(self.spec)
        from datasets import load_from_disk

        return load_from_disk(self.spec.tokens)

    def on_device(self, loader: Any) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of a loader on this rank's device."""
        for batch in loader:
            yield {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def loss(self, share: torch.Tensor) -> None:
        """Record what one micro-batch on this rank adds to the mean loss of its step."""
        self._losses.append(share.detach())

    def step_done(self) -> None:
        """Record the end of an optimizer step."""
        done = len(self._stamps) + 1
        if self.on_cuda and done in (1, self.spec.warm_up, self.spec.steps):
            torch.cuda.synchronize()
        self._stamps.append(time.time())

    def note_memory(self) -> None:
        """Record the peak memory so far, for a library that resets the device's peak."""
        self._memory = max(self._memory, peak_memory_bytes(self.device))

    def deepspeed_engine(self, engine: Any) -> str:
        """A description of the engine. Raises RuntimeError unless it is DeepSpeed at the work's stage on all ranks."""
        import deepspeed

        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            raise RuntimeError(f"this loop should train on DeepSpeed and has a {type(engine).__name__}")
        if engine.zero_optimization_stage() != self.spec.stage:
            raise RuntimeError(f"ZeRO-{engine.zero_optimization_stage()} instead of ZeRO-{self.spec.stage}")
        return f"{type(engine).__name__}, {type(engine.optimizer).__name__}, {engine.device}"

    def finish(self, engine: str) -> None:
        """Write the result and leave the process group. A collective. engine: what trained, as seen in this process.

        Raises RuntimeError if the ranks did not train together.
        """
        if dist.get_world_size() != self.world_size:
            raise RuntimeError(f"{dist.get_world_size()} ranks instead of {self.world_size} trained together")
        self.note_memory()
        memory = torch.tensor([self._memory], dtype=torch.float64, device=self.device)
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
        losses = torch.stack(self._losses).double().view(self.spec.steps, self.spec.accumulation).sum(1)
        dist.all_reduce(losses)
        if self.rank == 0:
            mean = (losses / self.world_size).tolist()
            Result(mean, self._stamps, int(memory), engine).write(self._result)
        dist.barrier()
        dist.destroy_process_group()


def use_deepspeed(*, on_cuda: bool) -> None:
    """Have Accelerate use DeepSpeed.

    On a machine without a GPU, Accelerate 1.15 does so only if the environment requests it and the process group is
    started with gloo first; otherwise it silently trains with plain DDP.
    """
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if not on_cuda:
        PartialState(backend="gloo")


def run_on_deepspeed(train: Callable[[Job], Any]) -> None:
    """Run a loop as this process's job. train: trains the work and returns the engine used."""
    from training.distributed import build_no_shared_memory_op

    job = Job()
    build_no_shared_memory_op()
    job.finish(job.deepspeed_engine(train(job)))


def _tuples(section: dict[str, Any]) -> dict[str, Any]:
    """A section of the run config with the tuples that JSON turned into lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A micro-batch of rows as made by the libraries' own collators: (micro, longest) int64 each."""
    filling = {"input_ids": 0, "labels": IGNORED_LABEL, "attention_mask": 0}
    found = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    return {
        name: pad_sequence([torch.tensor(row[name]) for row in found], batch_first=True, padding_value=filler)
        for name, filler in filling.items()
    }


class Windows(torch.utils.data.Dataset):
    """The token windows of all steps, one after another."""

    def __init__(self, spec: Spec) -> None:
        windows = np.load(spec.tokens, mmap_mode="r")
        self._windows = windows.reshape(-1, windows.shape[-1])
        self.length = windows.shape[-1] - 1

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.from_numpy(self._windows[index].astype(np.int64))
        # Hugging Face models shift labels themselves unless shift_labels is given.
        return {"input_ids": window[:-1], "labels": window[1:], "shift_labels": window[1:]}
