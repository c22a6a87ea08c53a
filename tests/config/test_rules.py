"""Keys that do not fit together are refused, those that do are not, and an uneven batch names sizes that come out."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.batch import BatchPlan, plan_batch
from config.errors import UserError
from config.load import load_config
from config.schema import BatchSection, ParallelSection
from config.task import settle_task
from tests.support.refusals import refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "corpus.idx").touch()
    (tmp_path / "demo.yaml").write_text("model: {architecture: llama}\nrun: {steps: 100}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


MESSAGES = "{path: a.jsonl, format: messages}"
SPLIT = "precision.masters=split"
OF_A_MODEL = ["model.architecture=null", "model.name_or_path=gpt2"]
GRPO = ["task=grpo", "grpo.rewards=[exact_match]", "data.source=jsonl", "data.path=a.txt"]
REFUSED = [
    (["model.architecture=null"], "model.architecture is missing"),
    (["model.name_or_path=gpt2"], "model.name_or_path = 'gpt2' excludes model.architecture = 'llama'"),
    (["model.architecture=null", "model.name_or_path=./nowhere"], "model.name_or_path = './nowhere' is not a folder"),
    (["model.config.torch_dtype=bfloat16"], "model.config.torch_dtype is decided by precision.compute"),
    (["model.config._attn_implementation=eager"], "model.config._attn_implementation is decided by model.attention"),
    (["model={loss: full, loss_chunk_tokens: 8}"], "model.loss_chunk_tokens = 8 is only read by model.loss = chunked"),
    (["task=classify", "model.loss=chunked"], "model.loss = chunked computes a cross-entropy, … task = classify"),
    (["task=distill", "distill.teacher=a", "model.loss=chunked"], "model.loss = chunked … task = distill does not use"),
    ([*GRPO, "model.loss=chunked"], "model.loss = chunked … task = grpo does not use; set it to auto or full"),
    (["task=dpo", "model={loss: full, loss_chunk_tokens: 8}"], "model.loss_chunk_tokens = 8 … task = pretrain, sft"),
    (
        ["optimizer={learning_rate: 0, groups: [{match: '*', learning_rate: 0}]}"],
        "optimizer.groups gives a learning rate while optimizer.learning_rate = 0; set the latter",
    ),
    (["schedule.decay_fraction=0.1"], "schedule.decay_fraction = 0.1 is only read by schedule.name = wsd; remove it"),
    (["data={source: text, path: a.txt, split: test}"], "data.split = 'test' is only read by source = hub; remove it"),
    (["checkpoint.keep_best=2", "evaluate.every_steps=0"], "checkpoint.keep_best = 2 needs the losses of evaluations"),
    (["guard.warnings=[signal_share]"], "guard.warnings[0] = signal_share has no bound in warnings.signal_share; set"),
    (["data={tokenizer: model, sources: [{path: a.txt}]}"], "data.tokenizer = model needs model.name_or_path; set"),
    (
        ["task=grpo", "grpo.rewards=[exact_match]", "data={tokenizer: bytes, sources: [{path: a.jsonl}]}"],
        "data.sources is not verified with task = grpo; give one data.path instead",
    ),
    (["run.name=a/b"], "run.name = 'a/b' is not the name of a folder"),
    (["run.name=''"], "run.name = '' is not the name of a folder"),
    (["run.resume=nowhere"], "run.resume = 'nowhere' does not exist"),
    (["data.source=jsonl"], "data.path is missing; data.source = jsonl needs it"),
    (["data.source=hub"], "data.path is missing; data.source = hub needs it"),
    (["data.source=text", "data.path=nowhere/*.txt"], "data.path = 'nowhere/*.txt' matches no file"),
    (["data.path=a.txt"], "data.path = 'a.txt' is not read by data.source = stdlib"),
    (["grpo.beta=0.1"], "grpo.beta = 0.1 is only read by task = grpo; remove it, or set task=grpo"),
    ([*GRPO, "grpo.rewards=[]"], "grpo.rewards is empty; name a function, such as my_rewards:correct, or exact_match"),
    ([*GRPO, "grpo.transfer=collective"], "grpo.transfer = 'collective' is only read by grpo.engine = vllm"),
    ([*GRPO, "grpo.top_p=0.9"], "grpo.top_p = 0.9: the sampler would draw from another distribution"),
    ([*GRPO, "grpo.reward_weights=[1, 2]"], "grpo.reward_weights has 2 for 1 grpo.rewards"),
    ([*GRPO, "grpo.max_new_tokens=512"], "grpo.max_new_tokens = 512 leaves a prompt no token of data.sequence_length"),
    ([*GRPO, "batch.global_size=12"], "batch.global_size = 12 counts answers; make it a multiple of grpo.group_size"),
    ([*GRPO, "grpo={algorithm: gspo, surrogate: cispo}"], "grpo.ratio = sequence has no weight for a token"),
    (
        [*GRPO, "grpo={engine: vllm, urls: ['http://a']}", "guard.reactions=[promote]"],
        "guard.reactions = promote … = vllm",
    ),
    (
        [*GRPO, "grpo.surrogate=cispo"],
        "grpo.clip_high = 0.2 is the largest weight of a token by grpo.surrogate = cispo",
    ),
    ([*GRPO, "grpo={engine: vllm, urls: ['h:80']}"], "grpo.urls = h:80 is no address; write http://h:80"),
    ([*GRPO, "grpo.server_seconds=9"], "grpo.server_seconds = 9.0 is only read by grpo.engine = vllm"),
    ([*GRPO, "grpo.correction=mask", "guard.reactions=[correct]"], "guard.reactions = correct … to mask"),
    (
        [*GRPO, "grpo={engine: vllm, urls: ['http://a']}", "adapter.kind=dora"],
        "grpo.engine = vllm merges what adapter.kind",
    ),
    ([*GRPO, "parallel.tensor=2"], "task = grpo is not verified with parallel.tensor = 2; set parallel.tensor to 1"),
    ([*GRPO, "data.format=preference"], "data.format = preference"),
    ([*GRPO, "task=opd"], "distill.teacher is missing for task = opd; name a model folder or a hub id"),
    ([*GRPO, "task=opd", "distill.teacher=a", "grpo.beta=1"], "grpo.beta = 1.0 is only read by task = grpo"),
    ([*GRPO, "task=opd", "distill={teacher: a, top_k: 3}"], "distill.top_k = 3 is only read by task = distill"),
    (["data.validation=[{path: no.jsonl}]"], "data.validation[0].path = 'no.jsonl' matches no file; give a file"),
    (["data.validation=[{source: jsonl}]"], "data.validation[0].path is missing; data.validation[0].source = jsonl"),
    (["data.validation=[{name: held out}]"], "data.validation names a set 'held out', the name of the data's own"),
    (["data.validation=[{name: a}, {name: a}]"], "data.validation has a name that another set or source has; give"),
    (["data.validation=[{path: a.jsonl, format: preference}]", "task=sft"], "data.format = preference … task = sft"),
    (["task=distill", "distill.teacher=a", f"data.validation=[{MESSAGES}]"], "data.validation[0].format = messages"),
    (["data={source: text, path: a.txt, validation: [{path: a.txt}]}"], "data.validation[0] names the rows … trained"),
    (
        ["data={source: hub, path: a/b, validation: [{path: a/b}]}"],
        "data.validation[0] names the rows that are trained",
    ),
    (["data.validation=[{path: a.txt, split: x}]"], "data.validation[0].split = 'x' is only read by source = hub"),
    (["data.name=en"], "data.name = 'en' is only read by data.source = hub"),
    (["task=sft", "data.begin_of_document=auto"], "data.begin_of_document = auto is for documents of task = pretrain"),
    (["data={source: megatron, path: corpus, begin_of_document: auto}"], "data.begin_of_document = auto adds nothing"),
    (["data.document_separator=ab"], 'data.document_separator = "ab" is only read by data.source = text; remove it'),
    (["data.source=text", "data.path=a.txt", 'data.document_separator=""'], "data.document_separator is empty … null"),
    (["data={source: jsonl, path: a.txt, input_ids_field: ids}", "task=sft"], "data.input_ids_field = 'ids' … = sft"),
    (["data.input_ids_field=ids"], "data.input_ids_field = 'ids' is only read by data.source = jsonl, parquet and hub"),
    (["data={source: jsonl, path: a.txt, input_ids_field: ids}"], "data.tokenizer = bpe:4096 … tokens already; name"),
    (["data={source: megatron, path: corpus}"], "data.tokenizer = bpe:4096 is trained on text"),
    (["data={source: megatron, path: corpus}", "task=sft"], "data.source = megatron has no rows"),
    (["data={source: megatron, path: b, tokenizer: bytes}"], "data.path = 'b' matches no file"),
    (["data={source: text, path: 's3://me:hush@b/x'}"], "data.path holds what looks like a credential, which would be"),
    (
        ["data={source: text, path: 'https://h/x?X-Amz-Signature=abcdef0123456789abcdef0123456789'}"],
        "data.path holds what looks like a credential",
    ),
    (["data={source: auto, path: 's3://b/x'}"], "data.path = 's3://b/x' is a URL, which source = hub does not"),
    (["data={source: megatron, path: 's3://b/x', tokenizer: bytes}"], "data.path = 's3://b/x' is a URL, and files of"),
    (["data={tokenizer: bytes, sources: [{path: 'gs://b/x'}]}"], "data.sources[0].path = 'gs://b/x' … source = hub"),
    (["tracking.otlp_endpoint=localhost:4318"], "tracking.otlp_endpoint = 'localhost:4318' is not an address"),
    (["tracking.otlp_endpoint=http://me:hush@host"], "tracking.otlp_endpoint holds a password"),
    (["profile={start: 101, steps: 1}"], "profile.start = 101 is after the last step, run.steps = 100"),
    (["schedule.warmup_steps=101"], "schedule.warmup_steps = 101 is more than run.steps = 100"),
    (["schedule={name: wsd, warmup_steps: 90}"], "schedule.decay_fraction = 0.2 of run.steps = 100 leaves no room"),
    (["task=distill"], "distill.teacher is missing for task = distill; name a model folder or a hub id"),
    (["task=distill", "distill.teacher=./gone"], "distill.teacher = './gone' is not a folder"),
    (["model.config={load_in_4bit: true}"], "model.config.load_in_4bit asks for a quantised base … BF16, FP16 or FP32"),
    (["adapter.base=nf4"], "adapter.base = 'nf4' is only read by adapter.kind = lora and dora; remove it"),
    (["adapter={kind: lora, base: fp4}"], "adapter.base = 'fp4' is not one of compute, nf4, int8"),
    ([*OF_A_MODEL, "adapter={kind: lora, base: int8, double_quant: true}"], "adapter.double_quant = true … base = nf4"),
    ([*OF_A_MODEL, "task=classify", "adapter={kind: lora, base: nf4}"], "adapter.base = nf4 … causal language models"),
    (["sft.neftune_alpha=5"], "sft.neftune_alpha = 5.0 is only read by task = sft; remove it, or set task=sft"),
    (["sft.loss=row"], "sft.loss = 'row' is only read by task = sft; remove it, or set task=sft"),
    (["distill.teacher=gpt2"], "distill.teacher = 'gpt2' is only read by task = distill"),
    (["task=distill", "distill={teacher: gpt2, beta: 0.1}"], "distill.beta = 0.1 is only read by distill.loss = jsd"),
    (["task=distill", "distill={teacher: gpt2, temperature: 0}"], "distill.temperature = 0.0 is out of … above 0"),
    (["task=distill", "distill={teacher: gpt2, loss: kl}"], "distill.loss = 'kl' is not one of forward_kl"),
    (["task=distill", "distill.teacher=gpt2", "data.train_on=all"], "data.train_on = 'all' … distill … data.format"),
    (["task=distill", "distill={teacher: gpt2, top_k: 8}", "model.compile=true"], "distill.top_k = 8 … model.compile"),
    (["task=sft", "model.compile=true"], "model.compile = true … rows, which task = sft learns; remove it"),
    (["task=sft", "data.packing=none", "model.compile=true"], "model.compile = true … rows, which task = sft learns"),
    ([*GRPO, "model.compile=true"], "model.compile = true … rows, which task = grpo learns; remove it"),
    ([*GRPO, "data.packing=best_fit"], "data.packing = best_fit: rows are not packed by task = grpo; remove it"),
    (["task=dpo", "data.packing=best_fit"], "data.packing = best_fit: rows are not packed by task = dpo; remove it"),
    ([*GRPO, "data.target_length=7"], "data.target_length = 7: answers end after grpo.max_new_tokens = … remove it"),
    (["task=classify", "data.sources=[{path: a.jsonl, format: tagged}]"], "data.sources[0].format = tagged … kind"),
    (["adapter={kind: lora, init: pissa}"], "adapter.init = 'pissa' is not offered: it changes the base"),
    (["precision.path=manifest"], "precision.manifest is missing for precision.path = manifest"),
    (["precision={path: manifest, manifest: m.json, compute: bf16}"], "precision.compute = bf16 … path = manifest"),
    (["precision.path=cast", "precision.manifest=m.json"], "precision.manifest is only read by precision.path = manif"),
    (["precision.compute=bf16", "precision.manifest=m.json"], "precision.compute = bf16 … path = manifest … 'm.json'"),
    (["deepspeed={stage: 0, offload: cpu}"], "deepspeed.offload = cpu needs deepspeed.stage 1 or more, not 0"),
    (["precision.loss_scale.initial=1000"], "precision.loss_scale.initial = 1000 is not a power of two"),
    (["precision.loss_scale.minimum=0.5"], "precision.loss_scale.minimum = 0.5 is not a whole number"),
    (["precision.loss_scale={initial: 2, minimum: 4}"], "precision.loss_scale.initial = 2 is below"),
    (["precision.loss_scale={initial: 8, maximum: 4}"], "precision.loss_scale.initial = 8 is above"),
    (["precision.loss_scale={policy: adaptive, maximum: 2048}"], "precision.loss_scale.initial = 4096 is above"),
    (["precision.loss_scale.minimum=131072"], "precision.loss_scale.initial = 65536 is below"),
    (["precision.loss_scale.maximum=100000"], "precision.loss_scale.maximum = 100000 is not a power of two"),
    (["precision.loss_scale.factor=4"], "precision.loss_scale.factor = 4 is not read by policy: deepspeed"),
    (["precision.loss_scale={policy: adaptive, factor: 3}"], "precision.loss_scale.factor = 3 … policy: adaptive … 4"),
    (["precision.loss_scale={policy: adaptive, minimum: 3}"], "precision.loss_scale.minimum = 3 is not a power of two"),
    (["precision.loss_scale.escalate_after=5"], "precision.loss_scale.escalate_after = 5 is only read by policy"),
    (["precision.loss_scale.escalate_within=5"], "precision.loss_scale.escalate_within = 5 is only read by policy"),
    (["precision.loss_scale={policy: adaptive, escalate_after: 9, escalate_within: 8}"], "precision … after = 9"),
    (["evaluate.every_steps=5", "data.validation_fraction=0"], "evaluate.every_steps = 5 needs held-out text"),
    (["faults=[{kind: inf_gradient, step: 101}]"], "faults[0].step = 101 is after the last step"),
    (["faults=[{kind: nan_loss, step: 1, module: a}]"], "faults[0].module = a is not read by kind: nan_loss"),
    (["faults=[{kind: loss_spike, step: 1, module: a}]"], "faults[0].module = a is not read by kind: loss_spike"),
    (["faults=[{kind: lost_update, step: 1, rank: 1}]"], "faults[0].rank = 1 is not read by kind: lost_update"),
    (["faults=[{kind: nan_loss, step: 1, factor: 3}]"], "faults[0].factor = 3.0 is not read by kind: nan_loss"),
    (["guard.reactions=[skip, cut_lr, skip]"], "guard.reactions names skip twice; name it once and set guard.skip_bud"),
    (["guard.warnings=[adam_rms, self_chek]"], "guard.warnings[1] = 'self_chek' is not one of attention_logit, …"),
    (["guard.reactions=[abort, skip]"], "guard.reactions never reaches skip after abort; move abort to the end"),
    (["guard={min_update_ratio: 0.1, max_update_ratio: 0.1}"], "guard.min_update_ratio = 0.1 is not below guard.max"),
    (["parallel.sequence=4", "data.sequence_length=3"], "parallel.sequence = 4 exceeds the tokens of data.seq"),
    (["parallel.sequence=2", "data.sequence_length=33", "model.balance_loss=0.01"], "parallel.sequence = 2 … = 33"),
    (["guard={spike_sigmas: 6, spike_window: 200}"], "guard.spike_window = 200 never takes effect in run.steps"),
    (["precision={masters: split, compute: fp32}"], "precision.masters = split holds an FP32 master … in FP32 there"),
    (["precision={masters: split, compute: fp16}"], "precision.masters = split holds an FP32 master as its 16-bit wei"),
    (["precision={masters: split, path: manifest, manifest: m.json}"], "precision.masters = split … the manifest path"),
    (
        ["precision.masters=split", "optimizer.name=lion"],
        "precision.masters = split … for optimizer.name = lion; set … to adamw",
    ),
    ([SPLIT, "faults=[{kind: flipped_bit, step: 1, module: a, place: master}]"], "faults[0].place = master … split"),
]
"""Overrides, and how what is said of them begins: keys, values and remedy, with … for any words between."""


@pytest.mark.parametrize(("overrides", "expected"), REFUSED)
def test_refused(folder: Path, overrides: list[str], expected: str) -> None:
    where, _, text = refused(load_config, folder / "demo.yaml", overrides, None).partition(": ")
    assert re.match(".*".join(map(re.escape, re.split(" ?… ?", expected))), text), text
    assert where in ("command line", str(folder / "demo.yaml"))


BUDGET = "model={activation_checkpointing: budget, activation_memory_gib: 1}"
SLICED = "adapter.kind=lora precision.masters=split model.compile=true model.kernels=liger BUDGET"
BESIDE = {
    "adapter.base=nf4": "adapter.kind=dora model.compile=true precision.path=manifest deepspeed.offload=cpu",
    "model.compile=true": "model.checkpointing_reentrant=true model.attention=flex_attention BUDGET profile.steps=1 "
    "data.document_masking=true",
    "guard.update_checks=9": "optimizer.name=lion",
    "parallel.sequence=2": "task=mlm sft.neftune_alpha=5 sft.loss=row model.attention=eager model.compile=true BUDGET "
    "guard.reexecute=suspicious",
    "parallel.tensor=2": f"parallel.sequence=2 task=sft model.attention=flash_attention_2 {SLICED} optimizer.name=muon "
    "guard.replica_checks=9 guard.update_checks=9 guard.gradient_checks=9 guard.reexecute=suspicious "
    "guard.min_update_ratio=0.1 guard.max_update_ratio=0.1 telemetry.probe=true",
    "parallel.expert=2": f"parallel.sequence=2 parallel.tensor=2 task=mlm model.checkpointing_reentrant=true {SLICED} "
    "guard.replica_checks=9 guard.reexecute=suspicious telemetry.probe=true",
}
"""A setting, and others that are refused beside it."""


@pytest.mark.parametrize("setting", BESIDE)
def test_what_is_not_verified_together_is_refused(folder: Path, setting: str) -> None:
    for other in BESIDE[setting].split():
        task = ["task=sft"] if other.startswith("sft.") else []
        task += [*OF_A_MODEL, "adapter.kind=lora"] if "adapter." in setting + other else []
        given = [*task, setting, BUDGET if other == "BUDGET" else other]
        one, two = (item.partition("=")[0] for item in (setting, other.replace("BUDGET", "model.activation_check")))
        said = refused(load_config, folder / "demo.yaml", given, None)
        assert re.search(rf"{one} = \S+ .*{two}.* = \S+; set {two}\w* to .*, or remove {one}$", said), said


ALLOWED = [
    ["tracking.otlp_endpoint=https://host/v1", "profile={start: 100, steps: 1}"],
    ["schedule.warmup_steps=100"],
    ["schedule={name: wsd, warmup_steps: 80}"],
    ["data.source=text", "data.path=a.txt"],
    ["data.source=text", "data.path='*.txt'"],
    ["data.source=text", "data.path=a.txt", 'data.document_separator="\\n\\n"'],
    ["data={source: jsonl, path: a.txt, tokenizer: bytes, input_ids_field: ids}"],
    ["data={source: megatron, path: corpus, tokenizer: bytes}"],
    ["data={source: auto, path: corpus.idx, tokenizer: bytes}"],
    ["data={source: text, path: 's3://bucket/*.txt'}"],
    ["data={source: auto, path: 'https://host/a.jsonl.gz?download=true'}"],
    ["data.source=hub", "data.path=owner/name", "data.name=en"],
    ["data={source: hub, path: a/b, validation: [{path: a/b, split: test}, {path: a/b, configuration: de}]}"],
    ["precision.loss_scale={policy: static, initial: 1000, minimum: 0.5}"],
    ["precision.loss_scale.initial=1"],
    ["precision.loss_scale={minimum: 3, maximum: 65536, factor: 2}"],
    ["precision.loss_scale={policy: adaptive, factor: 16, escalate_after: 8, escalate_within: 8, hysteresis: 2}"],
    ["model.architecture=null", "model.name_or_path=owner/name"],
    ["run.resume=never"],
    ["faults=[{kind: inf_gradient, step: 100}]"],
    ["faults=[{kind: gradient_spike, step: 100, module: a, factor: 3}, {kind: nan_activation, step: 1, module: a}]"],
    ["guard.reactions=[]"],
    ["guard.reactions=[skip, cut_lr, promote, rollback, abort]"],
    ["guard={spike_sigmas: 6, spike_window: 198}"],
    ["guard={min_update_ratio: 0.1, max_update_ratio: 0.2}"],
    ["data.validation_fraction=0"],
    ["evaluate.batches=null"],
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_allowed(folder: Path, overrides: list[str]) -> None:
    assert load_config(folder / "demo.yaml", overrides, None) != load_config(folder / "demo.yaml", [], None)


def test_a_run_that_has_a_key_without_effect_still_loads(folder: Path) -> None:
    (folder / "old.yaml").write_text("model: {architecture: llama, loss: chunked}\ntask: classify\n")
    assert "model.loss = chunked" in refused(load_config, folder / "old.yaml", [], None)
    assert load_config(folder / "old.yaml", [], None, started=True).model.loss == "chunked"


def test_evaluations_are_of_all_rows_where_these_are_classified_unless_set(folder: Path) -> None:
    for overrides, batches in (
        ([], 8),
        (["evaluate.batches=null"], None),
        (["task=classify"], None),
        (["task=classify", "evaluate.batches=8"], 8),
    ):
        assert settle_task(load_config(folder / "demo.yaml", overrides, None)).evaluate.most_batches == batches


def test_a_form_of_rows_is_that_of_sources_and_validation_sets_without_their_own(folder: Path) -> None:
    for file in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (folder / file).touch()
    sources = "data.sources=[{path: a.jsonl}, {path: b.jsonl, format: alpaca}]"
    data = ["data.tokenizer=bytes", sources, "data.validation=[{path: c.jsonl}]"]
    for task, form in ((["task=sft"], "text"), (["task=distill", "distill.teacher=gpt2"], "messages")):
        config = settle_task(load_config(folder / "demo.yaml", [*task, *data, f"data.format={form}"], None))
        assert config.learns_rows
        assert [item.format for item in (*config.data.sources, *config.data.validation)] == [form, "alpaca", form]


def test_a_glob_from_the_root_is_found(folder: Path) -> None:
    glob = f"{folder}/**/*.txt"
    assert load_config(folder / "demo.yaml", ["data.source=text", f"data.path={glob}"], None).data.path == glob


def test_a_setting_of_another_optimizer_is_refused(folder: Path) -> None:
    """A setting that the chosen optimizer ignores must not look as if it took effect."""
    for overrides in (
        ["optimizer.eps=1e-6"],
        ["optimizer.name=sgd", "optimizer.momentum=0.5"],
        ["optimizer.name=muon"],
    ):
        load_config(folder / "demo.yaml", overrides, None)
    for override, name, readers in (
        ("optimizer.eps=1e-6", "lion", "adamw, muon, lamb and stable_adamw"),
        ("optimizer.momentum=0.5", "adamw", "sgd and muon"),
        ("optimizer.orthogonalization=bf16", "sgd", "muon"),
    ):
        key = override.partition("=")[0]
        said = refused(load_config, folder / "demo.yaml", [f"optimizer.name={name}", override], None)
        assert key in said and f"is only read by optimizer.name = {readers}; remove it" in said


SIZES = st.integers(1, 200)


def planned(global_size: int, micro_size: int, world_size: int, **shared: int) -> BatchPlan:
    batch = BatchSection(global_size=global_size, micro_size=micro_size)
    return plan_batch(batch, ParallelSection(**shared), world_size, where="demo.yaml")


@given(SIZES, SIZES, SIZES)
def test_a_plan_multiplies_out_or_proposes_sizes_that_do(global_size: int, micro_size: int, world_size: int) -> None:
    try:
        plan = planned(global_size, micro_size, world_size)
    except UserError as error:
        assert global_size % (micro_size * world_size)
        check_proposals(str(error), global_size, micro_size, world_size)
    else:
        assert plan.micro_size * plan.accumulation * plan.world_size == plan.global_size == global_size
        assert plan.accumulation >= 1


def check_proposals(message: str, global_size: int, micro_size: int, world_size: int) -> None:
    """Every size that the message names works when it is put in."""
    for size in numbers(message, r"batch.micro_size to one of ([\d, ]+)"):
        planned(global_size, size, world_size)
    for size in numbers(message, r"run on one of ([\d, ]+)"):
        planned(global_size, micro_size, size)
    proposed = numbers(message, r"batch.global_size to ([\d or]+)")
    assert proposed
    for size in proposed:
        planned(size, micro_size, world_size)


def numbers(message: str, pattern: str) -> list[int]:
    found = re.search(pattern, message)
    return [int(item) for item in re.findall(r"\d+", found[1])] if found else []


def test_the_message_is_one_line_with_file_keys_and_values() -> None:
    assert refused(planned, 12, 4, 2) == (
        "demo.yaml: batch.global_size = 12 cannot be cut into micro-batches of batch.micro_size = 4 on 2 processes; "
        "set batch.micro_size to one of 1, 2, 3, 6, or run on one of 1, 3 processes, "
        "or set batch.global_size to 8 or 16"
    )


@given(SIZES, SIZES, SIZES, st.integers(1, 8))
def test_ranks_that_share_sequences_count_as_one(global_size: int, micro_size: int, groups: int, ranks: int) -> None:
    try:
        plan = planned(global_size, micro_size, groups * ranks, sequence=ranks)
    except UserError as error:
        assert global_size % (micro_size * groups)
        for size in numbers(str(error), r"run on one of ([\d, ]+)"):
            planned(global_size, micro_size, size, sequence=ranks)
    else:
        alone = planned(global_size, micro_size, groups)
        assert (plan.accumulation, plan.data_ranks) == (alone.accumulation, groups)


@pytest.mark.parametrize(("key", "data_ranks"), [("expert", 8), ("tensor", 4), ("sequence", 4)])
def test_ranks_that_share_experts_alone_have_sequences_of_their_own(key: str, data_ranks: int) -> None:
    plan = planned(8, 1, 8, **{key: 2})
    assert (plan.data_ranks, plan.accumulation) == (data_ranks, 8 // data_ranks)
    fix = "set it to one of 1, 2, 4, 8, or run on a multiple of it"
    said = refused(planned, 8, 1, 8, **{key: 3})
    assert said == f"demo.yaml: parallel.{key} = 3 does not divide 8 processes; {fix}"


def test_the_message_says_how_many_ranks_share() -> None:
    said = refused(planned, 4, 3, 8, tensor=2)
    assert "on 8 processes, 2 to a tensor (parallel.tensor); set batch.micro_size to one of 1" in said
