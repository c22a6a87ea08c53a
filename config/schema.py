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
    """What this run is called, how long it trains and where it leaves its folder."""

    name: str = "run"
    """[text] Name of the run; its folder is run.dir/run.name and wandb shows it."""
    dir: str = "runs"
    """[path] Folder that holds the run folders."""
    steps: int = limit(100, at_least=0, null=0)
    """[steps] Optimizer steps to attempt in all, with those of earlier sessions. 0: as many as run.epochs makes."""
    epochs: float | None = limit(None, above=0.0)
    """[epochs] Alternative to run.steps: how often each training sample is seen. The steps, rounded up to whole
    batches, are known once the data are prepared, and recorded as run.steps (docs/data.md). null: run.steps."""
    max_minutes: float | None = limit(None, above=0.0)
    """[minutes] Time from the first step of a session after which the run saves and ends with exit code 75, to be
    resumed, as on SIGTERM. null: no limit."""
    timeout_minutes: float = limit(30.0, above=0.0)
    """[minutes] How long a collective waits for a rank before the run ends, naming it."""
    seed: int = limit(0, at_least=0)
    """[integer] Seed of the initial weights, of the data order and of dropout."""
    resume: str = "auto"
    """[auto | never | path] auto: resume from the newest complete checkpoint of this run, if there is one.
    never: start anew; an earlier folder of that name is renamed, not deleted. A path: resume from that checkpoint."""
    hypothesis: str = ""
    """[text] Hypothesis that this run tests; kept with the run folder, the report and wandb."""
    bind_cores: Literal["auto", "always", "never"] = "auto"
    """[choice] Whether each rank is bound to cores of its own, near its GPU if it has one. auto: on machines with
    several NUMA nodes. always: on every machine, unless a launcher has bound the ranks. never: no binding."""
    deterministic: bool = False
    """[true or false] Use only kernels and collectives that sum in the same order each time, so that a step computed
    again has the same bits on GPUs, too; an operator that has none ends the run with its name. CPUs need no key."""


@dataclass(frozen=True)
class ModelSection:
    """Which Hugging Face model is trained, and how its activations are kept."""

    name_or_path: str | None = None
    """[path or hub id] Model whose config and weights are loaded. Excludes model.architecture."""
    architecture: str | None = None
    """[model_type] Hugging Face model type trained from scratch, such as llama, qwen3 or gpt2."""
    config: dict[str, Any] = field(default_factory=dict)
    """[mapping] Arguments of that architecture's Hugging Face config, such as hidden_size. vocab_size defaults to the
    tokenizer's, max_position_embeddings to data.sequence_length. With name_or_path: values that override its config."""
    trust_remote_code: bool = False
    """[true or false] Run model code that comes with a hub repository. Never done unless set here."""
    attention: str = "auto"
    """[implementation] Hugging Face attention implementation: sdpa, eager, flash_attention_2, flex_attention. auto:
    sdpa where the model supports it, else eager."""
    activation_checkpointing: Literal["none", "full", "selective", "attention", "ops", "budget"] = "none"
    """[choice] Activations that the backward pass recomputes: full every transformer block, selective
    every model.checkpointing_every-th, attention the attention of every block, ops all but the results of matmuls and
    fused attention, budget as few blocks as model.activation_memory_gib allows."""
    checkpointing_every: int = limit(2, at_least=1)
    """[blocks] selective recomputes one block in this many: 2 is every second one, with about half the saving and half
    the recomputation of full."""
    activation_memory_gib: float | None = limit(None, above=0.0)
    """[GiB per rank] For budget: largest memory of one micro-batch's activations, logits included. Counted in forward
    passes at the start."""
    checkpointing_reentrant: bool = False
    """[true or false] Use torch's reentrant checkpointing (the older of its two implementations)."""
    compile: bool = False
    """[true or false] Compile the transformer blocks with torch.compile, at ZeRO 0 to 2 (docs/compile.md)."""
    kernels: Literal["auto", "torch", "liger"] = "auto"
    """[choice] Kernels of norms, rotary embeddings and gated activations: torch's, or the Triton kernels of
    liger-kernel, which must be installed, on a GPU; auto is liger where it is available (docs/kernels.md)."""
    loss: Literal["auto", "full", "chunked"] = "auto"
    """[choice] full computes all logits of a micro-batch at once; chunked computes them and their gradients for some
    tokens at a time, so that they are never all in memory; auto is chunked where a micro-batch has many logits and the
    model allows it (docs/loss.md)."""
    loss_chunk_tokens: int = limit(0, at_least=0, null=0)
    """[tokens] Size of one chunk; 0: by the size of the vocabulary."""
    balance_loss: float = limit(0.0, at_least=0.0, null=0.0)
    """[factor] Weight of the loss that balances a mixture's experts, over all tokens of the step, whatever its cut into
    ranks and micro-batches (docs/moe.md). 0: none, also where the model's config has one."""
    router_z_loss: float = limit(0.0, at_least=0.0, null=0.0)
    """[factor] Weight of the mean squared logsumexp of the routers' logits (Zoph et al. 2022). 0: none."""


@dataclass(frozen=True)
class AdapterSection:
    """Low-rank adapters on a frozen model, by the library peft (docs/finetuning.md)."""

    kind: Literal["none", "lora", "dora"] = "none"
    """[choice] none: all weights are trained. lora: W + (alpha / r) B A, of which B and A are. dora: the same with a
    trained length of every row."""
    r: int = limit(16, at_least=1)
    """[rows] Rank: rows of A, columns of B."""
    alpha: int = limit(32, at_least=1)
    """[factor] Numerator of the adapter's factor."""
    dropout: float = limit(0.0, at_least=0.0, below=1.0)
    """[fraction] Dropout on the adapter's input."""
    rslora: bool = False
    """[true or false] Divide alpha by the root of r instead of r (Kalajdzievski 2023)."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """[names] Ends of the names of the modules that get an adapter, such as [q_proj, v_proj]. all-linear: every linear
    layer but the output embedding."""
    modules_to_save: tuple[str, ...] = ()
    """[names] Modules that are trained whole and saved with the adapter, such as [lm_head]."""
    init: Literal["default", "gaussian"] = "default"
    """[choice] How A is drawn: default is uniform as torch's linear layers, gaussian is normal. B starts at zero."""
    base: Literal["compute", "nf4", "int8"] = "compute"
    """[choice] How the frozen linear layers are held. compute: in precision.compute. nf4: 4 bits a weight and a scale
    of each 64, as load_in_4bit with bnb_4bit_quant_type nf4. int8: 8 bits and a scale of each row. Both need the
    package bitsandbytes and compute in precision.compute (docs/finetuning.md)."""
    double_quant: bool = False
    """[true or false] With nf4: hold the scales in 8 bits, as bnb_4bit_use_double_quant: 4.13 bits a weight for 4.5."""


