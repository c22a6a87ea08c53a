"""The run config: every key a user may set, with its type, unit, default and range.

Each section is a frozen dataclass. The string under a field is its documentation: it opens with the unit in square
brackets, and `train.py --help` prints it. Ranges are `limit(...)` metadata, enforced by `config.load`.

Standard library only, so that `--help` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, replace
from typing import Any, Literal


def limit(default: Any = MISSING, **bounds: float) -> Any:
    """A dataclass field with a default and bounds: at_least, above, at_most, below, and null, what null stands for."""
    return field(default=default, metadata=bounds)


@dataclass(frozen=True)
class RunSection:
    """The run's name, its length and its folder."""

    name: str = "run"
    """[text] Name of the run, also in wandb; its folder is run.dir/run.name."""
    dir: str = "runs"
    """[path] Folder that holds the run folders."""
    steps: int = limit(100, at_least=0, null=0)
    """[steps] Optimizer steps to attempt in total, earlier sessions included. 0: given by run.epochs."""
    epochs: float | None = limit(None, above=0.0)
    """[epochs] Alternative to run.steps: passes over the training samples. The number of steps, rounded up to whole
    batches, is known once the data are prepared, and recorded as run.steps (docs/data.md). null: run.steps."""
    max_minutes: float | None = limit(None, above=0.0)
    """[minutes] Time limit of a session, from its first step: the run then saves and ends as on SIGTERM. null: none."""
    timeout_minutes: float = limit(30.0, above=0.0)
    """[minutes] Longest wait of a collective for a rank; then the run ends and names that rank."""
    seed: int = limit(0, at_least=0)
    """[integer] Seed of initial weights, data order and dropout."""
    resume: str = "auto"
    """[auto | never | path] auto: resume from the newest complete checkpoint of this run, if there is one.
    never: start anew; an earlier folder of that name is renamed, not deleted. A path: resume from that checkpoint."""
    hypothesis: str = ""
    """[text] Hypothesis that this run tests; shown in the run folder, the report and wandb."""
    bind_cores: Literal["auto", "always", "never"] = "auto"
    """[choice] Bind each rank to its own cores, near its GPU if it has one. auto: on machines with several NUMA nodes.
    always: on every machine, unless a launcher has bound the ranks. never: no binding."""
    deterministic: bool = False
    """[true or false] Use only deterministic kernels and collectives, so that a repeated step has the same bits on GPUs
    too. An operator without a deterministic kernel ends the run and is named. CPUs always use such kernels."""


@dataclass(frozen=True)
class ModelSection:
    """The Hugging Face model to train, and how its activations are kept."""

    name_or_path: str | None = None
    """[path or hub id] Model whose config and weights are loaded. Excludes model.architecture."""
    architecture: str | None = None
    """[model_type] Hugging Face model type trained from scratch, such as llama, qwen3 or gpt2."""
    config: dict[str, Any] = field(default_factory=dict)
    """[mapping] Arguments of that architecture's Hugging Face config, such as hidden_size. vocab_size defaults to the
    tokenizer's, max_position_embeddings to data.sequence_length. With name_or_path: values that override its config."""
    trust_remote_code: bool = False
    """[true or false] Run model code from a hub repository. Off unless set here."""
    attention: str = "auto"
    """[name] sdpa, eager, flash_attention_2 or flex_attention. auto: sdpa if the model supports it, else eager."""
    activation_checkpointing: Literal["none", "full", "selective", "attention", "ops", "budget"] = "none"
    """[choice] Activations recomputed in backward. full: every transformer block. selective: every
    model.checkpointing_every-th block. attention: the attention of every block. ops: all but the results of matmuls and
    fused attention. budget: as few blocks as fit in model.activation_memory_gib."""
    checkpointing_every: int = limit(2, at_least=1)
    """[blocks] selective recomputes one block in this many; 2 has about half the saving of full and half its cost."""
    activation_memory_gib: float | None = limit(None, above=0.0)
    """[GiB per rank] For budget: limit for a micro-batch's activations, logits included; counted at startup."""
    checkpointing_reentrant: bool = False
    """[true or false] Use torch's reentrant checkpointing (the older of its two implementations)."""
    compile: bool = False
    """[true or false] Compile the transformer blocks with torch.compile, at ZeRO 0 to 2 (docs/compile.md)."""
    kernels: Literal["auto", "torch", "liger"] = "auto"
    """[choice] Kernels of norms, rotary embeddings and gated activations: torch's, or on a GPU the Triton kernels of
    liger-kernel, if installed. auto: liger where available (docs/kernels.md)."""
    loss: Literal["auto", "full", "chunked"] = "auto"
    """[choice] full: all logits of a micro-batch at once. chunked: logits and their gradients for some tokens at a
    time. auto: chunked if a micro-batch has many logits and the model supports it (docs/loss.md)."""
    loss_chunk_tokens: int = limit(0, at_least=0, null=0)
    """[tokens] Size of one chunk; 0: chosen by vocabulary size."""
    balance_loss: float = limit(0.0, at_least=0.0, null=0.0)
    """[factor] Coefficient of the MoE load-balancing loss, computed over all tokens of the step, however it is split
    into ranks and micro-batches (docs/moe.md). 0: none, even if the model's config has one."""
    router_z_loss: float = limit(0.0, at_least=0.0, null=0.0)
    """[factor] Coefficient of the router z-loss, mean squared logsumexp of router logits (Zoph et al. 2022)."""

    @property
    def wide_attention(self) -> str:
        """The attention for FP32 and FP64 on any device: FlashAttention's kernels take 16 bits only, and FlexAttention
        multiplies in TF32 on a GPU and has no backward pass on a CPU."""
        return self.attention if self.attention in ("sdpa", "eager") else "auto"


@dataclass(frozen=True)
class AdapterSection:
    """Low-rank adapters on a frozen model, by the library peft (docs/finetuning.md)."""

    kind: Literal["none", "lora", "dora"] = "none"
    """[choice] lora: freezes W and trains B and A in W + (alpha / r) B A. dora: also a magnitude of every row."""
    r: int = limit(16, at_least=1)
    """[rows] Rank: rows of A, columns of B."""
    alpha: int = limit(32, at_least=1)
    """[factor] Numerator of the scale alpha / r."""
    dropout: float = limit(0.0, at_least=0.0, below=1.0)
    """[fraction] Dropout on the adapter's input."""
    rslora: bool = False
    """[true or false] Divide alpha by the root of r instead of r (Kalajdzievski 2023)."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """[names] Ends of names of modules with an adapter, such as [q_proj, v_proj]; all-linear: all but the head."""
    modules_to_save: tuple[str, ...] = ()
    """[names] Modules trained in full and saved with the adapter, such as [lm_head]."""
    init: Literal["default", "gaussian"] = "default"
    """[choice] Initialisation of A. default: uniform, as torch's linear layers. gaussian: normal. B starts at zero."""
    base: Literal["compute", "nf4", "int8"] = "compute"
    """[choice] Storage of the frozen linear layers. compute: precision.compute. nf4: 4 bits per weight and a scale per
    64 weights. int8: 8 bits and a scale per row. Both need bitsandbytes and compute in precision.compute
    (docs/finetuning.md)."""
    double_quant: bool = False
    """[true or false] With nf4: store scales in 8 bits, as bnb_4bit_use_double_quant: 4.13 bits per weight, not 4.5."""


