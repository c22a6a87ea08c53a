"""Record a few steps of a DeepSpeed run, for `python -m tools.audit FOLDER`. Needs torch and DeepSpeed only.

A bare engine, or the model that `accelerator.prepare` returned:

    from mantissa_probe import Probe
    probe = Probe(engine, "probe")            # scheduler=... where DeepSpeed does not step it itself

The Hugging Face Trainer, and those of TRL:

    from mantissa_probe import Probe
    trainer.add_callback(Probe.callback(trainer, "probe"))

Every rank must create the probe. In a chosen step each rank writes the model's inputs, and rank 0 the masters, moments
and reduced gradient, into FOLDER/step-N.rankR.pt (numbers, text and tensors: `torch.load(weights_only=True)`). A file
appears whole or not at all. No random number is drawn, and the model gets no hook that outlives a forward pass.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import random
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

MOMENTS = ("exp_avg", "exp_avg_sq")
OF_PREFERENCES = (
    *("f_divergence_type", "use_weighting", "ld_alpha", "rpo_alpha"),
    *("reference_free", "sync_ref_model", "loss_weights"),
)
"""Settings of TRL's DPO that make another loss of the sigmoid one."""
_SHARES = 2 + 2 * len(MOMENTS)
"""FP32 copies of all parameters in a step: gradient, masters after it, moments before and after."""
_INPUTS = 2**30
"""[bytes] Inputs of a step that are kept in memory, also where fewer may be written."""


