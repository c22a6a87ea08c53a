"""Liger's kernels: held against torch's code, in one model of the process only, and refused where they cannot be had.

What needs the kernels runs on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter (`make test-kernels`).
"""

import copy
import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from modeling import kernels
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.kernels import ARCHITECTURES, Norm, plan_liger, require_liger
from precision.dtypes import DTYPES
from tests.modeling import model_cases as cases
from tests.support.jobs.launches import command, finish
from tests.support.models import interpreted_liger
from tests.support.models.small_models import distance
from training.engine import kernels as engine_kernels

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0}


def here(test: Any) -> Any:
    """A test that runs the kernels."""
    reason = interpreted_liger.why_not()
    return pytest.mark.kernels(pytest.mark.skipif(bool(reason), reason=reason)(test))


def build(architecture: str, dtype: torch.dtype, **more: Any) -> Any:
    """A model of two blocks, the same weights each time, norms' weights among them far from where they start."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, **SHAPE, **more)
    attention = "eager" if architecture == "gemma2" else "sdpa"  # which transformers does not have for gemma2
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(interpreted_liger.prepare(), dtype).train()


def gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and its gradients by name in FP32; positions start again in the middle of a sequence."""
    device = model.device
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 0, 1, 2, 3, 4]], device=device)
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.view(-1, 64), ids.roll(-1, 1).view(-1))
    loss.backward()
    return loss.item(), {name: parameter.grad.float().clone() for name, parameter in model.named_parameters()}


@here
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_gradients_are_those_of_torch_in_fp32(architecture: str) -> None:
    plain = build(architecture, torch.float32)
    fast = copy.deepcopy(plain)
    said = plan_liger(fast, dtype=torch.float32, device=plain.device).apply()
    assert "RMSNorm" in said and "rotary embedding in 2 modules" in said and "GLU in 2 modules" in said
    (loss, exact), (found_loss, found) = gradients(plain), gradients(fast)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert 0 < distance(found, exact) < 2e-6  # 0: the kernels did not run
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@here
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "phi3", "olmo2"])
def test_in_16_bits_no_further_from_fp32_than_torch(architecture: str, compute: str) -> None:
    plain = build(architecture, DTYPES[compute])
    fast, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    plan_liger(fast, dtype=DTYPES[compute], device=plain.device).apply()
    (loss, reference), (_, own), (found_loss, found) = (gradients(model) for model in (exact, plain, fast))
    assert found_loss == pytest.approx(loss, rel={"bf16": 1e-3, "fp16": 1e-4}[compute])
    assert distance(found, reference) < 1.2 * distance(own, reference)


@here
@pytest.mark.parametrize(
    ("mode", "options", "rotations"),
    [
        ("full", {"reentrant": False}, 4),
        ("full", {"reentrant": True}, 4),
        ("selective", {"reentrant": False, "every": 2}, 3),
        ("attention", {"reentrant": False}, 4),
        ("budget", {"reentrant": False}, 4),
    ],
)
def test_recomputed_activations_give_the_same_gradients(mode, options, rotations, monkeypatch) -> None:
    """rotations: how often the kernel runs in two blocks, recomputation included."""
    from liger_kernel.ops import LigerRopeFunction

    calls, own = [], LigerRopeFunction.forward
    monkeypatch.setattr(LigerRopeFunction, "forward", staticmethod(lambda *given: calls.append(1) or own(*given)))
    model = build("llama", torch.float32)
    plan_liger(model, dtype=torch.float32, device=model.device).apply()
    loss, exact = gradients(model)
    assert apply_activation_checkpointing(model, mode, **options)
    calls.clear()
    again, found = gradients(model)
    assert again == loss and len(calls) == rotations
    assert all(torch.equal(found[name], exact[name]) for name in exact)


@here
def test_other_models_of_the_process_stay_plain_torch() -> None:
    from transformers.models.llama import modeling_llama

    before, names = dict(vars(modeling_llama)), set(vars(modeling_llama))
    earlier, fast = (build("llama", torch.float32) for _ in range(2))
    plan_liger(fast, dtype=torch.float32, device=fast.device).apply()
    later = build("llama", torch.float32)
    assert set(vars(modeling_llama)) == names and all(vars(modeling_llama)[name] is before[name] for name in names)
    assert not liger_functions(earlier) and not liger_functions(later)
    assert liger_functions(fast) == {
        "LigerRMSNormFunctionBackward": 5,
        "LigerSiLUMulFunctionBackward": 2,
        "LigerRopeFunctionBackward": 2,
    }


