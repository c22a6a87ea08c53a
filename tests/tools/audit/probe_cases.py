"""Mistakes planted into other people's loops, by `python -m lab.audit --plant tests.tools.audit.probe_cases:NAME`.

Each is called in both ranks before the loop, and changes DeepSpeed, torch or the work from inside, where the probe does
not look.
"""

from __future__ import annotations

import copy
import gc
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lab import audit
from lab.audit import bare
from tools.audit import mantissa_probe
from tools.audit.mantissa_probe import Probe

ADAMW: Any = torch.optim.AdamW


def _backward(work: Any, factor: Any) -> None:
    """Backward of the loss times `factor(number of the micro-batch)`."""
    inner, count = DeepSpeedEngine.backward, [0]

    def backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return inner(self, loss * factor(count[0] - 1), *args, **kwargs)

    DeepSpeedEngine.backward = backward


def _after_step(change: Any) -> None:
    """Call `change(engine, number of the step)` after each of DeepSpeed's steps."""
    inner, count = DeepSpeedEngine._take_model_step, [0]

    def step(self: Any, *args: Any) -> None:
        inner(self, *args)
        count[0] += 1
        with torch.no_grad():
            change(self, count[0])

    DeepSpeedEngine._take_model_step = step


def dropped_micro_batch(work: Any) -> None:
    """The second micro-batch of each step has no gradient."""
    _backward(work, lambda number: float(number % 2 == 0))


def doubled_micro_batch(work: Any) -> None:
    """The second micro-batch of each step counts twice."""
    _backward(work, lambda number: 1.0 + number % 2)


def doubled_gradient(work: Any) -> None:
    """The accumulation is not divided by."""
    _backward(work, lambda number: 2.0)


def skipped_rank(work: Any) -> None:
    """Rank 1's gradients do not count."""
    _backward(work, lambda number: 1.0 - work.rank)


def dropped_parameter(work: Any) -> None:
    """One matrix has no gradient."""
    inner = work.model

    def model() -> Any:
        found = inner()
        found.model.layers[1].mlp.down_proj.weight.register_hook(torch.zeros_like)
        return found

    work.model = model


def forgotten_parameter(work: Any) -> None:
    """The optimizer is made before the head is."""
    inner = work.optimizer

    def optimizer(model: Any) -> torch.optim.Optimizer:
        found = inner(model)
        found.param_groups[0]["params"] = [each for each in model.parameters() if each is not model.lm_head.weight]
        return found

    work.optimizer = optimizer


def old_gradients(work: Any) -> None:
    """Gradients of the step before are not cleared (without ZeRO)."""
    DeepSpeedEngine.zero_grad = lambda self: None


def rounded_start(work: Any) -> None:
    """The model is loaded in BF16."""
    inner = work.model
    work.model = lambda: inner().bfloat16().float()


def rounded_masters(work: Any) -> None:
    """Masters are rounded to BF16 after each update."""

    def change(engine: Any, number: int) -> None:
        for flat in engine.optimizer.single_partition_of_fp32_groups:
            flat.copy_(flat.bfloat16())

    _after_step(change)


def clipped_before_unscaling(work: Any) -> None:
    """The scaled gradient's norm clips."""

    def unscale(self: Any, flat: Any, norm: Any) -> None:
        clip = (norm + 1e-6) / self.clip_grad
        for each in flat:
            each.mul_(1.0 / (self.loss_scale * max(1.0, float(clip))))

    DeepSpeedZeroOptimizer.unscale_and_clip_grads = unscale


def partial_norm(work: Any) -> None:
    """Each rank clips by the norm of its own part."""
    inner = DeepSpeedZeroOptimizer.scaled_global_norm

    def norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = inner(self, *args, **kwargs)
        parts = [value for group in self.averaged_gradients.values() if group for value in group]
        own = torch.stack([value.float().norm() for value in parts]).norm()
        return own if float(own) else whole

    DeepSpeedZeroOptimizer.scaled_global_norm = norm


def norm_of_a_group(work: Any) -> None:
    """The norm that clips is 0.6 of the gradient's on all ranks, as of one group of parameters."""
    inner = DeepSpeedZeroOptimizer.scaled_global_norm
    DeepSpeedZeroOptimizer.scaled_global_norm = lambda self, *args, **kwargs: inner(self, *args, **kwargs) * 0.6


