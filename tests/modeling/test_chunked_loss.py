"""The chunked loss against FP64, the models' own logits and the full loss on two real ranks; the memory it takes."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from config.schema import Config, ModelSection
from launch.plan.loss import loss_bytes
from modeling.chunked_head import AUTO_FROM_LOGITS, CHUNK_LOGITS, CHUNK_LOGITS_ON_A_GPU, ChunkedHead, loss_chunk
from modeling.linear_cross_entropy import (
    Head,
    label_loss_sum,
    likeliest,
    linear_cross_entropy,
)
from tests.modeling import model_cases as cases
from tests.support.jobs.launches import finish
from tests.support.models.small_models import VOCABULARY, distance, small_model

HIDDEN = 24
ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def draw(dtype: torch.dtype, *, bias: bool, seed: int) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """Hidden states of (3, 11) tokens, weight and bias, and labels of which a whole sequence and more are masked."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 11, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)]
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    labels = torch.randint(VOCABULARY, (3, 11), generator=generator)
    labels[0, :4], labels[2] = -100, -100
    return [tensors[0], tensors[1], tensors[2] if bias else None], labels


def in_fp64(
    tensors: list[torch.Tensor | None], labels: torch.Tensor, scale: float, cap: float | None, weights: Any = 1.0
) -> Any:
    """(loss, gradients, losses of the labels before their weights) with all logits at once."""
    wide = [None if item is None else item.detach().double().requires_grad_() for item in tensors]
    logits = functional.linear(*wide) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    loss = (losses.view_as(labels) * weights).sum()
    loss.backward()
    return loss.detach(), [None if item is None else item.grad for item in wide], losses.detach().view_as(labels)


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize(
    ("chunk", "scale", "cap", "bias"),
    [(7, 1.0, None, False), (1, 1 / 3, None, True), (5, 1.0, 2.0, True), (99, 1.0, None, False)],
)
def test_value_and_gradients_are_those_of_fp64(dtype, chunk: int, scale: float, cap: float | None, bias: bool) -> None:
    """Loss within rounding of the logits, gradients within some roundings of their norm."""
    tensors, labels = draw(dtype, bias=bias, seed=chunk)
    hidden, weight, offset = tensors
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(chunk)) if chunk in (5, 7) else None
    head = Head(weight, offset, scale, cap)
    loss, losses = linear_cross_entropy(hidden, head, labels, chunk_tokens=chunk, weights=weights)
    loss.backward()
    exact, gradients, of_labels = in_fp64(tensors, labels, scale, cap, 1.0 if weights is None else weights)
    assert not losses.requires_grad and relative(losses, of_labels) < 4 * ROUNDOFF[dtype] + 2e-15
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert relative(loss.detach(), exact) < 4 * ROUNDOFF[dtype] + 2e-15
    for item, gradient in zip(tensors, gradients, strict=True):
        if item is not None:
            assert item.grad.dtype == dtype
            assert relative(item.grad, gradient) < 8 * ROUNDOFF[dtype] + 2e-15


@pytest.mark.parametrize(("chunk", "scale", "cap"), [(7, 1.0, None), (99, 1 / 3, None), (5, 1.0, 2.0)])
def test_labels_that_are_the_likeliest_tokens_are_found_chunk_by_chunk(chunk, scale, cap) -> None:
    tensors, labels = draw(torch.float32, bias=True, seed=chunk)
    with torch.no_grad():
        logits = functional.linear(*tensors) * scale
        best = (logits if cap is None else cap * torch.tanh(logits / cap)).argmax(-1)
        labels = torch.where((torch.arange(11) % 2 == 0) & (labels != -100), best, labels)
        right = torch.full(labels.shape, 9.0)
        linear_cross_entropy(tensors[0], Head(*tensors[1:], scale, cap), labels, chunk_tokens=chunk, right=right)
    assert torch.equal(right, (best == labels).float()) and 6 < right.sum() < 18
    assert torch.equal(likeliest(logits.detach(), labels), right)
    with pytest.raises(ValueError, match="without gradients only"):
        linear_cross_entropy(tensors[0], Head(*tensors[1:]), labels, chunk_tokens=chunk, right=right)


