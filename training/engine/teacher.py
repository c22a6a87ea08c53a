"""A teacher's forward pass: a model that is not trained, whole on every rank or partitioned by ZeRO-3."""

from pickle import UnpicklingError
from typing import Any

import deepspeed
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from config.errors import UserError, one_line
from config.resolved import Resolved
from config.rules import QUANTISED_TEACHERS
from modeling.build import refuse_quantised
from modeling.document_masking import require_documents_apart
from precision.dtypes import DTYPES
from training.distributed import World, allow_fp16_on_cpu


class Teacher:
    """The model of `distill.teacher` in evaluation mode, without gradients; calls are collectives if it is sharded.
    Built before the student, whose ZeRO-3 settings would otherwise apply to it."""

    def __init__(self, resolved: Resolved, world: World) -> None:
        """Load it. Raises UserError if that cannot be done."""
        section, name = resolved.config.distill, str(resolved.config.distill.teacher)
        trusted = resolved.config.model.trust_remote_code
        options: dict[str, Any] = {"trust_remote_code": trusted}
        allow_fp16_on_cpu()
        try:
            shape = AutoConfig.from_pretrained(name, trust_remote_code=trusted)
            refuse_quantised(shape, f"distill.teacher = {name}", QUANTISED_TEACHERS)
            dtype = shape.dtype or torch.float32 if section.dtype == "auto" else DTYPES[section.dtype]
            student = resolved.config.model
            attention = student.wide_attention if dtype == torch.float32 else student.attention
            if attention != "auto":
                options["attn_implementation"] = attention
            document: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": 1,
                # a stream of its own for gathers is not waited for while a student without one trains
                # (training/engine/gradients.py)
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
                "bf16": {"enabled": dtype == torch.bfloat16},
                "fp16": {"enabled": dtype == torch.float16},
            }
            zero3 = HfDeepSpeedConfig(document) if section.sharded else None
            options |= {"dtype": dtype, "output_loading_info": True}
            loaded: Any = AutoModelForCausalLM.from_pretrained(name, **options)
            model, found = loaded
            if found["missing_keys"]:  # which would be initialised at random
                raise ValueError(f"its files lack {min(found['missing_keys'])}")
        except (ImportError, ValueError, OSError, SafetensorError, UnpicklingError) as error:
            raise UserError(f"distill.teacher = {name}: cannot be loaded ({one_line(error)})") from error
        model.requires_grad_(False).eval()
        self._forward: Any = model.to(world.device) if zero3 is None else None
        self._engine: Any = None
        if zero3 is not None:
            self._engine, *_ = deepspeed.initialize(model=model, config=document)
            self._forward = self._engine
            self._engine.eval()
        if resolved.config.keeps_documents_apart:
            require_documents_apart(lambda inputs: self(**inputs).logits, model.config, world.device)

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        """transformers' output; its logits are (batch, sequence, vocabulary) in the teacher's dtype."""
        return self._forward(**inputs | {"use_cache": False})

    @property
    def weights(self) -> list[torch.Tensor]:
        """This rank's part of the weights."""
        return [getattr(parameter, "ds_tensor", parameter).data for parameter in self._forward.parameters()]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
        self._forward = self._engine = None