def other_weights(work: Any) -> None:
    """Rank 1 has another weight from the first step on (without ZeRO)."""

    def change(engine: Any, number: int) -> None:
        if work.rank == 1 and number == 1:
            engine.module.lm_head.weight[3] += 1e-3

    _after_step(change)


def stale_weights(work: Any) -> None:
    """The model keeps the weights that it had before the second update."""
    kept: dict[str, torch.Tensor] = {}

    def change(engine: Any, number: int) -> None:
        named = dict(engine.module.named_parameters())
        if number == 1:
            kept.update({name: value.clone() for name, value in named.items()})
        if number >= 2:
            for name, value in named.items():
                value.copy_(kept[name])

    _after_step(change)


def changed_masters(work: Any) -> None:
    """Masters are replaced by the rounded weights after the first step, as a reload of weights does."""

    inner, count = DeepSpeedEngine.forward, [0]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            self.optimizer.refresh_fp32_params()
        return inner(self, *args, **kwargs)

    DeepSpeedEngine.forward = forward


def rate_one_step_ahead(work: Any) -> None:
    """The schedule is stepped before the first update."""
    inner = work.schedule

    def schedule(optimizer: Any) -> Any:
        found = inner(optimizer)
        found.step()
        return found

    work.schedule = schedule


def _warm_up(work: Any, rate: float) -> None:
    """A rate of 0 in the first step, which grows by `rate` in each."""
    schedule = torch.optim.lr_scheduler.LambdaLR
    work.schedule = lambda optimizer: schedule(optimizer, lambda step: step * rate / work.lr)


def warm_up(work: Any) -> None:
    """No mistake: the rate warms up in 10 steps."""
    _warm_up(work, work.lr / 10)


def long_warm_up(work: Any) -> None:
    """No mistake: the second update is below half an ulp of some masters."""
    _warm_up(work, 1e-8)


def longer_warm_up(work: Any) -> None:
    """No mistake: the first updates are below half an ulp of nearly all masters."""
    _warm_up(work, 1e-12)


def other_rate(work: Any) -> None:
    """The optimizer moves at half of the rate that its group says."""
    inner = ADAMW.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] /= 2
        try:
            return inner(self, *args, **kwargs)
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    ADAMW.step = step


def lost_update(work: Any) -> None:
    """Masters are put back after each update."""
    inner = ADAMW.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = [value for group in self.param_groups for value in group["params"]]
        kept = [value.detach().clone() for value in params]
        found = inner(self, *args, **kwargs)
        for value, before in zip(params, kept, strict=True):
            value.data.copy_(before)
        return found

    ADAMW.step = step


def coarse_moments(work: Any) -> None:
    """The second moment is kept in BF16."""
    inner = ADAMW.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(self, *args, **kwargs)
        for state in self.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].bfloat16())
        return found

    ADAMW.step = step


def shifted_labels(work: Any) -> None:
    """Labels are shifted in the loader, and again in the model."""
    inner = work.batches

    def batches() -> Any:
        for batch in inner():
            labels = torch.cat([batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], -100)], 1)
            yield {**batch, "labels": labels}

    work.batches = batches


def stale_batch(work: Any) -> None:
    """The second micro-batch is the first one again."""
    inner = work.batches

    def batches() -> Any:
        read = inner()
        for batch in read:
            yield batch
            next(read)
            yield batch

    work.batches = batches


def same_batch_on_ranks(work: Any) -> None:
    """Both ranks read rank 0's rows."""
    work.rank = 0


def loss_in_16_bits(work: Any) -> None:
    """The model's loss is BF16."""
    inner = work.model

    def model() -> Any:
        found = inner()

        def coarse(module: Any, args: Any, output: Any) -> Any:
            output.loss = output.loss.bfloat16()
            return output

        found.register_forward_hook(coarse)
        return found

    work.model = model


