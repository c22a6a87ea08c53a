"""The Hugging Face Trainer with a DeepSpeed JSON: on windows, or on rows with labels; an adapter is peft's.

torchrun --nproc_per_node 2 -m lab.benchmark.peers.trainer_loop SPEC RESULT
"""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lab.benchmark.peers.common import Job, padded, run_on_deepspeed, use_deepspeed


class Measured(TrainerCallback):
    """Reports every step to the job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._job.step_done()


class InOrder:
    """Mixin before a Trainer: keeps the work's order of samples, and records the loss of every micro-batch.

    Optimizer and scheduler are created here: DeepSpeed silently drops those passed as `optimizers`.
    """

    job: Job
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self.job.optimizer(self.job.model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = self.lr_scheduler = self.job.scheduler(optimizer or self.optimizer)
        return scheduler

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """The Trainer's loss: over the labels of the whole step, times the processes, by which DeepSpeed divides."""
        loss: Any = super().compute_loss(*arguments, **options)  # type: ignore[misc]
        self.job.loss(loss)
        return loss


class OrderedTrainer(InOrder, Trainer):
    """The Trainer on the work."""


def deepspeed_arguments(
    folder: str, document: dict[str, Any], *, steps: int, rate: float, clipping: float, on_cuda: bool
) -> dict[str, Any]:
    """Arguments of `TrainingArguments` and its subclasses for steps on DeepSpeed of which nothing is written."""
    use_deepspeed(on_cuda=on_cuda)
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": document["train_micro_batch_size_per_gpu"],
        "gradient_accumulation_steps": document["gradient_accumulation_steps"],
        "learning_rate": rate,
        "max_grad_norm": clipping,
        **{dtype: document.get(dtype, {}).get("enabled", False) for dtype in ("bf16", "fp16")},
        "deepspeed": document,
        "use_cpu": not on_cuda,
        "accelerator_config": None if on_cuda else {"use_configured_state": True},
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def trainer_arguments(job: Job, folder: str) -> dict[str, Any]:
    """Arguments that make any Trainer do the work."""
    spec = job.spec
    rate, clipping = spec.optimizer["learning_rate"], spec.optimizer["gradient_clipping"]
    common = {"steps": spec.steps, "rate": rate, "clipping": clipping, "on_cuda": job.on_cuda}
    own = {"seed": spec.seed, "logging_strategy": "no", "remove_unused_columns": False}
    return deepspeed_arguments(folder, spec.deepspeed, **common) | own


def make_trainer(job: Job, folder: str) -> Any:
    """The Trainer on the work."""
    arguments = TrainingArguments(**trainer_arguments(job, folder))
    return OrderedTrainer(
        model=job.load_model(),
        args=arguments,
        data_collator=None if job.spec.task == "pretrain" else padded,
        train_dataset=job.samples(),
        callbacks=[Measured(job)],
    )


def train(make: Callable[[Job, str], Any], job: Job) -> Any:
    """Train the work with the trainer that `make` returns; returns the engine."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(job, folder)
        trainer.job = job
        trainer.train()
    return trainer.model_wrapped


if __name__ == "__main__":
    run_on_deepspeed(partial(train, make_trainer))
