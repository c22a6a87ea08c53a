"""The keys of a DeepSpeed 0.19.8 JSON: those that Mantissa accepts, with their kinds, and those that it refuses.

DeepSpeed silently ignores an unknown top-level key: `zero_optimisation` trains without ZeRO.
tests/config/deepspeed/test_keys.py compares this table with the installed DeepSpeed, whose import takes seconds.
"""

from __future__ import annotations

DTYPES = "fp32|bf16|fp16"


def _keys(**kinds: str) -> dict[str, str]:
    """Key to kind, from `kind="key key ..."`."""
    return {key: kind for kind, names in kinds.items() for key in names.split()}


# Section (dotted; "" is the top level) to its keys and their kinds: bool, int, float (which takes an int), str, list,
# section, or the allowed words joined by |.
SECTIONS: dict[str, dict[str, str]] = {
    "": _keys(
        int="train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print",
        float="gradient_clipping gradient_predivide_factor",
        bool="prescale_gradients disable_allgather dump_state disable_python_gc wall_clock_breakdown memory_breakdown"
        " zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        section="zero_optimization bf16 fp16 data_types aio comms_logger flops_profiler"
        " tensorboard csv_monitor comet checkpoint timers",
        str="log_level",
    )
    | {"communication_data_type": DTYPES},
    "zero_optimization": _keys(
        int="stage reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size"
        " stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters"
        " stage3_max_reuse_distance stage3_module_granularity_threshold zero_hpz_partition_size",
        bool="contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm"
        " load_from_fp32_weights stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params"
        " stage3_allgather_sequential ignore_unused_parameters round_robin_gradients parameter_alignment"
        " memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings"
        " enable_sanity_checks",
        section="offload_optimizer offload_param leaf_module",
    ),
    "zero_optimization.offload_optimizer": _keys(
        str="nvme_path",
        int="buffer_count",
        bool="pin_memory pipeline_read pipeline_write fast_init super_offload",
        float="ratio cpuadam_cores_perc",
    )
    | {"device": "none|cpu|nvme"},
    "zero_optimization.offload_param": _keys(
        str="nvme_path", int="buffer_count buffer_size max_in_cpu", bool="pin_memory"
    )
    | {"device": "none|cpu|nvme"},
    "zero_optimization.leaf_module": _keys(list="classes names name_suffixes"),
    "bf16": _keys(bool="enabled immediate_grad_update check_grad_overflow"),
    "fp16": _keys(
        bool="enabled consecutive_hysteresis",
        float="loss_scale",
        int="initial_scale_power loss_scale_window hysteresis min_loss_scale",
    ),
    "data_types": {"grad_accum_dtype": DTYPES},
    "aio": _keys(int="block_size queue_depth intra_op_parallelism", bool="single_submit overlap_events use_gds"),
    "comms_logger": _keys(bool="enabled prof_all verbose debug", list="prof_ops"),
    "flops_profiler": _keys(
        bool="enabled detailed",
        float="recompute_fwd_factor",
        int="profile_step module_depth top_modules",
        str="output_file",
    ),
    "tensorboard": _keys(bool="enabled", str="output_path job_name"),
    "csv_monitor": _keys(bool="enabled", str="output_path job_name"),
    "comet": _keys(
        bool="enabled online",
        int="samples_log_interval",
        str="project workspace api_key experiment_name experiment_key mode",
    ),
    "checkpoint": {},
    "timers": _keys(section="throughput"),
    "timers.throughput": _keys(bool="enabled synchronized"),
}

_OWN_WRITER = "Mantissa writes checkpoints itself, hashed and flushed; remove it and use the checkpoint.* keys"
_OWN_SAMPLER = "Mantissa's sampler decides which sample is trained when; remove it"
_NOT_DRIVEN = "Mantissa does not drive it; remove it"
_LOSSY = (
    "it quantizes communication to 8 or 4 bits, and has no CPU form to verify it with; remove it, and use"
    " zero_hpz_partition_size for fewer gathers between nodes"
)
_TRADES_PRECISION = "it changes the numerics outside of the run config; remove it and use the precision.* keys"