@dataclass(frozen=True)
class SftSection:
    """How task sft weighs labels, and the noise it adds to embeddings (docs/finetuning.md)."""

    loss: Literal["token", "row"] = "token"
    """[choice] token: the mean over all labels of the global batch, so that a long answer weighs more than a short one.
    row: the mean over its rows of each row's mean, so that all weigh the same."""
    neftune_alpha: float = limit(0.0, at_least=0.0, null=0.0)
    """[factor] Scale of uniform noise on the embeddings in training, divided by the root of the row's tokens times the
    embedding's width (NEFTune, Jain et al. 2023, who use 5 to 15). 0: none."""


@dataclass(frozen=True)
class PreferenceSection:
    """The loss of task dpo over pairs of answers (docs/finetuning.md)."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """[choice] Loss of beta times the margin, which is by how much more the model than the reference prefers the chosen
    answer. sigmoid: DPO (Rafailov et al. 2023). hinge: SLiC (Zhao et al. 2023). ipo: IPO (Azar et al. 2023), on sums of
    log-probabilities as in the paper."""
    beta: float = limit(0.1, above=0.0)
    """[per nat] Strength of the pull towards the reference; larger is stronger."""
    label_smoothing: float = limit(0.0, at_least=0.0, below=0.5)
    """[fraction] Share of pairs whose answers are taken to be the wrong way round: conservative DPO (Mitchell 2023), of
    sigmoid only."""
    sft_weight: float = limit(0.0, at_least=0.0, null=0.0)
    """[factor] Weight of the chosen answer's mean cross-entropy by token, added to the loss (Pang et al. 2024)."""
    reference: Literal["auto", "adapter_off", "precomputed"] = "auto"
    """[choice] Reference model of the log-probabilities. adapter_off: the base under the adapter, in every step.
    precomputed: the start weights, once before the first step, kept beside the prepared data. auto: adapter_off with an
    adapter, else precomputed."""


@dataclass(frozen=True)
class DistillSection:
    """The teacher of tasks distill and opd, and what is learned from it (docs/finetuning.md, docs/rl.md)."""

    teacher: str | None = None
    """[path or hub id] Model of the same vocabulary whose distributions are learned. It is never trained."""
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """[choice] Divergence of student q from teacher p at every label. forward_kl: KL(p || q) (Hinton et al. 2015).
    reverse_kl: KL(q || p). jsd: of both from their mixture beta p + (1 - beta) q (Agarwal et al. 2024)."""
    beta: float = limit(0.5, above=0.0, below=1.0)
    """[fraction] The teacher's share in the mixture of jsd, and the weight of its KL."""
    temperature: float = limit(1.0, above=0.0)
    """[factor] Both logits are divided by it, and the divergence is multiplied by its square."""
    ce_weight: float = limit(0.0, at_least=0.0, at_most=1.0)
    """[fraction] Weight of the labels' cross-entropy; the divergence has the rest. 1: nothing is learned from the
    teacher, for comparison."""
    top_k: int = limit(0, at_least=0, null=0)
    """[tokens] 0: the teacher answers live, with all logits. k: its k likeliest tokens and the rest as one are computed
    before training, once for every sequence, and kept beside the prepared data."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """[choice] The teacher computes in it. auto: the dtype that its weights are saved in."""
    sharded: bool = False
    """[true or false] Partition the teacher over the ranks (ZeRO-3), where a whole one on each does not fit."""


@dataclass(frozen=True)
class GrpoSection:
    """How tasks grpo and opd sample answers, and how grpo learns from their rewards (docs/rl.md)."""

    rewards: tuple[str, ...] = ()
    """[names] Functions that reward answers: your own, as file.py:function or module:function, or exact_match, regex,
    json_schema, length. Each gets prompts, completions, completion_ids and every column of the rows, as TRL's do."""
    reward_weights: tuple[float, ...] = ()
    """[factors] Weight of each in the sum. Empty: 1."""
    reward_options: dict[str, Any] = field(default_factory=dict)
    """[mapping] Arguments for every row that has no column of that name, such as {regex: "^[0-9]+$"}."""
    reward_workers: int = limit(2, at_least=1)
    """[processes] Processes of each rank that run the functions."""
    reward_seconds: float = limit(10.0, above=0.0)
    """[seconds] Time for the answers to one prompt, after which a function counts as failed: no reward, no end."""
    algorithm: Literal["grpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo"] = "grpo"
    """[choice] Decides each key below that is null, as its paper does (modeling/objectives/policy.py has them)."""
    advantage: Literal["group_std", "group_mean", "rloo"] | None = None
    """[choice] Reward less the group's mean, divided by its standard deviation or not; rloo: less the others' mean."""
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
    """[choice] Weight of a token, pi / mu of trainer and sampler: none, cut off at correction_high, or 0 beyond it."""
    correction_high: float = limit(2.0, at_least=1.0)
    """[factor] Largest weight; mask keeps those from 1 / correction_high on."""
    group_size: int = limit(8, at_least=2)
    """[answers] Answers to each prompt. batch.global_size counts answers."""
    max_new_tokens: int = limit(128, at_least=1)
    """[tokens] Longest answer, its end included; a prompt has the rest of data.sequence_length."""
    temperature: float = limit(1.0, above=0.0)
    """[factor] Logits are divided by it in sampler and trainer."""
    top_p: float = 1.0
    """[fraction] 1: a token is drawn from all tokens."""
    updates: int = limit(1, at_least=1)
    """[steps] Optimizer steps on the same answers; from the second on the policy is no longer theirs."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """[choice] The sampler. transformers: a copy of the model in every rank's process. vllm: servers (grpo.urls)."""
    urls: tuple[str, ...] = ()
    """[addresses] Servers of engine vllm, such as http://127.0.0.1:8105; they read weights from the run folder."""
    server_seconds: float = limit(600.0, above=0.0)
    """[seconds] How long a server that died or hangs is waited for before the run ends."""
    at_once: int = limit(64, at_least=1)
    """[answers] How many the sampler draws at a time."""
    resamples: int = limit(0, at_least=0)
    """[times] How often groups whose answers all have one reward are sampled again at most (DAPO)."""
    max_gap: float = limit(3.0, above=1.0)
    """[factor] Largest healthy k3 of sampler and trainer, in units of the trainer's distance from itself."""


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
    """[text] Its name in the record. null: validation 1 and so on, or source 1 and so on."""
    format: RowFormat = "auto"
    """[choice] Same as data.format."""


@dataclass(frozen=True)
class SourceSection(ValidationSection):
    """One source of a mixture."""

    weight: float | None = limit(None, above=0.0)
    """[ratio] Its share of the samples, in proportion to the other weights. null: by data.sources.epochs."""
    epochs: float | None = limit(None, above=0.0)
    """[passes] Alternative to a weight: how often its samples come in the time in which those of a source with 1 come
    once. null: 1, unless there is a weight."""


