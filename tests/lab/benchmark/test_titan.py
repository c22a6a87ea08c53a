"""torchtitan's own Trainer as a contestant of the benchmark, as real jobs: it trains what Mantissa trains.

Needs torchtitan, which `make titan` installs into a folder of its own.
"""

import pytest

from lab.benchmark.peers.titan_terms import unavailable_reason
from tests.lab.benchmark.benchmark_cases import benchmarked

REASON = unavailable_reason()
pytestmark = [pytest.mark.slow, pytest.mark.titan, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SIZES = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4"
GROUPED = f"model.config={{{SIZES}, num_key_value_heads: 2, tie_word_embeddings: false, rms_norm_eps: 1.0e-3}}"
TIED = f"model.config={{{SIZES}, tie_word_embeddings: true, rope_parameters: {{rope_type: default, rope_theta: 500}}}}"
SCALED = (
    f"model.config={{{SIZES}, num_key_value_heads: 1, head_dim: 16, rope_parameters: {{rope_type: llama3, "
    "rope_theta: 100, factor: 4.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 16}}"
)
# a decay and a learning rate at which a parameter in the wrong group shows, and an epsilon at which the scale of the
# gradients does, which AdamW would divide away
ROUGH = ["optimizer.learning_rate=0.01", "optimizer.weight_decay=3", "optimizer.gradient_clipping=0.3"]
ROUGH += ["optimizer.eps=0.01"]
UNCLIPPED = ["optimizer.learning_rate=0.01", "optimizer.gradient_clipping=0"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"


def run(
    folder,
    *overrides: str,
    stage: int,
    compute: str = "fp32",
    processes: int = 2,
    names: str = "mantissa,torchtitan",
) -> dict:
    """The report of Mantissa and torchtitan, side by side for ten steps of two micro-batches a rank."""
    given = ["--processes", str(processes), "--peak-tflops", "1", f"batch.global_size={4 * processes}"]
    return benchmarked(folder, names, *given, *overrides, stage=stage, compute=compute)


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        (2, [GROUPED, *ROUGH]),
        (2, [TIED, *ROUGH]),
        (3, [SCALED, "optimizer.learning_rate=0.01", "model.activation_checkpointing=full"]),
        (1, [TIED, *UNCLIPPED]),
        (0, [GROUPED, *ROUGH]),
    ],
)
def test_it_trains_the_same_in_fp32(stage, overrides, tmp_path, cache) -> None:
    found = run(tmp_path, *overrides, cache, stage=stage)
    mine = found["contestants"]["torchtitan"]
    assert 0 < mine["loss_difference"] < 1e-6  # of its own kernels, and not a copy of ours
    assert mine["engine"].startswith("torchtitan's Trainer, ") and "AdamW, torch.float32, cpu" in mine["engine"]
    assert mine["memory_bytes"] > 1e8


def test_compiled_it_trains_the_same(tmp_path, cache) -> None:
    found = run(tmp_path, TIED, cache, stage=2, names="mantissa,torchtitan,torchtitan-compile")["contestants"]
    plain, compiled = found["torchtitan"], found["torchtitan-compile"]
    assert "2 compiled modules" in compiled["engine"] and "compiled" not in plain["engine"]
    assert 0 < compiled["loss_difference"] < 1e-6


def test_it_trains_the_same_in_bf16(tmp_path, cache) -> None:
    found = run(tmp_path, TIED, cache, stage=3, compute="bf16")
    mine = found["contestants"]["torchtitan"]
    assert 0 < mine["loss_difference"] < 5e-3 and "torch.bfloat16" in mine["engine"]
