"""Code run inside the processes of the tests in this folder. Every function is called on every rank."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import safe_get_full_fp32_param
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from config.errors import UserError
from config.resolved import Resolved
from config.schema import Fp8Section
from config.task import SEQ2SEQ_LM
from data.batches.loader import IGNORED_LABEL, Batch
from data.corpora.documents import document_positions
from modeling.adapter import add_adapter
from modeling.build import build_model, model_config
from precision.manifest import load_manifest
from precision.regions import Regions
from tests.support.models.flex_on_cpu import flex_on_cpu
from tests.support.models.plain_steps import mean_label_loss, plain_steps
from tests.support.models.small_models import small_model
from tests.support.models.small_run import (
    SEQUENCE,
    VOCABULARY,
    batch_of,
    changed_json,
    engine_of,
    manifest_of,
    masters_of,
    plain_model,
    resolve,
    take,
)
from tests.training.engine.expert_cases import model_of
from training.distributed import World
from training.engine import Engine, kernels
from training.engine.build import build_engine
from training.engine.expert_slices import forget_groups
from training.engine.faults import overwritten
from training.engine.health import Outcome, RanksDisagree
from training.engine.ledger import PrecisionError, read_ledger, read_start
from training.engine.masters import local_masters
from training.engine.tensors import (
    checksums_of,
    local_gradient,
    momentum_norm,
    shard_of,
    trainable_parameters,
    whole_gradient,
    whole_weight,
)
from training.engine.weights import StaleMaster, require_fresh_masters


def steps_of(
    world: World, *, steps: int, micro: int = 4, lr: float = 0.001, mask: str = "uneven", **options: Any
) -> list[dict[str, Any]]:
    """Each of an engine's steps from the seeded weights, on different batches, with the masters before and after it."""
    rows = []
    with engine_of(world, resolve(world, micro=micro, **options)) as engine:
        for step in range(1, steps + 1):
            before = masters_of(engine)
            health, update = take(engine, batch_of(world, micro, seed=step, mask=mask), step=step, lr=lr)
            rows.append(
                {
                    "loss": health.loss,
                    "grad_norm": health.grad_norm,
                    "metrics": health.metrics,
                    "applied": update.applied,
                    "clip": update.clip_coefficient,
                    "change": update.scale_change.reason if update.scale_change else None,
                    "momentum": momentum_norm(engine),
                    "before": before,
                    "after": masters_of(engine),
                    "notes": engine.notes,
                }
            )
    return rows


def one_step(world: World, **options: Any) -> dict[str, Any]:
    """The first of `steps_of`."""
    return steps_of(world, steps=1, **options)[0]


def reference_step(world: World, *, mask: str, manifest: str | None = None) -> dict[str, Any]:
    """The same step in plain torch, FP32, one process, the whole batch at once, no DeepSpeed."""
    resolved = resolve(world, stage=0, compute="fp32", micro=8)
    with engine_of(world, resolved) as engine:
        weights = masters_of(engine)
    model = plain_model(resolved, weights)
    if manifest is not None:
        Regions(model, load_manifest(Path(manifest)))
    loss_of = partial(mean_label_loss, mask=mask)
    loss, norm, _ = plain_steps(model, resolved.config.optimizer, steps=1, lr=0.001, loss_of=loss_of)
    return {"loss": loss, "grad_norm": norm, "after": {name: p.detach() for name, p in model.named_parameters()}}


class _Reductions(TorchDispatchMode):
    """Counts reductions over ranks, and those of more than one value."""

    all = large = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d" and "reduce" in function.name():
            self.all += 1
            self.large += any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in tree_leaves(args))
        return function(*args, **(kwargs or {}))


