"""Gradients of single sound modules over random shapes, dtypes, sizes and loss scales: what rounding makes of them.

`tools.parity.rounding` says how far plain torch may be off in the plan's dtype; here is how far it is.
"""

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
from transformers.pytorch_utils import Conv1D

from precision.tolerance import unit_roundoff
from tests.support.models.architectures import CASES
from tools.parity.rounding import GRADIENT, Part, findings, largest_in_plan, pooled, roundoff_of, size_of
from tools.parity.signature import Signatures

Make = Callable[[int], torch.nn.Module]
MODULES: dict[str, Make] = {
    "LayerNorm": torch.nn.LayerNorm,
    "RMSNorm, written out": LlamaRMSNorm,
    "Gemma's RMSNorm": Gemma3RMSNorm,
    "torch's RMSNorm": torch.nn.RMSNorm,
    "Linear with a bias": lambda width: torch.nn.Linear(width, 2 * width),
    "GPT-2's Conv1D": lambda width: Conv1D(2 * width, width),
    "Embedding": lambda width: torch.nn.Embedding(64, width),
}


class Model(torch.nn.Module):
    """One module, so that it is inside of another."""

    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inside(given)
        return found


def parts_of(kind: str, dtype: torch.dtype, seed: int, *, most: int = 2048, wrong: float = 1.0) -> list[Part]:
    """The parts of one module's gradients over 8 to `most` positions.

    Gradients may fall below FP16's normal numbers; terms are of one sign, of either, or cancel as those of a softmax.

    In BF16 at most 256, 1 / u: a longer sum of terms of one sign comes to a standstill, which is no rounding of mean
    zero any more (2,048 were 44% off), and it is right that it is named. wrong: a factor on the run's gradients of its
    parameters.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(least: float, largest: float) -> float:
        return least + (largest - least) * float(torch.rand((), generator=generator))

    most = min(most, round(1 / unit_roundoff(dtype)))
    rows, width = round(2 ** uniform(3, math.log2(most))), round(2 ** uniform(5, 8))
    torch.manual_seed(seed)
    reference = Model(MODULES[kind](width))
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    run = copy.deepcopy(reference)
    for parameter in run.parameters():
        parameter.data = parameter.data.to(dtype)
    for parameter in run.parameters() if wrong != 1 else ():
        parameter.register_hook(lambda found: (found.double() * wrong).to(found.dtype))
    given = torch.randn(2, rows // 2, width, generator=generator) * 2 ** uniform(-6, 4)
    tokens = torch.randint(round(2 ** uniform(0, 6)), (2, rows // 2), generator=generator)
    signatures = Signatures(reference, run, compute=dtype)
    with signatures.of_candidate():
        output = run(tokens if kind == "Embedding" else given.to(dtype).requires_grad_())
        gradient = torch.randn(output.shape, generator=generator) + uniform(-1, 1)
        if seed % 3 == 0:
            gradient -= gradient.mean((0, 1))
        scale = uniform(-22, 4) if dtype == torch.float16 else uniform(-60, 4)
        output.backward((gradient * 2**scale).to(dtype))
    return [part for part in pooled([signatures.measured()]) if part.part.startswith(GRADIENT)]


def off(part: Part) -> float:
    """Its error in the plan's dtype over the largest that is explained."""
    return size_of(part, "plan") / roundoff_of(part) / largest_in_plan(part)


def cases(count: int) -> Iterator[tuple[str, torch.dtype, int]]:
    for kind in MODULES:
        for dtype in (torch.float16, torch.bfloat16):
            for seed in range(count):
                yield kind, dtype, seed


def test_rounding_explains_the_gradients_of_sound_modules() -> None:
    parts = [part for case in cases(3) for part in parts_of(*case, most=256)]
    assert findings(parts) == []
    assert max(map(off, parts)) < 0.8


def test_a_bias_whose_sum_walks_in_16_bits_is_explained_and_was_not_by_three_roundings() -> None:
    """torch's LayerNorm adds one position after the other to a 16-bit number."""
    for dtype in (torch.float16, torch.bfloat16):
        found = [part for seed in range(6) for part in parts_of("LayerNorm", dtype, seed)]
        biases = [part for part in found if part.part == "gradient of bias"]
        assert any(size_of(part, "plan") / part.roundoff > 4 * math.sqrt(3) for part in biases)
        assert findings(biases) == []