@dataclass(frozen=True)
class DataSection:
    """Where the text comes from and how it becomes token sequences."""

    source: SourceKind = "stdlib"
    """[choice] stdlib: the .py files of the running Python, on every machine; for tasks sft and seq2seq its functions,
    each with the first sentence of its docstring, for dpo beside more of it, for classify its package. text, jsonl,
    parquet: files at data.path (text: one document a file, or several by data.document_separator). hub: the dataset
    data.path of the Hugging Face hub, or a local dataset folder. megatron: documents that Megatron-LM tokenized, .bin
    files with their .idx. auto: stdlib without a data.path, else what its name says: .jsonl and .json, .parquet, .txt,
    .idx, and hub for the rest."""
    path: str | None = None
    """[path, glob, URL or hub id] File, folder or glob of text, jsonl, parquet and megatron, of which it may be what
    both files' names begin with; of the first three also behind a URL that fsspec knows, such as s3://bucket/*.jsonl.
    The dataset's id for hub."""
    document_separator: str | None = None
    """[text] For source text: separator between the documents of a file, such as "\\n\\n" in double quotes. Empty
    documents are left out and counted. null: a file is a document."""
    sources: tuple[SourceSection, ...] = ()
    """[list] Several sources in place of data.path, each {path, name, format, weight or epochs}. Each is prepared and
    held out by itself; samples are drawn by share (docs/data.md)."""
    validation: tuple[ValidationSection, ...] = ()
    """[list] Validation sets in files of their own, each {path, name, format}, beside what data.validation_fraction
    holds out. Each is evaluated, up to evaluate.batches, and none of it trained; the record has each one's loss by its
    name."""
    name: str | None = None
    """[text] Configuration name of a hub dataset."""
    split: str = "train"
    """[text] Split of a hub dataset."""
    text_field: str = "text"
    """[text] Field that holds the document, for jsonl, parquet and hub."""
    input_ids_field: str | None = None
    """[text] For documents of jsonl, parquet and hub that are tokenized already: field with the list of token ids,
    which is read in place of a text. data.tokenizer names the tokenizer that made them. null: documents are text."""
    text_pair_field: str | None = None
    """[text] For task classify: field with a second text, read with the first. null: none."""
    label_field: str = "label"
    """[text] For task classify: field with the label of the row, or with its number."""
    tokens_field: str = "tokens"
    """[text] For task classify with classify.kind = token: field with the list of words."""
    tags_field: str = "tags"
    """[text] For classify.kind = token: field with the list of their labels."""
    format: RowFormat = "auto"
    """[choice] Form of the rows of tasks sft and seq2seq. messages: a list of role and content. sharegpt: from and
    value in `conversations`. alpaca: instruction, input, output. prompt_completion: two texts, or two lists of
    messages. text: the field data.text_field. auto: by the fields of the first row; for task distill: documents, not
    rows. preference, that of task dpo: `chosen` and `rejected`, each text or a list of messages, and `prompt`, or what
    both begin with. For task classify it follows from classify.kind: labelled, one or two texts and a label; tagged,
    words with a label each; scored, texts and a number."""
    on_bad_row: Literal["error", "skip"] = "error"
    """[choice] A row that does not fit its format ends the preparation, or is left out and counted."""
    chat_template: str | None = None
    """[path] File with a Jinja chat template, in place of the tokenizer's own."""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """[choice] Which tokens of a row have labels: the assistant's turns with their ends (those of the completion, where
    the row has one; the output, where there are no turns), the last of them only, or all."""
    packing: Literal["auto", "best_fit", "none"] = "auto"
    """[choice] best_fit: whole rows share a sequence, and do not see each other. none: one row a sequence, padded to
    the longest of its batch, which holds rows of similar length. auto: best_fit, but none for dpo and seq2seq."""
    too_long: Literal["drop", "truncate_left", "truncate_right"] = "drop"
    """[choice] Treatment of a row longer than data.sequence_length + 1 tokens. truncate_left cuts off its start. For
    task seq2seq: of a source longer than data.sequence_length, whose special tokens stay; a target that is longer than
    data.target_length is dropped or loses its end."""
    target_length: int | None = limit(None, at_least=2)
    """[tokens] For task seq2seq: length of the longest target, its end included. null: data.sequence_length."""
    tokenizer: str = "bpe:4096"
    """[bytes | bpe:<vocab> | model | path | hub id] bytes: 256 byte tokens and the end of a document. bpe:<vocab>: a
    byte-level BPE of that vocabulary size, trained on this data. model: that of model.name_or_path. Otherwise a Hugging
    Face tokenizer."""
    sequence_length: int = limit(512, at_least=2)
    """[tokens] Length of one training sequence; documents are packed end to end to fill it. Of task seq2seq: length of
    the longest source, its special tokens included."""
    document_masking: bool = False
    """[true or false] Keep packed documents apart: attention stops where a document ends, positions start at 0 again,
    and its end does not predict the next one. false: a sequence is attended to as a whole, as GPT-3's were.
    Packed rows are always apart."""
    validation_fraction: float = limit(0.01, at_least=0.0, below=1.0)
    """[fraction] Share of documents held out for evaluation, drawn by a hash of their text."""
    hold_out: Literal["auto", "documents"] = "auto"
    """[choice] documents: whole documents only. auto: the same, and where none is drawn or none is left, as of a single
    file, that share of the text from the end of the longest document."""
    cache_dir: str = "~/.cache/mantissa"
    """[path] Folder of prepared tokens; reused by fingerprint of source, tokenizer and split. Where the default may not
    be written, mantissa-<user id> in the folder of temporary files takes its place."""
    workers: int = limit(2, at_least=1)
    """[processes] Processes that tokenize, on every machine that sees data.cache_dir. The tokens do not depend on their
    number."""
    wait_minutes: float = limit(60.0, above=0.0)
    """[minutes] How long a process waits for another one that is preparing the same data and makes no progress."""
    verify: bool = True
    """[true or false] Check the sha256 of prepared shards before training; sizes are always checked."""

    @property
    def label_length(self) -> int:
        """[tokens] Places of a sequence that may have labels: of a target where there are such, once they are known."""
        return self.target_length or self.sequence_length

    @property
    def longest(self) -> int:
        """[tokens] Positions that a model needs."""
        return max(self.sequence_length, self.label_length)


@dataclass(frozen=True)
class ClassifySection:
    """The prediction target of task classify (docs/finetuning.md)."""

    kind: Literal["sequence", "token", "regression"] = "sequence"
    """[choice] sequence: one label for a row. token: one for each of its words. regression: a number for a row."""
    labels: tuple[str, ...] = ()
    """[names] The labels in the order of the model's outputs. Empty: those of the data, sorted."""


@dataclass(frozen=True)
class MlmSection:
    """Token masking of task mlm (docs/finetuning.md)."""

    probability: float = limit(0.15, above=0.0, at_most=1.0)
    """[fraction] Probability that a token, or a word, is chosen to be predicted. Of the chosen ones 80% become the mask
    token, 10% another token and 10% stay (Devlin et al. 2019)."""
    whole_word: bool = True
    """[true or false] Choose whole words with all their tokens."""