@dataclass(frozen=True)
class SftSection:
    """Label weighting of task sft, and noise on embeddings (docs/finetuning.md)."""

    loss: Literal["token", "row"] = "token"
    """[choice] token: mean over all labels of the global batch. row: mean over rows of each row's mean."""
    neftune_alpha: float = limit(0.0, at_least=0.0, null=0.0)
    """[factor] Scale of uniform noise on embeddings (NEFTune, Jain et al. 2023, who use 5 to 15). 0: none."""


@dataclass(frozen=True)
class PreferenceSection:
    """The loss of task dpo over pairs of answers (docs/finetuning.md)."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """[choice] Loss of beta x margin over the reference. sigmoid: DPO (Rafailov et al. 2023). hinge: SLiC (Zhao et al.
    2023). ipo: IPO (Azar et al. 2023), on sums of log-probabilities."""
    beta: float = limit(0.1, above=0.0)
    """[per nat] Strength of the pull towards the reference model."""
    label_smoothing: float = limit(0.0, at_least=0.0, below=0.5)
    """[fraction] Assumed share of pairs with swapped answers: conservative DPO (Mitchell 2023), for sigmoid only."""
    sft_weight: float = limit(0.0, at_least=0.0, null=0.0)
    """[factor] Weight of the chosen answer's mean per-token cross-entropy, added to the loss (Pang et al. 2024)."""
    reference: Literal["auto", "adapter_off", "precomputed"] = "auto"
    """[choice] Source of reference log-probabilities. adapter_off: the base model, in every step. precomputed: the
    initial weights, once, stored beside the prepared data. auto: adapter_off with an adapter, else precomputed."""


@dataclass(frozen=True)
class DistillSection:
    """The teacher of tasks distill and opd, and what is learned from it (docs/finetuning.md, docs/rl.md)."""

    teacher: str | None = None
    """[path or hub id] Teacher model, with the same vocabulary. It is never trained."""
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """[choice] Divergence of student q from teacher p at every label. forward_kl: KL(p || q) (Hinton et al. 2015).
    reverse_kl: KL(q || p). jsd: both from their mixture beta p + (1 - beta) q (Agarwal et al. 2024)."""
    beta: float = limit(0.5, above=0.0, below=1.0)
    """[fraction] The teacher's share in the mixture of jsd, and the weight of its KL."""
    temperature: float = limit(1.0, above=0.0)
    """[factor] Both models' logits are divided by it, and the divergence is multiplied by its square."""
    ce_weight: float = limit(0.0, at_least=0.0, at_most=1.0)
    """[fraction] Weight of the cross-entropy with the labels; the divergence has the rest. 1: labels only."""
    top_k: int = limit(0, at_least=0, null=0)
    """[tokens] 0: the teacher runs in every step, with all logits. k: its k most likely tokens, and the rest as one,
    are computed before training, once per sequence, and stored beside the prepared data."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """[choice] Dtype in which the teacher computes. auto: the dtype of its saved weights."""
    sharded: bool = False
    """[true or false] Partition the teacher over the ranks (ZeRO-3) when a full copy on each does not fit."""


@dataclass(frozen=True)
class GrpoSection:
    """How tasks grpo and opd sample answers, and how grpo learns from their rewards (docs/rl.md)."""

    rewards: tuple[str, ...] = ()
    """[names] Functions that reward answers: your own, as file.py:function or module:function, or exact_match, regex,
    json_schema, length. Each gets prompts, completions, completion_ids and every column of the rows, as TRL's do."""
    reward_weights: tuple[float, ...] = ()
    """[factors] Weight of each in the sum. Empty: 1."""
    reward_options: dict[str, Any] = field(default_factory=dict)
    """[mapping] Arguments passed for rows without a column of that name, such as {regex: "^[0-9]+$"}."""
    reward_workers: int = limit(2, at_least=1)
    """[processes] Processes of each rank that run the functions."""
    reward_seconds: float = limit(10.0, above=0.0)
    """[seconds] Time limit for the answers to one prompt; a slower function counts as failed and gives no reward."""
    algorithm: Literal["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo"] = "grpo"
    """[choice] Decides each key below that is null, as its paper does (modeling/objectives/policy.py has them)."""
    advantage: Literal["group_std", "group_mean", "rloo"] | None = None
    """[choice] Reward minus the group's mean, divided by its standard deviation or not; rloo: minus the others'."""
    loss: Literal["sequence", "token", "constant"] | None = None
    """[choice] Mean over answers of means over tokens; mean over all tokens; or sum / (answers x max_new_tokens)."""
    ratio: Literal["token", "sequence"] | None = None
    """[choice] Ratio of the policies: of each token, or of an answer, its tokens' geometric mean."""
    surrogate: Literal["clip", "cispo"] | None = None
    """[choice] clip: the smaller gain of ratio and clipped ratio. cispo: log-probabilities times a capped ratio."""
    clip_low: float | None = limit(None, at_least=0.0, at_most=1.0)
    """[fraction] The ratio is clipped below 1 - clip_low."""
    clip_high: float | None = limit(None, at_least=0.0)
    """[fraction] The ratio is clipped above 1 + clip_high; the largest weight of cispo."""
    beta: float = limit(0.0, at_least=0.0)
    """[per nat] Weight of the KL divergence from the start weights; 0: they are not kept."""
    correction: Literal["none", "truncate", "mask"] = "truncate"
    """[choice] Weight of a token, pi / mu of trainer and sampler: none, capped at correction_high, or 0 beyond it."""
    correction_high: float = limit(2.0, at_least=1.0)
    """[factor] Largest weight; mask also drops weights below 1 / correction_high."""
    group_size: int = limit(8, at_least=2)
    """[answers] Answers to each prompt. batch.global_size counts answers."""
    max_new_tokens: int = limit(128, at_least=1)
    """[tokens] Longest answer, its end included; a prompt has the rest of data.sequence_length."""
    temperature: float = limit(1.0, above=0.0)
    """[factor] Logits are divided by it in sampler and trainer."""
    top_p: float = 1.0
    """[fraction] 1: a token is drawn from all tokens."""
    updates: int = limit(1, at_least=1)
    """[steps] Optimizer steps on the same answers, which are off-policy from the second step on."""
    engine: Literal["transformers", "continuous", "vllm"] = "transformers"
    """[choice] The sampler. transformers: a copy of the model in every rank's process; continuous: the same in
    transformers' continuous batches, where an answer that ends makes room for the next. vllm: servers (grpo.urls)."""
    urls: tuple[str, ...] = ()
    """[addresses] Servers of engine vllm, such as http://127.0.0.1:8105."""
    transfer: Literal["file", "collective"] = "file"
    """[choice] file: servers read weights from the run folder. collective: broadcast, NCCL on GPUs and gloo on CPUs."""
    server_seconds: float = limit(600.0, above=0.0)
    """[seconds] Longest request, and longest wait for a server that died or hangs before the run ends."""
    at_once: int = limit(64, at_least=1)
    """[answers] Number of answers that the sampler draws at a time."""
    resamples: int = limit(0, at_least=0)
    """[times] How often at most groups whose answers all have the same reward are sampled again (DAPO)."""
    keep_rollouts: int = limit(100, at_least=0, null=0)
    """[steps] Number of newest steps whose answers stay in rollouts/, beside those that a resume from one of the newest
    checkpoint.keep checkpoints repeats, and the first 10. 0: all."""
    max_gap: float = limit(3.0, above=1.0)
    """[factor] Largest healthy k3 between sampler and trainer, in units of the trainer's distance from itself."""


RowFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "labelled", "tagged", "scored"
]
SourceKind = Literal["auto", "stdlib", "text", "jsonl", "parquet", "megatron", "hub"]


@dataclass(frozen=True)
class ValidationSection:
    """One validation set of its own."""

    path: str | None = None
    """[path, glob or hub id] Same as data.path."""
    source: SourceKind = "auto"
    """[choice] Same as data.source."""
    name: str | None = None
    """[text] Name in the record. null: validation 1, 2, ... or source 1, 2, ..."""
    format: RowFormat = "auto"
    """[choice] Form of its rows. auto: data.format."""
    split: str | None = None
    """[text] Split of a hub dataset. null: data.split."""
    configuration: str | None = None
    """[text] Configuration name of a hub dataset. null: data.name."""


@dataclass(frozen=True)
class SourceSection(ValidationSection):
    """One source of a mixture."""

    weight: float | None = limit(None, above=0.0)
    """[ratio] Share of the samples, relative to the other weights. null: by data.sources.epochs."""
    epochs: float | None = limit(None, above=0.0)
    """[passes] Alternative to a weight: passes per pass over a source with epochs 1. null: 1, or by weight."""


@dataclass(frozen=True)
class DataSection:
    """The training text and its way to token sequences."""

    source: SourceKind = "stdlib"
    """[choice] stdlib: the .py files of the running Python; for tasks with rows its functions, their docstrings and
    packages. text, jsonl, parquet: files at data.path (text: one document a file, or several by
    data.document_separator). hub: the dataset data.path of the Hugging Face hub, or a local dataset folder. megatron:
    documents that Megatron-LM tokenized, .bin files with their .idx. auto: stdlib without a data.path, else by its
    extension: .jsonl, .json and .ndjson, .parquet, .txt, .idx, and hub for the rest."""
    path: str | None = None
    """[path, glob, URL or hub id] File, folder or glob; for text, jsonl and parquet also a URL that fsspec supports,
    such as s3://bucket/*.jsonl. For megatron also the common prefix of .bin and .idx; for hub the dataset's id."""
    document_separator: str | None = None
    """[text] For source text: separator between the documents of a file, such as "\\n\\n" in double quotes. Empty
    documents are left out and counted. null: one document per file."""
    begin_of_document: Literal["none", "auto"] = "none"
    """[choice] auto: documents begin with the token that the tokenizer puts before a text, if it has one, such as <bos>
    of Gemma and Llama. none: they only end with a token."""
    sources: tuple[SourceSection, ...] = ()
    """[list] Several sources instead of data.path, each {path, name, format, weight or epochs}. Each is prepared and
    split by itself; samples are drawn by share (docs/data.md)."""
    validation: tuple[ValidationSection, ...] = ()
    """[list] Validation sets in files of their own, each {path, name, format}, besides the text held out by
    data.validation_fraction. Each is evaluated, up to evaluate.batches, under its name."""
    name: str | None = None
    """[text] Configuration name of a hub dataset."""
    split: str = "train"
    """[text] Split of a hub dataset."""
    text_field: str = "text"
    """[text] Field that holds the document, for jsonl, parquet and hub."""
    input_ids_field: str | None = None
    """[text] For tokenized documents of jsonl, parquet and hub: field with the list of token ids, read instead of a
    text. data.tokenizer names the tokenizer that made them. null: documents are text."""
    text_pair_field: str | None = None
    """[text] For task classify: field with a second text, encoded with the first. null: none."""
    label_field: str = "label"
    """[text] For task classify: field with the row's label or number."""
    tokens_field: str = "tokens"
    """[text] For task classify with classify.kind = token: field with the list of words."""
    tags_field: str = "tags"
    """[text] For classify.kind = token: field with the list of their labels."""
    format: RowFormat = "auto"
    """[choice] Form of the rows; docs/data.md has the fields of each. auto: by the fields of the first row; for task
    distill: documents, not rows. text: the field data.text_field. preference is for task dpo; labelled, tagged and
    scored are for task classify and follow from classify.kind."""
    on_bad_row: Literal["error", "skip"] = "error"
    """[choice] A row that does not match its format: error ends the preparation, skip leaves it out and counts it."""
    chat_template: str | None = None
    """[path] File with a Jinja chat template, in place of the tokenizer's own."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """[choice] Tokens of a row that have labels. assistant: the assistant's turns with their ends (or the completion or
    output, in rows without turns). last_assistant: only the last of them. all: every token."""
    packing: Literal["auto", "best_fit", "none"] = "auto"
    """[choice] best_fit: several whole rows per sequence, which do not attend to each other. none: one row per
    sequence, padded to the longest of its batch of similar rows. auto: best_fit, but none for dpo and seq2seq."""
    too_long: Literal["drop", "truncate_left", "truncate_right"] = "drop"
    """[choice] Handling of rows longer than data.sequence_length + 1 tokens; truncate_left cuts off the start. For task
    seq2seq: of sources; targets longer than data.target_length are dropped or lose their end."""
    target_length: int | None = limit(None, at_least=2)
    """[tokens] For task seq2seq: length of the longest target, its end included. null: data.sequence_length."""
    tokenizer: str = "bpe:4096"
    """[bytes | bpe:<vocab> | model | path | hub id] bytes: 256 byte tokens and the end of a document. bpe:<vocab>: a
    byte-level BPE of that size, trained on this data. model: that of model.name_or_path. Else a Hugging Face one."""
    sequence_length: int = limit(512, at_least=2)
    """[tokens] Length of a sequence, which documents fill end to end. For task seq2seq: of the longest source."""
    document_masking: bool = False
    """[true or false] Attention stays within a document, positions restart at 0, and its last token does not predict
    the next document. false: attention spans the whole sequence, as for GPT-3. Packed rows are always masked."""
    validation_fraction: float = limit(0.01, at_least=0.0, below=1.0)
    """[fraction] Share of documents held out for evaluation, drawn by a hash of their text."""
    hold_out: Literal["auto", "documents"] = "auto"
    """[choice] documents: whole documents only. auto: the same, unless no document would be drawn or left (a single
    file, say): then that share of the text, from the end of the longest document."""
    cache_dir: str = "~/.cache/mantissa"
    """[path] Folder of prepared tokens, reused by fingerprint of source, tokenizer and split. If the default is not
    writable: mantissa-<user id> in the folder of temporary files."""
    workers: int = limit(2, at_least=1)
    """[processes] Processes that tokenize, on every machine that shares data.cache_dir."""
    wait_minutes: float = limit(60.0, above=0.0)
    """[minutes] Longest wait for another process that is preparing the same data and makes no progress."""
    verify: bool = True
    """[true or false] Check the sha256 of prepared shards before training; sizes are always checked."""

    @property
    def label_length(self) -> int:
        """[tokens] Most labels in a sequence: data.target_length if it is set, else data.sequence_length."""
        return self.target_length or self.sequence_length

    @property
    def longest(self) -> int:
        """[tokens] Positions that a model needs."""
        return max(self.sequence_length, self.label_length)


@dataclass(frozen=True)
class ClassifySection:
    """The prediction target of task classify (docs/finetuning.md)."""

    kind: Literal["sequence", "token", "regression"] = "sequence"
    """[choice] sequence: one label per row. token: one per word. regression: one number per row."""
    labels: tuple[str, ...] = ()
    """[names] Labels in the order of the model's outputs. Empty: the labels found in the data, sorted."""