def reported_sum(work: Any) -> None:
    """The Trainer logs the sum over ranks."""
    from transformers import Trainer

    inner = Trainer.log

    def log(self: Any, logs: Any, *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs:
            logs["loss"] *= 2
        return inner(self, logs, *args, **kwargs)

    setattr(Trainer, "log", log)  # noqa: B010


def _limited(work: Any, most: int) -> None:
    """A probe that may write so many bytes; the masters have 460,032."""
    inner = work.probe
    work.probe = lambda engine, **given: inner(engine, max_bytes=most, **given)


def little_space(work: Any) -> None:
    """No mistake: the probe may write less than three whole steps take."""
    _limited(work, 2_000_000)


def room_for_two_steps(work: Any) -> None:
    """No mistake: the probe may write less than the masters of three steps take."""
    _limited(work, 1_300_000)


def room_for_no_masters(work: Any) -> None:
    """No mistake: the probe may write less than the masters of a step take."""
    _limited(work, 400_000)


def no_room(work: Any) -> None:
    """No mistake: the probe may write less than the inputs of a step take."""
    _limited(work, 1000)


def frozen_matrices(work: Any) -> None:
    """No mistake: only the norms are trained."""
    inner = work.model

    def model() -> Any:
        found = inner()
        for name, parameter in found.named_parameters():
            parameter.requires_grad_("norm" in name)
        return found

    work.model = model


def large_frozen_matrices(work: Any) -> None:
    """No mistake: the probe may write less than the matrices take, and only the norms are trained."""
    frozen_matrices(work)
    _limited(work, 200_000)


def smoothed_labels(work: Any) -> None:
    """No mistake: the Trainer smooths labels."""
    inner = audit._arguments
    audit._arguments = lambda work: inner(work) | {"label_smoothing_factor": 0.1}


def noisy_embeddings(work: Any) -> None:
    """No mistake: the Trainer adds noise to embeddings."""
    inner = audit._arguments
    audit._arguments = lambda work: inner(work) | {"neftune_noise_alpha": 5.0}


def own_cross_entropy(work: Any) -> None:
    """No mistake: the loop computes its loss from logits, and from labels that the loader has shifted."""
    shifted_labels(work)
    inner = work.probe

    def probe(engine: Any) -> Any:
        found, forward = inner(engine), engine.forward

        def called(labels: torch.Tensor, **inputs: Any) -> Any:
            found.batch = {"labels": labels}
            logits = forward(**inputs).logits
            return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

        engine.forward = called
        return found

    work.probe = probe


class Truncated(TorchDispatchMode):
    """Matrix products whose factors lose the last 13 bits of their mantissa, as on tensor cores by TF32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            cut = [(each.view(torch.int32) & -(1 << 13)).view(torch.float32) for each in args[-2:]]
            args = (*args[:-2], *cut)
        return func(*args, **kwargs or {})


def tf32(work: Any) -> None:
    """No mistake: products are those of TF32."""
    Truncated().__enter__()


def tf32_without_a_micro_batch(work: Any) -> None:
    """The second micro-batch of each step has no gradient, and products are those of TF32."""
    tf32(work)
    dropped_micro_batch(work)


def _prepared(work: Any, before: Any, after: Any = lambda engine: None) -> None:
    """Call `before(engine)` and `after(engine)` around the making of the probe, if there is one."""
    inner = work.probe

    def probe(engine: Any, **given: Any) -> Any:
        before(engine)
        found = inner(engine, **given)
        after(engine)
        return found

    work.probe = probe


def _compile(engine: Any) -> None:
    """Without `fullgraph`, since hooks of DeepSpeed 0.19.8 break the graph."""
    engine.compile(backend="eager")


def _count_graphs(work: Any) -> None:
    """Keep the number of graphs that were compiled until each update."""
    before = counters["stats"]["unique_graphs"]  # the process may be forked from one that compiled

    def count(engine: Any, number: int) -> None:
        with Path(f"{work.folder}.graphs.{work.rank}").open("a", encoding="utf-8") as file:
            file.write(f"{counters['stats']['unique_graphs'] - before}\n")

    _after_step(count)


def compiled(work: Any) -> None:
    """No mistake: the engine is compiled before the probe is made."""
    _count_graphs(work)
    _prepared(work, _compile)


def compiled_later(work: Any) -> None:
    """No mistake: the engine is compiled after the probe is made."""
    _count_graphs(work)
    _prepared(work, lambda engine: None, _compile)


def compiled_model(work: Any) -> None:
    """No mistake: the model is wrapped by torch.compile."""
    _count_graphs(work)
    inner = work.model
    work.model = lambda: torch.compile(inner(), backend="eager", fullgraph=True)


def compiled_layers(work: Any) -> None:
    """No mistake: each layer is compiled."""
    _count_graphs(work)

    def change(engine: Any) -> None:
        for layer in engine.module.model.layers:
            layer.compile(backend="eager", fullgraph=True)

    _prepared(work, change)


def compiled_by_the_trainer(work: Any) -> None:
    """No mistake: the Trainer compiles the model."""
    _count_graphs(work)
    inner = audit._arguments
    more = {"torch_compile": True, "torch_compile_backend": "eager"}
    audit._arguments = lambda work: inner(work) | more


def without_deepspeed(work: Any) -> None:
    """No mistake: the Trainer does not use DeepSpeed."""
    _print_warnings()
    inner = audit._arguments

    def arguments(work: Any) -> dict[str, Any]:
        found = inner(work)
        del os.environ["ACCELERATE_USE_DEEPSPEED"], found["deepspeed"], found["accelerator_config"]
        return found

    audit._arguments = arguments


def copied_model(work: Any) -> None:
    """No mistake: the loop copies the model after each step, as for an average of weights."""
    _after_step(lambda engine, number: copy.deepcopy(engine.module))


def busy_trainer(work: Any) -> None:
    """No mistake: the Trainer recomputes activations, evaluates after each step, and generates before its passes."""
    from transformers import Trainer

    inner, step, init = audit._arguments, Trainer.training_step, Trainer.__init__
    more = {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 1}
    audit._arguments = lambda work: inner(work) | more

    def training_step(self: Any, model: Any, inputs: Any, *given: Any) -> Any:
        with torch.inference_mode():
            model(**{key: value.clone() for key, value in inputs.items()})
        with torch.no_grad():
            self.model.generate(inputs["input_ids"][:, :4], max_new_tokens=2, do_sample=False)
        return step(self, model, inputs, *given)

    def made(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named, eval_dataset=work.rows()[:8])

    setattr(Trainer, "training_step", training_step)  # noqa: B010
    setattr(Trainer, "__init__", made)  # noqa: B010


def two_engines(work: Any) -> None:
    """No mistake: an engine with a probe of its own is trained in turns with the loop's."""
    import deepspeed

    def start(engine: Any) -> None:
        model = work.model()
        other, *_ = deepspeed.initialize(model=model, optimizer=work.optimizer(model), config=work.json())
        Probe(other, f"{work.folder}.other", [1, 2])
        forward = engine.forward

        def both(**batch: Any) -> Any:
            other.backward(other(**batch).loss)
            other.step()
            return forward(**batch)

        engine.forward = both

    _prepared(work, start)


def held_batches(work: Any) -> None:
    """No mistake: it is kept whether the probe holds a batch while the Trainer computes a loss."""
    from transformers import Trainer

    inner = Trainer.compute_loss

    def compute_loss(self: Any, *given: Any, **named: Any) -> Any:
        [probe] = [each for each in gc.get_objects() if isinstance(each, Probe)]
        with Path(f"{work.folder}.held.{work.rank}").open("a", encoding="utf-8") as file:
            file.write("-+"[probe.batch is not None])
        return inner(self, *given, **named)

    compute_loss.__qualname__ = inner.__qualname__
    setattr(Trainer, "compute_loss", compute_loss)  # noqa: B010


def retried_passes(work: Any) -> None:
    """No mistake: the first forward pass runs out of memory, as does the first backward pass, and both are repeated."""
    inner, failed = work.probe, set[str]()

    def failing(name: str, call: Any) -> Any:
        def once(*given: Any, **named: Any) -> Any:
            if name not in failed:
                failed.add(name)
                raise torch.OutOfMemoryError
            return call(*given, **named)

        return once

    def retrying(call: Any) -> Any:
        def twice(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except torch.OutOfMemoryError:
                return call(*given, **named)

        return twice

    def probe(engine: Any) -> Any:
        engine.forward, engine.backward = failing("forward", engine.forward), failing("backward", engine.backward)
        found, forward, backward = inner(engine), engine.forward, engine.backward
        last: list[Any] = []

        def again(**batch: Any) -> Any:
            last[:] = [batch]
            return retrying(forward)(**batch)

        def back(loss: Any) -> Any:
            try:
                return backward(loss)
            except torch.OutOfMemoryError:
                return backward(forward(**last[0]).loss)

        engine.forward, engine.backward = again, back
        return found

    work.probe = probe


def _fails(work: Any, name: str, rank: int) -> None:
    """A method of the probe raises on one rank in the second step."""
    inner = getattr(Probe, name)

    def method(self: Any, *given: Any) -> Any:
        if self.rank == rank and self._step == 2:
            raise torch.OutOfMemoryError(name)
        return inner(self, *given)

    setattr(Probe, name, method)
    warnings.simplefilter("error", UserWarning)


def fails_forward(work: Any) -> None:
    """The probe fails in a forward pass of rank 1, and its warnings are errors."""
    _fails(work, "_before_forward", 1)


def fails_backward(work: Any) -> None:
    """The probe fails in a backward pass of rank 0."""
    _fails(work, "_before_backward", 0)


def fails_before_step(work: Any) -> None:
    """The probe of rank 1 finds no room for what it would read."""
    _fails(work, "_strides", 1)


def fails_to_keep(work: Any) -> None:
    """Rank 0 has no memory for what it keeps of the second step, while rank 1 waits for it."""
    kept = Probe._keep

    def keep(self: Any, held: Any, name: str, value: Any, stride: int) -> None:
        kept(self, held, name, None if self._step == 2 and "1.mlp" in name else value, stride)

    setattr(Probe, "_keep", keep)  # noqa: B010


def fails_after_step(work: Any) -> None:
    """Rank 0 has no memory for what it keeps after the second update."""
    kept, states = Probe._keep, Probe._states

    def keep(self: Any, held: Any, name: str, value: Any, stride: int) -> None:
        kept(self, held, name, None if self._step == 2 and self._after else value, stride)

    def of(self: Any, when: str, *strides: int) -> Any:
        self._after = when == "after"
        return states(self, when, *strides)

    setattr(Probe, "_keep", keep)  # noqa: B010
    setattr(Probe, "_states", of)  # noqa: B010


def _print_warnings() -> None:
    """Write warnings to the log, from which pytest keeps them."""
    warnings.showwarning = lambda message, *given, **named: os.write(2, f"{message}\n".encode())


def other_steps(work: Any) -> None:
    """Ranks are given seeds of their own."""
    _print_warnings()
    work.probe = lambda engine, **given: Probe(engine, work.folder, seed=work.rank, **given)


def never_stepped(work: Any) -> None:
    """No mistake: the loop's inputs have more bytes than the probe may hold, as where `step` is never called."""
    mantissa_probe._INPUTS = 3000
    _limited(work, 3000)


def own_loss(work: Any) -> None:
    """No mistake: the Trainer's subclass adds another loss."""
    import transformers

    class Penalised(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, True, **named)
            return loss + 0.1 * outputs.logits.square().mean()

    setattr(transformers, "Trainer", Penalised)  # noqa: B010


def resumed_trainer(work: Any) -> None:
    """No mistake: the Trainer saves a checkpoint of its first step, or resumes from it with the probe."""
    from transformers import Trainer

    inner, train = audit._arguments, Trainer.train
    audit._arguments = lambda work: inner(work) | {"save_strategy": "steps", "save_steps": 1}
    if work.probed:
        setattr(Trainer, "train", lambda self: train(self, f"{work.folder}.out/checkpoint-1"))  # noqa: B010


def without_probe_first(work: Any) -> None:
    """No mistake: the bare loop has run without the probe before, and the weights that it ended with are kept; and what
    probes said that left its engine alone."""
    probed, work.probed = work.probed, None
    engine = bare(work)
    work.probed = probed
    held, file, steps = Path(f"{work.folder}.held"), Path(f"{work.folder}.file"), engine.step
    held.mkdir(exist_ok=True)
    (held / "step-000001.rank0.pt").touch()
    file.touch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for folder in (held, file):
            Probe(engine, folder).report(1.0)
    assert engine.step == steps and len(list(held.iterdir())) == 1
    Path(f"{work.folder}.said.{work.rank}").write_text("\n".join(str(each.message) for each in said), encoding="utf-8")
    if work.rank == 0:
        torch.save(engine.module.state_dict(), f"{work.folder}.unprobed")