def liger_functions(model: Any) -> Counter[str]:
    """The number of calls of each of Liger's functions in the graph of one forward pass."""
    logits = model(input_ids=torch.arange(18, device=model.device).view(2, 9), use_cache=False).logits
    waiting, seen = [logits.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
    return Counter(node.name() for node in seen if "Liger" in node.name())


@here
def test_names_classes_and_copies_stay() -> None:
    plain = build("llama", torch.float32)
    fast = copy.deepcopy(plain)
    plan_liger(fast, dtype=torch.float32, device=plain.device).apply()
    for (name, module), (name_now, now) in zip(plain.named_modules(), fast.named_modules(), strict=True):
        assert name == name_now and isinstance(now, type(module)) and type(now).__name__ == type(module).__name__
        assert "forward" not in now.__dict__
    assert list(fast.state_dict()) == list(plain.state_dict())
    (_, found), (_, of_copy) = gradients(fast), gradients(copy.deepcopy(fast))
    assert all(torch.equal(found[name], of_copy[name]) for name in found)


@here
def test_a_pass_over_fp32_weights_is_plain_torch() -> None:
    """Telemetry's probe calls a 16-bit model with its masters this way."""
    plain = build("llama", torch.bfloat16)
    fast = copy.deepcopy(plain)
    plan_liger(fast, dtype=torch.bfloat16, device=plain.device).apply()
    masters = {name: parameter.detach().float() for name, parameter in plain.named_parameters()}
    options = {"input_ids": torch.arange(18, device=plain.device).view(2, 9), "use_cache": False}
    logits = [torch.func.functional_call(model, masters, args=(), kwargs=options).logits for model in (plain, fast)]
    assert logits[0].dtype == torch.float32 and torch.equal(*logits)


@here
def test_generated_text_is_the_same() -> None:
    """One token at a time, with a cache of keys that the rotation was written over."""
    plain = build("llama", torch.float32).eval()
    fast = copy.deepcopy(plain)
    plan_liger(fast, dtype=torch.float32, device=plain.device).apply()
    ids = torch.arange(1, 6, device=plain.device)[None]
    texts = [model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True) for model in (plain, fast)]
    assert texts[0].shape == (1, 10) and torch.equal(*texts)


@here
def test_a_kernel_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.ARCHITECTURES, "llama", Norm(1.0))
    model = build("llama", torch.bfloat16)
    with pytest.raises(UserError, match="RMSNorm in LlamaRMSNorm is .* away from FP32"):
        plan_liger(model, dtype=torch.bfloat16, device=model.device).apply()


@here
@pytest.mark.parametrize(
    ("stage", "compute"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16"), (2, "fp16")]
)
def test_two_ranks_train_as_with_torch(pair: Any, stage: int, compute: str) -> None:
    """FP32 agrees to rounding, masters included; 16 bits are no further from FP32's gradients than torch is."""
    own, found = (_two_steps(pair, stage, compute, word)[0] for word in ("torch", "liger"))
    assert found["notes"] and not own["notes"]
    tolerance = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-4}[compute]
    for (loss, norm, _), (loss_of_torch, norm_of_torch, _) in zip(found["rows"], own["rows"], strict=True):
        assert loss == pytest.approx(loss_of_torch, rel=tolerance)
        assert norm == pytest.approx(norm_of_torch, rel=5 * tolerance)  # BF16's are 7e-3 away from FP32's by themselves
    assert found["evaluated"] == pytest.approx(own["evaluated"], rel=tolerance)
    if compute == "fp32":
        assert distance(found["gradients"], own["gradients"]) < 2e-6
        assert distance(found["masters"], own["masters"]) < 1e-5
    else:
        exact = _two_steps(pair, 0, "fp32", "torch")[0]["gradients"]
        assert distance(found["gradients"], exact) < 1.2 * distance(own["gradients"], exact)


@functools.cache
def _two_steps(pair: Any, stage: int, compute: str, word: str) -> list[dict[str, Any]]:
    return pair.run(cases.two_steps_of_kernels, stage=stage, compute=compute, kernels=word)


@here
def test_auto_is_liger_where_it_can_be_had(pair: Any) -> None:
    """Two norms, the final one, a gated activation and a rotation of one block."""
    said = "Liger 0.8.5 computes RMSNorm in 3 modules, SwiGLU in 1 modules, rotary embedding in 1 modules"
    assert pair.run(cases.chosen) == [([said], 5)] * 2


