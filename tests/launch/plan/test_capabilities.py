"""Each way to train: peak memory within 10% of the tensors', bytes within 5%."""

from pathlib import Path

import pytest

from launch.plan.memory import peak_memory
from launch.plan.speed import traffic
from tests.launch.plan import plan_cases
from tests.launch.plan.plan_cases import MODEL
from tests.support.models.small_run import changed_json

MIXTURE = (
    "model={architecture: mixtral, config: {num_hidden_layers: 4, hidden_size: 192, intermediate_size: 256, "
    "num_attention_heads: 4, num_key_value_heads: 4, num_local_experts: 8}}"
)
SEQUENCES = "data.sequence_length=512", "parallel.sequence=2", "batch.global_size=8"
MATRICES = "data.sequence_length=256", "parallel.tensor=2", "batch.global_size=8"
MANIFEST = "precision.manifest=config/manifests/bf16.json", "precision.compute=auto"
RELEASED = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold")
CASES = [
    *(("adamw", stage, ()) for stage in (1, 2, 3)),
    ("adamw", 2, ("model.activation_checkpointing=full",)),
    ("manifest", 2, MANIFEST),
    *(("muon", stage, ("optimizer.name=muon",)) for stage in (1, 2, 3)),
    *(("lamb", stage, ("optimizer.name=lamb",)) for stage in (1, 2, 3)),
    *(("fp8", stage, ("precision.manifest=config/manifests/fp8.json", "precision.compute=auto")) for stage in (2, 3)),
    ("sequence", 2, (*SEQUENCES, "batch.micro_size=2", "batch.global_size=4")),
    ("sequence", 2, (*SEQUENCES, "batch.micro_size=1", "batch.global_size=4", "data.document_masking=true")),
    ("sequence", 3, (*SEQUENCES, "model.activation_checkpointing=full")),
    *(
        ("expert", stage, (MIXTURE, "parallel.expert=2", "batch.micro_size=2", "batch.global_size=8"))
        for stage in (1, 2, 3)
    ),
    ("hpz", 3, ()),
    *(("split masters", stage, ("precision.masters=split",)) for stage in (1, 2, 3)),
    *(("tensor", stage, MATRICES) for stage in (1, 2, 3)),
    ("tensor", 2, (*MATRICES, "model.activation_checkpointing=full")),
    ("tensor", 2, (*MATRICES, "model.loss=chunked", "model.loss_chunk_tokens=256")),
    *(("tensor, manifest", stage, (*MATRICES, *MANIFEST)) for stage in (1, 2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "stage", "more"), CASES)
def test_memory_is_planned_to_a_tenth_and_bytes_to_a_twentieth(
    pair, tmp_path: Path, what: str, stage: int, more
) -> None:
    """Two ranks and micro-batches, BF16, buckets of 1 M values. What ranks send is compared as their mean."""
    compute = "fp32" if what in ("fp8", "manifest", "tensor, manifest") else "bf16"
    copies = dict.fromkeys(RELEASED, 0) | {"zero_hpz_partition_size": 2} if what == "hpz" else {}
    changed = changed_json(tmp_path, f"zero{stage}_{compute}", reduce_bucket_size=1_000_000, **copies)
    overrides = [MODEL, "model.activation_checkpointing=none", "data.sequence_length=128", "batch.micro_size=4"]
    overrides += ["batch.global_size=16", changed, f"precision.compute={compute}", *more]
    found = pair.run(plan_cases.peak_of, overrides=overrides, vocabulary=1024)
    shape, layout = plan_cases.planned(overrides, on_cpu=False)
    assert peak_memory(shape, layout).total == pytest.approx(max(rank["peak"] for rank in found), rel=0.1)
    sent = [sum(size for name, size in rank["sent"].items() if name != "rows") for rank in found]
    assert traffic(shape, layout).sent == pytest.approx(sum(sent) / 2, rel=0.05)
