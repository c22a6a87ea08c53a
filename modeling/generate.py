"""A text sample from the model in training."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> str:
    """The prompt and its continuation by `tokens` sampled tokens.

    Every rank has to call it with the same arguments: under ZeRO-3 each forward pass is a collective. The length is
    fixed, so that no rank stops before another. Leaves the generators and the training mode as they were.
    """
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(device)
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        output = model.generate(  # type: ignore[operator]  # a method that torch's stubs hide
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            temperature=temperature,
            top_k=50,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=None,
            use_cache=True,
        )
    model.train(was_training)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