@dataclass(frozen=True)
class MlmSection:
    """Token masking of task mlm (docs/finetuning.md)."""

    probability: float = limit(0.15, above=0.0, at_most=1.0)
    """[fraction] Share of tokens to predict: 80% masked, 10% another token, 10% unchanged (Devlin et al. 2019)."""
    whole_word: bool = True
    """[true or false] Choose whole words with all their tokens, or single tokens of words longer than 16."""


@dataclass(frozen=True)
class BatchSection:
    """The number of sequences in an optimizer step, and how they are cut into micro-batches."""

    global_size: int = limit(8, at_least=1)
    """[sequences] Sequences (pairs for task dpo) in one optimizer step, over all ranks."""
    micro_size: int = limit(1, at_least=1)
    """[sequences] Sequences in one forward pass on one rank. Accumulation is global_size / (micro_size x ranks)."""


@dataclass(frozen=True)
class ParallelSection:
    """Parallelism besides ZeRO's partitions (docs/parallel.md)."""

    sequence: int = limit(1, at_least=1)
    """[ranks] Ranks that share each sequence: each takes a slice of its tokens and keeps only that slice's activations.
    Must divide the number of processes; data.sequence_length need not be a multiple of it. 1: off."""
    tensor: int = limit(1, at_least=1)
    """[ranks] Ranks that share each matrix of a block: each holds some heads or a part of the MLP, and all compute the
    same sequences. Must divide the number of processes and of attention heads. 1: off."""
    expert: int = limit(1, at_least=1)
    """[ranks] Ranks that share the experts of each MoE layer: each holds some experts, and tokens are sent to them.
    Must divide the number of processes and of experts. 1: every rank has all experts."""


@dataclass(frozen=True)
class ParameterGroupSection:
    """Parameters with their own learning rate or weight decay."""

    match: str = "*"
    """[glob] Pattern of parameter names, such as model.embed_tokens.* ; the last matching group wins."""
    learning_rate: float | None = limit(None, at_least=0.0)
    """[per step] Their peak learning rate, which follows the same schedule. null: optimizer.learning_rate."""
    weight_decay: float | None = limit(None, at_least=0.0)
    """[per step and learning rate] Their weight decay, whatever their shape. null: as without the group."""


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer on the FP32 masters."""

    name: Literal["adamw", "muon", "stable_adamw", "lamb", "lion", "sgd"] = "adamw"
    """[choice] adamw: decoupled weight decay (Loshchilov and Hutter 2019), fused where torch has it. muon:
    orthogonalized updates of hidden matrices (Jordan et al. 2024, Liu et al. 2025), adamw for the rest. stable_adamw:
    smaller steps where gradients outgrow their average (Wortsman et al. 2023). lamb: Adam's, scaled by each parameter's
    norm (You et al. 2020). lion: the sign of an average (Chen et al. 2023). sgd: coupled decay (docs/optimizers.md)."""
    learning_rate: float = limit(3e-4, at_least=0.0)
    """[per step] Peak learning rate."""
    betas: tuple[float, float] = limit((0.9, 0.95), at_least=0.0, below=1.0)
    """[fraction, fraction] Decay of the first and second moments; for lion, of the update's mix and of the average."""
    momentum: float | None = limit(None, at_least=0.0, below=1.0)
    """[fraction] Decay of sgd's velocity, and of muon's average. null: 0.9 for sgd, 0.95 for muon."""
    orthogonalization: Literal["auto", "fp32", "bf16"] = "auto"
    """[choice] Precision of the Newton-Schulz iteration of muon. auto: bf16 in a 16-bit run on GPUs, else fp32."""
    eps: float = limit(1e-8, above=0.0)
    """[gradient units] Added to the root of the second moment."""
    weight_decay: float = limit(0.1, at_least=0.0)
    """[per step and learning rate] Decoupled decay of weight matrices; not of norms, biases and embeddings."""
    gradient_clipping: float = limit(1.0, at_least=0.0, null=0.0)
    """[gradient units] Largest global gradient norm; 0: no clipping."""
    groups: tuple[ParameterGroupSection, ...] = ()
    """[list] Learning rates and weight decays by parameter name, each {match, learning_rate, weight_decay}."""


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over applied optimizer steps; never scaled by the number of processes."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """[choice] Shape after the warm-up. wsd: constant, then a linear decay over the last schedule.decay_fraction."""
    warmup_steps: int = limit(0, at_least=0)
    """[applied steps] Linear warm-up: step n (from 1) runs at peak x n / warmup_steps."""
    final_ratio: float = limit(0.1, at_least=0.0, at_most=1.0)
    """[fraction of the peak] Learning rate at the last step."""
    decay_fraction: float = limit(0.2, above=0.0, at_most=1.0)
    """[fraction of the schedule] Length of the decay of wsd."""
    steps: int | None = limit(None, at_least=1)
    """[applied steps] Length of the whole schedule; a run with fewer run.steps stops within it. null: run.steps."""


@dataclass(frozen=True)
class LossScaleSection:
    """Loss scaling for FP16, done by DeepSpeed's scaler. Ignored by BF16 and FP32, which need none."""

    policy: Literal["deepspeed", "adaptive", "static"] = "deepspeed"
    """[choice] deepspeed: halved on overflow, doubled after a clean window, as DeepSpeed does. adaptive: starts lower,
    backs off harder and regrows more slowly when overflows come in a burst. static: always `initial`."""
    initial: float | None = limit(None, above=0.0)
    """[factor] First loss scale; a power of two unless static. null: 65536, or 4096 for adaptive."""
    window: int = limit(1000, at_least=1)
    """[steps] Steps without overflow before the scale grows."""
    factor: float = limit(2.0, at_least=2.0, at_most=16.0)
    """[factor] adaptive divides by it on overflow and multiplies by it after a window; a power of two. deepspeed: 2."""
    minimum: float = limit(1.0, above=0.0)
    """[factor] Smallest loss scale; scaling cannot fix an overflow at this scale."""
    maximum: float | None = limit(None, above=0.0)
    """[factor] Largest loss scale, a power of two. null: no limit for deepspeed, 2^24 for adaptive."""
    hysteresis: int | None = limit(None, at_least=1)
    """[overflows] Overflows since the last growth needed to lower the scale. null: 2, or 1 for adaptive."""
    escalate_after: int = limit(3, at_least=1)
    """[overflows] Overflows within escalate_within steps that square backoff and double the window; adaptive."""
    escalate_within: int = limit(100, at_least=1)
    """[steps] Attempted steps over which escalate_after counts; adaptive only."""

    @property
    def initial_scale(self) -> float:
        """First loss scale, with the default of the policy."""
        return self.initial if self.initial is not None else 4096.0 if self.policy == "adaptive" else 65536.0

    @property
    def largest_scale(self) -> float:
        """Largest loss scale, with the default of the policy; inf: none."""
        return self.maximum if self.maximum is not None else 2.0**24 if self.policy == "adaptive" else math.inf

    @property
    def tolerated_overflows(self) -> int:
        """Hysteresis, with the default of the policy."""
        return self.hysteresis if self.hysteresis is not None else 1 if self.policy == "adaptive" else 2

    def resolved(self) -> LossScaleSection:
        """This section with defaults in place of every null."""
        largest = self.largest_scale if math.isfinite(self.largest_scale) else None
        return replace(self, initial=self.initial_scale, maximum=largest, hysteresis=self.tolerated_overflows)