@dataclass(frozen=True)
class BatchSection:
    """How many sequences an optimizer step sees, and how they are cut into micro-batches."""

    global_size: int = limit(8, at_least=1)
    """[sequences] Sequences in one optimizer step over all ranks, pairs of them for task dpo; does not change with the
    number of processes."""
    micro_size: int = limit(1, at_least=1)
    """[sequences] Sequences in one forward pass on one rank. Accumulation is global_size / (micro_size x ranks)."""


@dataclass(frozen=True)
class ParallelSection:
    """Parallelism besides ZeRO's partitions (docs/parallel.md)."""

    sequence: int = limit(1, at_least=1)
    """[ranks] Ranks that share each sequence, a slice of its tokens each, so that a rank keeps the activations of its
    slice only. It divides the number of processes; data.sequence_length need not be a multiple of it. 1: none share
    any."""
    tensor: int = limit(1, at_least=1)
    """[ranks] Ranks that share each matrix of a block, a part of its heads or of its MLP each, and compute the same
    sequences with it. It divides the number of processes and the attention heads. 1: every rank computes with whole
    matrices."""
    expert: int = limit(1, at_least=1)
    """[ranks] Ranks that share the experts of each layer of a mixture, a part of them each, and send each other the
    tokens of theirs. It divides the number of processes and of experts. 1: every rank has all experts."""


@dataclass(frozen=True)
class ParameterGroupSection:
    """Parameters with a learning rate or a weight decay of their own."""

    match: str = "*"
    """[glob] Pattern of parameters' names, such as model.embed_tokens.* ; of several groups that match, the last one
    counts."""
    learning_rate: float | None = limit(None, at_least=0.0)
    """[per step] Their peak learning rate, which follows the same schedule. null: optimizer.learning_rate."""
    weight_decay: float | None = limit(None, at_least=0.0)
    """[per step and learning rate] Their decay, whatever their shape. null: as without the group."""


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer on the FP32 masters."""

    name: Literal["adamw", "muon", "stable_adamw", "lamb", "lion", "sgd"] = "adamw"
    """[choice] adamw: decoupled weight decay (Loshchilov and Hutter 2019), fused where torch has it. muon: orthogonal
    steps of hidden matrices (Jordan et al. 2024, Liu et al. 2025), adamw for the rest. stable_adamw: smaller steps
    where gradients outgrow their average (Wortsman et al. 2023). lamb: Adam's direction with the norm of each whole
    parameter (You et al. 2020). lion: the sign of an average (Chen et al. 2023). sgd: with momentum, its weight decay
    part of the gradient (docs/optimizers.md)."""
    learning_rate: float = limit(3e-4, at_least=0.0)
    """[per step] Peak learning rate."""
    betas: tuple[float, float] = limit((0.9, 0.95), at_least=0.0, below=1.0)
    """[fraction, fraction] Decay of the first and the second moment; for lion of the mix and of the average."""
    momentum: float | None = limit(None, at_least=0.0, below=1.0)
    """[fraction] Decay of sgd's velocity, and of muon's average, per step. null: 0.9 for sgd, 0.95 for
    muon."""
    orthogonalization: Literal["auto", "fp32", "bf16"] = "auto"
    """[choice] Precision of the Newton-Schulz iteration of muon. auto: bf16 in a 16-bit run on GPUs, else fp32."""
    eps: float = limit(1e-8, above=0.0)
    """[gradient units] Added to the root of the second moment."""
    weight_decay: float = limit(0.1, at_least=0.0)
    """[per step and learning rate] Decoupled decay of what layers multiply their inputs by; not of embeddings."""
    gradient_clipping: float = limit(1.0, at_least=0.0, null=0.0)
    """[gradient units] Largest global gradient norm; 0 leaves gradients as they are."""
    groups: tuple[ParameterGroupSection, ...] = ()
    """[list] Learning rate and weight decay by parameters' names, each {match, learning_rate, weight_decay}."""


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over applied optimizer steps; never scaled by the number of processes."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """[choice] Shape after the warm-up. wsd: constant, then a linear decay over the last schedule.decay_fraction."""
    warmup_steps: int = limit(0, at_least=0)
    """[applied steps] Linear rise from 0, which no step has, to the peak, which the last of them has. The step after
    them has it too: there the decay starts."""
    final_ratio: float = limit(0.1, at_least=0.0, at_most=1.0)
    """[fraction of the peak] Learning rate at the last step."""
    decay_fraction: float = limit(0.2, above=0.0, at_most=1.0)
    """[fraction of the schedule] Length of the decay of wsd."""
    steps: int | None = limit(None, at_least=1)
    """[applied steps] Length of the whole schedule, of which a run with fewer run.steps is the beginning. null:
    run.steps."""


@dataclass(frozen=True)
class LossScaleSection:
    """Loss scaling for FP16, done by DeepSpeed's scaler. Ignored by BF16 and FP32, which need none."""

    policy: Literal["deepspeed", "adaptive", "static"] = "deepspeed"
    """[choice] deepspeed: halved on overflow, doubled after a clean window, as DeepSpeed does. adaptive: starts lower,
    backs off harder and regrows more slowly when overflows come in a burst. static: always `initial`, reads no more."""
    initial: float | None = limit(None, above=0.0)
    """[factor] First loss scale; a power of two unless static. null: 65536, or 4096 for adaptive."""
    window: int = limit(1000, at_least=1)
    """[steps] Steps without overflow before the scale grows."""
    factor: float = limit(2.0, at_least=2.0, at_most=16.0)
    """[factor] adaptive divides by it on overflow and multiplies by it after a window; a power of two. deepspeed: 2."""
    minimum: float = limit(1.0, above=0.0)
    """[factor] Smallest loss scale; an overflow at this scale is more than scaling can repair."""
    maximum: float | None = limit(None, above=0.0)
    """[factor] Largest loss scale, a power of two. null: none for deepspeed, which has none, 2^24 for adaptive."""
    hysteresis: int | None = limit(None, at_least=1)
    """[overflows] Overflows since the last growth that it takes to lower the scale. null: 2, or 1 for adaptive."""
    escalate_after: int = limit(3, at_least=1)
    """[overflows] How many within escalate_within steps square the backoff and double the window; adaptive only."""
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
    """How modules compute that a precision manifest sets to fp8 (docs/fp8.md)."""

    gradient: Literal["e4m3", "e5m2"] = "e4m3"
    """[choice] Format of the gradient that arrives at a module; its input and its weight are E4M3. e5m2 has a wider
    range and one bit less, which scales by row make up for."""
    scaling: Literal["row", "block32", "tensor"] = "row"
    """[choice] Values that share a scale: those that one sum is over, 32 of them, or the whole tensor,
    in which an outlier costs all others their precision. There is no delayed scaling: it hides inf and nan."""
    weight_gradient: Literal["ambient", "fp8"] = "ambient"
    """[choice] Dtype in which the gradient of the weight is computed: the dtype around the module, or fp8, with scales
    over the tokens of a micro-batch."""
    kernel: Literal["auto", "emulate", "scaled_mm"] = "auto"
    """[choice] scaled_mm: FP8 matmuls of GPUs of compute capability 9.0 and higher, and of CPUs. emulate: rounding to
    FP8 and back, anywhere. auto: on such a GPU scaled_mm where a module can have it and a comparison with FP8's
    definition at the start holds."""


