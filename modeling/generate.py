"""Samples text from the model during training."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from modeling.build import positions_before


def can_cache(config: PretrainedConfig) -> bool:
    """Whether `generate` may cache keys and values, which fails if T5's decoder has more layers than its encoder."""
    deep = getattr(config, "num_decoder_layers", None)
    return deep is None or deep <= config.num_hidden_layers


def room_of(model: PreTrainedModel) -> float:
    """The number of tokens that the model has positions for; inf if it computes them as it goes, by rotation."""
    text = model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if context is None or any("inv_freq" in name for name, _ in model.named_buffers()):
        return math.inf
    return float(context - positions_before(text.model_type, getattr(text, "pad_token_id", None)))


def tokens_within(model: PreTrainedModel, tokens: int, *, after: int) -> int:
    """The number of tokens to generate: `tokens`, or fewer if the model has no more positions, of which a decoder's
    prompt of `after` tokens takes some. Raises ValueError if that leaves none."""
    room, has_encoder = room_of(model), model.config.is_encoder_decoder
    if after >= room + has_encoder:
        raise ValueError(f"its prompt of {after} tokens leaves none of the model's {room:g} positions")
    return int(min(tokens, room if has_encoder else room - after))


@contextmanager
def without_settings(model: Any) -> Iterator[None]:
    """Context manager in which `generate` has no penalties, beams or bounds of the base's generation_config.json."""
    own = model.generation_config
    begins = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(own, name) for name in begins})
    try:
        yield
    finally:
        model.generation_config = own


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
    has_encoder: bool = False,
    begin: Sequence[int] = (),
) -> str:
    """The prompt continued by `tokens` sampled tokens, or by as many as the model has positions for; for an
    encoder-decoder, the answer on the next line. Every rank must make the same call: under ZeRO-3 each forward pass is
    a collective, so the length is fixed. begin: [ids] put before the prompt. Raises ValueError if that leaves none."""
    asked = tokenizer(prompt, add_special_tokens=has_encoder).input_ids
    ids = torch.tensor([[*begin, *asked]], device=device)
    tokens = tokens_within(model, tokens, after=ids.shape[1])
    was_training = model.training
    model.eval()
    try:
        with without_settings(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
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
                use_cache=can_cache(model.config),
            )
    finally:
        model.train(was_training)
    text = str(tokenizer.decode(output[0], skip_special_tokens=True))
    return f"{prompt}\n{text}" if has_encoder else text