@pytest.mark.parametrize(("dtype", "wrong"), [(torch.float16, 1.01), (torch.bfloat16, 1.06)])
def test_a_factor_on_a_norms_gradients_is_still_named(dtype: torch.dtype, wrong: float) -> None:
    for seed in (1, 2, 4, 5):  # whose terms do not cancel
        found = {item.part for item in findings(parts_of("LayerNorm", dtype, seed, wrong=wrong))}
        assert found >= {"gradient of weight", "gradient of bias"}
        assert findings(parts_of("LayerNorm", dtype, seed)) == []


def gradients_of(module: torch.nn.Module, dtype: torch.dtype, *, width: int, tokens: int = 64) -> list[Part]:
    """The parts of a sound module's gradients."""
    reference = Model(module)
    run = copy.deepcopy(reference).to(dtype)
    signatures = Signatures(reference, run, compute=dtype)
    with signatures.of_candidate():
        output = run(torch.randn(2, tokens, width).to(dtype).requires_grad_())
        output.backward(torch.randn(output.shape).to(dtype))
    return [part for part in pooled([signatures.measured()]) if part.part.startswith(GRADIENT)]


class InParallel(torch.nn.Module):
    """A block of GPT-NeoX: attention and MLP both read its input, which is added to what they make."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = (torch.nn.Linear(width, width) for _ in range(2))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.mlp(given) + self.attention(given) + given
        return found


def test_a_gradient_that_comes_from_three_places_may_be_added_up_in_any_order() -> None:
    """The sum of both small gradients, as torch.autograd.grad begins, is rounded once less beside the large one."""
    for seed in range(3):
        torch.manual_seed(seed)
        block = InParallel(32)
        for layer in (block.attention, block.mlp):
            torch.nn.init.normal_(layer.weight, std=0.02)
        parts = [part for part in gradients_of(block, torch.float16, width=32, tokens=1024) if part.module == "inside"]
        assert "gradient of its input" in {part.part for part in parts} and findings(parts) == []


def test_a_gradient_whose_terms_cancel_inside_of_fp32_is_not_blamed() -> None:
    """Qwen3-Next's decays: each pair of positions adds to one and takes from the other, of which FP32 leaves
    0.05% to 600% as an error. Rounding the inputs anew moved it by nothing at all in half of these."""
    shape = next(case.config for case in CASES if case.architecture == "qwen3_next")
    config = AutoConfig.for_model("qwen3_next", **shape)
    for seed in range(3):
        torch.manual_seed(seed)
        net = Qwen3NextGatedDeltaNet(config, 0)
        with torch.no_grad():
            net.A_log.uniform_(5, 16).log_()
            for parameter in net.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.02)
        parts = gradients_of(net, torch.bfloat16, width=config.hidden_size)
        decays = [part for part in parts if part.part == "gradient of A_log"]
        assert decays and all(size_of(part, "fp32") > 1e-4 for part in decays)
        assert findings(parts) == []


class Narrowed(torch.nn.Module):
    """Terms that all but cancel, the larger of them rounded to BF16 by its own code where `narrow` is set."""

    def __init__(self, narrow: bool) -> None:
        super().__init__()
        self.narrow, self.weight = narrow, torch.nn.Parameter(torch.randn(32))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        gain = self.weight * given
        kept = gain.bfloat16().to(gain.dtype) if self.narrow else gain
        return (kept.float().exp() - gain.float().exp() * 0.99).to(given.dtype)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_cast_inside_of_fp32_is_named_though_terms_cancel(narrow: bool) -> None:
    torch.manual_seed(0)
    parts = gradients_of(Narrowed(narrow), torch.float16, width=32)
    assert any("does not shrink" in item.why for item in findings(parts)) == narrow


@pytest.mark.slow
def test_how_far_the_gradients_of_many_sound_modules_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    """The quantiles are in docs/parity.md."""
    shares: dict[tuple[str, str], list[float]] = {}
    alarms = []
    for kind, dtype, seed in cases(120):
        for part in parts_of(kind, dtype, 1000 + seed):
            shares.setdefault((kind, part.part), []).append(off(part))
            alarms += findings([part])
    with capsys.disabled():
        for (kind, name), found in shares.items():
            at = torch.tensor(found).quantile(torch.tensor([0.5, 0.99, 1.0])).tolist()
            print(f"\n{kind}, {name}: {len(found)} parts, {at[0]:.2f}, {at[1]:.2f}, {at[2]:.2f}", end="")
        print(f"\n{sum(map(len, shares.values()))} parts, {len(alarms)} alarms")
    assert alarms == []
