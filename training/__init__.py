"""The training run. The only package that a run imports deepspeed or torch.distributed in."""

import logging

from config.moved import refuse_old_name

refuse_old_name()

# DeepSpeed warns of every machine without a GPU as it is imported, on each rank, before its level can be set.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