class Probe:
    """Records chosen steps of an engine. A failure of its own warns once and ends the recording, never the training."""

    def __init__(
        self,
        engine: Any,
        folder: str | os.PathLike[str],
        steps: Iterable[int] | None = None,
        *,
        scheduler: Any = None,
        max_bytes: int = 2**31,
        max_seconds: float = 300.0,
        seed: int = 0,
        trainer: dict[str, Any] | None = None,
    ) -> None:
        """steps: optimizer steps counted from 1 (default: the first three, and three drawn by `seed` up to step 1,000).

        scheduler: the learning rate scheduler, if the loop steps it. max_bytes, max_seconds: most that a rank may
        write, and most time for recording, in total. Masters before the update are kept whole in as many of the steps
        as have room for them; where none has, and of all else, every n-th value is kept. trainer: facts of a Hugging
        Face trainer, which `callback` fills in.
        """
        self.engine, self.folder = getattr(engine, "engine", engine), Path(folder)
        self.batch: Mapping[str, Any] | None = None
        """The micro-batch as the trainer has it, if it holds more than the model's inputs."""
        self._bytes_left, self._seconds_left = int(max_bytes), max_seconds
        self._failed, self._step, self._applied = False, 1, 0
        self._micros: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        """Calls of the model since the last backward pass."""
        self._held = 0
        """[bytes] Inputs kept of this step."""
        self._hooks: list[Any] = []
        self._inner: dict[str, str] = {}
        if not hasattr(self.engine, "zero_optimization_stage"):  # on all ranks alike
            self._failed = True
            _warn(f"nothing is recorded: the probe is for DeepSpeed, and this is a {type(engine).__name__}")
            return
        self.rank, self.stage = dist.get_rank(), self.engine.zero_optimization_stage()
        self.model = getattr(self.engine.module, "_orig_mod", self.engine.module)  # torch.compile wraps it
        self.scheduler = scheduler if scheduler is not None else getattr(self.engine, "lr_scheduler", None)
        self._training = self._most(time.time_ns())
        """Identifies the training: the same on all ranks, and in each file."""
        why = ""
        try:
            drawn = [1, 2, 3, *random.Random(seed).sample(range(4, 1001), 3)]
            self.steps = sorted(set(drawn if steps is None else steps))
            self._prepare(trainer or {})
        except Exception as error:  # no failure here may end a training
            why = f"{type(error).__name__}: {error}"
        chosen = zlib.crc32(repr(getattr(self, "steps", None)).encode())
        if self._most(chosen) != -self._most(-chosen):  # ranks would wait for each other
            why = why or "ranks were given other steps, or another seed"
        if self._most(bool(why)):
            self._failed = True
            _warn(f"nothing is recorded: {why or 'another rank cannot'}")
            return
        self._forward, self._backward, self._engine_step = self.engine.forward, self.engine.backward, self.engine.step
        self.engine.forward, self.engine.backward = self._on_forward, self._on_backward
        self.engine.step = self._on_step

    def _prepare(self, trainer: dict[str, Any]) -> None:
        """Find parameters and masters, and write the run's facts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.glob("step-*.pt")):  # as after a restart
            raise FileExistsError(f"{self.folder} holds a training's steps already; give this one another folder")
        for left in ("reported.jsonl", f"ended.rank{self.rank}.txt"):
            (self.folder / left).unlink(missing_ok=True)
        self._optimizer = getattr(self.engine, "basic_optimizer", None) or self.engine.optimizer
        self._places = self._placed()
        named = list(self.model.named_parameters())
        self._trained = {name: each for name, each in named if each.requires_grad and id(each) in self._places}
        self._frozen = {name: each for name, each in named if name not in self._trained}
        """Parameters that only the first recorded step keeps, for no step changes them."""
        self._frozen_stride = max(1, -(-4 * _bytes(self._frozen) // max(1, self._bytes_left)))
        self._bind = inspect.signature(self.model.forward).bind_partial
        if self.rank == 0:
            facts = json.dumps({**self._facts(), "trainer": trainer}, default=str)
            self._write("probe.json", lambda path: path.write_text(facts, encoding="utf-8"))

    @staticmethod
    def callback(trainer: Any, folder: str | os.PathLike[str], **options: Any) -> Any:
        """A TrainerCallback that probes a Hugging Face Trainer's engine; `options` are those of `Probe`."""
        from transformers import TrainerCallback

        # a wrong option is told before training
        inspect.signature(Probe).bind(trainer, folder, scheduler=None, trainer=None, **options)

        class Callback(TrainerCallback):
            probe: Probe
            resumed_from: int

            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                names = ("beta", "loss_type", "label_smoothing", "label_smoothing_factor")
                facts = {key: getattr(args, key, None) for key in names} | {"resumed_from": state.global_step}
                facts["preferences"] = {key: getattr(args, key, None) for key in OF_PREFERENCES}
                loss = getattr(trainer, "compute_loss_func", None) or trainer.compute_loss
                facts |= {"class": type(trainer).__name__, "loss": getattr(loss, "__qualname__", type(loss).__name__)}
                scheduler, self.resumed_from = given.get("lr_scheduler"), state.global_step
                self.probe = Probe(trainer.model_wrapped, folder, scheduler=scheduler, trainer=facts, **options)
                inner = trainer.compute_loss

                def compute_loss(model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
                    if self.probe.records and isinstance(inputs, Mapping):
                        self.probe.batch = dict(inputs)
                    return inner(model, inputs, *more, **named)

                if not self.probe._failed:
                    trainer.compute_loss = compute_loss

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
                if (args.logging_strategy, args.logging_steps) == ("steps", 1) and "loss" in (logs or ()):
                    self.probe.report(logs["loss"], state.global_step - self.resumed_from)

        return Callback()

    def report(self, loss: Any, step: int | None = None) -> None:
        """Record the loss that the loop shows for a step (the last one), if not the one passed to `backward`."""
        step = self._step - 1 if step is None else step
        if self._failed or self.rank or step not in self.steps:
            return
        try:
            line = json.dumps({"step": step, "loss": float(loss)})
            with (self.folder / "reported.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except Exception as error:  # no failure here may end a training
            self._fail(f"recording ended after step {step}: {type(error).__name__}: {error}")

    @property
    def records(self) -> bool:
        """Whether a forward pass that starts now is recorded."""
        return not self._failed and self._step in self.steps and torch.is_grad_enabled()

    # Called by the loop

    def _on_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Wraps the engine's method, since a compiled model traces its own hooks, and copies of a model copy them."""
        call = self._guarded(self._before_forward, args, kwargs) if self.records else None
        try:
            output = self._forward(*args, **kwargs)
        finally:
            while self._hooks:
                self._hooks.pop().remove()
        if call:
            self._guarded(self._after_forward, call)
        return output

    def _before_forward(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = dict(self._bind(*args, **kwargs).arguments)
        for name in [name for name, value in given.items() if isinstance(value, dict)]:
            given |= given.pop(name)
        device, engine = self.engine.device.type, self.engine
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if getattr(engine, "torch_autocast_enabled", bool)():  # which the engine will enter
            dtype = engine.torch_autocast_dtype()
        call = {"inputs": self._copies(given), "autocast": dtype and str(dtype), "training": self.model.training}
        call |= {"routers": bool(given.get("output_router_logits")), "random": self._random_states()}
        if not self._inner and not any(map(_is_compiled, self.engine.module.modules())):  # which would compile it again
            leaves = [each for each in self.model.modules() if next(each.children(), None) is None]
            self._hooks = [each.register_forward_hook(self._note_dtype) for each in leaves]
        return call

    def _after_forward(self, call: dict[str, Any]) -> None:
        states = zip(call["random"], self._random_states(), strict=True)
        self._calls.append(call | {"random": not all(torch.equal(before, after) for before, after in states)})

    def _random_states(self) -> list[torch.Tensor]:
        """States of the generators that a forward pass may draw from."""
        device = self.engine.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    def _note_dtype(self, module: Any, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and isinstance(output, torch.Tensor) and output.is_floating_point():
            self._inner[type(module).__name__] = str(output.dtype)

    def _copies(self, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        found = {key: value.detach() for key, value in given.items() if isinstance(value, torch.Tensor)}
        self._held += sum(value.nbytes for value in found.values())
        if self._held > max(self._bytes_left, _INPUTS):  # also of a loop that never calls `step`
            raise MemoryError(f"its inputs have more than {max(self._bytes_left, _INPUTS)} bytes; set max_bytes")
        return {key: value.to("cpu", copy=True) for key, value in found.items()}

    def _on_backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        micro = self._guarded(self._before_backward, loss, kwargs.get("scale_wrt_gas", True))
        self._calls, self.batch = [], None
        result = self._backward(loss, *args, **kwargs)
        if micro:
            self._micros.append(micro)
        return result

    def _before_backward(self, loss: Any, divided: bool) -> dict[str, Any]:
        micro = {"loss": float(loss.detach()), "loss_dtype": str(loss.dtype), "calls": self._calls}
        micro["divided_by"] = self.engine.gradient_accumulation_steps() if divided else 1
        return {**micro, "batch": self._copies(self.batch or {})}

    def _on_step(self, *args: Any, **kwargs: Any) -> Any:
        boundary = self.engine.is_gradient_accumulation_boundary()
        record = self._recorded() if boundary and self._step in self.steps else None
        result = self._engine_step(*args, **kwargs)
        if boundary or not getattr(self.engine, "managed_gradient_accumulation", lambda: True)():
            applied = getattr(self.engine, "was_step_applied", lambda: True)()
            if record:
                self._guarded(self._after_step, record, applied)
            self._applied += bool(applied)
            self._step, self._micros, self._calls, self._held = self._step + 1, [], [], 0
        return result

    def _recorded(self) -> dict[str, Any] | None:
        """Record the state before an update, on all ranks or on none, since reading masters is a collective."""
        found: Any = ()
        for record in (self._strides, self._before_step):
            found = self._guarded(record, *found)
            if self._most(found is None or self._failed):
                self._failed = True
                return None
        return found

    def _strides(self) -> tuple[int, int] | None:
        """Strides of the masters before the update, and of all else, that are kept; None: the step is not recorded."""
        masters = 4 * sum(_shape(each).numel() for each in self._trained.values())
        left, found = max(0, self._bytes_left - _bytes(self._frozen) // self._frozen_stride), None
        steps = sum(step >= self._step for step in self.steps)
        for whole, share in itertools.product((True, False), range(steps, 0, -1)):
            room = left // share - self._held - whole * masters
            stride = max(1, -(-(_SHARES + (not whole)) * masters // max(1, room)))
            if found is None and room > 0 and stride <= (64 if whole else 4096):
                found = 1 if whole else stride, stride
        needed = f"max_bytes={int(1.2 * (self._held + masters))} for each step would keep all masters"
        why = "" if found else f"{left} bytes are left; {needed}"
        why = "max_seconds is used up" if self._seconds_left < 0 else why
        if why:
            self._fail(f"nothing is recorded from step {self._step} on: {why}")
            return None
        if found and found[0] > 1 and self.rank == 0 and self._step == self.steps[0]:
            _warn(f"masters are kept in part; {needed}")
        largest = max(_shape(each).numel() for each in self.model.parameters())
        torch.empty(2 * largest + 2**26, device=self.engine.device)  # or it has no room, and others would wait for it
        return found

    def _guarded(self, record: Any, *given: Any) -> Any:
        """The result of a method in a chosen step; None in other steps, or once the recording has ended."""
        if self._failed or self._step not in self.steps:
            return None
        started = time.monotonic()
        try:
            with torch.no_grad():
                return record(*given)
        except Exception as error:  # no failure here may end a training
            self._fail(f"recording ended in step {self._step}: {type(error).__name__}: {error}")
        finally:
            self._seconds_left -= time.monotonic() - started

    def _fail(self, why: str) -> None:
        self._failed, self._micros, self._calls, self.batch = True, [], [], None
        _warn(f"rank {self.rank}: {why}")
        with contextlib.suppress(OSError):
            (self.folder / f"ended.rank{self.rank}.txt").write_text(why, encoding="utf-8")  # for the audit

    # What is recorded

    def _before_step(self, start_stride: int, stride: int) -> dict[str, Any]:
        found: dict[str, Any] = {key: {} for key in ("weights", "gradients", "squares", "frozen", "gradient")}
        for name, parameter in self.model.named_parameters():
            if self.stage < 3:
                found["weights"][name] = _sum(parameter)
            if self.stage == 0 and parameter.grad is not None:
                found["gradients"][name] = _sum(parameter.grad)
            if name in self._frozen:
                with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                    self._keep(found["frozen"], name, parameter, self._frozen_stride)
            elif name in self._trained and (gradient := safe_get_full_grad(parameter)) is not None:
                found["squares"][name] = _sum(gradient)[1]
                self._keep(found["gradient"], name, gradient, stride)
        found |= self._states("before", start_stride, stride)
        found["groups"] = [
            {key: value for key, value in group.items() if isinstance(value, int | float | str | tuple)}
            for group in self.engine.optimizer.param_groups
        ]
        optimizer, scheduler = self.engine.optimizer, getattr(self.scheduler, "scheduler", self.scheduler)
        scale = getattr(optimizer, "loss_scale", None) or getattr(optimizer, "cur_scale", None) or 1.0
        found |= {"start_stride": start_stride, "stride": stride, "frozen_stride": self._frozen_stride}
        found |= {"scale": float(scale), "schedule": getattr(scheduler, "last_epoch", None)}
        found["fp32"] = sorted({str(each.dtype) for each in self._stepped() if each.is_floating_point()})
        return found

    def _after_step(self, found: dict[str, Any], applied: bool) -> None:
        norm = self.engine.get_global_grad_norm()
        found |= self._states("after", found["stride"], found["stride"])
        found |= {"training": self._training, "step": self._step, "rank": self.rank, "applied": bool(applied)}
        counted = [*self._optimizer.state.values(), *self._optimizer.param_groups]
        steps = next((float(each["step"]) for each in counted if "step" in each), None)
        found |= {"applied_before": self._applied, "optimizer_step": steps, "inner": self._inner}
        found |= {"norm": None if norm is None else float(norm), "micros": self._micros}
        if self._failed:
            return
        self._write(f"step-{self._step:06d}.rank{self.rank}.pt", lambda path: torch.save(found, path))
        self._frozen = {}

    def _keep(self, kept: dict[str, torch.Tensor], name: str, value: torch.Tensor, stride: int) -> None:
        """Keep every `stride`-th value, on rank 0: gathered values are the same on all ranks."""
        if self.rank or self._failed:
            return
        try:
            part = value.detach().reshape(-1)[::stride] if stride > 1 else value.detach()
            kept[name] = part.to("cpu", copy=True)
        except Exception as error:  # of memory: the other ranks wait for this one to gather the next
            self._fail(f"recording ended in step {self._step}: {type(error).__name__}: {error}")

    def _states(self, when: str, of_masters: int, stride: int) -> dict[str, dict[str, torch.Tensor]]:
        """Masters, and moments if every rank's optimizer has both for all parameters that it steps."""
        known = [self._optimizer.state.get(each, {}) for each in self._stepped()]
        lacks = self._most(any(key not in state for state in known for key in MOMENTS))
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key in ("", *(() if lacks else MOMENTS)):
            kept = found[f"{key}_{when}" if key else when] = {}
            for name, parameter in self._trained.items():
                self._keep(kept, name, self._state(parameter, key), stride if key else of_masters)
        return found

    def _state(self, parameter: Any, key: str) -> torch.Tensor:
        """The whole FP32 master of a parameter, or its moment for a key of MOMENTS."""
        if hasattr(parameter, "ds_id"):  # ZeRO-3
            whole = safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
        elif hasattr(parameter, "_hp_mapping"):  # DeepSpeed's reader handles the first parameter group only
            whole, piece = torch.zeros(parameter.numel(), device=parameter.device), parameter._hp_mapping
            if piece is not None:
                flat = self._optimizer.param_groups[piece.param_group_index]["params"][0]
                there, here = piece.hp_fragment_address, piece.lp_fragment_address
                part = (self._optimizer.state[flat][key] if key else flat).narrow(0, there.start, there.numel)
                whole.narrow(0, here.start, here.numel).copy_(part)
            dist.all_reduce(whole, group=parameter._dp_group)
        else:
            _, source, at = self._places[id(parameter)]
            whole = (self._optimizer.state[source][key] if key else source).reshape(-1)[at : at + parameter.numel()]
        return whole.view(_shape(parameter))

    def _stepped(self) -> list[torch.Tensor]:
        partitions = getattr(self.engine.optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3's
        return partitions or [each for group in self._optimizer.param_groups for each in group["params"]]

    def _placed(self) -> dict[int, tuple[int, Any, int]]:
        """Parameter id to its group and, without ZeRO, to the tensor that holds its master and the offset in it."""
        optimizer, found = self.engine.optimizer, dict[int, tuple[int, Any, int]]()
        listed = (getattr(optimizer, f"{dtype}_groups", None) for dtype in ("bit16", "fp16", "bf16"))
        groups = next(filter(None, listed), None) or [group["params"] for group in optimizer.param_groups]
        for index, group in enumerate(groups):
            number = getattr(optimizer, "sub_group_to_group_id", {}).get(index, index)  # ZeRO-3's
            own, at = [] if self.stage else self._optimizer.param_groups[number]["params"], 0
            for place, parameter in enumerate(group):
                flat = len(own) < len(group)  # one tensor holds the group's masters
                source = own[0 if flat else place] if own else None
                found[id(parameter)] = number, source, at if flat else 0
                at += parameter.numel()
        return found

    def _facts(self) -> dict[str, Any]:
        engine = self.engine
        embedding = getattr(self.model, "get_input_embeddings", lambda: None)()
        drops = [each for each in self.model.modules() if "Dropout" in type(each).__name__]
        left = [name for name, own in self.model.named_parameters() if own.requires_grad and name not in self._trained]
        found = {"training": self._training, "world": dist.get_world_size(), "stage": self.stage}
        found |= {"forgotten": len(left), "forgotten_names": ", ".join(left)}
        found |= {"versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__}}
        found |= {"engine": type(engine).__name__, "accumulation": engine.gradient_accumulation_steps()}
        found |= {"optimizer": type(self._optimizer).__name__, "clipping": float(engine.gradient_clipping())}
        found["compute"] = "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"
        found |= {"model": type(self.model).__name__, "padding_idx": getattr(embedding, "padding_idx", None)}
        found["model_config"] = getattr(getattr(self.model, "config", None), "to_dict", lambda: None)()
        found["dropout"] = any(getattr(each, "p", 0) for each in drops)
        found["product_bits"] = _product_bits(engine.device)
        found["parameters"] = {
            name: [list(_shape(each)), name in self._trained, self._places.get(id(each), (0,))[0]]
            for name, each in self.model.named_parameters()
        }
        return found

    def _most(self, value: int) -> int:
        """The largest of the ranks' values."""
        found = torch.tensor([int(value)], device=self.engine.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found.item())

    def _write(self, name: str, save: Callable[[Path], object]) -> None:
        """Write a file, which appears whole or not at all."""
        written = self.folder / f"{name}.tmp"
        try:
            save(written)
            self._bytes_left -= written.stat().st_size
            written.replace(self.folder / name)
        finally:
            written.unlink(missing_ok=True)  # a full disk is needed by others


def _warn(why: str) -> None:
    with contextlib.suppress(Warning):  # scripts may make them errors
        warnings.warn(f"mantissa_probe: {why}", stacklevel=4)


def _is_compiled(module: Any) -> bool:
    wrapped = hasattr(module, "_orig_mod") or hasattr(module.forward, "_torchdynamo_orig_callable")
    return wrapped or getattr(module, "_compiled_call_impl", None) is not None


def _product_bits(device: torch.device) -> int:
    """Bits of mantissa of an FP32 number that its product with 1 keeps: 10 by TF32. No setting of torch's tells all."""
    bits = torch.arange(512, device=device) % 23 + 1
    numbers = (1 + 0.5**bits).expand(512, 512)
    with torch.autocast(device.type, enabled=False):
        lost = (numbers @ torch.eye(512, device=device))[0] != numbers[0]
    return int(bits[lost].min()) - 1 if bool(lost.any()) else 23


def _shape(parameter: Any) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _bytes(parameters: dict[str, Any]) -> int:
    return sum(_shape(each).numel() * each.element_size() for each in parameters.values())


def _sum(values: torch.Tensor) -> list[float]:
    """A checksum: the sum and the sum of squares in FP64. A GPU may have no room for a whole parameter in it."""
    total = square = 0.0
    for part in values.detach().reshape(-1).split(2**24):
        total, square = total + float(part.double().sum()), square + float(part.double().square().sum())
    return [total, square]