def masters_on_one_rank(
    world: World, *, stage: int, compute: str, variant: str, reduces: bool
) -> tuple[dict[str, torch.Tensor], int, int]:
    """Masters after two steps, and the numbers of reductions, of gradients and in all.

    reduces: as DeepSpeed does on one rank.
    """
    with engine_of(world, resolve(world, stage=stage, compute=compute, micro=2, variant=variant)) as engine:
        if reduces:
            optimizer: Any = engine.deepspeed.optimizer
            optimizer.reduce_scatter = True
            for name in ("gradient_reduction_w_predivide", "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"):
                delattr(optimizer, name)
            del engine.deepspeed.allreduce_no_retain
        with _Reductions() as counted:
            for step in (1, 2):
                take(engine, batch_of(world, 2, seed=step), step=step, lr=0.01)
        return masters_of(engine), counted.large, counted.all


def norms_of_skipped(world: World, *, stage: int, compute: str) -> list[float]:
    """The gradient norm of a batch, twice, where masters are in host memory and each step is discarded."""
    found = []
    with engine_of(world, resolve(world, stage=stage, compute=compute, micro=2, variant="_offload")) as engine:
        for step in (1, 2):
            found.append(engine.health(engine.forward_backward(batch_of(world, 2, seed=1), step=step)).grad_norm)
            engine.discard_gradients()
    return found


def partitioned_build(world: World) -> dict[str, Any]:
    """The number of parameters that this rank holds after a ZeRO-3 build, and the weights it drew."""
    resolved = resolve(world, stage=3, compute="fp32", overrides=["model.config.tie_word_embeddings=false"])
    with engine_of(world, resolved) as engine:
        parameters = list(engine.model.parameters())
        return {
            "whole": sum(p.ds_numel for p in parameters),
            "held": sum(p.ds_tensor.numel() for p in parameters),
            "resident": sum(p.numel() for p in parameters if not p.ds_persist),
        }


def ledger(world: World, *, stage: int, compute: str, reduce: str, promise: str) -> tuple[dict[str, str], str]:
    """The ledger after a step, and the error when the config's promise on reduction is `promise` instead."""
    resolved = resolve(world, stage=stage, compute=compute, overrides=[f"precision.reduce={reduce}"])
    with engine_of(world, resolved) as engine:
        read_ledger(engine, reduce=reduce)
        take(engine, batch_of(world, 4, seed=1), step=1, lr=0.001)
        rows = {entry.what: entry.dtype for entry in read_ledger(engine, reduce=reduce)}
        return rows, complaint(engine, reduce=promise)


def complaint(engine: Engine, *, reduce: str = "fp32") -> str:
    """The ledger's complaint about what is not as promised; empty when there is none."""
    try:
        read_ledger(engine, reduce=reduce)
    except PrecisionError as error:
        return str(error)
    return ""


def sums_in_16_bits(world: World) -> str:
    """The ledger's complaint where cuBLAS may add parts of a product in 16 bits."""
    matmul = torch.backends.cuda.matmul
    with engine_of(world, resolve(world, stage=2, compute="bf16")) as engine:
        matmul.allow_bf16_reduced_precision_reduction = True
        try:
            return complaint(engine)
        finally:
            matmul.allow_bf16_reduced_precision_reduction = False