def test_tokens_that_are_equally_likely_share_what_is_right() -> None:
    """A head of zeros makes them so: its share of right answers is that of chance."""
    logits = torch.tensor([[2.0, 1.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    labels, expected = torch.tensor([2, 1, 0, -100]), torch.tensor([0.5, 0.25, 1.0, 0.0])
    right = torch.zeros(4)
    with torch.no_grad():
        linear_cross_entropy(torch.eye(4), Head(logits.t().contiguous(), None), labels, chunk_tokens=3, right=right)
    assert torch.equal(right, expected) and torch.equal(likeliest(logits, labels), expected)


def test_a_gradient_of_another_size_than_told_is_right_too() -> None:
    """A fault on the loss, say, changes it after the forward pass; and 0 was told for a micro-batch that counts not."""
    found = {}
    for told, brought in ((0.25, 0.25), (1.0, 0.25), (0.0, 0.0)):
        (hidden, weight, _), labels = draw(torch.float32, bias=False, seed=1)
        loss = linear_cross_entropy(hidden, Head(weight, None), labels, chunk_tokens=7, gradient_scale=told)[0]
        (loss * brought).backward()
        found[told] = hidden.grad, weight.grad
    torch.testing.assert_close(found[0.25], found[1.0])
    assert all(not gradient.any() for gradient in found[0.0])


def test_fp16_gradients_that_the_scale_lifts_are_not_flushed_before() -> None:
    """A token is predicted to 1.5e-8, half of what FP16 rounds to zero: two logits, 9 and -9, both exact."""
    weight, label, found = torch.tensor([[1.0], [-1.0]]).half(), torch.tensor([0]), {}
    for told in (2.0**12, 1.0):
        hidden = torch.tensor([[9.0]]).half().requires_grad_()
        loss = linear_cross_entropy(hidden, Head(weight, None), label, chunk_tokens=1, gradient_scale=told)[0]
        (loss * 2.0**12).backward()
        assert hidden.grad is not None
        found[told] = float(hidden.grad) / 2.0**12
    wide = torch.tensor([[9.0]], requires_grad=True)
    label_loss_sum(functional.linear(wide, weight.float())[None], label[None]).backward()
    assert wide.grad is not None
    assert found[1.0] == 0.0
    assert found[2.0**12] == pytest.approx(float(wide.grad), rel=2 * ROUNDOFF[torch.float16])


def test_a_weight_gradient_of_many_chunks_is_rounded_once() -> None:
    """The test uses BF16 and as many chunks as tokens; summing in BF16 is several times further off."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator).bfloat16() for size in (512, VOCABULARY))
    labels = torch.randint(VOCABULARY, (512,), generator=generator)
    once, each = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    linear_cross_entropy(hidden, Head(once, None), labels, chunk_tokens=1)[0].backward()
    for state, label in zip(hidden.split(1), labels.split(1), strict=True):
        label_loss_sum(functional.linear(state, each)[None], label[None]).backward()
    _, gradients, _ = in_fp64([hidden[None], weight, None], labels[None], 1.0, None)
    assert relative(once.grad, gradients[1]) < ROUNDOFF[torch.bfloat16] < relative(each.grad, gradients[1]) / 2


def test_autocast_does_not_round_the_gradient_of_an_fp32_weight() -> None:
    """Matmuls in BF16 as with the full loss, whose weight gradient has BF16's 8 bits; the chunked one's has more."""
    (hidden, weight, _), labels = draw(torch.float32, bias=False, seed=6)
    _, exact, _ = in_fp64([hidden, weight, None], labels, 1.0, None)
    made = {}
    for way in ("full", "chunked"):
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if way == "full":
                loss = label_loss_sum(functional.linear(hidden, weight), labels)
            else:
                loss = linear_cross_entropy(hidden, Head(weight, None), labels, chunk_tokens=7)[0]
        loss.backward()
        made[way] = weight.grad
        assert hidden.grad.dtype == weight.grad.dtype == torch.float32
        assert ROUNDOFF[torch.bfloat16] / 8 < relative(weight.grad, exact[1]) < 4 * ROUNDOFF[torch.bfloat16], way
    assert torch.equal(made["full"].bfloat16().float(), made["full"])
    assert not torch.equal(made["chunked"].bfloat16().float(), made["chunked"])
    assert relative(made["chunked"], exact[1]) < relative(made["full"], exact[1])


def test_one_backward_pass_and_none_without_gradients() -> None:
    (hidden, weight, _), labels = draw(torch.float32, bias=False, seed=4)
    loss = linear_cross_entropy(hidden, Head(weight, None), labels, chunk_tokens=7)[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()
    with torch.no_grad():
        again = linear_cross_entropy(hidden, Head(weight, None), labels, chunk_tokens=7)[0]
    assert torch.equal(again, loss.detach()) and not again.requires_grad
    with pytest.raises(ValueError, match="labels of"):
        linear_cross_entropy(hidden, Head(weight, None), labels[:2], chunk_tokens=7)[0]


FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {"n_positions": 32},
    "phi": {},  # a bias in its head
    "gemma2": {"final_logit_softcapping": 0.5, "head_dim": 16},
    "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
}


def model_of(family: str) -> torch.nn.Module:
    return small_model(family, "eager", num_hidden_layers=1, pad_token_id=None, **FAMILIES[family]).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_has_the_loss_of_its_own_logits(family: str) -> None:
    """Whatever it does to them: factor, soft cap, bias, tied weights; the gradients of all its weights, too."""
    model = model_of(family)
    with torch.no_grad():  # logits that its soft cap or factor bends visibly
        model.get_output_embeddings().weight.mul_(20)
    ids, labels = (torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5)) for _ in range(2))
    labels[0, :3] = -100
    full = label_loss_sum(model(input_ids=ids, use_cache=False).logits, labels)
    full.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    head = ChunkedHead(model, chunk_tokens=5)
    with torch.no_grad():
        head.detect_logit_transform(lambda: model(input_ids=ids[:1, :2], use_cache=False))
    with head.loss_of(labels, 1.0):
        chunked = model(input_ids=ids, use_cache=False).logits.sum()
    chunked.backward()
    torch.testing.assert_close(chunked, full)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)  # sums in another order, of values up to 2
    assert model(input_ids=ids, use_cache=False).logits.shape == (2, 9, VOCABULARY), "idle outside"
    head.close()
    assert "forward" not in model.__dict__ and "forward" not in model.get_output_embeddings().__dict__


def test_a_model_that_does_something_else_to_its_logits_is_told() -> None:
    model, ids = model_of("llama"), torch.zeros((1, 2), dtype=torch.int64)
    head = ChunkedHead(model, chunk_tokens=5)
    for spoil, reason in (
        (lambda output: output.logits[..., 3].fill_(-1e4), "unknown way"),
        (lambda output: setattr(output, "logits", output.logits[..., :-1]), "it makes logits of"),
    ):
        handle = model.register_forward_hook(lambda module, inputs, output, spoil=spoil: (spoil(output), output)[1])
        with torch.no_grad(), pytest.raises(ValueError, match=reason):
            head.detect_logit_transform(lambda: model(input_ids=ids, use_cache=False))
        handle.remove()
    head.close()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="Sequential, not a plain linear layer"):
        ChunkedHead(model, chunk_tokens=5)


def test_auto_is_chunked_where_logits_are_many() -> None:
    auto, vocabulary = ModelSection(), 128_256
    few = AUTO_FROM_LOGITS // vocabulary
    assert loss_chunk(auto, tokens=few, vocabulary=vocabulary, on_cpu=True) == 0
    for on_cpu, most in ((True, CHUNK_LOGITS), (False, CHUNK_LOGITS_ON_A_GPU)):
        chunk = loss_chunk(auto, tokens=few + 1, vocabulary=vocabulary, on_cpu=on_cpu)
        assert chunk % 64 == 0 and most / 2 < chunk * vocabulary <= most
    assert loss_chunk(ModelSection(loss="full"), tokens=10**6, vocabulary=vocabulary, on_cpu=True) == 0
    assert loss_chunk(ModelSection(loss="chunked"), tokens=1, vocabulary=10**9, on_cpu=True) == 64
    few = ModelSection(loss="chunked", loss_chunk_tokens=3)
    assert loss_chunk(few, tokens=1, vocabulary=4, on_cpu=True) == 3


PEAK = """
import sys
from lab.benchmark.loss import measure
way, dtype = sys.argv[1:]
print(measure(way, vocabulary=131072, hidden=16, tokens=1024, dtype=dtype, repeats=0)["peak_bytes"])
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("way", "compute"), [("full", "fp32"), ("chunked", "bf16")])
def test_logits_of_a_large_vocabulary_take_what_the_planner_says(tmp_path: Path, way: str, compute: str) -> None:
    """1,024 tokens of 131,072 logits are 512 MiB in FP32: three times that all at once, half of it in chunks of 512."""
    (tmp_path / "peak.py").write_text(PEAK)
    measured = finish(["python", str(tmp_path / "peak.py"), way, compute])
    shape: Any = SimpleNamespace(vocabulary=131072, hidden=16, plain_head=True, trained_head=True, head_share=1)
    width = {"fp32": 4, "bf16": 2}[compute]
    model = ModelSection(loss=way)
    sizes = {"tokens": 1024, "label_tokens": 1024, "width": width}
    layout: Any = SimpleNamespace(config=Config(model=model), manifest=False, on_cpu=True, **sizes)
    said = loss_bytes(shape, layout)
    assert said <= {"full": 3, "chunked": 0.8}[way] * 512 * 2**20
    assert int(measured) == pytest.approx(said, rel=0.1)


@cache
def found(pair: Any, stage: int, compute: str, loss: str, *overrides: str, manifest: str = "") -> list[dict[str, Any]]:
    """Both ranks' results of two steps; the full loss in FP32 at stage 0 is asked for by every test."""
    options = {"stage": stage, "compute": compute, "loss": loss, "overrides": overrides, "manifest": manifest}
    return pair.run(cases.two_steps, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("compute", "stage"),
    [("fp32", 0), *((compute, stage) for compute in ("fp32", "bf16") for stage in (1, 2, 3)), ("fp16", 3)],
)
def test_two_ranks_train_as_with_the_full_loss(pair, stage: int, compute: str) -> None:
    """FP32 agrees to rounding, masters included; 16 bits are no further from FP32's gradients than the full loss.

    Masters after a step of AdamW differ by the sign of the smallest gradients in 16 bits, so that they prove nothing.
    """
    exact = found(pair, 0, "fp32", "full")[0]
    full, chunked = (found(pair, stage, compute, loss) for loss in ("full", "chunked"))
    assert all(rank["chunked"] and rank["unchunked_reason"] is None for rank in chunked)
    assert not full[0]["chunked"]
    tolerance = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-4}[compute]
    for (loss, norm, applied), (loss_of_full, norm_of_full, _) in zip(chunked[0]["rows"], full[0]["rows"], strict=True):
        assert applied and loss == pytest.approx(loss_of_full, rel=tolerance)
        assert norm == pytest.approx(norm_of_full, rel=tolerance)
    assert chunked[0]["evaluated"] == pytest.approx(full[0]["evaluated"], rel=tolerance)
    if compute == "fp32":
        assert distance(chunked[0]["gradients"], exact["gradients"]) < 1e-6
        assert distance(chunked[0]["masters"], full[0]["masters"]) < 1e-5
    else:
        allowed = 1.1 * distance(full[0]["gradients"], exact["gradients"])
        assert distance(chunked[0]["gradients"], exact["gradients"]) < allowed, allowed


@pytest.mark.parametrize("stage", [1, 3])
def test_the_head_keeps_its_precision_region(pair, tmp_path, stage: int) -> None:
    """lm_head in FP16 among BF16 modules, and FP32 masters."""
    exact = found(pair, 0, "fp32", "full", "model.config.tie_word_embeddings=false")[0]
    untied = ("model.config.tie_word_embeddings=false",)
    ways = {loss: found(pair, stage, "fp32", loss, *untied, manifest=str(tmp_path))[0] for loss in ("full", "chunked")}
    assert ways["chunked"]["chunked"]
    for row, of_full in zip(ways["chunked"]["rows"], ways["full"]["rows"], strict=True):
        assert row == pytest.approx(of_full, rel=1e-3)
    for names in (set(exact["gradients"]), {"lm_head.weight"}):
        of = {name: exact["gradients"][name] for name in names}
        assert distance(ways["chunked"]["gradients"], of) < 1.1 * distance(ways["full"]["gradients"], of)


def test_an_observed_head_computes_what_it_computes_unobserved(pair, tmp_path) -> None:
    """A step stays chunked under hooks and modes; dtypes and FLOPs are those that are seen of the full loss."""
    full, chunked = (pair.run(cases.observed, loss=loss, folder=str(tmp_path))[0] for loss in ("full", "chunked"))
    assert chunked["step"] == chunked["unseen"] and full["step"] == full["unseen"]
    assert full["shapes"] == {(2, 16, 64)} and chunked["shapes"] == {(1, 1, 1)}
    assert chunked["computed"]["lm_head"] == {"fp16"}
    for what in ("computed", "flops", "inner"):
        assert chunked[what] == full[what] != {}


@pytest.mark.parametrize(
    ("module", "kind"),
    [("lm_head", "nan_activation"), ("model.layers.1.mlp.down_proj", "nan_activation"), ("lm_head", "inf_gradient")],
)
def test_a_spoiled_step_names_the_same_module_without_making_logits(pair, module: str, kind: str) -> None:
    full, chunked = (pair.run(cases.spoiled, loss=loss, module=module, kind=kind)[0] for loss in ("full", "chunked"))
    assert not chunked["finite"] and chunked["blamed"] == full["blamed"] != []
    assert full["shapes"] == {(2, 16, 64)} and chunked["shapes"] <= {(1, 1, 1)} | full["shapes"]


def test_what_cannot_be_chunked_is_refused_or_stays_full(pair) -> None:
    """RecurrentGemma caps its logits under a name of its own."""
    for rank in pair.run(cases.cannot):
        assert rank["refused"].startswith("model.loss = chunked: not supported for model recurrent_gemma: it changes")
        assert rank["refused"].endswith("set model.loss=auto or full")
        assert not rank["chunked"] and "unknown way" in rank["reason"]
        assert rank["loss"] == rank["loss_of_full"]


def test_a_micro_batch_that_counts_for_nothing_has_gradients_of_numbers(pair) -> None:
    assert all(gradient.isfinite().all() for gradient in pair.run(cases.unwanted)[0].values())