@here
@pytest.mark.parametrize(
    ("overrides", "lacking", "words"),
    [
        (("model.activation_checkpointing=ops",), None, "rank 0: liger cannot be combined with model.activation"),
        (("model.architecture=gpt2", "model.config={n_embd: 32, n_layer: 1, n_head: 2}"), None, "supported for gpt2"),
        ((), 1, "because of rank 1: model.kernels = liger: RMSNorm in LlamaRMSNorm is"),
    ],
)
def test_auto_is_torch_on_every_rank_where_one_cannot_have_it(pair, overrides, lacking, words) -> None:
    for notes, exchanged in pair.run(cases.chosen, overrides=overrides, lacking=lacking):
        assert exchanged == 0
        [note] = notes
        assert note.startswith("model.kernels = auto: torch's on every rank") and words in note


def test_auto_is_torch_without_a_word_where_there_is_no_gpu(pair: Any) -> None:
    if torch.cuda.is_available() or not interpreted_liger.why_not():
        pytest.skip("Triton has something to run on here")
    assert pair.run(cases.chosen) == [([], 0)] * 2


@here
def test_whoever_looks_sees_the_same(pair: Any) -> None:
    for own, found in zip(*(pair.run(cases.looks, kernels=word) for word in ("torch", "liger")), strict=True):
        assert all(torch.equal(found["probe"][name], own["probe"][name]) for name in own["probe"])
        not_called = {"model.layers.0.mlp.act_fn"}
        assert own["event"]["activation_max"].keys() - not_called == found["event"]["activation_max"].keys()
        assert found["event"]["gradients"].keys() == own["event"]["gradients"].keys()
        assert found["computed"] == own["computed"] and found["flops"] == own["flops"]
        assert not found["finite"] and found["causes"] == own["causes"]
        assert [name for _, name, tensor, _ in found["causes"] if tensor == "activation"] == [cases.SICK] * 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.activation_checkpointing=ops", "set that to attention, selective, full or none"),
        ("model.compile=true", "model.compile = true; remove one of them"),
        ("precision.path=manifest", "precision.path = manifest"),
    ],
)
def test_what_does_not_go_with_it_is_refused(override: str, words: str, refusal: Any) -> None:
    given = ["--config", str(REPOSITORY / "config/recipes/demo.yaml"), "model.kernels=liger", override]
    if override == "precision.path=manifest":
        given += ["precision.manifest=config/manifests/bf16.json", "precision.compute=fp32"]
    error = refusal(read_command_line, given)
    assert "model.kernels" in error and words in error


@pytest.mark.parametrize(
    ("architecture", "device", "missing", "words"),
    [
        ("gpt2", "cuda", "", "not supported for gpt2, only for gemma, gemma2, .* qwen3, smollm3; or set"),
        ("llama", "cpu", "", "need a GPU"),
        ("llama", "cuda", "liger_kernel", "liger-kernel is not installed"),
        ("llama", "cuda", "triton", "triton is not installed"),
    ],
)
def test_what_it_needs_is_told(monkeypatch, architecture: str, device: str, missing: str, words: str) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None if name == missing else "a spec")
    with pytest.raises(UserError, match=words):
        require_liger(architecture, torch.device(device))


def test_a_run_that_has_to_do_without_says_so_at_its_start(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter gives a CPU the choice that a GPU has."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    settings = ("model.activation_checkpointing=ops", "run.steps=2", "schedule.warmup_steps=1")
    said = finish(command("python", tmp_path, "slower", *settings))
    [line] = [line for line in said.splitlines() if line.startswith("WARNING")]
    assert (
        "slower than it could be: model.kernels = auto: torch's on every rank, because of rank 0: liger cannot" in line
    )


def test_a_chunked_loss_without_its_kernel_is_computed_alike_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = read_command_line(["--config", str(REPOSITORY / "config/recipes/demo.yaml")])
    world: Any = SimpleNamespace(device=torch.device("cuda"), gather_objects=lambda problem: [None, problem])
    monkeypatch.setattr(engine_kernels, "find_spec", lambda name: None)
    softmax, [note] = engine_kernels.choose_softmax(resolved, world)
    assert softmax is None
    assert "torch's operators on every rank, because of rank 1: triton is not installed" in note
    asked = read_command_line(["--config", str(REPOSITORY / "config/recipes/demo.yaml"), "model.kernels=torch"])
    assert engine_kernels.choose_softmax(asked, world) == (None, [])


def test_a_machine_that_triton_cannot_compile_on_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    gpu = torch.device("cuda")
    assert kernels.uncompilable_reason(torch.device("cpu")) is None
    monkeypatch.setattr(kernels, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    monkeypatch.setattr(kernels.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h, which is missing; apt-get install python3-dev" in str(kernels.uncompilable_reason(gpu))
    (tmp_path / "Python.h").touch()
    assert kernels.uncompilable_reason(gpu) is None
    monkeypatch.setattr(kernels, "which", lambda name: None)
    assert "neither gcc nor clang" in str(kernels.uncompilable_reason(gpu))
