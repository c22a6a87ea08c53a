"""The training run. The only package that imports deepspeed or torch.distributed."""

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from training.moved import refuse_old_name

if sys.argv[:1] == ["-m"]:  # Python imports this package on its way to the module that `python -m` asked for
    refuse_old_name(sys.orig_argv)

# DeepSpeed warns of every machine without a GPU as it is imported, on each rank, before its level can be set.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())


class _NoMLflowForTheAutotuner(MetaPathFinder):
    """Where MLflow is installed DeepSpeed's autotuner imports all of it, and Mantissa never tunes.

    1.3 s of CPU time of each process (python -X importtime). It copes, as where there is no MLflow; others can import
    it.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "mlflow":
            autotuner = sys.modules.get("deepspeed.autotuning.autotuner")
            if autotuner is not None and getattr(autotuner.__spec__, "_initializing", False):
                raise ModuleNotFoundError("not imported for DeepSpeed's autotuner", name=name)


sys.meta_path.insert(0, _NoMLflowForTheAutotuner())
