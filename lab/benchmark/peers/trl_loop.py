"""TRL's SFTTrainer on rows, its DPOTrainer on pairs; an adapter is peft's.

torchrun --nproc_per_node 2 -m lab.benchmark.peers.trl_loop SPEC RESULT

Both get the tokens that Mantissa trains on, so that templates and truncation play no part, and keep their defaults
except where the work decides: recomputation only if it has some, no dropout. Their metrics (entropy, token accuracy,
rewards) are computed in every step, as they are for every user.
"""

from functools import partial
from typing import Any

from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from lab.benchmark.peers.common import Job, run_on_deepspeed
from lab.benchmark.peers.trainer_loop import InOrder, Measured, train, trainer_arguments


class OrderedSFT(InOrder, SFTTrainer):
    """The SFTTrainer on the work."""


class OrderedDPO(InOrder, DPOTrainer):
    """The DPOTrainer on the work, whose pairs are already tokens."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        """The DPOTrainer's loss: the mean over a micro-batch's pairs, which the Trainer divides by the accumulation."""
        loss: Any = DPOTrainer.compute_loss(self, *arguments, **options)
        self.job.loss(loss / self.job.spec.accumulation)
        return loss


def make_trainer(job: Job, folder: str) -> Any:
    """The trainer of the work's task."""
    spec = job.spec
    common = {**trainer_arguments(job, folder), "gradient_checkpointing": False, "max_length": None}
    given: dict[str, Any] = {
        "train_dataset": job.samples(),
        "processing_class": AutoTokenizer.from_pretrained(spec.tokenizer, local_files_only=True),
        "callbacks": [Measured(job)],
    }
    # Before the model: at ZeRO-3 this has it loaded in partitions.
    if spec.task == "sft":
        sft = SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True})
        return OrderedSFT(model=job.load_model(), args=sft, **given)
    preference = spec.preference
    dpo = DPOConfig(**common, beta=preference["beta"], precompute_ref_log_probs=preference["precomputed"])
    return OrderedDPO(model=job.load_model(), args=dpo, **given)


if __name__ == "__main__":
    run_on_deepspeed(partial(train, make_trainer))
