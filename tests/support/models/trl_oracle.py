"""TRL's own trainers on rows as a user gives them, in one process without DeepSpeed, as test_trl_oracle.py starts them.

python -m tests.support.models.trl_oracle FOLDER: reads FOLDER/spec.json, writes FOLDER/steps.json and
FOLDER/weights.safetensors. Optimizer, templates' masks, packing and padding are TRL's and transformers' own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class Steps(TrainerCallback):
    """Keeps what is logged of each step."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """A step, or the end's summary, which has no norm."""
        if logs and "grad_norm" in logs:
            self.found.append({name: float(value) for name, value in logs.items()})


def main(folder: Path) -> None:
    """Train as the spec says."""
    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(spec["base"], local_files_only=True)
    tokenizer.chat_template = spec["template"]
    given: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "per_device_train_batch_size": spec["micro"],
        "gradient_accumulation_steps": spec["accumulation"],
        "max_steps": spec["steps"],
        "learning_rate": spec["rate"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta2": 0.95,
        "max_grad_norm": spec["clipping"],
        "optim": "adamw_torch",
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "max_length": spec["length"],
        "bf16": False,
    }
    adapter = LoraConfig(task_type="CAUSAL_LM", **spec["adapter"]) if spec["adapter"] else None
    steps = Steps()
    more: dict[str, Any] = {
        "model": spec["base"],
        "train_dataset": Dataset.from_list(spec["rows"]),
        "processing_class": tokenizer,
        "peft_config": adapter,
        "callbacks": [steps],
    }
    if spec["task"] == "sft":
        packing = {"packing": True, "packing_strategy": "bfd"} if spec["packed"] else {}
        trainer: Any = SFTTrainer(args=SFTConfig(**given, assistant_only_loss=True, **packing), **more)
    else:
        trainer = DPOTrainer(args=DPOConfig(**given, loss_type=[spec["loss"]], beta=spec["beta"]), **more)
    model = trainer.model.get_base_model() if adapter else trainer.model
    if adapter:
        first = load_file(folder / "first.safetensors")
        missing, unknown = model.load_state_dict(first, strict=False)
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert not unknown and not trained & set(missing)
    trainer.train()
    weights = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    save_file(weights, folder / "weights.safetensors")
    (folder / "steps.json").write_text(json.dumps(steps.found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
