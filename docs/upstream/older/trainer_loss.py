"""Whether the Trainer of the transformers that is imported takes the mean over the labels of a step's micro-batches.

One process, no DeepSpeed: two rows of 3 and 31 labels, a micro-batch each, against plain torch on both at once.
tools/audit/known.yaml names the releases in which it does not.

Run: python docs/upstream/older/trainer_loss.py

To run another release: pip install --no-deps --target /tmp/older transformers==4.45.2 tokenizers==0.20.3
huggingface_hub==0.26.5 accelerate==1.0.1, then PYTHONPATH=/tmp/older before the command.
"""

import os
import tempfile

import torch

os.environ["ACCELERATE_USE_CPU"] = "true"
import transformers.utils.import_utils as imports

for name in ("_datasets_available", "_peft_available", "_torchao_available"):  # their newest do not go with old ones
    if hasattr(imports, name):
        setattr(imports, name, False)
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, __version__  # noqa: E402

VOCABULARY = 64


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, attn_implementation="eager")
    return LlamaForCausalLM(config)


def gradient(parameters: object) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten().clone() for parameter in parameters])


class Recording(torch.optim.SGD):
    """Keeps the gradient that the step gets."""

    seen: torch.Tensor

    def step(self, closure: object = None) -> None:
        self.seen = gradient(parameter for group in self.param_groups for parameter in group["params"])


ids = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
labels = ids.clone()
labels[0, 4:] = -100
model = build()
logits = model(input_ids=ids).logits[:, :-1].float()
torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)).backward()
right = gradient(model.parameters())

model = build()
optimizer = Recording(model.parameters(), lr=0.0)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=1,
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None)).train()
off, norm = (optimizer.seen - right).norm() / right.norm(), optimizer.seen.norm() / right.norm()
print(f"transformers {__version__}: gradient off by {float(off):.3f}, norm {float(norm):.3f} of the true one")