@dataclass(frozen=True)
class Fp8Section:
    """Settings of modules that a precision manifest sets to fp8 (docs/fp8.md)."""

    gradient: Literal["e4m3", "e5m2"] = "e4m3"
    """[choice] Format of a module's output gradient; its input and weight are E4M3. e5m2 has a wider range and one
    mantissa bit less; per-row scales make the range unnecessary."""
    scaling: Literal["row", "block32", "tensor"] = "row"
    """[choice] Values that share a scale: a row along the summed dimension, 32 values of it, or the whole tensor, where
    one outlier costs all others precision. There is no delayed scaling: it hides inf and nan."""
    weight_gradient: Literal["ambient", "fp8"] = "ambient"
    """[choice] Dtype of the weight gradient: that around the module, or fp8, scaled over a micro-batch's tokens."""
    kernel: Literal["auto", "emulate", "scaled_mm"] = "auto"
    """[choice] scaled_mm: FP8 matmuls on CPUs and GPUs of compute capability 9.0 or more. emulate: rounding to FP8 and
    back. auto: scaled_mm on such a GPU for modules that support it, if it matches FP8's definition."""


@dataclass(frozen=True)
class PrecisionSection:
    """The dtypes in which the model computes, accumulates and reduces. Masters and optimizer state are always FP32."""

    path: Literal["cast", "manifest"] = "cast"
    """[choice] cast: the weights are 16-bit and ZeRO holds FP32 masters (DeepSpeed's bf16 and fp16 sections). manifest:
    parameters stay FP32 and precision.manifest sets each module's dtype; implied by precision.manifest."""
    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """[choice] Dtype of forward and backward; selects the JSON in ds_configs/. auto: deepspeed.config's, or bf16."""
    manifest: str | None = None
    """[path] JSON precision manifest. Implies path: manifest and a DeepSpeed JSON in FP32."""
    verify_every_steps: int = limit(1000, at_least=0, null=0)
    """[steps] Interval at which each module's actual compute dtype is observed, besides the first step of a session; a
    module that departs from the manifest stops the run. 0: the first step only."""
    routers: Literal["fp32", "compute"] = "fp32"
    """[choice] Dtype in which MoE routers compute on the cast path; their weights are in precision.compute. A manifest
    has rules for them instead, and uses FP32 without one."""
    loss_scale: LossScaleSection = field(default_factory=LossScaleSection)
    """[section] Loss scaling of FP16."""
    fp8: Fp8Section = field(default_factory=Fp8Section)
    """[section] FP8 settings of a manifest's modules."""
    masters: Literal["fp32", "split"] = "fp32"
    """[choice] split: stores an FP32 master as its BF16 weight and the bits lost in rounding: 1.9 bytes less per value,
    and bit for bit as fp32. For BF16 on the cast path, AdamW, ZeRO-1, 2 and 3 without offload."""
    accumulate: Literal["fp32"] = "fp32"
    """[choice] Dtype in which gradients of micro-batches are summed."""
    reduce: Literal["fp32", "compute"] = "fp32"
    """[choice] Dtype in which gradients cross the network. compute halves the traffic of 16-bit runs."""


@dataclass(frozen=True)
class DeepSpeedSection:
    """The DeepSpeed JSON: your own, or the one in ds_configs/ for precision.compute, this stage and this offload."""

    config: str | None = None
    """[path] DeepSpeed JSON; a relative path is looked up beside the run config, then in the working folder and in
    Mantissa's own folder. `--deepspeed_config` on the command line overrides it. null: chosen. Where the run config
    names one in ds_configs/, keys on the command line that choose one select another; they must agree with any other
    JSON."""
    stage: int | None = limit(None, at_least=0, at_most=3)
    """[ZeRO stage] Partitioned: 1 optimizer states, 2 gradients too, 3 all. null: deepspeed.config's, or 2."""
    offload: Literal["none", "cpu"] | None = None
    """[choice] cpu: optimizer states, and at stage 3 parameters, in host memory. null: deepspeed.config's, or none."""


@dataclass(frozen=True)
class EvaluateSection:
    """Validation loss while training."""

    every_steps: int = limit(0, at_least=0, null=0)
    """[steps] Interval of evaluations; there is one more at the end. 0: never."""
    batches: int | Literal["auto"] | None = limit("auto", at_least=1)
    """[batches] Most global batches in an evaluation, evenly spaced. null: all. auto: all for classify, else 8."""
    also_after: tuple[int, ...] = limit((), at_least=1)
    """[steps] Further steps after which to evaluate, such as [900, 1350], unless every_steps is 0."""
    at_start: bool = False
    """[true or false] Also evaluate before step 1, unless every_steps is 0, as a baseline."""

    @property
    def most_batches(self) -> int | None:
        """[batches] `batches`, once auto is decided."""
        assert not isinstance(self.batches, str)
        return self.batches


@dataclass(frozen=True)
class CheckpointSection:
    """Checkpoints under run.dir/run.name/checkpoints, and in an object store where one is named."""

    dir: str | None = None
    """[URL] s3://bucket/folder or another URL that fsspec supports: every checkpoint is also uploaded to URL/run.name,
    in the background, and the run resumes from there. The run folder keeps the newest, and those not uploaded. null:
    none."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    """[mapping] Options of fsspec's file system, such as endpoint_url or s3_additional_kwargs; never credentials."""
    encryption_key: str | None = None
    """[env:NAME or file:PATH] Location of a 256-bit key, which encrypts checkpoints by AES-256-GCM. null: none."""
    accept_plain: bool = False
    """[true or false] Allow resuming from an unencrypted checkpoint although a key is set, to turn encryption on."""
    every_steps: int = limit(0, at_least=0, null=0)
    """[steps] Interval of saves; there is one more at the end. 0: only at the end."""
    also_after: tuple[int, ...] = limit((), at_least=1)
    """[steps] Further steps after which a checkpoint is saved, such as [900, 1350]."""
    at_end: bool = True
    """[true or false] Save the state after the last planned step. false, for runs that are only timed: nothing is left
    to resume or export from; a run that is stopped early still saves."""
    keep: int = limit(2, at_least=1)
    """[checkpoints] Number of newest checkpoints that stay on disk."""
    keep_every: int = limit(0, at_least=0, null=0)
    """[steps] Also keep checkpoints whose step is a multiple of this; 0: off."""
    keep_best: int = limit(0, at_least=0, null=0)
    """[checkpoints] Also keep this many with the lowest validation loss, of those at steps of evaluate.every_steps."""
    background: Literal["auto", "always", "never"] = "auto"
    """[choice] always: training waits only for a copy to host memory, as large as the rank's files. never: training
    waits until the checkpoint is on disk. auto: never with offload, which already fills host memory, else always."""
    max_failures: int = limit(3, at_least=1)
    """[saves] Failed saves in a row (a full disk, say) after which training stops with exit code 74; until then it goes
    on and retries at the next save. If the last save of a run fails, the run ends with that code too."""
    verify_after_save: bool = False
    """[true or false] Read each checkpoint back and compare hashes before it counts as saved, else set it aside."""


