"""FlexAttention with a backward pass on a CPU, for tests of what surrounds it.

torch has its formulas for every device, but a fused kernel for the backward pass on a GPU only, so on a CPU it refuses
tensors that require gradients. Here the check is left out and the graph is run operator by operator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.flex_attention as of_torch
import transformers.integrations.flex_attention as of_transformers

from modeling.compiling import quote_library_folders


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    """`attn_implementation="flex_attention"` trains on a CPU in here."""
    quote_library_folders()  # transformers has masks of blocks compiled, by g++ here
    compiled = torch.compile(of_torch.flex_attention, backend="aot_eager")

    def wrapped(training: bool) -> Callable[[], Any]:
        return lambda: compiled

    with (
        mock.patch.object(of_torch, "_validate_device", lambda query, key, value: None),
        mock.patch.object(of_transformers, "WrappedFlexAttention", wrapped),
    ):
        yield
