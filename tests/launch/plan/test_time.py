"""The modelled time of a step: its FLOPs against the formula, its bytes against operators that ran."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.launcher import as_launched
from launch.plan.devices import DEVICES
from launch.plan.layout import Layout, layout_of
from launch.plan.model import Shape, read_shape
from launch.plan.operations import Log, Operation, fused
from launch.plan.timed import LIGER, LOSS_KERNEL, SOFTMAX_BYTES, kernels_of, levers, loss_operations, time_of
from modeling.linear_cross_entropy import Head, label_loss_sum, linear_cross_entropy
from tests.launch.plan import plan_cases

H100 = DEVICES["h100"]


@pytest.fixture(scope="module")
def planned() -> tuple[Shape, Layout]:
    """Two blocks of the 1B recipe on one GPU."""
    recipe = str(REPOSITORY / "config/recipes/benchmark_1b.yaml")
    resolved = read_command_line(["--config", recipe, "model.config.num_hidden_layers=2"], as_launched(1))
    layout = layout_of(resolved, world=1, on_cpu=False)
    return read_shape(resolved.config, layout), layout


def test_flops_are_those_of_the_formula(planned: tuple[Shape, Layout]) -> None:
    shape, layout = planned
    operations = [*shape.counted.operations, *loss_operations(shape, layout, fused_softmax=True)]
    matmuls = sum(one.flops for one in operations if one.kind == "matmul") / layout.tokens
    assert matmuls == pytest.approx(6 * shape.matmul_parameters, rel=0.01)
    # the forward pass's, of which a causal kernel leaves half out, three times over
    attention = 3 * 2 * sum(one.flops for one in operations if one.kind == "attention" and not one.backward)
    found = matmuls + attention / layout.tokens
    assert found == pytest.approx(shape.flops_per_token(layout.sequence), rel=0.01)


def test_a_side_as_long_as_the_vocabulary_is_no_head() -> None:
    """The demo's micro-batch has as many tokens as its vocabulary."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    settings = [f"model.config={sizes}", "data.sequence_length=64", "batch.micro_size=1", "batch.global_size=2"]
    shape, layout = plan_cases.planned(settings, world=1, on_cpu=False)
    operations = [*shape.counted.operations, *loss_operations(shape, layout, fused_softmax=True)]
    matmuls = sum(one.flops for one in operations if one.kind == "matmul") / layout.tokens
    assert matmuls == pytest.approx(6 * shape.matmul_parameters, rel=0.01)


def test_every_part_of_a_block_is_counted_in_both_passes(planned: tuple[Shape, Layout]) -> None:
    shape, layout = planned
    size = 2 * shape.hidden * layout.tokens  # one tensor of the residual stream, in bytes
    scopes = {(one.scope, one.backward): 0.0 for one in shape.counted.operations}
    for one in shape.counted.operations:
        if one.kind == "other":
            scopes[one.scope, one.backward] += one.bytes / size
    # two sums of the residual stream a block, three tensors each
    assert scopes["block", False] == pytest.approx(2 * 2 * 3, rel=0.01)
    # SiLU and the product, which read three tensors and write two that are four times as wide
    assert scopes["MLP", False] == pytest.approx(2 * 5 * 4, rel=0.01)
    assert scopes["Norm", True] > scopes["Norm", False] > 5 * 13  # five norms in FP32
    liger = kernels_of(shape.counted.operations, layout, "llama")
    norms = [one.bytes / size for one in liger if (one.scope, one.backward) == ("Norm", False)]
    # read once and written once, but for the last one, which the head reads
    assert norms == pytest.approx([2.0] * 4 + [1.0], rel=0.01)


def operation(reads: str, writes: str, kind: str = "other", *, backward: bool = False) -> Operation:
    return Operation(kind, "block", backward, 0.0, {ord(one): 1.0 for one in reads}, {ord(one): 1.0 for one in writes})


def test_one_kernel_reads_its_inputs_once_and_writes_what_is_read_later() -> None:
    chain = [operation("ab", "c"), operation("ca", "d"), operation("d", "e"), operation("de", "f", "matmul")]
    back = [operation("f", "g"), operation("gc", "h", backward=True), operation("h", "i", "matmul", backward=True)]
    found = fused([*chain, *back], lambda one: "all")
    # c is read by the backward pass alone, which computes it again from a and b
    assert names(found) == ["ab>de", "de>f", "f>", "fab>h", "h>i"]
    # a kernel of its own, outside of what is compiled, needs it
    assert names(fused([*chain, *back], lambda one: None if one.backward else "all"))[0] == "ab>cde"
    assert fused([*chain, *back], lambda one: None) == [*chain, *back]


def names(operations: list[Operation]) -> list[str]:
    return ["".join(map(chr, one.reads)) + ">" + "".join(map(chr, one.writes)) for one in operations]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.log = Log()

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        result = function(*given, **(options or {}))
        self.log.add(function, given, options or {}, result)
        return result


@pytest.mark.parametrize("way", ["operators", "full"])
def test_a_logit_moves_as_many_bytes_as_its_operators_do(way: str) -> None:
    tokens, vocabulary, hidden = 64, 4096, 2
    states = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    with Counting() as counting:
        if way == "full":
            label_loss_sum((states @ weight.t()).unsqueeze(0), labels.unsqueeze(0)).backward()
        else:
            linear_cross_entropy(states, Head(weight, None), labels, chunk_tokens=tokens)[0].backward()
    others = sum(one.bytes for one in counting.log.operations if one.kind == "other")
    assert others / tokens / vocabulary == pytest.approx(SOFTMAX_BYTES[way], rel=0.05)


def test_what_a_lever_changes(planned: tuple[Shape, Layout]) -> None:
    shape, layout = planned
    layout = replace(layout, stage=1)

    def seconds(layout: Layout, *without: str) -> float:
        found = time_of(shape, layout, H100, communication=0.0, without=without)
        assert found is not None
        return found.seconds

    now = seconds(layout)
    found = {lever.name: seconds(lever.layout, *lever.without) / now for lever in levers(shape, layout)}
    assert found["model.compile=true"] < 1 < min(found["without the loss's kernel"], found["without liger-kernel"])
    assert 1 < found["model.activation_checkpointing=attention"] < found["model.activation_checkpointing=full"] < 4 / 3
    assert seconds(layout, LIGER, LOSS_KERNEL) > max(seconds(layout, LIGER), seconds(layout, LOSS_KERNEL))
    two = time_of(shape, replace(layout, world=2), H100, communication=0.5)
    assert two is not None and two.step["communication, exposed"] == 0.5
    hidden = time_of(shape, replace(layout, world=2, overlap=True), H100, communication=0.5)
    assert hidden is not None and hidden.step["communication, exposed"] < 0.5
    slow = time_of(shape, layout, replace(H100, reached=replace(H100.reached, launch=1e-3)), communication=0.0)
    assert slow is not None and slow.micro["host, exposed"] > 0
