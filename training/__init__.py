"""The training run; the only package in which a run imports deepspeed or torch.distributed."""

import logging

from config.moved import refuse_old_name

refuse_old_name()

# On a machine without a GPU, DeepSpeed warns on each rank while it is imported, before its log level can be set.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
