"""The Hugging Face Trainer with a DeepSpeed JSON.

torchrun --nproc_per_node 2 -m training.benchmark.peers.trainer_loop SPEC RESULT

On a machine without a GPU it uses DeepSpeed only with an Accelerate state set up for it; see `accelerate_loop`.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from accelerate import PartialState
from transformers import Trainer, TrainerCallback, TrainingArguments

from training.benchmark.peers.common import Job, Windows


class Measured(TrainerCallback):
    """Reports every step to the job."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the optimizer step."""
        self._job.step_done()


class InOrder(Trainer):
    """The Trainer, on the work's order of samples; it keeps the loss of every micro-batch without a device sync.

    Optimizer and scheduler are made here: those given as `optimizers` are silently dropped under DeepSpeed.
    """

    job: Job

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The work's."""
        if self.optimizer is None:
            self.optimizer = self.job.optimizer(self.job.model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The work's."""
        scheduler = self.lr_scheduler = self.job.scheduler(optimizer or self.optimizer)  # type: ignore[arg-type]
        return scheduler

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """Its own loss: normalised by the labels of the whole step, times the processes that DeepSpeed divides by."""
        loss: Any = super().compute_loss(*arguments, **options)
        self.job.loss(loss)
        return loss


def main() -> None:
    """Train the work of the command line."""
    job = Job()
    state = None
    if not job.on_cuda:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        state = {"use_configured_state": True}
    spec = job.spec
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=spec.steps,
            per_device_train_batch_size=spec.micro_size,
            gradient_accumulation_steps=spec.accumulation,
            learning_rate=spec.optimizer["learning_rate"],
            max_grad_norm=spec.optimizer["gradient_clipping"],
            bf16=spec.compute == "bf16",
            fp16=spec.compute == "fp16",
            deepspeed=spec.deepspeed,
            use_cpu=not job.on_cuda,
            accelerator_config=state,
            seed=spec.seed,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = InOrder(
            model=job.load_model(), args=arguments, train_dataset=Windows(spec), callbacks=[Measured(job)]
        )
        trainer.job = job
        trainer.train()
    job.finish(job.deepspeed_engine(trainer.model_wrapped))


if __name__ == "__main__":
    main()