def stepped_back(world: World, *, folder: str, compute: str, secondary: int) -> dict[str, Any]:
    """A saved step, two more with evaluations between, back to what was saved, two more; ZeRO-3, two engines in a row.

    secondary: zero_hpz_partition_size.
    """
    tag = f"{world.world_size}-{secondary}-{compute}"
    zero = {"zero_hpz_partition_size": secondary, "stage3_param_persistence_threshold": 0}
    changed = changed_json(Path(folder), f"zero3_{compute}", **zero)
    resolved = resolve(world, stage=3, compute=compute, micro=2, overrides=[changed])
    with engine_of(world, resolved):
        pass
    losses, copies = [], []
    with engine_of(world, resolved) as engine:

        def train(step: int) -> None:
            outcome = engine.forward_backward(batch_of(world, 2, seed=step), step=step)
            copies.append(
                {
                    tuple(copy.shape) == (-(-parameter.ds_numel // secondary),)
                    for parameter in engine.model.parameters()
                    if (copy := parameter.ds_secondary_tensor) is not None
                }
            )
            engine.step(health := engine.health(outcome), 0.01)
            losses.append((health.loss, health.grad_norm, engine.evaluate([batch_of(world, 2, seed=9)]).loss))

        train(1)
        engine.save(Path(folder), tag)
        train(2)
        train(3)
        engine.load(Path(folder), tag, TorchCheckpointEngine())
        train(2)
        train(3)
        return {"losses": losses, "copies": copies, "masters": masters_of(engine)}


def of_mixers(world: World, *, stage: int, folder: str) -> list[float]:
    """Losses of a resumed Mamba, whose mixers read the parameters of other modules."""
    sizes = "model.config={hidden_size: 32, state_size: 8, num_hidden_layers: 2}"
    overrides = ["model.architecture=mamba", sizes]
    resolved = resolve(world, stage=stage, compute="fp32", micro=2, overrides=overrides)
    batch = batch_of(world, 2, seed=9)
    with engine_of(world, resolved) as engine:
        engine.save(Path(folder), f"mixers-{stage}")
        engine.load(Path(folder), f"mixers-{stage}", TorchCheckpointEngine())  # gathers small parameters
        losses = [engine.evaluate([batch, batch]).loss]
        for parameter in engine.model.parameters():
            whole_weight(engine, parameter)  # which partitions them again
        for step in (1, 2):
            losses.append(engine.evaluate([batch]).loss)
            outcome = engine.forward_backward(batch_of(world, 2, seed=step), step=step)
            engine.step(health := engine.health(outcome), 0.01)
            losses.append(health.loss)
        return losses


def rounded_buffer(world: World, *, stage: int) -> tuple[dict[str, str], str]:
    """The ledger of a Gemma in BF16, and what it says when a buffer has been cast to 16 bits behind its back."""
    overrides = ["model.architecture=gemma"]
    resolved = resolve(world, stage=stage, compute="bf16", overrides=overrides)
    with engine_of(world, resolved) as engine:
        rows = {entry.what: entry.dtype for entry in read_ledger(engine, reduce="fp32")}
        rotary: Any = engine.model.get_submodule("model.rotary_emb")
        rotary.inv_freq = rotary.inv_freq.bfloat16()
        return rows, complaint(engine)


def broken_master(world: World, *, stage: int) -> str:
    """The ledger's complaint when an optimizer's master has been cast to 16 bits behind its back."""
    resolved = resolve(world, stage=stage, compute="bf16")
    with engine_of(world, resolved) as engine:
        optimizer = engine.deepspeed.optimizer
        groups = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
        groups[0].data = groups[0].data.bfloat16()
        return complaint(engine)


Cell = tuple[str, list[str]]
"""Name of a way to start, and its overrides."""


def start(world: World, *, stage: int, compute: str, cells: list[Cell], variant: str = "") -> dict[str, dict[str, Any]]:
    """Differences from an FP32 model built without ZeRO, the ledger's row, and counts of masters, cell by cell."""
    found = {}
    for name, overrides in cells:
        resolved = resolve(world, stage=stage, compute=compute, variant=variant, overrides=overrides)
        expected = {key: value.detach() for key, value in _plain(resolved.config).named_parameters()}
        shared = _shared(world, resolved)
        with engine_of(shared, resolved) as engine:
            masters = masters_of(engine)
            row = read_start(engine)
            weights = {key: whole_weight(engine, value) for key, value in trainable_parameters(engine).items()}
            if shared.tensor is None:  # whose ranks would need the same batch
                take(engine, batch_of(shared, 4, seed=1), step=1, lr=0.0)  # copies masters to weights
            stepped = {key: whole_weight(engine, value) for key, value in trainable_parameters(engine).items()}
        wrong = [key for key, master in masters.items() if not _same(master, expected[key])]
        wrong += [key for key, weight in weights.items() if not _same(weight, expected[key].to(weight.dtype))]
        wrong += [key for key, weight in stepped.items() if not torch.equal(weight, weights[key])]
        rounds = sum(not torch.equal(weights[key].float(), expected[key]) for key in masters)
        found[name] = {"wrong": wrong, "said": row.dtype, "masters": len(masters), "round": rounds}
    return found


def changed(world: World, *, stage: int, compute: str) -> list[str]:
    """The ledger's complaint when one rank's master changed a little before the first step, the check's when it did so
    by more than a weight's rounding."""
    found = []
    with engine_of(world, resolve(world, stage=stage, compute=compute)) as engine:
        for change, check in ((1e-6, read_start), (0.5, require_fresh_masters)):
            if world.rank == 1:
                local_masters(engine.deepspeed.optimizer)[0].data[5] += change
            try:
                check(engine)
            except (StaleMaster, PrecisionError) as error:
                found.append(str(error))
    return found


def misread(world: World, *, stage: int, overrides: list[str]) -> str:
    """The error of a start from files that were read wrongly: a norm's weights are not theirs."""
    resolved = resolve(world, stage=stage, compute="bf16", overrides=overrides)

    def wrong(*given: Any, **options: Any) -> Any:
        model = build_model(*given, **options)
        with torch.no_grad(), options["gather"]([model.model.norm.weight]):
            model.model.norm.weight.mul_(1.001)
        return model

    with mock.patch("training.engine.build.build_model", wrong):
        try:
            with engine_of(world, resolved):
                return ""
        except StaleMaster as error:
            forget_groups()
            return str(error)


def _plain(config: Any) -> torch.nn.Module:
    if config.model.name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path, dtype=torch.float32)
    else:
        shape = model_config(config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
        model = build_model(config.model, shape, seed=config.run.seed)
    return model if config.adapter.kind == "none" else add_adapter(model, config.adapter, seed=config.run.seed)


def _shared(world: World, resolved: Any) -> World:
    parallel = resolved.config.parallel
    return world.sharing(tensor=parallel.tensor, expert=parallel.expert, timeout_minutes=1)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    return found.dtype == expected.dtype and torch.equal(found.view(bits), expected.view(bits))


def save_models(world: World, *, folder: str, models: Mapping[str, list[str]], dtype: str) -> None:
    """Hugging Face folders of drawn models by name, in a dtype."""
    for name, overrides in models.items():
        resolved = resolve(world, stage=0, compute="fp32", overrides=["run.seed=5", *overrides])
        if world.is_main:
            _plain(resolved.config).to(getattr(torch, dtype)).save_pretrained(Path(folder) / f"{name}-{dtype}")
    world.wait_for_all()


SKIPPED, STRUCK = 3, 5
"""Steps that are not applied: discarded, and with a gradient that is not finite."""
FAULT = f"faults=[{{kind: inf_gradient, step: {STRUCK}, rank: 0, module: model.layers.1.mlp.down_proj}}]"


def trained(
    world: World, *, stage: int, masters: str, steps: int, more: Sequence[str] = (), save: str = "", load: str = ""
) -> dict[str, Any]:
    """Steps on different batches, clipped, two of them not applied: what each reports, and all checksums at the end.

    save: a folder, after the first half of the steps. load: a folder, instead of the first half.
    """
    with engine_of(world, _resolved(world, stage, masters, more)) as engine:
        first, rows, unchanged = 1, [], True
        if load:
            engine.load(Path(load), "deepspeed", TorchCheckpointEngine())
            first = steps // 2 + 1
        for step in range(first, steps + 1):
            health = engine.health(engine.forward_backward(batch_of(world, 2, seed=step), step=step))
            before = checksums_of(engine) if step in (SKIPPED, STRUCK) else {}
            update = engine.step(health, 0.01, apply=step != SKIPPED)
            rows.append((health.loss, health.grad_norm, update.applied, update.update_ratio))
            unchanged &= not before or checksums_of(engine) == before
            if save and step == steps // 2:
                engine.save(Path(save), "deepspeed", TorchCheckpointEngine())
        return {"rows": rows, "checksums": checksums_of(engine), "skipped_unchanged": unchanged}


def held(world: World, *, stage: int) -> dict[str, Any]:
    """The tensors that hold the masters, and their readers, after two steps."""
    with engine_of(world, _resolved(world, stage, "split")) as engine:
        take(engine, batch_of(world, 2, seed=1), step=1, lr=0.01)
        rows = {entry.what: entry for entry in read_ledger(engine, reduce="fp32")}
        flats = engine.deepspeed.basic_optimizer.splits
        parameter = next(iter(trainable_parameters(engine).values()))
        own = shard_of(engine, parameter)
        inside = {}
        with engine.whole_masters(), engine.whole_masters():
            inside["masters"] = masters_of(engine)
            inside["deepspeed"] = {
                name: safe_get_full_fp32_param(p).float() for name, p in trainable_parameters(engine).items()
            }
        return {
            "row": (rows["masters"].dtype, rows["masters"].bytes),
            "values": sum(flat.numel() for flat in flats),
            "memory": sum(flat.untyped_storage().nbytes() for flat in flats),
            "past": safe_get_full_fp32_param(parameter).isnan().any(),
            "part": own is None or torch.equal(own.master(3, 5), own.master()[3:8]),
            "outside": masters_of(engine),
            **inside,
        }


def written_wrong(world: World) -> tuple[str, dict[str, Any]]:
    """The error when one rank writes a master that the weight is not, and the masters once it is what it was."""
    with engine_of(world, _resolved(world, 2, "split")) as engine:
        before, text = masters_of(engine), ""
        try:
            with engine.whole_masters():
                if world.rank == 0:
                    flat = next(iter(engine.deepspeed.basic_optimizer.splits))
                    kept = flat.data[3].clone()
                    flat.data[3] += 1.0
        except UserError as error:
            text = str(error)
        with engine.whole_masters():
            if world.rank == 0:
                flat.data[3] = kept
        after = masters_of(engine)
        return text, {"same": all(torch.equal(after[name], before[name]) for name in before)}


def _resolved(world: World, stage: int, masters: str, more: Sequence[str] = ()) -> Any:
    settings = [f"precision.masters={masters}", "optimizer.gradient_clipping=0.5", "guard.max_update_ratio=10", FAULT]
    return resolve(world, stage=stage, compute="bf16", micro=2, overrides=[*settings, *more])


def chosen_kernels(world: World, *, folder: str, manifest: dict[str, Any]) -> dict[str, str]:
    """The remarks on torch's scaled matmul for FP8 layers: sound, not available, and wrong on the last rank."""
    overrides = [*manifest_of(folder, manifest), "precision.fp8.kernel=scaled_mm"]

    def built(*more: str) -> str:
        try:
            with engine_of(world, resolve(world, stage=2, compute="fp32", overrides=[*overrides, *more])) as engine:
                return next(note for note in engine.notes if "fp8.kernel" in note)
        except UserError as error:
            return str(error)

    found = {"asked": built(), "by block": built("precision.fp8.scaling=block32")}
    own, factor = torch._scaled_mm, 1.03 if world.rank else 1.0
    wrong = mock.patch.object(torch, "_scaled_mm", lambda *given, **more: own(*given, **more) * factor)
    # as on a GPU that has it, where `auto` takes it
    with wrong, mock.patch.object(kernels, "no_kernel", lambda *given: ""):
        found["asked, wrong"] = built()
        regions = Regions(small_model("llama"), load_manifest(Path(overrides[1].partition("=")[2])), Fp8Section())
        found["auto, wrong"] = kernels.choose_fp8_kernel(regions, world)[0]
        found["then"] = regions.fp8.kernel
    return found


KINDS = ("norm", "embed_tokens", "q_proj", "experts.down_proj")
"""The first parameter of each kind is spoiled: replicas of `parallel.tensor`, slices of it, shared experts."""
VALUES = (float("nan"), float("inf"))


def spoiled(
    world: World, *, stage: int, compute: str, layout: str, folder: str, overrides: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The spoiled gradients that were taken for finite or changed a master, and whether a sound step is applied after.

    layout: tensor, sequence and expert share by two; hpz, offload; and data, of nothing shared.
    """
    world, alone, resolved = _laid_out(world, stage, compute, layout, Path(folder), overrides)
    wrong, micro = [], int(resolved.config.batch.micro_size or 1)
    with engine_of(world, resolved) as engine:
        take(engine, batch_of(alone, micro, seed=1), step=1, lr=0.01)
        before = [master.clone() for master in engine.masters()]
        for case, (name, plant) in enumerate(_plants(engine, reduced=layout != "offload")):
            for rank in range(world.world_size):
                value = VALUES[(case + rank) % 2]
                after = plant(value) if world.rank == rank else None
                outcome = engine.forward_backward(batch_of(alone, micro, seed=2), step=2)
                if after is not None:
                    after()
                took = _took(engine, outcome)
                held = zip(before, engine.masters(), strict=True)
                if took or not all(torch.equal(old, new) for old, new in held):
                    wrong.append(f"{value} in {name} on rank {rank}")
        sound = take(engine, batch_of(alone, micro, seed=3), step=3, lr=0.01)[1].applied
        finite = all(bool(master.isfinite().all()) for master in engine.masters())
    return {"wrong": wrong, "sound": sound and finite, "cases": case + 1}


def _took(engine: Engine, outcome: Outcome) -> bool:
    """Whether a spoiled step was taken for a finite one, or applied.

    Where each rank has whole gradients, one that is changed after the reduction makes them disagree: the run ends.
    """
    try:
        health = engine.health(outcome)
    except RanksDisagree as error:
        engine.gradients.discard()
        return not str(error).startswith("the gradient norm differs between ranks")
    return engine.step(health, 0.01).applied or health.finite


def _laid_out(
    world: World, stage: int, compute: str, layout: str, folder: Path, overrides: tuple[str, ...]
) -> tuple[World, World, Resolved]:
    """The ranks as they share, one of those that take samples of their own, and the run."""
    given, alone = ["telemetry.every_steps=0", "optimizer.eps=0.01", *overrides], world
    if layout == "tensor":
        world = world.sharing(tensor=2, timeout_minutes=2)
        given += ["parallel.tensor=2", "model.config.num_key_value_heads=2"]
        alone = World(world.zero_rank, world.zero_ranks, 0, world.device)
    elif layout == "sequence":
        world = world.sharing(sequence=2, timeout_minutes=2)
        given += ["parallel.sequence=2"]
    elif layout == "expert":
        world = world.sharing(expert=2, timeout_minutes=2)
        given += [model_of("mixtral"), "parallel.expert=2"]
    elif layout == "hpz":
        copies = {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
        given.append(changed_json(folder, f"zero3_{compute}", **copies))
    variant = "_offload" if layout == "offload" else ""
    return world, alone, resolve(world, stage=stage, compute=compute, micro=2, variant=variant, overrides=given)


def _plants(engine: Engine, *, reduced: bool) -> list[tuple[str, Callable[[float], Callable[[], None]]]]:
    """Ways to spoil a gradient of this rank, before it is reduced and after: each gives what to do after the passes."""
    found: list[tuple[str, Callable[[float], Callable[[], None]]]] = []
    for kind in KINDS:
        chosen = next(((n, p) for n, p in trainable_parameters(engine).items() if kind in n), None)
        if chosen is not None:
            name, parameter = chosen
            found.append((f"the gradient of {name}", partial(_in_backward, parameter)))
            if reduced:
                found.append((f"the reduced {name}", partial(_in_reduced, engine, parameter)))
    return found


def _in_backward(parameter: torch.nn.Parameter, value: float) -> Callable[[], None]:
    return parameter.register_hook(partial(overwritten, value)).remove


def _in_reduced(engine: Engine, parameter: torch.nn.Parameter, value: float) -> Callable[[], None]:
    """Spoil this rank's part of the reduced gradient or, where it has no part, the gradient in the backward pass."""
    shard = shard_of(engine, parameter)
    if shard is None:
        return _in_backward(parameter, value)

    def overwrite() -> None:
        gradient = local_gradient(parameter, shard, engine.stage)
        assert gradient is not None
        gradient[0] = value

    return overwrite


END = 1


def packed(world: World, *, rank: int | None = None) -> Batch:
    """A rank's part of the global batch of `batch_of`, cut into documents wherever END happens to stand, or every 5."""
    there = world if rank is None else replace(world, rank=rank)
    batch = batch_of(there, 4, seed=3)
    ids, labels = batch.input_ids.clone(), batch.labels.clone()
    ids[..., 4::5] = END
    labels[ids == END] = IGNORED_LABEL
    positions = document_positions(ids.reshape(-1, SEQUENCE).numpy(), END)
    return replace(
        batch,
        input_ids=ids,
        labels=labels,
        label_tokens=int((labels != IGNORED_LABEL).sum()),
        position_ids=torch.from_numpy(positions).reshape(ids.shape),
    )


def against_separate_documents(
    world: World, *, stage: int, compute: str, loss: str = "full", attention: str = "sdpa"
) -> dict[str, float]:
    """Loss and norm of the engine on packed documents, and of plain FP32 torch on each document alone."""
    overrides = ["data.document_masking=true", f"model.loss={loss}", f"model.attention={attention}"]
    resolved = resolve(world, stage=stage, compute=compute, overrides=overrides)
    flex = flex_on_cpu() if attention == "flex_attention" else nullcontext()
    with flex, engine_of(world, resolved) as engine:
        plain = plain_model(resolved, masters_of(engine))
        batch = packed(world)
        health = engine.health(engine.forward_backward(batch, step=1))
        evaluated = engine.evaluate([batch]).loss
    total, tokens = torch.zeros(()), 0
    for rank in range(world.world_size):
        whole = packed(world, rank=rank)
        rows = zip(whole.input_ids.reshape(-1, SEQUENCE), whole.labels.reshape(-1, SEQUENCE), strict=True)
        for ids, labels in rows:
            for at in range(0, SEQUENCE, 5):  # the definition, not what is tested
                ends = [at + i for i in range(len(ids[at : at + 5])) if ids[at + i] == END]
                start = at
                for end in [*ends, at + len(ids[at : at + 5]) - 1]:
                    if end < start:
                        continue
                    logits = plain(input_ids=ids[start : end + 1].unsqueeze(0), use_cache=False).logits[0]
                    wanted = labels[start : end + 1]
                    total = total + functional.cross_entropy(
                        logits, wanted, ignore_index=IGNORED_LABEL, reduction="sum"
                    )
                    start = end + 1
        tokens += whole.label_tokens
    mean = total / tokens
    mean.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    return {
        "loss": health.loss,
        "norm": health.grad_norm,
        "evaluated": evaluated,
        "alone": float(mean.detach()),
        "norm_alone": float(norm),
    }


assert END < VOCABULARY


def of_idle_experts(world: World, *, stage: int, folder: str) -> tuple[set[int], dict[str, torch.Tensor]]:
    """Experts of the decoder that this rank's tokens choose, and the reduced gradients of the Switch Transformers in
    `folder`."""
    overrides = ["task=seq2seq", f"model.name_or_path={folder}", "model.architecture=null", "model.config={}"]
    resolved = resolve(world, stage=stage, compute="fp32", overrides=overrides)
    sizes = {"vocab_size": VOCABULARY, "sequence_length": SEQUENCE}
    config = model_config(resolved.config.model, model_class=SEQ2SEQ_LM, **sizes)
    with closing(build_engine(resolved, config, world)) as engine:
        chosen = []
        experts = engine.model.get_submodule("decoder.block.1.layer.2.mlp.experts")
        experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1]))
        ids = torch.randint(3, VOCABULARY, (2, 2), generator=torch.Generator().manual_seed(5000 + world.rank))
        engine.backward(engine.deepspeed(input_ids=ids, labels=ids).loss, last=True)
        return {int(expert) for expert in chosen[0].nonzero()[:, 2]}, {
            name: whole_gradient(engine, parameter) for name, parameter in trainable_parameters(engine).items()
        }
