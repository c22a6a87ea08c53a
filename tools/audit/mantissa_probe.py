"""Record a few steps of a DeepSpeed training, for `python -m tools.audit FOLDER`. Needs torch and DeepSpeed only.

A bare engine, or the model that `accelerator.prepare` returned:

    from mantissa_probe import Probe
    probe = Probe(engine, "probe")            # scheduler=... where DeepSpeed does not step it itself

The Hugging Face Trainer, and those of TRL:

    from mantissa_probe import Probe
    trainer.add_callback(Probe.callback(trainer, "probe"))

Every rank has to make the probe. In a chosen step each rank writes what went into the model, and rank 0 the masters,
moments and reduced gradient, into FOLDER/step-N.rankR.pt (plain tensors, `torch.load(weights_only=True)`) and .json. A
file appears whole or not at all. Nothing is written into the engine, and no random number is drawn.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
_SHARES = 3 + 2 * len(MOMENTS)
"""Whole FP32 copies of the parameters in a step: gradient, masters and moments before and after."""


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
    ) -> None:
        """steps: optimizer steps counted from 1 (default: the first three, and three drawn by `seed` up to step 1,000).

        scheduler: the learning rate's, where the loop steps it. max_bytes, max_seconds: what a rank may write, and may
        take for recording, in all; where masters and moments are larger, a part of their values is kept.
        """
        self.engine, self.folder = getattr(engine, "engine", engine), Path(folder)
        self.model, self.rank, self.stage = self.engine.module, dist.get_rank(), self.engine.zero_optimization_stage()
        drawn = [1, 2, 3, *random.Random(seed).sample(range(4, 1001), 3)]
        self.steps = sorted(set(drawn if steps is None else steps))
        self.scheduler = scheduler if scheduler is not None else getattr(self.engine, "lr_scheduler", None)
        self.batch: dict[str, Any] | None = None
        """The micro-batch as the trainer has it, where it knows more than the model is given."""
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self._seconds, self._bytes, self._failed = 0.0, 0, False
        self._step, self._applied = 1, 0
        self._micros: list[dict[str, Any]] = []
        self._calls: list[dict[str, Any]] = []
        self._hooks: list[Any] = []
        self._inner: dict[str, str] = {}
        self._rng: dict[str, torch.Tensor] = {}
        exists = self.rank == 0 and (self.folder / "probe.json").exists()
        if self._any(exists):
            raise ValueError(f"{self.folder} holds a probe already; give the new one another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._optimizer = getattr(self.engine, "basic_optimizer", None) or self.engine.optimizer
        self._fp32_of = self._fp32_without_zero()
        self._bind = inspect.signature(self.model.forward).bind_partial
        self.write_once("probe.json", self._facts())
        self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self.model.register_forward_hook(self._after_forward, with_kwargs=True)
        self._backward, self._engine_step = self.engine.backward, self.engine.step
        self.engine.backward, self.engine.step = self._on_backward, self._on_step

    @staticmethod
    def callback(trainer: Any, folder: str | os.PathLike[str], **options: Any) -> Any:
        """A TrainerCallback that probes a Hugging Face Trainer's engine; `options` are those of `Probe`."""
        from transformers import TrainerCallback

        class Callback(TrainerCallback):
            probe: Probe

            def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                engine = trainer.model_wrapped
                if not hasattr(engine, "zero_optimization_stage"):
                    raise TypeError(f"the probe is for DeepSpeed, and this trainer trains a {type(engine).__name__}")
                self.probe = Probe(engine, folder, scheduler=given.get("lr_scheduler"), **options)
                inner = trainer.compute_loss

                def compute_loss(model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
                    self.probe.batch = dict(inputs) if torch.is_grad_enabled() else None
                    return inner(model, inputs, *more, **named)

                trainer.compute_loss = compute_loss
                kept = ("beta", "loss_type", "label_smoothing_factor", "label_smoothing", "max_grad_norm")
                facts = {"class": type(trainer).__name__, **{key: getattr(args, key, None) for key in kept}}
                self.probe.write_once("trainer.json", facts)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
                if logs and "loss" in logs:
                    self.probe.report(logs["loss"], state.global_step)

        return Callback()

    def report(self, loss: Any, step: int | None = None) -> None:
        """The loss that the loop shows for a step (the last one), where it is not what went into `backward`."""
        if self.rank == 0:
            line = {"step": self._step - 1 if step is None else step, "loss": float(loss)}
            with (self.folder / "reported.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def write_once(self, name: str, facts: dict[str, Any]) -> None:
        """Facts beside the steps, as JSON."""
        if self.rank == 0:
            self._write(name, facts)

    # What the loop calls

    @property
    def _recording(self) -> bool:
        return self._step in self.steps and not self._failed

    def _before_forward(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (self._recording and torch.is_grad_enabled()):
            return
        if not self._micros and not self._calls:
            self._rng = {"cpu": torch.get_rng_state()}
            if torch.cuda.is_available():
                self._rng["cuda"] = torch.cuda.get_rng_state()
            if not self._inner:
                leaves = [each for each in module.modules() if next(each.children(), None) is None]
                self._hooks = [each.register_forward_hook(self._note_dtype) for each in leaves]
        try:
            given = dict(self._bind(*args, **kwargs).arguments)
        except TypeError:
            given = {f"argument {number}": value for number, value in enumerate(args)} | kwargs
        for name in [name for name, value in given.items() if isinstance(value, dict)]:
            given |= given.pop(name)
        autocast = torch.is_autocast_enabled(self.engine.device.type)
        dtype = str(torch.get_autocast_dtype(self.engine.device.type)) if autocast else None
        self._calls.append({"inputs": _plain(given), "autocast": dtype})

    def _after_forward(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._calls and torch.is_grad_enabled():
            found = output if isinstance(output, dict) else {"output": output}
            dtypes = {name: str(value.dtype) for name, value in found.items() if isinstance(value, torch.Tensor)}
            self._calls[-1]["dtypes"] = dtypes
            self._calls[-1]["training"] = module.training

    def _note_dtype(self, module: Any, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            self._inner[type(module).__name__] = str(output.dtype)

    def _on_backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if self._recording:
            scaled = kwargs.get("scale_wrt_gas", True)
            shares = self.engine.gradient_accumulation_steps() if scaled else 1
            value = loss.detach().double().cpu() if loss.numel() == 1 else torch.tensor(float("nan"))
            micro = {"loss": float(value), "loss_dtype": str(loss.dtype), "divided_by": shares, "calls": self._calls}
            micro["batch"] = _plain(self.batch or {})
            self._micros.append(micro)
            self._calls, self.batch = [], None
        return self._backward(loss, *args, **kwargs)

    def _on_step(self, *args: Any, **kwargs: Any) -> Any:
        boundary = self.engine.is_gradient_accumulation_boundary()
        kept = self._kept() if boundary and self._step in self.steps else None
        before = self._guarded(self._before_step, kept) if kept else None
        result = self._engine_step(*args, **kwargs)
        if boundary or not getattr(self.engine, "managed_gradient_accumulation", lambda: True)():
            applied = getattr(self.engine, "was_step_applied", lambda: True)()
            if kept and before:
                self._guarded(self._after_step, before, kept, applied)
            self._applied += bool(applied)
            self._step, self._micros, self._calls = self._step + 1, [], []
        return result

    def _kept(self) -> int:
        """Every how manieth value of a parameter is kept in this step; 0 for a step that is not recorded."""
        given = sum(_size(micro) for micro in self._micros)
        numel = sum(_numel(each) for each in self.model.parameters() if each.requires_grad)
        left = [step for step in self.steps if step >= self._step]
        budget = (self._max_bytes - self._bytes) // len(left) - given
        least = 4 * numel  # the masters before, from which the step is recomputed
        stride = 1 if budget >= _SHARES * least + least else -(-_SHARES * least // max(1, budget - least))
        over = self._seconds > self._max_seconds or budget < least or stride > 4096
        if self._any(over or self._failed):  # the same on all ranks, since reading masters is a collective
            if not self._failed:
                self._say(f"nothing is recorded from step {self._step} on: max_bytes or max_seconds is used up")
            self._failed = True
            return 0
        return stride

    def _guarded(self, record: Any, *given: Any) -> Any:
        started = time.monotonic()
        try:
            with torch.no_grad():
                return record(*given)
        except Exception as error:  # whatever fails here is not to end a training
            self._failed = True
            self._say(f"recording ended in step {self._step}: {type(error).__name__}: {error}")
        finally:
            self._seconds += time.monotonic() - started

    def _say(self, text: str) -> None:
        warnings.warn(f"mantissa_probe, rank {self.rank}: {text}", stacklevel=2)

    # What is recorded

    def _before_step(self, stride: int) -> dict[str, Any]:
        tensors: dict[str, torch.Tensor] = {}
        sums: dict[str, Any] = {"weights": {}, "gradients": {}, "squares": {}}
        missing: list[str] = []
        has_state = self._has_moments()
        for name, parameter in self.model.named_parameters():
            if self.stage < 3:
                sums["weights"][name] = _sum(parameter)
                if parameter.grad is not None:
                    sums["gradients"][name] = _sum(parameter.grad)
            if not parameter.requires_grad:
                with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                    self._keep(tensors, f"frozen/{name}", parameter, 1, narrow=False)
                continue
            gradient, master = safe_get_full_grad(parameter), self._master(parameter)
            self._keep(tensors, f"before/{name}", master, 1)
            if gradient is None:
                missing.append(name)
            else:
                sums["squares"][name] = float(gradient.double().square().sum())
                sums.setdefault("gradient_dtypes", {})[name] = str(gradient.dtype)
                self._keep(tensors, f"gradient/{name}", gradient, stride)
            for key in MOMENTS if has_state else ():
                self._keep(tensors, f"{key}/before/{name}", self._moment(parameter, key), stride)
        groups = [
            {key: value for key, value in group.items() if isinstance(value, int | float | str | tuple)}
            for group in self.engine.optimizer.param_groups
        ]
        found = {"groups": groups, "scale": self._scale(), "sums": sums, "no_gradient": missing}
        found |= {"optimizer_step": self._optimizer_step(), "moments": has_state}
        found["schedule"] = getattr(getattr(self.scheduler, "scheduler", self.scheduler), "last_epoch", None)
        found["fp32"] = sorted({str(each.dtype) for each in self._stepped() if each.is_floating_point()})
        return {"facts": found, "tensors": tensors}

    def _after_step(self, before: dict[str, Any], stride: int, applied: bool) -> None:
        tensors, facts = before["tensors"], before["facts"]
        has_state = self._has_moments()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._keep(tensors, f"after/{name}", self._master(parameter), stride)
                for key in MOMENTS if has_state else ():
                    self._keep(tensors, f"{key}/after/{name}", self._moment(parameter, key), stride)
        norm = self.engine.get_global_grad_norm()
        facts |= {"step": self._step, "rank": self.rank, "world": dist.get_world_size(), "stride": stride}
        facts |= {"applied": bool(applied), "applied_before": self._applied, "scale_after": self._scale()}
        facts |= {"norm": None if norm is None else float(norm), "optimizer_step_after": self._optimizer_step()}
        facts |= {"inner": self._inner, "moments_after": has_state, "seconds": self._seconds}
        micros = []
        for number, micro in enumerate(self._micros):
            for index, call in enumerate(micro["calls"]):
                given = call.pop("inputs")
                tensors |= {f"inputs/{number}/{index}/{key}": value for key, value in given["tensors"].items()}
                call["inputs"] = given["plain"]
            batch = micro.pop("batch")
            tensors |= {f"batch/{number}/{key}": value for key, value in batch["tensors"].items()}
            micros.append({**micro, "batch": batch["plain"]})
        tensors |= {f"rng/{key}": value for key, value in self._rng.items()}
        name = f"step-{self._step:06d}.rank{self.rank}"
        written = self.folder / f"{name}.pt.tmp"
        torch.save(tensors, written)
        self._bytes += written.stat().st_size
        written.replace(self.folder / f"{name}.pt")
        self._write(f"{name}.json", {**facts, "micros": micros})

    def _keep(
        self, tensors: dict[str, torch.Tensor], name: str, value: Any, stride: int, *, narrow: bool = True
    ) -> None:
        """Every `stride`-th value, on rank 0: what is gathered is the same on all ranks."""
        if value is not None and self.rank == 0:
            flat = value.detach().reshape(-1)[::stride] if stride > 1 else value.detach()
            tensors[name] = flat.float().cpu().clone() if narrow else flat.cpu().clone()

    def _master(self, parameter: Any) -> torch.Tensor:
        found = safe_get_full_fp32_param(parameter)
        return (self._without_zero(parameter) if found is None else found).view(_shape(parameter))

    def _moment(self, parameter: Any, key: str) -> torch.Tensor | None:
        if hasattr(parameter, "ds_id"):
            return safe_get_full_optimizer_state(parameter, key)
        if hasattr(parameter, "_hp_mapping"):  # DeepSpeed's own reader knows the first parameter group's alone
            whole, piece = torch.zeros(parameter.numel(), device=parameter.device), parameter._hp_mapping
            if piece is not None:
                flat = self._optimizer.param_groups[piece.param_group_index]["params"][0]
                there, here = piece.hp_fragment_address, piece.lp_fragment_address
                part = self._optimizer.state[flat][key].narrow(0, there.start, there.numel)
                whole.narrow(0, here.start, here.numel).copy_(part)
            dist.all_reduce(whole, group=parameter._dp_group)
            return whole
        return self._without_zero(parameter, key)

    def _has_moments(self) -> bool:
        """Whether every rank's optimizer has both moments for all that it steps."""
        states = [self._optimizer.state.get(each, {}) for each in self._stepped()]
        return not self._any(any(key not in state for state in states for key in MOMENTS))

    def _stepped(self) -> list[torch.Tensor]:
        partitions = getattr(self.engine.optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3's
        return partitions or [each for group in self._optimizer.param_groups for each in group["params"]]

    def _fp32_without_zero(self) -> dict[int, tuple[torch.Tensor, int]]:
        """By parameter, the FP32 tensor of a 16-bit optimizer without ZeRO, and where in it the master is."""
        optimizer, found = self.engine.optimizer, dict[int, tuple[torch.Tensor, int]]()
        for index, group in enumerate([] if self.stage else getattr(optimizer, "fp16_groups", [])):
            at = 0
            for place, parameter in enumerate(group):
                whole = hasattr(optimizer, "fp32_groups")
                source = optimizer.fp32_groups[index][place] if whole else optimizer.fp32_groups_flat[index]
                found[id(parameter)] = source, 0 if whole else at
                at += parameter.numel()
        return found

    def _without_zero(self, parameter: Any, key: str = "") -> torch.Tensor:
        """The master, or a moment, of a parameter that no ZeRO partitions."""
        source, at = self._fp32_of.get(id(parameter), (parameter, 0))
        value = self._optimizer.state[source][key] if key else source
        return value.reshape(-1)[at : at + parameter.numel()]

    def _scale(self) -> float:
        optimizer = self.engine.optimizer
        scale = getattr(optimizer, "loss_scale", None) or getattr(optimizer, "cur_scale", None) or 1.0
        return float(scale)

    def _optimizer_step(self) -> float | None:
        found = [state["step"] for state in self._optimizer.state.values() if "step" in state]
        counted = found or [group["step"] for group in self._optimizer.param_groups if "step" in group]
        return float(counted[0]) if counted else None

    def _facts(self) -> dict[str, Any]:
        engine, optimizer, groups = self.engine, self.engine.optimizer, dict[str, int]()
        config: Any = getattr(self.model, "config", None)
        embedding = getattr(self.model, "get_input_embeddings", lambda: None)()
        listed = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "fp16_groups", None)
        listed = listed or [group["params"] for group in optimizer.param_groups]
        for index, group in enumerate(listed):
            index = getattr(optimizer, "sub_group_to_group_id", {}).get(index, index)
            groups |= {self._names[id(each)]: index for each in group if id(each) in self._names}
        found = {"format": FORMAT, "world": dist.get_world_size(), "steps": self.steps, "stage": self.stage}
        found |= {"versions": {"deepspeed": deepspeed.__version__, "torch": torch.__version__}}
        found |= {"device": str(engine.device), "engine": [type(engine).__name__, type(optimizer).__name__]}
        found |= {"optimizer": type(self._optimizer).__name__, "clipping": float(engine.gradient_clipping())}
        found["accumulation"] = engine.gradient_accumulation_steps()
        found["compute"] = "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"
        found["config"] = getattr(engine.config, "_param_dict", engine.config)
        found |= {"model": type(self.model).__name__, "padding_idx": getattr(embedding, "padding_idx", None)}
        found["model_config"] = config.to_dict() if hasattr(config, "to_dict") else None
        drops = [each for each in self.model.modules() if "Dropout" in type(each).__name__]
        found["dropout"] = any(getattr(each, "p", 0) for each in drops)
        found["parameters"] = {
            name: [list(_shape(each)), str(each.dtype), each.requires_grad, groups.get(name)]
            for name, each in self.model.named_parameters()
        }
        return found

    def _any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        found = torch.tensor([int(flag)], device=self.engine.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        written = self.folder / f"{name}.tmp"
        written.write_text(json.dumps(facts, default=str), encoding="utf-8")
        written.replace(self.folder / name)


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """Copies of the tensors, and the numbers."""
    tensors = {key: value.detach().cpu().clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    plain = {key: value for key, value in given.items() if isinstance(value, int | float | str | bool)}
    return {"tensors": tensors, "plain": plain}


def _size(micro: dict[str, Any]) -> int:
    parts = [micro["batch"], *(call["inputs"] for call in micro["calls"])]
    return sum(value.nbytes for part in parts for value in part["tensors"].values())


def _shape(parameter: Any) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _sum(values: torch.Tensor) -> list[float]:
    """A checksum: the sum, and that of the squares, in FP64."""
    wide = values.detach().double()
    return [float(wide.sum()), float(wide.square().sum())]
