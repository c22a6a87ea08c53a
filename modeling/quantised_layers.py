"""Linear layers of `bitsandbytes` that compute in the dtype of their input, and in no other.

The library's own layers round inputs to FP16 or to a dtype that the first call sets, and on some CPUs repack their
weights in evaluation. Here every forward pass rebuilds the weights from codes and scales, and the backward pass does so
again, so that only codes and scales are kept.

Import it only if the config asks for it: it needs the bitsandbytes package.
"""

import copy
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt


class _Product(torch.autograd.Function):
    """x W^T + b of a frozen layer, whose W is rebuilt in the dtype of x in both passes."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, layer: Any, bias: torch.Tensor | None) -> Any:
        """x: (..., inputs), any float. bias: frozen, like W."""
        context.layer = layer
        return torch.nn.functional.linear(x, layer.rebuilt(x.dtype), bias)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        # read from the layer now: ZeRO-3 has gathered its weight again, and did not keep the one gathered before
        return gradient @ context.layer.rebuilt(gradient.dtype), None, None


class _Frozen:
    weight: Any
    bias: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., outputs) in the dtype of x, or of the enclosing autocast region."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        found: torch.Tensor = _Product.apply(x, self, bias)
        return found

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Codes and bias only: scales are computed from the model's files at each start; checkpoints lack the base."""
        torch.nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)  # type: ignore[arg-type]


class FrozenLinear4bit(_Frozen, Linear4bit):
    """4-bit codes, two in a byte."""

    def rebuilt(self, dtype: torch.dtype) -> torch.Tensor:
        """(outputs, inputs): the weights, code times scale in FP32, rounded once."""
        state: Any = copy.copy(self.quant_state)
        size, block = self.whole_shape.numel(), state.blocksize
        # one block per row: on a CPU bitsandbytes 0.50.2 starts a new block at each row, but rows may end inside one
        state.shape = (size // block, block) if size % block == 0 else (1, size)
        state.dtype = dtype
        found: torch.Tensor = dequantize_4bit(self.weight.data.view(-1, 1), state)
        return found.view(self.whole_shape)

    def scales(self) -> list[torch.Tensor]:
        """The quantisation scales stored beside the codes."""
        state: Any = self.quant_state
        nested = [state.state2.absmax, state.offset] if state.nested else []
        return [state.absmax, *nested]

    @property
    def whole_shape(self) -> torch.Size:
        """(outputs, inputs)."""
        state: Any = self.quant_state
        return torch.Size(state.shape)


class FrozenLinear8bit(_Frozen, Linear8bitLt):
    """8-bit codes and the largest magnitude of each row."""

    largest: torch.Tensor
    """(outputs,) FP32. Not a buffer, which would be rounded with the model."""

    def rebuilt(self, dtype: torch.dtype) -> torch.Tensor:
        codes = self.weight.data.to(dtype)  # 8-bit codes are exact in every float dtype
        return codes.mul_((self.largest / 127).unsqueeze(1))

    def scales(self) -> list[torch.Tensor]:
        return [self.largest]

    @property
    def whole_shape(self) -> torch.Size:
        """(outputs, inputs)."""
        return torch.Size((self.out_features, self.in_features))


def freeze(layer: Any) -> None:
    """Turn one of the library's quantised layers into one of the above, in place; other modules stay unchanged."""
    weight: Any = getattr(layer, "weight", None)
    if isinstance(layer, Linear4bit):
        layer.__class__ = FrozenLinear4bit
        layer.quant_state = weight.quant_state
    elif isinstance(layer, Linear8bitLt):
        layer.__class__ = FrozenLinear8bit
        layer.largest = weight.SCB.float()
        # drop second references, which would keep in full what ZeRO-3 partitions
        weight.CB, layer.state.CB = None, None
