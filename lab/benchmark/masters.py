"""The cost of masters below FP32: one small model, trained with four kinds of masters on the same batches.

    python -m lab.benchmark.masters

A Llama of 2 layers computes in BF16; AdamW's averages are FP32 throughout. Only what is kept of a weight between two
steps differs: an FP32 master (fp32), the same as its BF16 weight and a remainder (split, `precision.masters: split`),
or the BF16 weight alone, rounded to nearest (bf16) or up or down by chance, so that the mean is exact (stochastic).
docs/numerics.md has what it printed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from config.cli import Arguments, entry_point
from training.engine.split_masters import SplitAdamW, SplitMaster

STEPS, VOCABULARY, SEQUENCE, BATCH = 150, 256, 64, 16
RATES = (3e-4, 1e-4)
KINDS = ("fp32", "split", "bf16", "stochastic")


def stochastically(values: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """FP32 rounded to BF16: up with the probability of its distance from the value below."""
    bits = values.view(torch.int32) + torch.randint(1 << 16, values.shape, generator=draw, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32).bfloat16()


def batches() -> torch.Tensor:
    """(STEPS, BATCH, SEQUENCE) of a Markov chain in which each token has four successors."""
    draw = torch.Generator().manual_seed(0)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=draw)
    tokens = torch.randint(VOCABULARY, (STEPS, BATCH, 1), generator=draw)
    for _ in range(SEQUENCE - 1):
        choice = torch.randint(4, (STEPS, BATCH, 1), generator=draw)
        tokens = torch.cat([tokens, successors[tokens[..., -1:], choice].view(STEPS, BATCH, 1)], dim=-1)
    return tokens


def train(kind: str, rate: float, data: torch.Tensor) -> tuple[float, float]:
    """(loss of the first step, mean loss of the last ten)."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    config.num_attention_heads = config.num_key_value_heads = 4
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = [parameter.data.view(-1) for parameter in model.parameters()]
    masters = [weight.float().requires_grad_() for weight in weights]
    optimizer = SplitAdamW([{"params": masters}], {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 0.1})
    if kind == "split":
        optimizer.splits = {m: SplitMaster(m, weight) for m, weight in zip(masters, weights, strict=True)}
        assert not any(split.split() for split in optimizer.splits.values())
    draw, losses = torch.Generator().manual_seed(1), []
    for tokens in data:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(float(loss.detach()))
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float().view(-1), None
        optimizer.step()
        for master, weight in zip(masters, weights, strict=True):
            if kind == "split":
                optimizer.splits[master].hide()
            elif kind == "stochastic":
                weight.copy_(stochastically(master.detach(), draw))
            else:
                weight.copy_(master.detach())
            if kind in ("bf16", "stochastic"):
                master.data.copy_(weight)
    return losses[0], sum(losses[-10:]) / 10


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """1 when split masters end elsewhere than FP32 masters."""
    Arguments("python -m lab.benchmark.masters", __doc__).parse_args(arguments)
    data, same = batches(), True
    for rate in RATES:
        ends = {}
        for kind in KINDS:
            first, ends[kind] = train(kind, rate, data)
            print(f"    learning rate {rate:.0e}, {kind:10} masters: loss {first:.4f} -> {ends[kind]:.4f}", flush=True)
        same = same and ends["split"] == ends["fp32"]
    print(f"    split ends where fp32 does, bit for bit: {same}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