# Dotted keys that DeepSpeed has, or once had, and that are refused: why, and what to do instead.
REFUSED: dict[str, str] = {
    "zero_optimization.elastic_checkpoint": "DeepSpeed replaced it by universal checkpoints; remove it",
    "zero_optimization.legacy_stage1": "DeepSpeed no longer has it; remove it",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "its name now says 16bit instead of fp16; rename it",
    "optimizer": "Mantissa owns the optimizer and its decay groups. DeepSpeed 0.19.8's Muon clips what it has"
    " orthogonalized (measured: an update of 1.000, not 5.161) and at ZeRO-2 drops gradients (6 of 6 biases stand"
    " still), and LAMB and Adafactor see flat shards (updates 14% to 68% off); set optimizer.* in the run config",
    "scheduler": "Mantissa owns the learning rate, counted in applied steps; set schedule.* in the run config",
    "wandb": "Mantissa writes wandb itself, once and from rank 0; set tracking.wandb in the run config",
    "torch_autocast": "with float16 DeepSpeed 0.19.8 clips by the scaled gradient norm (measured: 1.221e+05, not"
    " 1.863), never lowers the scale on overflow (0 of 12 steps applied, 7 were due), or changes it within a step"
    " (update 0.7040, not 1.4080), does not save it (65536, not 4096), and without ZeRO reports skipped steps as"
    " applied (12, not 7); use the fp16 or bf16 section (ds_configs/zero1_fp16.json, zero1_bf16.json)",
    "bfloat16": "it is the old name of the bf16 section; rename it",
    "bf16.bf16_master_weights_and_grads": "masters must be FP32, or small updates round away (measured: 200 steps move"
    " a weight of 1 by 0.0000, not 0.0195); remove it",
    "bf16.bf16_optimizer_states": "moments must be FP32; remove it",
    "fp16.fp16_master_weights_and_grads": "masters must be FP32, or small updates round away; remove it",
    "fp16.auto_cast": "token ids must not be cast; remove it",
    "data_types.param_dtype": "precision.compute in the run config decides it; remove it",
    "data_types.buffer_dtype": _TRADES_PRECISION,
    "data_types.keep_in_fp32_modules": _TRADES_PRECISION,
    "gradient_allreduce_op": "the loss is a mean over the global batch, so gradients are averaged; remove it",
    "managed_gradient_accumulation": "accumulation follows batch.*; remove it",
    "zero_optimization.compute_grad_norm": "every step reports its gradient norm; remove it",
    "zero_optimization.zero_quantized_weights": _LOSSY,
    "zero_optimization.zero_quantized_nontrainable_weights": _LOSSY,
    "zero_optimization.zero_quantized_gradients": _LOSSY,
    "zero_optimization.zenflow": "by design it updates a share of the columns (topk_ratio) each step and the others"
    " only after several steps, which is another optimizer than AdamW, and nothing of it was measured; use"
    " offload_optimizer: {device: cpu}",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "it is for the Muon optimizer only; remove it",
    "zero_optimization.cpu_offload": "it is the old form of offload_optimizer; write offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "it is the old form of offload_param; write offload_param: {device: cpu}",
    "zero_optimization.cpu_offload_use_pin_memory": "it is the old form of offload_optimizer.pin_memory; write that",
    "weight_quantization": _TRADES_PRECISION,
    "data_efficiency": _OWN_SAMPLER,
    "dataloader_drop_last": _OWN_SAMPLER,
    "checkpoint.writer": _OWN_WRITER,
    "checkpoint.tag_validation": _OWN_WRITER,
    "checkpoint.parallel_write": _OWN_WRITER,
    "checkpoint.checkpoint_serialization": _OWN_WRITER,
    "checkpoint.use_node_local_storage": "the nodes share the run folder, or checkpoint.dir; remove it",
    "checkpoint.load_universal": "run.resume decides how a checkpoint is loaded; remove it",
    "vocabulary_size": "the tokenizer decides it; remove it",
    "seq_parallel_communication_data_type": "gradients cross the network in precision.reduce; remove it",
    "sequence_parallel_size": "DeepSpeed 0.19.8 divides gradients by it again at ZeRO-3 (measured: norm 1.31, not"
    " 2.62), its attention drops windows and packed documents (logits 48% to 120% off), and BF16 stops at ZeRO-1"
    " (docs/upstream/); set parallel.sequence in the run config",
    "use_data_before_expert_parallelism": _NOT_DRIVEN,
    "tensor_parallel": "with dropout DeepSpeed 0.19.8 lets ranks' copies of a weight diverge (measured: by 3.5e-2 in"
    " 4 steps) while their gradient norms stay equal; set parallel.tensor in the run config, which keeps them equal",
    "expert_parallel": "DeepSpeed 0.19.8 does not start it with transformers 5.23 (TypeError), and without ZeRO clips"
    " by the mean of the ranks' norms (measured: an update of 0.062760, not 0.062279); set parallel.expert in the run"
    " config, which shares transformers' own experts",
    "pipeline": "DeepSpeed 0.19.8 does not reduce tied gradients in FP16 (measured: update off by 33.8%), counts them"
    " twice in FP32's clipping norm (off by 7.3%), and needs ZeRO-0 or 1; use ZeRO-3",
    "activation_checkpointing": "transformers' models do not use DeepSpeed's; remove it and set"
    " model.activation_checkpointing in the run config",
    "hybrid_engine": _NOT_DRIVEN,
    "autotuning": _NOT_DRIVEN,
    "compile": _NOT_DRIVEN,
    "datastates_ckpt": _NOT_DRIVEN,
}