@dataclass(frozen=True)
class TrackingSection:
    """Destinations of the run's record besides events.jsonl."""

    sinks: tuple[Literal["wandb", "tensorboard", "mlflow", "trackio", "csv"], ...] = ("wandb",)
    """[choices] Trackers fed from events.jsonl, each in its own process. csv writes RUN/metrics.csv. Optional installs:
    tensorboard (RUN/tensorboard), mlflow (MLFLOW_TRACKING_URI, else RUN/mlflow.db), trackio."""
    group: str = ""
    """[text] Name of a group of runs, such as seeds of one setting: wandb's and Trackio's group, a tag in MLflow."""
    tags: tuple[str, ...] = ()
    """[texts] Tags in wandb and MLflow."""
    job_type: str = "train"
    """[text] wandb's job type, a tag in MLflow."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """[choice] wandb mode. Trouble inside wandb never stops training."""
    project: str = "mantissa"
    """[text] Project in wandb and Trackio, experiment in MLflow."""
    log_every_steps: int = limit(1, at_least=1)
    """[steps] Interval of steps in the trackers and the plain console; events.jsonl has every step."""
    prometheus_port: int | None = limit(None, at_least=0, at_most=65535)
    """[port] Port where rank 0 answers `GET /metrics` for Prometheus; 0: any free one, logged; null: none."""
    prometheus_address: str = "127.0.0.1"
    """[address] Interface to listen on. There is no authentication: open it to trusted networks only."""
    otlp_endpoint: str | None = None
    """[URL] OpenTelemetry collector, such as http://localhost:4318, to which every rank sends spans of its steps by
    OTLP over HTTP. Headers and certificates come from the OTEL_EXPORTER_OTLP_* variables. null: none."""


@dataclass(frozen=True)
class ProfileSection:
    """A torch.profiler trace of a few steps, and a summary of it, in run.dir/run.name/profile."""

    start: int = limit(5, at_least=1)
    """[step] First step profiled, from 1. The first steps of a session are slower than those that follow."""
    steps: int = limit(0, at_least=0, null=0)
    """[steps] Number of profiled steps; one or two are enough. 0: none."""
    ranks: tuple[int, ...] = limit((0,), at_least=0)
    """[ranks] Ranks that profile; ranks that the run does not have are ignored."""


@dataclass(frozen=True)
class TelemetrySection:
    """Statistics of each module's gradients and activations, recorded at intervals in events.jsonl and wandb."""

    every_steps: int = limit(50, at_least=0, null=0)
    """[steps] Interval at which gradient norm, maximum and underflow, largest activation, distance of weights from
    masters and update size of each module are measured, for the heat maps. 0: never."""
    probe: bool = False
    """[true or false] On those steps also run the micro-batches in FP32 and compare gradients: cosine, sign agreement
    and relative error by parameter. Costs a pass, and an FP32 copy of the gradients in host memory on every rank."""


@dataclass(frozen=True)
class WarningsSection:
    """Healthy ranges of figures, reported as `warning` events where left (docs/early-warnings.md); null disables one.
    gradient_jump, router_... and those of answers are checked in every step, others with telemetry."""

    attention_logit: float | None = limit(100.0, above=0.0)
    """[logit] Largest healthy attention logit; Kimi K2 clips there."""
    attention_entropy: float | None = limit(0.01, above=0.0, below=1.0)
    """[fraction of uniform attention's] Smallest healthy entropy of a layer's attention, mean over heads."""
    adam_rms: float | None = limit(3.5, above=1.0)
    """[factor] Largest healthy RMS of gradient / sqrt(Adam's second moment); at most 1 / sqrt(1 - betas[1])."""
    gradient_jump: float | None = limit(2.3, above=1.0)
    """[factor] Largest healthy jump of the global gradient's clipped norm, in every step."""
    signal_share: float | None = limit(None, above=0.0, below=1.0)
    """[fraction] Largest healthy share of signal in a module's gradients. Sound runs start close to 1."""
    embedding_share: float | None = limit(0.99, above=0.0, below=1.0)
    """[fraction] Largest healthy share of the embedding in the squared gradient norm."""
    kurtosis_growth: float | None = limit(2.0, above=1.0)
    """[factor] Largest healthy ratio of a block's channel kurtosis to its recent median."""
    update_growth: float | None = limit(2.0, above=1.0)
    """[factor] Largest healthy ratio of the update-to-weight norm to its recent median."""
    overflow_steps: int | None = limit(200, at_least=1)
    """[steps] Warn when an FP16 activation grows so fast that it will overflow within this many steps."""
    router_entropy: float | None = limit(0.5, above=0.0, below=1.0)
    """[fraction of even use] Smallest healthy entropy of expert load, with router losses."""
    router_z: float | None = limit(1000.0, above=0.0)
    """[squared logit] Largest healthy z-loss of routers: BF16 steps are 0.25 at its root, 32."""
    answer_entropy: float | None = limit(0.01, above=0.0)
    """[nats per token] Smallest healthy entropy of sampled answers."""
    no_signal: float | None = limit(0.95, above=0.0, at_most=1.0)
    """[fraction] Largest healthy share of prompts whose answers all have the same reward."""
    truncated: float | None = limit(0.9, above=0.0, at_most=1.0)
    """[fraction] Largest healthy share of answers cut off at grpo.max_new_tokens."""


Reaction = Literal["skip", "cut_lr", "correct", "promote", "rollback", "abort"]


