"""UlyssesSPAttentionHF with sdpa: sliding windows and packed documents are dropped without a word.

Where (DeepSpeed 0.19.8): `runtime/sequence_parallel/ulysses_sp.py`, `uattn_wrapper`, line 545: every mask that is no
BlockMask is set to None; sdpa then is plainly causal. The window of Mistral, Gemma 3, OLMo 3, Cohere 2 and the borders
that `position_ids` give to packed documents were in that mask. flex_attention gets a plainly causal BlockMask (line
335). Flash attention takes the window and position_ids as arguments and is not hit.

Expected: the logits of the model without sequence parallelism. Needs transformers.

Run: torchrun --standalone --nproc_per_node 2 docs/upstream/ulysses_drops_mask.py

Printed (torch 2.13.0, transformers 5.23.0, gloo on a CPU):

    llama {} one document: logits differ by 0.0e+00
    llama {} two documents: logits differ by 1.2e+00
    mistral {'sliding_window': None} one document: logits differ by 0.0e+00
    mistral {'sliding_window': 8} one document: logits differ by 4.8e-01
    gemma3_text {'sliding_window': 8} one document: logits differ by 7.0e-01
    verdict: the defect is there
"""

import sys

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as state
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import logger
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

logger.setLevel("ERROR")
SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": None}


@torch.no_grad()
def difference(name: str, packed: bool, **more: object) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **SMALL, initializer_range=0.1, **more), attn_implementation="sdpa"
    ).eval()
    ids = torch.randint(0, 96, (1, 16))
    positions = torch.arange(16)[None] % (8 if packed else 16)
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    state._SEQUENCE_PARALLEL_GROUP = state._SEQUENCE_DATA_PARALLEL_GROUP = None
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", dist.get_world_size(), 1)
    here = [part.chunk(dist.get_world_size(), 1)[dist.get_rank()] for part in (ids, positions)]
    mine = model(input_ids=here[0], position_ids=here[1], use_cache=False).logits.contiguous()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return float((torch.cat(parts, 1) - expected).abs().max() / expected.abs().max())


def main() -> int:
    deepspeed.init_distributed(dist_backend="gloo")
    wrong = False
    for name, packed, more in (
        ("llama", False, {}),
        ("llama", True, {}),
        ("mistral", False, {"sliding_window": None}),
        ("mistral", False, {"sliding_window": 8}),
        ("gemma3_text", False, {"sliding_window": 8}),
    ):
        found = difference(name, packed, **more)
        wrong |= found > 1e-4
        if dist.get_rank() == 0:
            print(f"{name} {more} {'two documents' if packed else 'one document'}: logits differ by {found:.1e}")
    if dist.get_rank() == 0:
        print("verdict: the defect is there" if wrong else "verdict: fixed")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