@dataclass(frozen=True)
class PrecisionSection:
    """The dtypes in which the model computes, accumulates and reduces. Masters and optimizer state are always FP32."""

    path: Literal["cast", "manifest"] = "cast"
    """[choice] cast: the module itself is 16-bit and ZeRO holds FP32 masters (DeepSpeed's bf16 and fp16 sections).
    manifest: parameters stay FP32 and precision.manifest names each module's dtype, which naming one implies."""
    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """[choice] Dtype of forward and backward; it chooses the JSON of ds_configs/. auto: what deepspeed.config says, or
    bf16 where none is named."""
    manifest: str | None = None
    """[path] JSON precision manifest. Implies path: manifest and a DeepSpeed JSON in FP32."""
    verify_every_steps: int = limit(1000, at_least=0, null=0)
    """[steps] The dtype each module really computes in is watched on the first step of a session and every that many
    steps; a module that computes in another dtype than the manifest's stops the run. 0: the first step only."""
    routers: Literal["fp32", "compute"] = "fp32"
    """[choice] Dtype in which routers of experts compute on the cast path, of weights in precision.compute. A manifest
    has rules for them instead, and FP32 without one."""
    loss_scale: LossScaleSection = field(default_factory=LossScaleSection)
    """[section] Loss scaling of FP16."""
    fp8: Fp8Section = field(default_factory=Fp8Section)
    """[section] FP8 of a manifest's modules."""
    masters: Literal["fp32", "split"] = "fp32"
    """[choice] split: an FP32 master is held as its BF16 weight and the bits that rounding took from it, 1.9 bytes less
    for each value of a rank's part, and trains bit for bit as fp32 does. BF16 on the cast path, AdamW, ZeRO-1, 2 and 3
    without offload."""
    accumulate: Literal["fp32"] = "fp32"
    """[choice] Dtype in which gradients of micro-batches are summed."""
    reduce: Literal["fp32", "compute"] = "fp32"
    """[choice] Dtype in which gradients cross the network. compute halves the traffic of 16-bit runs."""


@dataclass(frozen=True)
class DeepSpeedSection:
    """The DeepSpeed JSON this run starts from; without one of the user's own, that of ds_configs/ for the dtype of
    precision.compute, this stage and this offload."""

    config: str | None = None
    """[path] DeepSpeed JSON; a relative path is looked up beside the run config, then in the working folder and in
    Mantissa's own folder. `--deepspeed_config` on the command line overrides it. null: chosen. On the command line
    precision.compute, precision.manifest, deepspeed.stage and deepspeed.offload choose another where the run config
    names one of ds_configs/; from any other JSON they must not differ."""
    stage: int | None = limit(None, at_least=0, at_most=3)
    """[ZeRO stage] State partitioned over the ranks: 1 optimizer states, 2 gradients too, 3 parameters too. null:
    what deepspeed.config says, or 2."""
    offload: Literal["none", "cpu"] | None = None
    """[choice] cpu: masters and moments, and at stage 3 parameters, are kept in host memory. null: what
    deepspeed.config says, or none."""


@dataclass(frozen=True)
class EvaluateSection:
    """Validation loss while training."""

    every_steps: int = limit(0, at_least=0, null=0)
    """[steps] Interval of evaluations, with one more at the end; 0: never."""
    batches: int | Literal["auto"] | None = limit("auto", at_least=1)
    """[batches] Global batches of validation sequences in one evaluation, at most, evenly spaced over the set. null:
    all of them. auto: all of task = classify, of the others 8."""
    also_after: tuple[int, ...] = limit((), at_least=1)
    """[steps] Further steps after which to evaluate, such as [900, 1350], unless every_steps is 0."""
    at_start: bool = False
    """[true or false] Evaluate before step 1, too, unless every_steps is 0: what the model could before training."""

    @property
    def most_batches(self) -> int | None:
        """[batches] `batches`, once auto is decided."""
        assert not isinstance(self.batches, str)
        return self.batches


@dataclass(frozen=True)
class CheckpointSection:
    """Checkpoints under run.dir/run.name/checkpoints, and in an object store where one is named."""

    dir: str | None = None
    """[URL] s3://bucket/folder, or any other that fsspec knows: every checkpoint is also uploaded to URL/run.name, in
    the background, and the run resumes from there. The run folder then keeps the newest one. null: none."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    """[mapping] Options of fsspec's file system, such as endpoint_url or s3_additional_kwargs; never credentials."""
    encryption_key: str | None = None
    """[env:NAME or file:PATH] Where a 256-bit key is: weights, masters, moments and random states are then encrypted
    with AES-256-GCM before they are written. null: not encrypted."""
    accept_plain: bool = False
    """[true or false] Resume from an unencrypted checkpoint although a key is set, when turning encryption on."""
    every_steps: int = limit(0, at_least=0, null=0)
    """[steps] Interval of saves, with one more at the end; 0: only at the end."""
    also_after: tuple[int, ...] = limit((), at_least=1)
    """[steps] Further steps after which a checkpoint is saved, such as [900, 1350]."""
    at_end: bool = True
    """[true or false] Save the state after the last planned step. false: nothing is left to resume or export from, for
    runs that are only timed; a run that is stopped early saves all the same."""
    keep: int = limit(2, at_least=1)
    """[checkpoints] Number of newest checkpoints that stay on disk."""
    keep_every: int = limit(0, at_least=0, null=0)
    """[steps] Checkpoints whose step is a multiple of this stay as well; 0: none for that reason."""
    keep_best: int = limit(0, at_least=0, null=0)
    """[checkpoints] Number with the lowest validation loss that stay as well, among those saved at a step at
    which evaluate.every_steps was due."""
    background: Literal["auto", "always", "never"] = "auto"
    """[choice] always: training waits only for a copy to host memory, of the size of the rank's files, which is written
    in the background. never: it waits until the checkpoint is on disk. auto: never with offload, which fills host
    memory already, else always."""
    max_failures: int = limit(3, at_least=1)
    """[saves] Failed saves in a row (a full disk, say) after which training stops with exit code 74; until then it
    continues and tries again at the next save. When the last save of a run fails it ends with that code too."""
    verify_after_save: bool = False
    """[true or false] Read each checkpoint back from disk and compare hashes before it counts as saved; one that
    differs is set aside. In the background as well."""


