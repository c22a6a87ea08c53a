"""The training run. The only package that imports deepspeed or torch.distributed."""

import logging

# DeepSpeed warns of every machine without a GPU as it is imported, on each rank, before its level can be set.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