@dataclass(frozen=True)
class GuardSection:
    """Checks of a step's health, and the reactions. The defaults change nothing about a healthy run."""

    max_consecutive_skips: int = limit(20, at_least=1)
    """[steps] Skipped steps in a row, in any dtype, after which guard.reactions moves on to the next reaction."""
    spike_window: int = limit(128, at_least=16)
    """[healthy steps] History that spikes are compared with; checks start once half of it is there."""
    spike_sigmas: float = limit(0.0, at_least=0.0, null=0.0)
    """[robust standard deviations] Loss or log gradient norm this far above its median is a spike; 0: off. OLMo 2 skips
    at 6. Off by default: skipping a finite step changes what the model learns from."""
    min_update_ratio: float | None = limit(None, above=0.0)
    """[fraction] Smallest healthy ratio of update to weight norm, 1e-3 in good runs. null disables it."""
    max_update_ratio: float | None = limit(None, above=0.0)
    """[fraction] Largest healthy ratio of update to weight norm. null disables it."""
    reactions: tuple[Reaction, ...] = ("skip", "rollback", "abort")
    """[ordered plan] The first reaction that can help, is possible and has budget left is taken; if none is left, the
    run stops with exit code 3. Only healthy steps are ever applied."""
    skip_budget: int = limit(100, at_least=0)
    """[times per run] Steps that may be skipped as incidents; FP16 overflows handled by the loss scale do not count."""
    cut_lr_budget: int = limit(3, at_least=0)
    """[times per run] Cuts of the learning rate allowed."""
    cut_lr_factor: float = limit(0.5, above=0.0, below=1.0)
    """[factor] Factor of a cut on the learning rate; overlapping cuts multiply."""
    cut_lr_steps: int = limit(100, at_least=1)
    """[applied steps] Length of a cut."""
    correct_budget: int = limit(4, at_least=0)
    """[times per run] How often grpo.correction may become mask, undone as a promotion is."""
    promote_budget: int = limit(4, at_least=0)
    """[times per run] Promotions of blamed modules allowed, or of the head after a gap of sampler and trainer."""
    promote_to: Literal["bf16", "fp32"] = "fp32"
    """[choice] Dtype that blamed modules are promoted to."""
    probation_steps: int = limit(1000, at_least=0, null=0)
    """[applied steps] Steps without an incident after which a promotion is undone; 0: never."""
    rollback_budget: int = limit(2, at_least=0)
    """[times per run] Rollbacks to the last good checkpoint allowed."""
    warnings: tuple[str, ...] = ()
    """[names of bounds in warnings, or self_check] Early warnings to which guard.reactions responds: to gradient_jump
    and findings of a self-check before the update, to others in the next step."""
    self_check_every: int = limit(500, at_least=0, null=0)
    """[steps] One randomly chosen step in this many, four early ones of each session, those after its first evaluation,
    save, skip and rollback, and some evaluations are compared with plain torch in the run's dtype, without changing a
    bit; differences are named by module or parameter and rank (docs/self-check.md). 0: never."""
    gradient_checks: int = limit(0, at_least=0, null=0)
    """[steps] Interval of comparing the norm and the reduced gradients of linear layers and embeddings. 0: only with
    self-checks."""
    replica_checks: int = limit(0, at_least=0, null=0)
    """[steps] Period in which every value that several ranks hold, or that is a rounded master, is compared once, some
    in each step. A value that differs is named by rank, host, parameter and bit, repaired where the right value is
    known, and the step is repeated. 0: never."""
    update_checks: int = limit(0, at_least=0, null=0)
    """[values] Size of the random slice of each rank's masters and optimizer state, drawn each step, whose update is
    recomputed in FP64; a difference beyond rounding is named as above. For adamw. 0: none."""
    reexecute: str = "never"
    """[never, suspicious, or every N] Repeat a step with micro-batches swapped between ranks. suspicious: after a
    non-finite loss or norm, or a spike; every N: also every N-th step. A transient fault is corrected, a persistent one
    ends the run with exit code 71 and names the rank and host, a true numeric event goes to guard.reactions."""
    attribute_overflows: bool = True
    """[true or false] Also name the module behind a routine FP16 overflow, at the cost of one more forward and backward
    of the step each time; incidents are always attributed."""


@dataclass(frozen=True)
class Fault:
    """One injected fault, for tests and drills."""

    kind: Literal[
        "inf_gradient",
        "nan_gradient",
        "nan_activation",
        "nan_loss",
        "loss_spike",
        "gradient_spike",
        "flipped_bit",
        "lost_update",
    ]
    """[choice] inf_gradient, nan_gradient: one gradient value is overwritten on the last micro-batch. nan_activation:
    one value of the module's output. nan_loss: the loss. loss_spike, gradient_spike: multiplied by `factor`.
    flipped_bit: silent corruption, one bit of one value of `place` (docs/corruption.md says what finds it).
    lost_update: a sound step is skipped on all ranks, as if it had overflowed in FP16."""
    step: int = limit(at_least=1)
    """[step] Step of the fault, from 1 in data order; a rollback may leave it out."""
    rank: int = limit(0, at_least=0)
    """[rank] Rank of the fault."""
    module: str | None = None
    """[module name] Module whose first parameter or output is changed. null: the first module with parameters."""
    factor: float = limit(1000.0, above=0.0)
    """[factor] loss_spike and gradient_spike multiply by it."""
    place: Literal["weight", "master", "moment", "second_moment", "gradient", "activation", "collective"] = "weight"
    """[choice] Target of flipped_bit, in the module's first parameter: its weight, its master, the optimizer's first or
    second state tensor, this rank's gradient, the module's output, the reduced gradient."""
    bit: int = limit(0, at_least=0, at_most=31)
    """[bit] Bit that flipped_bit flips; 0 is the lowest of the mantissa."""
    persists: bool = False
    """[true or false] flipped_bit recurs whenever this rank repeats the step, as on broken hardware. false: once."""


@dataclass(frozen=True)
class ParitySection:
    """Bounds for agreement with the FP32 twin run; read by `python -m tools.parity`."""

    seeds: int = limit(1, at_least=1)
    """[runs] Pairs of runs, at run.seed, run.seed + 1 ... From 2 on a mean delta that chance explains passes."""
    controls: int = limit(0, at_least=0, null=0)
    """[runs] FP32 runs at a learning rate 2^-8 larger, 2^-8 smaller, 2^-7 larger and so on. They diverge from the twin
    by chaos alone, so up to twice their root mean square distance passes."""
    points: int | None = limit(None, at_least=1)
    """[points] Points at which single steps are compared: the start, then a random one of each other part. null: 3, or
    2 in a run of fewer than 30 steps, which would otherwise take less time than its comparison."""
    draw: int = limit(0, at_least=0)
    """[number] Seed of the random points; another seed compares other steps."""
    oracle_steps: int = limit(2, at_least=0, null=0)
    """[steps] First steps of the FP32 run to recompute outside the engine, with the step after each drawn point: an
    error that both runs share, such as a lost label, exceeds FP32's bounds there. 0: none."""
    whole_steps: int = limit(8, at_least=0, null=0)
    """[steps] One randomly chosen step in this many of the trained runs is compared in full with plain torch, besides
    the smaller checks of every step (docs/self-check.md). 0: none."""
    validation_delta: float = limit(0.005, above=0.0)
    """[fraction] Largest difference of the final validation loss from FP32's."""
    loss_gap: float = limit(0.02, above=0.0)
    """[fraction] Largest difference of the training loss's running median from FP32's, anywhere on the curve."""
    grad_norm_ratio: float = limit(1.1, above=1.0)
    """[factor] Largest median ratio of gradient norms, either way."""
    skipped_share: float = limit(0.05, at_least=0.0, at_most=1.0)
    """[fraction] Largest share of skipped steps, besides those in which a high initial loss scale settles."""
    nonfinite_events: int = limit(0, at_least=0)
    """[events] Non-finite values allowed, besides overflows handled by the loss scale."""
    lower_dtypes: int = limit(0, at_least=0)
    """[modules] Modules that may compute a softmax, norm, loss, rotary table, router or residual in a lower dtype."""
    unexplained: int = limit(0, at_least=0)
    """[modules] Modules whose error, however small, may exceed what rounding in the planned dtype explains."""
    fp8_products: float = limit(1.0, above=0.0)
    """[factor] Largest distance of an FP8 layer's output, input gradient and weight gradient from FP8's definition on
    the same inputs, in units of the rounding of the sums and of the dtype around it."""
    restored_share: float = limit(1.0, at_least=0.0, at_most=1.0)
    """[fraction] Share of the compared points that must resume and reproduce the recorded loss."""
    module_error: float = limit(0.02, above=0.0)
    """[fraction] Largest relative error that a module adds itself: its output against FP32 on the same inputs."""
    accumulation_error: float = limit(2e-5, above=0.0)
    """[fraction] Largest relative error of the engine's sum of two known gradients: 1e-7 in FP32, 1e-3 in BF16."""
    weighting_error: float = limit(1e-4, above=0.0)
    """[fraction] Largest relative distance of a module's reduced gradient from the sum over the step's micro-batches
    with equal weight for every label: 0 on a CPU, 0.02 for a mean of means of packed short documents."""
    loss_error: float = limit(1e-6, above=0.0)
    """[fraction] Largest relative distance of the reported loss from the mean over all labels of the global batch."""
    gradient_error: float = limit(0.15, above=0.0)
    """[fraction] Largest relative error of a module's weight gradients from the same masters and batch."""
    gradient_excess: float = limit(1.5, above=0.0)
    """[factor] Largest error of a module's weight gradients, beyond one rounding, in units of plain torch's error in
    the run's dtype, from the same masters and batch. Not measured in FP32 or with a manifest."""
    gradient_cosine: float = limit(0.99, at_least=-1.0, at_most=1.0)
    """[cosine] Smallest cosine of a module's weight gradients with FP32's."""
    sign_agreement: float = limit(0.9, at_least=0.0, at_most=1.0)
    """[fraction] Smallest share of a module's weight gradients that have FP32's sign."""
    update_error: float = limit(0.001, above=0.0)
    """[fraction] Largest relative error of a module's update against the optimizer in FP64 on the reduced gradient."""
    update_rounding: float = limit(0.0, at_least=0.0, at_most=1.0)
    """[fraction] Largest share of a module's values whose master or moments differ after an update by AdamW, Lion or
    SGD from FP64's by more than FP32's rounding explains: a moment kept in fewer bits, a slightly wrong coefficient."""
    weight_drift: float = limit(0.0, at_least=0.0)
    """[fraction] Largest relative distance of a 16-bit weight from its rounded master."""
    price_per_device_hour: float = limit(0.0, at_least=0.0)
    """[money] Price per device-hour, for the cost per million tokens; 0 leaves it out."""