@dataclass(frozen=True)
class TrackingSection:
    """Where the record of the run goes besides events.jsonl."""

    sinks: tuple[Literal["wandb", "tensorboard", "mlflow", "trackio", "csv"], ...] = ("wandb",)
    """[choices] Trackers that are fed from events.jsonl, each in a process of its own. csv writes RUN/metrics.csv.
    Optional installs: tensorboard (RUN/tensorboard), mlflow (MLFLOW_TRACKING_URI, else RUN/mlflow.db), trackio."""
    group: str = ""
    """[text] Runs that belong together, such as seeds of a setting: wandb's and Trackio's group, a tag in MLflow."""
    tags: tuple[str, ...] = ()
    """[texts] Tags in wandb and MLflow."""
    job_type: str = "train"
    """[text] wandb's job type, a tag in MLflow."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """[choice] wandb mode. Trouble inside wandb never stops training."""
    project: str = "mantissa"
    """[text] Project in wandb and Trackio, experiment in MLflow."""
    log_every_steps: int = limit(1, at_least=1)
    """[steps] How often the trackers and the plain console get a step; events.jsonl has every step."""
    prometheus_port: int | None = limit(None, at_least=0, at_most=65535)
    """[port] Where rank 0 answers `GET /metrics` for Prometheus; 0: any free one, logged at the start; null: none."""
    prometheus_address: str = "127.0.0.1"
    """[address] Interface to listen on. There is no authentication: open it to trusted networks only."""
    otlp_endpoint: str | None = None
    """[URL] OpenTelemetry collector, such as http://localhost:4318, that every rank sends spans of its steps to by OTLP
    over HTTP. Headers and certificates come from the OTEL_EXPORTER_OTLP_* variables. null: none."""


@dataclass(frozen=True)
class ProfileSection:
    """A torch.profiler trace of a few steps, and a summary of it, in run.dir/run.name/profile."""

    start: int = limit(5, at_least=1)
    """[step] First step profiled, from 1. The first steps of a session are slower than those that follow."""
    steps: int = limit(0, at_least=0, null=0)
    """[steps] How many steps are profiled; one or two are enough. 0: none."""
    ranks: tuple[int, ...] = limit((0,), at_least=0)
    """[ranks] Ranks that profile; those the run does not have are left out."""


@dataclass(frozen=True)
class TelemetrySection:
    """Statistics of each module's gradients and activations, measured now and then into events.jsonl and wandb."""

    every_steps: int = limit(50, at_least=0, null=0)
    """[steps] Gradient norm, maximum and underflow, largest activation, distance of the weights from their masters and
    size of the update of each module, at this interval, for the heat maps. 0: never."""
    probe: bool = False
    """[true or false] On those steps also run the micro-batches in FP32 and compare gradients: cosine, sign agreement
    and relative error by parameter. One more pass, and an FP32 copy of the gradients in host memory on every rank."""


@dataclass(frozen=True)
class WarningsSection:
    """Bounds of figures that leave their healthy range before the loss shows it; a `warning` event says when one does.
    gradient_jump, router_... and those of answers are looked at in every step, the others where telemetry is
    (docs/early-warnings.md)."""

    attention_logit: float | None = limit(100.0, above=0.0)
    """[logit] Largest healthy attention logit; Kimi K2 clips there. null: any."""
    attention_entropy: float | None = limit(0.01, above=0.0, below=1.0)
    """[fraction of even attention's] Smallest healthy entropy of a layer's attention, mean over heads; null: any."""
    adam_rms: float | None = limit(3.5, above=1.0)
    """[factor] Largest healthy root mean square of gradient over the root of Adam's second moment, by module. It cannot
    exceed 1 / sqrt(1 - betas[1]), 4.5 at 0.95; null: any."""
    gradient_jump: float | None = limit(2.3, above=1.0)
    """[factor] Largest healthy jump of the whole gradient's clipped norm, in every step; null: any."""
    signal_share: float | None = limit(None, above=0.0, below=1.0)
    """[fraction] Largest healthy share of signal in a module's gradients, which otherwise all point one way; null: any,
    since it is close to 1 early in a sound run."""
    embedding_share: float | None = limit(0.99, above=0.0, below=1.0)
    """[fraction] Largest healthy share of the embedding in the squared gradient norm; 0.99 is ten times the norm of
    everything else. null: any."""
    kurtosis_growth: float | None = limit(2.0, above=1.0)
    """[factor] Largest healthy growth of the kurtosis of a block's channels over its median of late; null: any."""
    update_growth: float | None = limit(2.0, above=1.0)
    """[factor] Largest healthy growth of the updates' norm over that of the weights, over its median of late, which a
    learning rate that rises after the warm-up shows; null: any."""
    overflow_steps: int | None = limit(200, at_least=1)
    """[steps] Warn when an activation in FP16 grows so that it overflows within so many steps; null: never."""
    router_entropy: float | None = limit(0.5, above=0.0, below=1.0)
    """[fraction of even use] Smallest healthy entropy of the experts' load, where router losses are on; null: any."""
    router_z: float | None = limit(1000.0, above=0.0)
    """[squared logit] Largest healthy z-loss of routers: BF16 has steps of 0.25 at its root, 32; null: any."""
    answer_entropy: float | None = limit(0.01, above=0.0)
    """[nats per token] Smallest healthy entropy of sampled answers; null: any."""
    no_signal: float | None = limit(0.95, above=0.0, at_most=1.0)
    """[fraction] Largest healthy share of prompts whose answers all have the same reward; null: any."""
    truncated: float | None = limit(0.9, above=0.0, at_most=1.0)
    """[fraction] Largest healthy share of answers that were cut off at grpo.max_new_tokens; null: any."""


