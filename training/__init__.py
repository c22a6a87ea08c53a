"""The training run. The only package that a run imports deepspeed or torch.distributed in."""

import logging
import sys

from training.moved import refuse_old_name

if sys.argv[:1] == ["-m"]:  # Python imports this package on its way to the module that `python -m` asked for
    refuse_old_name(sys.orig_argv)

# DeepSpeed warns of every machine without a GPU as it is imported, on each rank, before its level can be set.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