@dataclass(frozen=True)
class CanarySection:
    """Settings of `python -m launch.canary`: the trial before the whole run, and how it watches that run."""

    steps: int | None = limit(None, at_least=1)
    """[steps] Length of the canary: the whole run's first steps, on the same data, schedule and seed. The whole run
    continues from the canary's state. null: 50, or given by data_share."""
    data_share: float | None = limit(None, above=0.0, below=1.0)
    """[fraction] The same as a share of the whole run's steps, and so of its data. null: given by canary.steps."""
    ranks: int | None = limit(None, at_least=1)
    """[processes] Processes of the canary, of its FP32 twin and of the checks. null: as many as the whole run has."""
    check_every: int = limit(0, at_least=0)
    """[steps] Smallest distance between checkpoints whose next step is compared with FP32 while the whole run goes on.
    0: every checkpoint, as far as the checks keep up. The last one is always checked."""
    bounds: dict[str, Any] = field(default_factory=dict)
    """[mapping] Bounds under `parity:` that differ for the canary and for the checks, such as {module_error: 0.05}."""
    device_hours: float | None = limit(None, above=0.0)
    """[device hours] Budget of canary, twin and checks: time x canary.ranks. A canary that exceeds it is stopped, and
    the whole run not started; no check starts once it is used up. null: no limit."""
    fallback: tuple[Literal["promote", "fp32"], ...] = ("promote", "fp32")
    """[ordered plan] Reactions to a failed check, after going back to the last checkpoint that passed, each once.
    promote: the named modules compute in FP32 from there on. fp32: all do. Then the run stops with exit code 3."""


SAMPLING_TASKS = ("grpo", "opd")
"""Tasks that learn from the model's own answers to prompts."""
UNPACKED_TASKS = ("seq2seq", "dpo", *SAMPLING_TASKS)
"""Tasks that learn from rows and put each into a sequence of its own."""


@dataclass(frozen=True)
class GenerateSection:
    """Text samples at the end of a run, and during it."""

    tokens: int = limit(120, at_least=0, null=0)
    """[tokens] Length of the sample; 0 writes none."""
    prompt: str = "def "
    """[text] Start of the sample."""
    temperature: float = limit(0.8, above=0.0)
    """[factor] Softmax temperature of sampling."""
    at_evaluations: bool = False
    """[true or false] Also sample at each evaluation: the run's page shows how the samples change."""


@dataclass(frozen=True)
class Config:
    """A whole run config."""

    task: Literal["pretrain", "sft", "seq2seq", "dpo", "grpo", "opd", "distill", "classify", "mlm"] = "pretrain"
    """[choice] Training objective. pretrain: the next token of documents that fill every sequence. sft: the answers in
    rows of chats, instructions or texts. seq2seq: the same answers, by an encoder-decoder such as T5 or BART. dpo: to
    prefer the chosen answer of a pair. grpo: the model's own answers, by their rewards; opd: the same, by a teacher
    (docs/rl.md). distill: a teacher's distributions, on rows where data.format names their form, or on documents.
    classify: labels of texts or words, by an encoder. mlm: hidden tokens, by an encoder (docs/finetuning.md)."""
    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    adapter: AdapterSection = field(default_factory=AdapterSection)
    sft: SftSection = field(default_factory=SftSection)
    preference: PreferenceSection = field(default_factory=PreferenceSection)
    grpo: GrpoSection = field(default_factory=GrpoSection)
    distill: DistillSection = field(default_factory=DistillSection)
    data: DataSection = field(default_factory=DataSection)
    classify: ClassifySection = field(default_factory=ClassifySection)
    mlm: MlmSection = field(default_factory=MlmSection)
    batch: BatchSection = field(default_factory=BatchSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    deepspeed: DeepSpeedSection = field(default_factory=DeepSpeedSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)
    profile: ProfileSection = field(default_factory=ProfileSection)
    telemetry: TelemetrySection = field(default_factory=TelemetrySection)
    warnings: WarningsSection = field(default_factory=WarningsSection)
    guard: GuardSection = field(default_factory=GuardSection)
    generate: GenerateSection = field(default_factory=GenerateSection)
    parity: ParitySection = field(default_factory=ParitySection)
    canary: CanarySection = field(default_factory=CanarySection)
    faults: tuple[Fault, ...] = ()
    """[list] Faults to inject, each {kind, step, rank, module}. For tests and drills; empty in real runs."""

    @property
    def scheduled_steps(self) -> int:
        """[applied steps] Length of the learning rate's schedule."""
        return self.schedule.steps or self.run.steps

    @property
    def precomputes_reference(self) -> bool:
        """Whether log-probabilities of the initial weights are computed before the first step."""
        return self.task == "dpo" and self.preference.reference == "precomputed"

    @property
    def group_size(self) -> int:
        """[sequences] Sequences that one data sample becomes in a batch: answers to a prompt, or itself."""
        return self.grpo.group_size if self.task in SAMPLING_TASKS else 1

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether attention and positions restart within a sequence."""
        packed = self.learns_rows and self.task not in UNPACKED_TASKS and self.data.packing != "none"
        return self.data.document_masking or packed

    @property
    def learns_rows(self) -> bool:
        """Whether the data are rows with their own labels rather than documents end to end."""
        formats: list[str] = [item.format for item in self.data.sources] or [self.data.format]
        return self.task in ("sft", *UNPACKED_TASKS) or (self.task == "distill" and set(formats) != {"auto"})