@dataclass(frozen=True)
class GuardSection:
    """When a step is not healthy, and what is done about it. The defaults change nothing about a healthy run."""

    max_consecutive_skips: int = limit(20, at_least=1)
    """[steps] Skipped steps in a row, of any dtype, after which guard.reactions moves on to the next reaction."""
    spike_window: int = limit(128, at_least=16)
    """[healthy steps] History that a spike is compared with; nothing is judged before half of it is there."""
    spike_sigmas: float = limit(0.0, at_least=0.0, null=0.0)
    """[robust standard deviations] Loss or log gradient norm this far above its median is a spike; 0: none is.
    6 is what OLMo 2 skips at. Off by default: skipping a finite step changes what the model learns from."""
    min_update_ratio: float | None = limit(None, above=0.0)
    """[fraction] Smallest healthy norm of an update over the norm of the weights, 1e-3 in good runs; null: any."""
    max_update_ratio: float | None = limit(None, above=0.0)
    """[fraction] Largest healthy norm of an update over the norm of the weights; null: any."""
    reactions: tuple[Literal["skip", "cut_lr", "promote", "rollback", "abort"], ...] = ("skip", "rollback", "abort")
    """[ordered plan] The first that can help, is possible and has budget left is taken; when none is left the run
    stops with exit code 3. Only a healthy step is ever applied."""
    skip_budget: int = limit(100, at_least=0)
    """[times a run] Steps that may be skipped as incidents; FP16 overflows that the loss scale answers do not count."""
    cut_lr_budget: int = limit(3, at_least=0)
    """[times a run] How often the learning rate may be cut."""
    cut_lr_factor: float = limit(0.5, above=0.0, below=1.0)
    """[factor] A cut multiplies the learning rate by it; overlapping cuts multiply."""
    cut_lr_steps: int = limit(100, at_least=1)
    """[applied steps] How long a cut lasts."""
    promote_budget: int = limit(4, at_least=0)
    """[times a run] How often blamed modules may be promoted."""
    promote_to: Literal["bf16", "fp32"] = "fp32"
    """[choice] Dtype that blamed modules are promoted to."""
    probation_steps: int = limit(1000, at_least=0, null=0)
    """[applied steps] Steps without an incident after which a promotion is taken back; 0 never."""
    rollback_budget: int = limit(2, at_least=0)
    """[times a run] How often the run may go back to its last good checkpoint."""
    warnings: tuple[
        Literal[
            "attention_logit",
            "attention_entropy",
            "adam_rms",
            "gradient_jump",
            "signal_share",
            "embedding_share",
            "kurtosis_growth",
            "update_growth",
            "overflow_steps",
            "router_entropy",
            "router_z",
            "answer_entropy",
            "no_signal",
            "truncated",
            "self_check",
        ],
        ...,
    ] = ()
    """[names of bounds in warnings, or self_check] Early warnings that count as trouble, which guard.reactions answers:
    gradient_jump and what a self-check finds before the update in their own step, others in the next one. Empty:
    warnings are recorded and nothing else."""
    self_check_every: int = limit(500, at_least=0, null=0)
    """[steps] Of each so many one, drawn, is compared with plain torch in the run's dtype, and the first step of each
    session: module outputs, reduced gradients, the loss, the update, and copies of weights. What differs is named by
    module or parameter and rank. The step stays the same bit for bit. 0: never."""
    gradient_checks: int = limit(0, at_least=0, null=0)
    """[steps] How often of these comparisons that of the gradients and their norm is made: each linear layer's reduced
    gradient, all of its values in a few random sums. 0: with the others only."""
    replica_checks: int = limit(0, at_least=0, null=0)
    """[steps] Period in which each value that several ranks hold, or that is a rounded master, is compared once,
    a part of them each step: weights, buffers, at ZeRO-0 the optimizer's state too. One that differs is named by rank,
    host, parameter and bit, repaired where the right value is known, and the step is made again. 0: never."""
    update_checks: int = limit(0, at_least=0, null=0)
    """[values] How many values of each rank's masters and optimizer state, a random slice each step, are kept and their
    next update recomputed in FP64; a difference beyond rounding is named as above. For adamw. 0: none."""
    reexecute: str = "never"
    """[never, suspicious, or every N] Run a step again, from the same random numbers, and with the ranks' micro-batches
    exchanged: suspicious are a loss or norm that is not finite, or a spike. A transient fault is made good, a
    persistent one ends the run with exit code 71 and names the rank and host to drain, a true numeric event goes to
    guard.reactions. every N also runs every N-th step again."""
    attribute_overflows: bool = True
    """[true or false] Name the module that caused a routine FP16 overflow too, which costs one more forward and
    backward of the micro-batch each time; incidents are always attributed."""


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
    flipped_bit: silent corruption, one bit of one value of `place`; in docs/corruption.md what finds it.
    lost_update: a sound step is not applied, on all ranks, as one that overflows in FP16 is not."""
    step: int = limit(at_least=1)
    """[step] Step at which it strikes, from 1 in the order of the data; a rollback may leave it out."""
    rank: int = limit(0, at_least=0)
    """[rank] Rank on which it strikes."""
    module: str | None = None
    """[module name] Module whose first parameter or output is hit; the first module with parameters when left out."""
    factor: float = limit(1000.0, above=0.0)
    """[factor] loss_spike and gradient_spike multiply by it."""
    place: Literal["weight", "master", "moment", "second_moment", "gradient", "activation", "collective"] = "weight"
    """[choice] Where flipped_bit strikes, in the module's first parameter: the weight computed with, its master, the
    optimizer's first or second state tensor, the gradient of this rank, the module's output, the gradient reduced over
    ranks."""
    bit: int = limit(0, at_least=0, at_most=31)
    """[bit] Which bit of the value flipped_bit flips; 0 is the lowest of the mantissa."""
    persists: bool = False
    """[true or false] flipped_bit strikes again whenever the step is run again on this rank, as broken hardware does.
    false: once."""


@dataclass(frozen=True)
class ParitySection:
    """What counts as agreeing with the FP32 twin run; read by `python -m tools.parity`."""

    seeds: int = limit(1, at_least=1)
    """[runs] Pairs of runs, at run.seed, run.seed + 1 and so on. From 2 on a validation delta that FP32 runs also show
    among each other, from seed to seed, is no failure."""
    controls: int = limit(0, at_least=0, null=0)
    """[runs] FP32 runs at a learning rate 2^-8 larger, 2^-8 smaller, 2^-7 larger and so on. They
    diverge from the twin by chaos alone, so twice their root mean square distance is no failure."""
    points: int = limit(3, at_least=1)
    """[points] Places of the trajectory at which single steps are compared: the start, then one drawn from each of the
    other equal parts of the run."""
    draw: int = limit(0, at_least=0)
    """[number] Seed of the places that are drawn; another one compares other steps."""
    oracle_steps: int = limit(2, at_least=0, null=0)
    """[steps] First steps of the FP32 run that are recomputed outside of the engine, and with them the step after each
    drawn point: an error that both runs share, such as a label that is lost, is beyond FP32's bounds there. 0: none."""
    whole_steps: int = limit(8, at_least=0, null=0)
    """[steps] Of each so many steps of the trained runs one, drawn, is compared whole with plain torch, and in every
    step the gradients of linear layers, their norm, copies of weights and a slice of the update (docs/self-check.md).
    0: none."""
    validation_delta: float = limit(0.005, above=0.0)
    """[fraction] Largest distance of the last validation loss from FP32's."""
    loss_gap: float = limit(0.02, above=0.0)
    """[fraction] Largest distance of the running median of the training loss from FP32's, anywhere on the curve."""
    grad_norm_ratio: float = limit(1.1, above=1.0)
    """[factor] Largest median ratio of gradient norms, either way."""
    skipped_share: float = limit(0.05, at_least=0.0, at_most=1.0)
    """[fraction] Largest share of skipped steps, without those in which a loss scale that starts high settles."""
    nonfinite_events: int = limit(0, at_least=0)
    """[events] Non-finite values allowed, those of overflows that the loss scale answers aside."""
    lower_dtypes: int = limit(0, at_least=0)
    """[modules] Modules that may compute a softmax, a norm's statistics, the loss, a rotary table, a router or the
    residual stream in fewer bits than promised."""
    unexplained: int = limit(0, at_least=0)
    """[modules] Modules whose error may be other than rounding in the planned dtype explains: a wrong constant, a term
    that is missing, a sum in a lower dtype, whatever its size."""
    fp8_products: float = limit(1.0, above=0.0)
    """[factor] Largest distance of the output, the input gradient and the weight gradient of an FP8 layer from those by
    FP8's definition on what the layer got, in units of what the sums and the dtype around it round."""
    restored_share: float = limit(1.0, at_least=0.0, at_most=1.0)
    """[fraction] Share of the compared points that must restore from their checkpoint and repeat the recorded loss."""
    module_error: float = limit(0.02, above=0.0)
    """[fraction] Largest relative error of a module's output against FP32 on the same inputs: its own error."""
    accumulation_error: float = limit(2e-5, above=0.0)
    """[fraction] Largest relative error of a module's gradient that is the sum of two known ones, added up by the
    engine: 1e-7 in FP32, 1e-4 and 1e-3 where something adds up in FP16 or BF16."""
    weighting_error: float = limit(1e-4, above=0.0)
    """[fraction] Largest relative distance of a module's reduced gradient from what the step's micro-batches add up to
    when every label counts the same: 0 on a CPU, 0.02 for a mean of means of packed short documents."""
    loss_error: float = limit(1e-6, above=0.0)
    """[fraction] Largest relative distance of the reported loss from the mean over all labels of the global batch."""
    gradient_error: float = limit(0.15, above=0.0)
    """[fraction] Largest relative error of a module's weight gradients from the same masters and batch."""
    gradient_excess: float = limit(1.5, above=0.0)
    """[factor] Largest error of a module's weight gradients, beyond one rounding, in units of plain torch's in the
    run's dtype, from the same masters and batch. Not measured in FP32 and with a manifest."""
    gradient_cosine: float = limit(0.99, at_least=-1.0, at_most=1.0)
    """[cosine] Smallest cosine of a module's weight gradients with FP32's."""
    sign_agreement: float = limit(0.9, at_least=0.0, at_most=1.0)
    """[fraction] Smallest share of a module's weight gradients that have FP32's sign."""
    update_error: float = limit(0.001, above=0.0)
    """[fraction] Largest relative error of a module's update against the optimizer in FP64 on the reduced gradient."""
    update_rounding: float = limit(0.0, at_least=0.0, at_most=1.0)
    """[fraction] Largest share of a module's values whose master or moments an update of AdamW left further from FP64's
    than FP32's rounding explains: a moment kept in fewer bits, a coefficient that is slightly wrong."""
    weight_drift: float = limit(0.0, at_least=0.0)
    """[fraction] Largest relative distance of a 16-bit weight from its rounded master."""
    price_per_device_hour: float = limit(0.0, at_least=0.0)
    """[money] Price of one device for one hour, for the cost of a million tokens; 0 leaves it out."""


