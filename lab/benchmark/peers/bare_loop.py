"""The loop of DeepSpeed's own documentation: initialize, forward, backward, step.

torchrun --nproc_per_node 2 -m lab.benchmark.peers.bare_loop SPEC RESULT
"""

from typing import Any

import deepspeed
from transformers.integrations import HfDeepSpeedConfig

from config.deepspeed.document import initializable
from lab.benchmark.peers.common import Job, run_on_deepspeed


def train(job: Job) -> Any:
    """Train the work and return the engine."""
    deepspeed.init_distributed(auto_mpi_discovery=False)
    # transformers partitions the model on loading while this object lives; AutoTP needs whole matrices to cut
    partitioned = job.spec.stage == 3 and job.spec.tensor == 1
    _zero3 = HfDeepSpeedConfig(job.spec.deepspeed) if partitioned else None
    model = job.load_model()
    optimizer, config = job.optimizer(model), initializable(job.spec.deepspeed)
    rates = job.scheduler(optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=rates, config=config)
    for index, batch in enumerate(job.on_device(job.loader()), start=1):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        job.loss(loss / job.spec.accumulation)
        if index % job.spec.accumulation == 0:
            job.step_done()
    return engine


if __name__ == "__main__":
    run_on_deepspeed(train)
