"""The cells of the precision matrix: the run config and DeepSpeed JSON of each.

The model is tiny, so buckets and ZeRO-3's thresholds are small as well: as in a large model, gradients go through
several buckets, matrices are partitioned and norms are not.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config.cli import REPOSITORY
from config.command_line import parse
from config.deepspeed.combinations import COMPUTES, FP8, SETTINGS, STAGES, Combination, Setting, combinations, refusal
from config.deepspeed.document import read_document
from config.deepspeed.resolve import resolve_unverified
from config.load import load_config
from config.resolved import Resolved, resolve_run
from precision.dtypes import DTYPES
from precision.tolerance import tolerance

VOCABULARY, SEQUENCE = 64, 16  # [tokens]
COARSEST = DTYPES | {"mixed": torch.bfloat16, "fp8": torch.float32, "fp8_bf16": torch.bfloat16}
"""The coarsest dtype of a run, by its compute setting, besides FP8."""
ROUNDINGS = 16
"""Consecutive roundings between a batch and its loss: in each of two blocks norm, projection, scores, attention,
output, norm, MLP in, MLP out."""
CLIPPING = 0.4
"""[norm] Smaller than the reference's gradient norm in every step."""
ACCUMULATIONS = (1, 4)  # [micro-batches]
CHECKPOINTINGS = ("none", "full")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "muon": (),
    "lamb": (),
    "stable_adamw": ("optimizer.eps=0.001",),
    "lion": ("optimizer.learning_rate=0.002", "optimizer.eps=1e-8"),
    "sgd": ("optimizer.learning_rate=0.5", "optimizer.eps=1e-8"),
}
"""Optimizers other than AdamW, with the settings that differ from AdamW's.

Lion steps by its rate, SGD by its rate times the gradient, and neither uses eps; with AdamW's eps StableAdamW would
never find a step too long, and equal AdamW."""
IN_16_BITS = ("muon", "lamb")
"""Also measured in BF16 and FP16."""
WHOLE = ("lamb", "stable_adamw")
"""Optimizers whose update depends on a norm or mean over a parameter. DeepSpeed gives them flat shards of many."""
RULE_BOUNDS = {"muon": 1e-4, "lion": 0.03, "lamb": 1e-5, "stable_adamw": 1e-5, "sgd": 1e-5}
"""[fraction] Smallest usable bound for a rule, beyond the effect of rounding gradients: masters are rounded to FP32,
which matters if they move little. Muon's quintic steps amplify the smallest directions up to 485 times. Lion steps by
signs, and rounding decides those of averages near zero: one flipped sign is 5e-3."""

FP8_BOUND = 1e-5
"""[fraction] Smallest usable bound with FP8 products: FP32 sums in another order differ by 1e-7, and if that moves a
value across the midpoint of two FP8 numbers it is rounded to the other one, 6% away."""