@dataclass(frozen=True)
class CanarySection:
    """What `python -m launch.canary` tries before it starts the whole run, and how it watches that one."""

    steps: int | None = limit(None, at_least=1)
    """[steps] Length of the canary: the whole run's first steps, on the same data, schedule and seed. The whole run
    starts after them, from the canary's state. null: 50, unless data_share says otherwise."""
    data_share: float | None = limit(None, above=0.0, below=1.0)
    """[fraction] Share of the whole run's data that the canary takes, from its start: this share of run.steps, rounded,
    at least one step. null: canary.steps says how many."""
    ranks: int | None = limit(None, at_least=1)
    """[processes] Processes of the canary, of its FP32 twin and of the checks. null: as many as the whole run has."""
    check_every: int = limit(0, at_least=0)
    """[steps] Least distance of the checkpoints whose next steps are compared with FP32 while the whole run goes on. 0:
    every checkpoint, as far as the checks keep up. The last one is always checked."""
    bounds: dict[str, Any] = field(default_factory=dict)
    """[mapping] Bounds of parity: that differ for the canary and for the checks, such as {module_error: 0.05}."""
    device_hours: float | None = limit(None, above=0.0)
    """[device hours] Budget of canary, twin and checks: seconds times canary.ranks. A canary that takes more is
    ended, and the whole run not started; checks that would are left out. null: no limit."""
    fallback: tuple[Literal["promote", "fp32"], ...] = ("promote", "fp32")
    """[ordered plan] Reactions to a failed check, after the run went back to the last checkpoint that held.
    promote: the modules that were named compute in FP32 from there on. fp32: all do. Each is tried once; when none is
    left the run stops with exit code 3."""


SAMPLING_TASKS = ("grpo", "opd")
"""Tasks that learn from the model's own answers to prompts."""
UNPACKED_TASKS = ("seq2seq", "dpo", *SAMPLING_TASKS)
"""Tasks that learn from rows and put each into a sequence of its own."""


@dataclass(frozen=True)
class GenerateSection:
    """The text sample at the end of a run, and on the way."""

    tokens: int = limit(120, at_least=0, null=0)
    """[tokens] Length of the sample; 0 writes none."""
    prompt: str = "def "
    """[text] Start of the sample."""
    temperature: float = limit(0.8, above=0.0)
    """[factor] Softmax temperature of sampling."""
    at_evaluations: bool = False
    """[true or false] Sample at each evaluation, too: the run's page shows how the samples change."""


@dataclass(frozen=True)
class Config:
    """A whole run config."""

    task: Literal["pretrain", "sft", "seq2seq", "dpo", "grpo", "opd", "distill", "classify", "mlm"] = "pretrain"
    """[choice] Training objective. pretrain: the next token of documents that fill every sequence. sft: the answers in
    rows of chats, instructions or texts. seq2seq: the same answers, by an encoder-decoder such as T5 or BART. dpo: to
    prefer the chosen answer of a pair. grpo: what rewards ask of the model's own answers; opd: what a teacher says to
    them (docs/rl.md). distill: a teacher's distributions, on rows where data.format names their form, or on documents.
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
        """Whether log-probabilities of the start weights are made before the first step."""
        return self.task == "dpo" and self.preference.reference == "precomputed"

    @property
    def group_size(self) -> int:
        """[sequences] What one sample of the data becomes in a batch: answers to a prompt, or itself."""
        return self.grpo.group_size if self.task in SAMPLING_TASKS else 1

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether attention and positions start anew within a sequence."""
        packed = self.learns_rows and self.task not in UNPACKED_TASKS and self.data.packing != "none"
        return self.data.document_masking or packed

    @property
    def learns_rows(self) -> bool:
        """Whether the data are rows with labels of their own, and not documents end to end."""
        formats: list[str] = [item.format for item in self.data.sources] or [self.data.format]
        return self.task in ("sft", *UNPACKED_TASKS) or (self.task == "distill" and set(formats) != {"auto"})
