"""Compiled blocks train as the blocks themselves do, and are replaced by them under observation."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import cpp_builder
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from config.cli import REPOSITORY
from config.command_line import read_command_line
from modeling.compiling import CompiledBlock, quote_library_folders
from tests.support.jobs.launches import command, events, finish, replay
from tests.support.jobs.process_group import ProcessGroup
from tests.training.engine import compile_cases as cases

CALLS = 2 * 2 * cases.STEPS
"""Two blocks, two micro-batches a step."""


# Relative, of losses and gradient norms; of masters, a share of how far they moved.
# Wider in FP16: gradient norms were 5.2e-4 apart, the compiled blocks' 2.4e-4 from FP32 and the eager ones' 7.6e-4.
BOUNDS = {"fp32": (1e-6, 1e-5, 1e-3), "bf16": (5e-5, 5e-4, 0.02), "fp16": (2e-4, 2e-3, 0.05)}
NO_WORSE = 1.5
"""[factor] How much further than the blocks as they are compiled ones may be from FP32."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize(
    ("stage", "compute"), [(0, "fp32"), *((stage, compute) for compute in BOUNDS for stage in (1, 2))]
)
def test_compiled_blocks_train_as_the_blocks_do(pair, stage, compute, mode) -> None:
    overrides = [f"model.activation_checkpointing={mode}", "model.config.attention_dropout=0.2"]
    for found in pair.run(cases.parity, seconds=300, stage=stage, compute=compute, overrides=overrides):
        assert found["compiled_calls"] == CALLS and found["own_calls"] == 0
        assert mode == "none" or found["kept"] <= 1.0
        for what, bound in zip(("loss", "norm", "masters"), BOUNDS[compute], strict=True):
            assert found[what] < bound, what
        for figure in ("loss", "norm") if compute != "fp32" else ():
            assert found[f"compiled {figure} from FP32"] < NO_WORSE * found[f"plain {figure} from FP32"]


@pytest.mark.slow
def test_a_compiled_bf16_job_replays_to_the_bit(tmp_path: Path) -> None:
    half = ["deepspeed.config=ds_configs/zero2_bf16.json", "precision.compute=bf16"]
    settings = ["model.compile=true", "model.activation_checkpointing=none", *half]
    finish(command("torchrun", tmp_path, "job", *settings), seconds=400)
    assert len(events(tmp_path, "job", "step")) == 6
    assert "as recorded" in replay(tmp_path, "job", 6)


@pytest.mark.slow
def test_observers_see_what_the_blocks_themselves_compute(pair: ProcessGroup) -> None:
    for found in pair.run(cases.looks, overrides=["model.activation_checkpointing=selective"]):
        plain, compiled, calls = found["false"], found["true"], found["calls"]
        assert plain == compiled
        assert {"bf16"} == compiled["computed"][cases.SICK] and not compiled["finite"]
        assert [name for _, name, tensor, _ in compiled["causes"] if tensor == "activation"] == [cases.SICK] * 2
        started = 2  # the pass that compiles
        assert calls["observed"][0] == started and calls["observed"][1] > 0
        assert calls["trained"][0] == started + 4  # the step that went wrong ran compiled
        assert calls["attributed"][0] == calls["trained"][0] and calls["attributed"][1] > calls["trained"][1]


class Doubling(GradientCheckpointingLayer):
    """The smallest block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: any shape, FP32."""
        return hidden * self.weight


def test_recomputing_around_a_block_is_not_counted() -> None:
    """transformers before 5.20 or so checkpoints around a block, so that its backward pass calls it again."""
    block, states = Doubling(), torch.ones(3, requires_grad=True)
    with torch.compiler.set_stance("force_eager"):
        forward = CompiledBlock(block)
        block.__dict__["forward"] = forward
        checkpoint(block, states, use_reentrant=False).sum().backward()
    assert states.grad is not None and states.grad.tolist() == [2.0] * 3
    assert (forward.compiled_calls, forward.own_calls) == (1, 0)


def test_a_library_is_found_below_a_path_with_a_space() -> None:
    for _ in range(2):
        quote_library_folders()
    options = cpp_builder.BuildOptionsBase(compiler="g++", libraries=["torch"], libraries_dirs=["/a path/it's/lib"])
    built = cpp_builder.CppBuilder(name="it", sources="it.cpp", BuildOption=options)
    assert "-L/a path/it's/lib" in shlex.split(built.get_command_line())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.activation_checkpointing=ops", "activation_checkpointing = ops"),
        ("model.activation_checkpointing=attention", "activation_checkpointing = attention"),
        ("model.checkpointing_reentrant=true", "checkpointing_reentrant"),
        ("model.attention=flex_attention", "flex_attention"),
        ("profile.steps=2", "set profile.steps to 0"),
        ("data.document_masking=true", "data.document_masking"),
        ("precision.path=manifest", "precision.path = manifest"),
        ("deepspeed.stage=3", "ZeRO-3 gathers parameters in hooks"),
    ],
)
def test_what_is_not_verified_is_refused(override: str, words: str, refusal: Any) -> None:
    given = ["--config", str(REPOSITORY / "config/recipes/demo.yaml"), "model.compile=true", override]
    if override == "precision.path=manifest":
        given += ["precision.manifest=config/manifests/bf16.json", "precision.compute=fp32"]
    assert words in refusal(read_command_line, given)
