"""`python -m tools.replay` on a CPU whose sums have no fixed order, as a GPU's without run.deterministic.

Each linear layer's output is off by up to an ulp of BF16 at random, in every run by another one.
"""

import os

import torch
from torch.nn.modules.module import register_module_forward_hook

from tools.replay import command, repeat

ULP = 2.0**-8


def main() -> int:
    """The exit code of the replay."""
    draw = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))

    def disturb(module: torch.nn.Module, given: object, output: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(module, torch.nn.Linear):
            return None
        return output * (1 + ULP * (torch.rand(output.shape, generator=draw) - 0.5))

    register_module_forward_hook(disturb)
    repeat.is_exact = lambda device: False  # type: ignore[assignment]
    return command.main()


if __name__ == "__main__":
    raise SystemExit(main())
