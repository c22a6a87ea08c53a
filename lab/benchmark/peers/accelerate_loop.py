"""The loop of Accelerate's documentation, on DeepSpeed.

torchrun --nproc_per_node 2 -m lab.benchmark.peers.accelerate_loop SPEC RESULT
"""

from typing import Any

from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader

from lab.benchmark.peers.common import Job, run_on_deepspeed, use_deepspeed


def train(job: Job) -> Any:
    """Train the work and return the engine."""
    use_deepspeed(on_cuda=job.on_cuda)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=job.spec.deepspeed),
        mixed_precision="no" if job.spec.compute == "fp32" else job.spec.compute,
        gradient_accumulation_steps=job.spec.accumulation,
    )
    model = job.load_model()
    plain = job.optimizer(model)
    scheduler = job.scheduler(plain)  # not prepared: Accelerate would step it once per process
    # the micro-batches of all ranks in turn, of which Accelerate selects this rank's own
    every = DataLoader(job.samples(), batch_size=job.spec.micro_size, pin_memory=job.on_cuda)
    model, optimizer, loader = accelerator.prepare(model, plain, every)
    for batch in job.on_device(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)  # includes DeepSpeed's step
            optimizer.step()
            optimizer.zero_grad()
        job.loss(loss / job.spec.accumulation)
        if accelerator.sync_gradients:
            scheduler.step()
            job.step_done()
    return model


if __name__ == "__main__":
    run_on_deepspeed(train)