# eps is as large as Adam's sqrt(v), about 0.01 here, so that the update depends on the size of the gradient. With the
# usual 1e-8 it is little more than the sign, which hides a halved gradient and turns rounding noise into whole steps.
_RUN = """
model:
  architecture: llama
  config: {hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2,
    num_key_value_heads: 2, tie_word_embeddings: true}
data: {sequence_length: 16}
optimizer: {learning_rate: 0.02, weight_decay: 0.1, betas: [0.9, 0.95], eps: 0.01}
precision: {loss_scale: {initial: 256, window: 2}}
run: {seed: 0, steps: 100}
"""
_MIXTURE = (
    "model={architecture: qwen3_moe, config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, "
    "num_key_value_heads: 2, head_dim: 16, num_experts: 4, num_experts_per_tok: %d, moe_intermediate_size: 16}}"
)
_TAKEN = {"parallel.expert": 4, "model.balance_loss": 2}
"""[experts] Number out of four that a token is routed to in cells of these settings, whose model is _MIXTURE instead of
the Llama: all four when ranks share them, so that rounding cannot change the choice; two for the balance loss, since
using all is always balanced."""
_DIVIDES = ("parallel.sequence", "parallel.tensor", "parallel.expert", "zero_optimization.zero_hpz_partition_size")
"""Settings that are numbers of processes, which have to divide the number of all."""
_SMALL = {"reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
_SMALL_ZERO3 = {
    "reduce_bucket_size": 4096,
    "stage3_prefetch_bucket_size": 4096,
    "stage3_param_persistence_threshold": 1000,
    "sub_group_size": 8192,
}
_FP8_RULES = [{"match": "*.layers.*", "module_class": "Linear", "compute": "fp8", "reason": "the matrix"}]
_MANIFESTS: dict[str, dict[str, Any] | Path] = {
    "bf16": REPOSITORY / "config/manifests/bf16.json",
    "fp16": {"default": "fp16", "rules": []},
    "mixed": REPOSITORY / "config/manifests/llama_mixed.json",
    "fp8": {"default": "fp32", "rules": _FP8_RULES},
    "fp8_bf16": {"default": "bf16", "rules": _FP8_RULES},
}


def global_size(world_size: int) -> int:
    """[sequences] Batch of a step: four micro-batches on every rank, and at least 8."""
    return max(8, 4 * world_size)


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    combination: Combination
    accumulation: int = 1
    """[micro-batches]"""
    clipping: bool = False
    checkpointing: str = "none"
    setting: Setting | None = None
    """A setting that differs from those in Mantissa's own JSONs."""
    optimizer: str = "adamw"
    """optimizer.name."""
    ranks: int | None = None
    """[processes] Number of ranks; None: as many as the matrix was started with."""

    @property
    def dtype(self) -> str:
        """Dtype of the parameters, as named in the DeepSpeed JSON: fp32, bf16 or fp16."""
        return "fp32" if self.combination.path == "manifest" else self.combination.compute

    @property
    def bound(self) -> float:
        """Largest relative error of loss, gradient norm and masters that counts as verified."""
        least = max(RULE_BOUNDS.get(self.optimizer, 0.0), FP8_BOUND if self.fp8 else 0.0)
        return max(tolerance(ROUNDINGS, COARSEST[self.combination.compute]), least)

    @property
    def fp8(self) -> bool:
        """Whether its linear layers, and the reference's, compute in FP8."""
        return self.combination.compute in FP8

    @property
    def plain(self) -> bool:
        """Whether it has no setting, no optimizer other than AdamW, and no FP8."""
        return self.setting is None and self.optimizer == "adamw" and not self.fp8

    @property
    def bare(self) -> bool:
        """Whether bare DeepSpeed is run as well, with the same JSON, and the same rule on what it gives its optimizer.

        Not if a setting is Mantissa's own, or upstream implements it by another loop or model, nor with Muon's rule,
        which would get a flat shard instead of a matrix.
        """
        own = self.setting is None or self.setting.in_json or self.setting.key == "parallel.tensor"
        return own and self.combination.path == "cast" and self.optimizer != "muon"

    @property
    def sharing(self) -> int:
        """[processes] Number that share each sequence or each matrix."""
        shares = self.setting is not None and self.setting.key in ("parallel.sequence", "parallel.tensor")
        return self.setting.other if self.setting and shares else 1

    def fits(self, processes: int) -> bool:
        """Whether a matrix on that many processes can measure it."""
        return self.setting is None or self.setting.key not in _DIVIDES or processes % self.setting.other == 0

    @property
    def name(self) -> str:
        """Unique name, the same in every matrix."""
        parts = [str(self.combination), f"accumulation {self.accumulation}"]
        parts += [f"clipping {'on' if self.clipping else 'off'}", f"checkpointing {self.checkpointing}"]
        parts += [f"setting {self.setting}"] if self.setting else []
        parts += [f"ranks {self.ranks}"] if self.ranks else []
        return ", ".join(parts if self.optimizer == "adamw" else [*parts, f"optimizer.name = {self.optimizer}"])

    def prepare(self, folder: Path) -> tuple[list[str], Path]:
        """Write the run config and DeepSpeed JSON into `folder`. Returns the overrides and the run config's path."""
        combination, data_ranks = self.combination, int(os.environ["WORLD_SIZE"]) // self.sharing
        size = global_size(int(os.environ["WORLD_SIZE"]))
        document = read_document(REPOSITORY / f"ds_configs/zero{combination.stage}_{self.dtype}.json")
        zero = document["zero_optimization"]
        zero |= {0: {}, 3: _SMALL_ZERO3}.get(combination.stage, _SMALL)
        for what in combination.offload.split("+"):
            if what != "none":
                zero[f"offload_{what}"] = {"device": "cpu", "pin_memory": True}
        overrides = [
            f"deepspeed.config={folder / 'deepspeed.json'}",
            f"batch.global_size={size}",
            f"batch.micro_size={size // data_ranks // self.accumulation}",
            f"optimizer.gradient_clipping={CLIPPING if self.clipping else 0}",
            f"model.activation_checkpointing={self.checkpointing}",
        ]
        if combination.path == "manifest":
            manifest = _MANIFESTS[combination.compute]
            if isinstance(manifest, dict):
                (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
                manifest = folder / "manifest.json"
            overrides += ["precision.path=manifest", f"precision.manifest={manifest}"]
        if self.setting:
            overrides += self._apply_setting(document)
        if self.optimizer != "adamw":
            overrides += [f"optimizer.name={self.optimizer}", *OPTIMIZERS[self.optimizer]]
        (folder / "deepspeed.json").write_text(json.dumps(document), encoding="utf-8")
        (folder / "run.yaml").write_text(_RUN, encoding="utf-8")
        return overrides, folder / "run.yaml"

    def resolve(self, folder: Path) -> Resolved:
        """The run as the command line would resolve it. Raises UserError if the config refuses it."""
        overrides, path = self.prepare(folder)
        return resolve_run(parse(["--config", str(path), *overrides]), os.environ)

    def resolve_document(self, folder: Path) -> dict[str, Any]:
        """The complete DeepSpeed JSON for bare DeepSpeed, even for a combination that the config refuses."""
        overrides, path = self.prepare(folder)
        json_path, config = folder / "deepspeed.json", load_config(path, overrides, None)
        world_size = int(os.environ["WORLD_SIZE"])
        document = resolve_unverified(config, json_path, read_document(json_path), world_size=world_size)
        if self.combination.stage == 0 and self.dtype != "fp32":
            del document["data_types"]  # without ZeRO DeepSpeed cannot accumulate in a dtype other than compute's
        return document

    def _apply_setting(self, document: dict[str, Any]) -> list[str]:
        """Write the setting into `document`, or return the override that sets it."""
        assert self.setting is not None
        if not self.setting.in_json:
            taken = _TAKEN.get(self.setting.key)
            return [*([_MIXTURE % taken] if taken else []), f"{self.setting.key}={self.setting.other}"]
        *parents, key = self.setting.key.split(".")
        section = document
        for parent in parents:
            section = section[parent]
        section[key] = self.setting.other
        return []


def all_cells() -> Iterator[Cell]:
    """The full matrix: every combination crossed with accumulation, clipping and checkpointing, FP8 at every stage also
    on one process, then the settings, then the optimizers at every stage with and without clipping.

    Settings and optimizers are measured with 4 micro-batches, settings without clipping, so that gradients are summed
    and an error in their magnitude shows.
    """
    for combination in combinations():
        for accumulation in ACCUMULATIONS:
            for clipping in (False, True):
                for checkpointing in CHECKPOINTINGS:
                    yield Cell(combination, accumulation, clipping, checkpointing)
    for combination in (Combination("manifest", compute, stage) for compute in FP8 for stage in STAGES):
        for accumulation in ACCUMULATIONS:
            for clipping in (False, True):
                yield Cell(combination, accumulation, clipping, ranks=1)
    for setting in SETTINGS:
        for combination in setting.combinations:
            yield Cell(combination, accumulation=4, setting=setting)
    for optimizer in OPTIMIZERS:
        for compute in COMPUTES["cast"] if optimizer in IN_16_BITS else ("fp32",):
            for combination in (Combination("cast", compute, stage) for stage in STAGES):
                if refusal(combination) is None:
                    for clipping in (False, True):
                        yield Cell(combination, accumulation=4, clipping=clipping, optimizer=optimizer)
