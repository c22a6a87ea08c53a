"""Export: tensors and adapters are the live engine's masters, the folder computes the same; uploads to a hub."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, MobileBertConfig

from config.cli import REPOSITORY
from config.errors import UserError
from config.schema import Config, DataSection, ModelSection
from config.version import VERSION
from precision.dtypes import DTYPES
from tests.support.jobs import launches
from tests.support.jobs.process_group import ProcessGroup
from tests.support.rows.chats import with_own_code, write_base, write_folder
from tests.support.runs.exports import exported, exported_adapter, source_of
from tests.support.servers.hub_server import TOKEN, USER, Hub, Repo, running
from tests.training.checkpoint import resume_cases as cases
from tests.training.checkpoint.checkpoint_cases import flip
from tests.training.checkpoint.reshard_cases import FROZEN, ODD, UNTIED, trained_and_saved
from tests.training.tasks.conftest import folder
from tools.export_hf import tensors as export_write
from tools.export_hf.command import main
from tools.export_hf.export import _seal, _write_settings, build_skeleton, export, find_source
from tools.export_hf.facts import run_facts
from tools.export_hf.gap import row_gap
from tools.export_hf.rows import rows_of_run
from tools.export_hf.tensors import Tensors, TensorsDiffer, compare_with_second_copy, rounded, write_shards
from tools.generate import load
from tracking.run_dir import RunDir
from training.checkpoint.partitions import SavedTensor, open_saved_model

MANIFEST = ["precision.path=manifest", "precision.manifest=config/manifests/llama_mixed.json"]
NEOX = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def save(group, folder, stage, compute, **layout):
    """A checkpoint in DeepSpeed's files after two steps; masters and computing weights of its engine, whole."""
    layout |= {"stage": stage, "compute": compute}
    return group.run(trained_and_saved, folder=str(folder), layout=layout, first=2)[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("stage", "compute", "options"),
    [
        (0, "fp32", {}),
        (1, "bf16", {}),
        (1, "bf16", {"frozen": FROZEN}),
        (1, "fp16", {"overrides": ODD}),
        (2, "fp32", {"frozen": FROZEN}),
        (2, "bf16", {"overrides": (*ODD, *UNTIED)}),
        (2, "bf16", {"variant": "_offload"}),
        (3, "fp32", {"overrides": ODD}),
        (3, "bf16", {"frozen": FROZEN}),
        (3, "fp16", {"overrides": UNTIED}),
        (3, "bf16", {"variant": "_offload"}),
        (2, "fp32", {"overrides": MANIFEST}),
        (2, "bf16", {"overrides": (*ODD, "optimizer.name=muon")}),
        (3, "fp32", {"overrides": ["optimizer.name=muon"]}),
        (1, "fp16", {"overrides": ["optimizer.name=lamb"]}),
        (0, "fp32", {"overrides": ["optimizer.name=muon"]}),
    ],
)
def test_every_tensor_read_is_the_engines_master(pair, tmp_path, stage, compute, options):
    """Tied or not, frozen, of two optimizer groups, in partitions that cut across parameters; bit for bit."""
    live = save(pair, tmp_path, stage, compute, **options)
    saved = open_saved_model(tmp_path / "deepspeed")
    assert saved.ranks == (2 if stage else 1)
    assert saved.frozen == set(options.get("frozen", ()))
    assert set(live["weights"]) <= set(saved.tensors) <= {*live["weights"], "lm_head.weight"}
    rounds = False
    for name, master in (live["weights"] | live["masters"]).items():
        found = saved.tensors[name].read()
        assert found.dtype == master.dtype
        assert torch.equal(found, master), name
        rounds |= not torch.equal(found.float(), live["weights"][name].float())
    assert rounds is (compute != "fp32")  # the masters were read, not the weights
    assert live["groups"] == 2 or stage == 0
    compared = compare_with_second_copy(saved)
    assert compared == (len(saved.tensors) - len(saved.frozen) * (stage < 3) if stage else 0)


def test_checkpoints_of_one_rank_and_of_two_read_alike(solo, pair, tmp_path):
    """Exports of the same training differ by rounding; a partition that was moved would be wrong by whole weights."""
    for ranks, group in enumerate((solo, pair), start=1):
        save(group, tmp_path / str(ranks), 3, "fp32")
    one, two = (open_saved_model(tmp_path / name / "deepspeed") for name in "12")
    assert (one.ranks, two.ranks) == (1, 2)
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(two.tensors[name].read(), tensor.read(), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A launched BF16 job at ZeRO-1 on two processes, with its run folder, corpus and checkpoints."""
    folder = tmp_path_factory.mktemp("job")
    overrides = ["deepspeed.config=ds_configs/zero1_bf16.json", "precision.compute=bf16", "checkpoint.every_steps=3"]
    overrides.append("model.config.tie_word_embeddings=true")
    launches.finish(launches.command("python", folder, "small", *overrides), ranks=2)
    return folder


def checkpoint_of(job: Path, step: int = 6) -> Path:
    """A checkpoint of the job."""
    return job / "runs/small/checkpoints" / f"step-{step}"


def test_the_exported_folder_loads_and_computes_what_the_masters_do(job, tmp_path, capsys):
    masters = {n: t.read().clone() for n, t in open_saved_model(checkpoint_of(job) / "deepspeed").tensors.items()}
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    for name, dtype in DTYPES.items():
        out = tmp_path / f"{name} and a space"
        assert main([str(checkpoint_of(job)), str(out), "--dtype", name, "--shard-size", "30KB"]) == 0
        assert len(list(out.glob("model-*.safetensors"))) > 1
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
        assert loaded.dtype == dtype and loaded.config.use_cache
        reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=dtype).eval()
        missing = reference.load_state_dict({n: value.to(dtype) for n, value in masters.items()}, strict=False)
        assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
        assert torch.equal(loaded(input_ids=tokens).logits, reference(input_ids=tokens).logits)
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert tokenizer.decode(tokenizer("def f(): pass").input_ids) == "def f(): pass"
        assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id == loaded.config.eos_token_id
    said = capsys.readouterr().out
    assert "20 of 20 tensors were compared with a second copy" in said
    [*_, command] = (line for line in said.splitlines() if line.startswith("record it in wandb: "))
    assert shlex.split(command)[-2] == str(out)


def test_generation_ends_where_a_text_of_the_base_or_of_the_run_ends(tmp_path):
    base = write_base(tmp_path / "base", eos_token_id=7)
    tokenizer, given = AutoTokenizer.from_pretrained(base), {"name_or_path": str(base)}
    end, turn = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    for task, section, form, ends in (
        ("pretrain", ModelSection(**given), "auto", [7, end]),
        ("sft", ModelSection(**given), "auto", [7, end, turn]),
        ("sft", ModelSection(), "auto", [end, turn]),
        ("distill", ModelSection(**given), "auto", [7, end]),
        ("distill", ModelSection(**given), "messages", [7, end, turn]),
    ):
        config = Config(task=task, model=section, data=DataSection(format=form))
        _write_settings(tmp_path / "out", config, AutoConfig.from_pretrained(base), tokenizer)
        assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == ends
        assert AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == (ends if section.name_or_path else end)


def test_the_generation_settings_of_a_base_are_kept_also_where_transformers_would_refuse_them(tmp_path):
    base = write_base(tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 7, "temperature": 0.9, "top_p": 0.6}')
    config = Config(task="sft", model=ModelSection(name_or_path=str(base)))
    _write_settings(tmp_path / "out", config, AutoConfig.from_pretrained(base), AutoTokenizer.from_pretrained(base))
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.temperature, found.top_p) == (0.9, 0.6) and 7 in found.eos_token_id and len(found.eos_token_id) == 3


def test_vocabulary_and_processor_of_the_origin_are_exported_with_the_tokenizer(tmp_path):
    base, other = (write_base(tmp_path / name) for name in ("base", "other"))
    for name in ("tokenizer.model", "preprocessor_config.json", "processor_config.json"):
        (base / name).write_text(name)
    tokenizer = AutoTokenizer.from_pretrained(other)
    for spec, expected in ((base, {"tokenizer.model"}), (other, set()), ("bytes", set())):
        config = Config(model=ModelSection(name_or_path=str(base)), data=DataSection(tokenizer=str(spec)))
        out = tmp_path / f"out-{Path(spec).name}"
        _write_settings(out, config, AutoConfig.from_pretrained(base), tokenizer)
        found = {path.name for path in out.iterdir() if path.name.endswith(".model") or "processor" in path.name}
        assert found == expected | {"preprocessor_config.json", "processor_config.json"}
        assert all((out / name).read_text() == name for name in found)


def test_a_model_with_code_of_its_own_is_exported_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tokenizer = AutoTokenizer.from_pretrained(write_base(tmp_path / "base"))
    base = with_own_code(tmp_path / "base")
    section = ModelSection(name_or_path=str(base), trust_remote_code=True)
    config = Config(model=section, data=DataSection(sequence_length=64))
    skeleton, shape = build_skeleton(config, tokenizer, dtype=torch.bfloat16)
    (tmp_path / "out").mkdir()
    _write_settings(tmp_path / "out", config, shape, tokenizer, skeleton)
    shutil.rmtree(base)
    alone = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(AutoModelForCausalLM.from_config(alone, trust_remote_code=True)).__name__ == "OwnModel"


def test_a_config_without_an_end_token_is_written(tmp_path):
    base = write_base(tmp_path / "base")
    tokenizer, section = AutoTokenizer.from_pretrained(base), ModelSection(name_or_path=str(base))
    _write_settings(tmp_path / "out", Config(task="mlm", model=section), MobileBertConfig(), tokenizer)
    _write_settings(tmp_path / "out", Config(task="pretrain", model=section), MobileBertConfig(), tokenizer)
    assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "mobilebert"


def test_further_chat_templates_are_hashed_in_their_folder(tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(write_base(tmp_path / "base"))
    tokenizer.chat_template = dict.fromkeys(("default", "tool_use"), tokenizer.chat_template)
    tokenizer.save_pretrained(tmp_path / "out")
    monkeypatch.setattr("tools.export_hf.export.model_card", lambda facts: "a card")
    _seal(tmp_path / "out", {"export": {}})
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True, text=True)
    assert done.returncode == 0 and "additional_chat_templates/tool_use.jinja: OK" in done.stdout


def test_the_facts_of_a_run_have_the_metrics_of_its_last_evaluation(job, tmp_path):
    """A session that resumed from the checkpoint on other processes has no part in them."""
    run = tmp_path / "small"
    shutil.copytree(job / "runs/small", run)
    lines = (run / "events.jsonl").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith('{"event":"step","step":3,'))
    found = {"loss": 1.5, "perplexity": None, "metrics": {"accuracy": 0.5}, "by_source": {"maths": 1.25}}
    lines.insert(at + 1, json.dumps(json.loads(lines[at]) | {"event": "eval"} | found))
    lines.insert(at + 2, json.dumps(json.loads(lines[0]) | {"step": 3, "world_size": 9}))
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    config = source_of(checkpoint_of(job)).config
    facts = run_facts(RunDir(run), run / "checkpoints/step-3", config, {})["training"]
    expected = {"validation loss": 1.5, "validation accuracy": 0.5, "validation loss, maths": 1.25}
    assert facts | expected | {"validated after step": 3, "processes": json.loads(lines[0])["world_size"]} == facts


def test_what_a_run_started_from_may_be_gone(tmp_path):
    """Its own retention deletes the checkpoint that run.resume names, and the raw data may be elsewhere."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "environment.json").write_text("{}")
    gone = "run: {resume: /gone}\ndata: {tokenizer: /gone, source: text, path: /gone}\nmodel: {architecture: llama}\n"
    (tmp_path / "config.yaml").write_text(gone)
    source = find_source(tmp_path / "checkpoints/step-3", run=None, tokenizer=tmp_path, parity=None)
    assert source.config.run.resume == "/gone" and source.tokenizer == tmp_path


def test_the_model_card_records_the_run_and_its_hashes_hold(job, tmp_path):
    source = find_source(checkpoint_of(job, 3), run=None, tokenizer=None, parity=parity_report(tmp_path, job))
    facts = export(source, tmp_path / "out", dtype="bf16", shard_size="5GB", force=False, log=lambda line: None)
    card, run = (tmp_path / "out/README.md").read_text(), job / "runs/small"
    environment = json.loads((run / "environment.json").read_text())
    step = launches.events(job, "small", "step")[2]
    assert facts["training"] | {"step": 3, "tokens": 3 * 8 * 32, "last loss": step["loss"]} == facts["training"]
    assert facts["training"]["validation loss"] is None  # evaluated after step 6 only
    for text in (
        environment["data"]["fingerprint"],
        environment["git"]["commit"],
        f"| mantissa | {VERSION} |",
        f"| exported with | mantissa {VERSION}, torch ",
        f"| last loss | {step['loss']:.6g} |",
        "| task | pretrain |",
        "| ZeRO stage | 1 |",
        "| compute | bf16 |",
        "**no parity**",
        "Not the same conditions as this run: data was other there",
        hashlib.sha256((tmp_path / "out/model.safetensors").read_bytes()).hexdigest(),
    ):
        assert text in card, text
    assert str(job) not in card + (tmp_path / "out/mantissa.json").read_text()
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True, text=True)
    assert checked.returncode == 0
    assert {line.partition(":")[0] for line in checked.stdout.splitlines()} == {
        path.name for path in (tmp_path / "out").iterdir() if path.name != "SHA256SUMS"
    }


def parity_report(folder: Path, job: Path) -> Path:
    """A parity.json of a run on other data, with a check that failed."""
    check = {"name": "validation_delta", "measured": 0.02, "bound": 0.005, "passed": False, "at_least": False}
    check |= {"where": "", "modules": [], "note": ""}
    conditions = {"hypothesis": "It does.", "compute": "bf16", "steps": 24, "data": "other"}
    conditions |= {"sequence_length": 32, "global_batch": 8}
    found = {"verdict": "no parity", "failed": ["validation_delta"], "checks": [check]}
    found |= {"conditions": conditions, "walks": [{"point": 0}, {"point": 12}]}
    (folder / "parity.json").write_text(json.dumps(found))
    return folder / "parity.json"


def test_a_mistake_is_one_line_and_leaves_nothing(job, tmp_path, refusal):
    damaged = tmp_path / "runs/small/checkpoints/step-6"
    shutil.copytree(job / "runs/small", tmp_path / "runs/small")
    shard = next((damaged / "deepspeed").glob("*optim_states.pt"))
    flip(shard)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine.txt").write_text("keep")
    (tmp_path / "1.txt").write_text("")
    whole = str(checkpoint_of(job))
    for arguments, message in (
        ([str(damaged), f"{tmp_path}/out"], rf"error: {damaged}: deepspeed/{shard.name} has SHA-256 .*; give a comp"),
        ([whole, f"{tmp_path}/taken"], "taken: exists already; choose another OUT, or replace it with --force"),
        ([whole, f"{tmp_path}/taken", "--force"], "taken: is not an exported model"),
        ([whole, f"{whole}/out"], "must not contain each other"),
        ([whole, "/proc/out"], "error: /proc/out: cannot be written"),
        ([f"{tmp_path}/step-1", f"{tmp_path}/out"], "config.yaml is not there; give the run folder with --run"),
        ([whole, f"{tmp_path}/out", "--shard-size", "much"], "--shard-size much: not a size"),
        ([whole, f"{tmp_path}/out", "--tokenizer", str(tmp_path)], "holds no tokenizer.json"),
        ([whole, f"{tmp_path}/out", "--parity", f"{whole}/state.json"], "state.json: not a parity.json"),
        ([whole, f"{tmp_path}/out", "--push-to-hub", "a--b"], "--push-to-hub a--b: not a repository's name"),
        ([whole, f"{tmp_path}/out", "--largest-kl", "1"], "--largest-kl: needs --compare-logits"),
        ([whole, f"{tmp_path}/out", "--compare-logits", "a.txt"], "--compare-logits a.txt: is not there; give a run"),
        ([whole, f"{tmp_path}/out", "--compare-logits", f"{tmp_path}/1.txt"], "1.txt: holds no document with text"),
        ([whole, f"{tmp_path}/out", "--private"], "--private: needs --push-to-hub"),
    ):
        assert re.search(message, refusal(main, [*arguments, "--dtype", "bf16"]))
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine.txt"]


def push(job: Path, out: Path, hub: Hub, name: str) -> subprocess.CompletedProcess[str]:
    """The command with --push-to-hub."""
    command = [sys.executable, "-m", "tools.export_hf", str(checkpoint_of(job)), str(out), "--dtype", "bf16"]
    command += ["--push-to-hub", name, "--private"]
    return subprocess.run(command, cwd=REPOSITORY, env=hub.environment(), capture_output=True, text=True, check=False)


def test_a_push_uploads_what_was_written_and_verified(job, tmp_path):
    with running() as hub:
        kept = {".gitattributes": b"*", "notes.md": b"mine"}
        old = (
            "model-00001-of-00002.safetensors",
            "pytorch_model.bin",
            "adapter_model.safetensors",
            "adapter_config.json",
        )
        hub.repos[f"{USER}/tiny"] = Repo(private=True, files={**dict.fromkeys(old, b"old"), **kept})
        done = push(job, tmp_path / "out", hub, "tiny")
        assert done.returncode == 0, done.stderr
        repo = hub.repos[f"{USER}/tiny"]
        assert repo.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} | kept
        assert repo.messages == [f"Export step 6 of small in bf16 (Mantissa {VERSION})"]
        assert f"uploaded to {hub.url}/{USER}/tiny/commit/" in done.stdout
        assert TOKEN not in done.stdout + done.stderr


def test_force_replaces_an_export_and_only_when_the_new_one_is_whole(job, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = [str(checkpoint_of(job)), str(out), "--dtype"]
    assert main([*arguments, "fp32"]) == 0
    real = export_write.save_file

    def flips_a_bit(tensors, path, **options):
        real({name: -value if value.dim() == 1 else value for name, value in tensors.items()}, path, **options)

    monkeypatch.setattr(export_write, "save_file", flips_a_bit)
    assert main([*arguments, "bf16", "--force"]) == 3
    assert "is not what was written; nothing was exported" in capsys.readouterr().err
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    monkeypatch.undo()
    assert main([*arguments, "bf16", "--force"]) == 0
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("stage", "compute"), [(1, "bf16"), (2, "fp16"), (3, "bf16")])
def test_a_partition_that_lies_elsewhere_is_found_out(pair, tmp_path, stage, compute):
    """Two ranks' files exchanged: every name, size and hash of the tensors is as before, the weights are not."""
    save(pair, tmp_path, stage, compute)
    saved = open_saved_model(tmp_path / "deepspeed")
    name = "model.layers.1.mlp.down_proj.weight"
    tensor, values = saved.tensors[name], saved.tensors[name].read().flatten().roll(1)
    saved.tensors[name] = SavedTensor(tensor.shape, lambda: values.view(tensor.shape), tensor.second_copy)
    with pytest.raises(TensorsDiffer, match=f"{name}: the partitions of the masters and .* differ"):
        compare_with_second_copy(saved)
    if stage < 3:
        first, second = sorted((tmp_path / "deepspeed").glob("*optim_states.pt"))
        for old, new in ((first, first.with_suffix(".x")), (second, first), (first.with_suffix(".x"), second)):
            old.rename(new)
        with pytest.raises((TensorsDiffer, UserError)):
            compare_with_second_copy(open_saved_model(tmp_path / "deepspeed"))


def test_a_missing_shard_foreign_code_and_another_model_are_refused(pair, tmp_path):
    save(pair, tmp_path, 2, "bf16")
    folder = tmp_path / "deepspeed"
    saved = open_saved_model(folder)
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=64)
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match="checkpoint is from another model: it has no transformer.wte.weight"):
        Tensors(saved, other, torch.float32)
    second = sorted(folder.glob("*optim_states.pt"))[1]
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(UserError, match="has 1 of 2 .*optim_states.pt files"):
        open_saved_model(folder)
    torch.save({"optimizer_state_dict": Path("/tmp")}, second)
    with pytest.raises(UserError, match=f"{second.name}: refers to code that is not allowed .*pathlib"):
        open_saved_model(folder)
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{second.name}: cannot be read"):
        open_saved_model(folder)


def test_what_a_dtype_cannot_hold_is_refused():
    master = torch.tensor([1.0, 65504.0, 65519.0])
    assert torch.isfinite(rounded("w", master, torch.float16)).all()
    with pytest.raises(UserError, match=r"--dtype: w reaches 65520, beyond the 65504 of float16; use bf16 or fp32"):
        rounded("w", torch.tensor([65520.0]), torch.float16)
    with pytest.raises(TensorsDiffer, match="w holds values that are not finite"):
        rounded("w", torch.tensor([float("nan")]), torch.float32)


def test_files_have_the_names_that_other_tools_read(pair, tmp_path):
    """transformers keeps gpt_neox's head as lm_head; the hub's files call it embed_out. `from_pretrained` reads it."""
    overrides = ["model.architecture=gpt_neox", f"model.config={json.dumps(NEOX)}"]
    live = save(pair, tmp_path, 2, "bf16", overrides=overrides)
    saved = open_saved_model(tmp_path / "deepspeed")
    config = AutoConfig.for_model("gpt_neox", **NEOX, vocab_size=64, max_position_embeddings=16)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    write_shards(Tensors(saved, skeleton, torch.float32), tmp_path, "5GB")
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    for name, master in live["masters"].items():
        assert torch.equal(loaded[name], master), name


def test_log_probabilities_are_compared_before_the_folder_appears(job, tmp_path, capsys):
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 40)
    command = [str(checkpoint_of(job)), str(out), "--dtype", "bf16", "--compare-logits"]
    assert main([*command, str(text), "--largest-kl", "1e-12"]) == 3
    said = capsys.readouterr()
    assert "is above the bound 1e-12" in said.err and "nothing was exported" in said.err
    assert said.err.count("\n") == 1 and "KL by position: 0 " in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    assert main([*command, "--compare-rows", "3", "--largest-kl", "0.1", "--largest-difference", "1"]) == 0
    gap, card = json.loads((out / "mantissa.json").read_text())["train-inference gap"], (out / "README.md").read_text()
    masters = {n: t.read() for n, t in open_saved_model(checkpoint_of(job) / "deepspeed").tensors.items()}
    exact = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out), dtype=torch.float32).eval()
    exact.load_state_dict(masters, strict=False)
    source = source_of(checkpoint_of(job))
    rows = rows_of_run(source.tokenizer.parent, source.config, 3)
    assert {row.inputs["input_ids"].shape for row in rows} == {(1, source.config.data.sequence_length)}, (
        "the model has no more positions"
    )
    found = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    kl = torch.cat([row_gap(exact, found, row).kl for row in rows])
    assert gap["kl"] == pytest.approx(float(kl.mean()), rel=1e-6) and gap["tokens"] == len(kl) and gap["rows"] == 3
    assert gap["bounds"] == {"kl": 0.1, "difference": 1.0, "ratio": 1.5} and gap["data"] == "of the run"
    for line in (f"| largest kl | {gap['largest kl']:.6g} |", f"| `{gap['modules'][0]['module']}` |"):
        assert line in card


__all__ = ["folder"]
KINDS = {
    "lora": "adapter={kind: lora, r: 4, modules_to_save: [lm_head]}",
    "dora": "adapter={kind: dora, r: 4, rslora: true, target_modules: [q_proj, down_proj]}",
}


@pytest.fixture(scope="module", params=KINDS)
def run(pair: ProcessGroup, folder: Path, request: pytest.FixtureRequest) -> Path:
    """The last checkpoint of a BF16 run at ZeRO-3."""
    overrides = cases.task_job(folder, KINDS[request.param], "precision.compute=bf16", "deepspeed.stage=3")
    return cases.checkpoint_of(pair, folder, request.param, overrides)


@pytest.mark.one_in(2)
def test_plain_peft_loads_the_folder_and_the_merge_computes_the_same(run: Path, tmp_path: Path) -> None:
    base, inputs = run.parents[3] / "base", {"input_ids": torch.arange(40)[None] * 7 % 300}
    facts, *_ = exported_adapter(run, tmp_path, lambda auto: auto.from_pretrained(base, dtype=torch.bfloat16), inputs)
    assert facts["adapter"]["merged"] is None
    assert "AutoPeftModelForCausalLM" in (tmp_path / "adapter" / "README.md").read_text()
    merged = json.loads((tmp_path / "merged" / "mantissa.json").read_text())["adapter"]["merged"]
    assert max(merged["lost by rounding"].values()) == 0 <= merged["kl"] < 1e-9


@pytest.mark.one_in(2)
def test_what_rounding_loses_is_measured(run: Path, tmp_path: Path) -> None:
    facts, said = exported(run, tmp_path / "merged", "bf16", merged=True)
    exact, _ = exported(run, tmp_path / "exact", "fp32", merged=True)
    base = AutoModelForCausalLM.from_pretrained(run.parents[3] / "base", dtype=torch.bfloat16).float()
    merged, whole = (AutoModelForCausalLM.from_pretrained(tmp_path / name).float() for name in ("merged", "exact"))
    found = facts["adapter"]["merged"]
    for layer, share in found["lost by rounding"].items():
        weights = [model.get_submodule(layer).weight.detach().double() for model in (base, whole, merged)]
        assert share == pytest.approx(
            float((weights[2] - weights[1]).norm() / (weights[1] - weights[0]).norm()), rel=1e-4
        )
        assert 0 < share < 1
    assert 0 < found["kl"] < found["largest kl"]
    assert "rounding to bf16 lost" in said[1]
    assert "KL" in said[2]
    assert json.loads((tmp_path / "merged" / "mantissa.json").read_text())["adapter"]["merged"]["kl"] == found["kl"]


def test_a_merge_from_fp32_is_that_of_plain_peft_rounded_once(run: Path, tmp_path: Path) -> None:
    """The usual merge is that of `peft` on the base rounded to BF16, which the run computed in."""
    exported(run, tmp_path / "adapter", "fp32")
    for merge_from, dtype in (("fp32", torch.float32), ("compute", torch.bfloat16)):
        facts, _ = exported(run, tmp_path / merge_from, "bf16", merged=True, merge_from=merge_from)
        assert facts["adapter"]["merged"]["from"] == merge_from
        base = AutoModelForCausalLM.from_pretrained(run.parents[3] / "base", dtype=dtype).float()
        model: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
        expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
        found = AutoModelForCausalLM.from_pretrained(tmp_path / merge_from, dtype=torch.bfloat16).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


_LATENT = {"first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 8, "v_head_dim": 8}
_LATENT |= {"num_key_value_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "moe_intermediate_size": 16}
_LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(("family", "config"), [("mixtral", {}), ("deepseek_v3", _LATENT)])
def test_adapters_of_fused_experts_and_routers_are_merged(pair, tmp_path, family, config) -> None:
    """A buffer that is no parameter, as of DeepSeek's routers, is exported with the merged weights."""
    base = write_folder(tmp_path, family, **config) / "base"
    values = load_file(base / "model.safetensors")
    correction = {name: torch.tensor([0.3, -0.1, 0.7, 0.1]) for name in values if "correction_bias" in name}
    save_file(values | correction, base / "model.safetensors", metadata={"format": "pt"})
    overrides = cases.task_job(tmp_path, "adapter={kind: lora, r: 4}", "precision.compute=bf16", "deepspeed.stage=3")
    checkpoint, inputs = cases.checkpoint_of(pair, tmp_path, "lora", overrides), {"input_ids": torch.arange(40)[None]}
    exported_adapter(checkpoint, tmp_path, lambda auto: auto.from_pretrained(base, dtype=torch.bfloat16), inputs)
    merged = json.loads((tmp_path / "merged" / "mantissa.json").read_text())["adapter"]["merged"]
    own = {
        name.partition("mlp.")[2] for name in merged["lost by rounding"] if re.search(r"\.mlp\.(experts\.|gate$)", name)
    }
    assert own == {"experts.gate_up_proj", "experts.down_proj", "gate"}
    written = load_file(tmp_path / "merged" / "model.safetensors")
    assert len(correction) == (family == "deepseek_v3")
    assert all(torch.equal(written[name], value) for name, value in correction.items())


@pytest.mark.parametrize("layers", ["lm_head", "embed_tokens", "lm_head, embed_tokens"])
def test_an_adapter_on_tied_weights_is_merged_into_weights_of_its_own(pair, tmp_path, layers) -> None:
    base = write_folder(tmp_path, tie_word_embeddings=True) / "base"
    overrides = cases.task_job(
        tmp_path, f"adapter={{kind: lora, r: 4, target_modules: [{layers}]}}", "precision.compute=bf16"
    )
    checkpoint, inputs = cases.checkpoint_of(pair, tmp_path, "lora", overrides), {"input_ids": torch.arange(40)[None]}
    *_, merged, _ = exported_adapter(
        checkpoint, tmp_path, lambda auto: auto.from_pretrained(base, dtype=torch.bfloat16), inputs
    )
    assert not merged.config.tie_word_embeddings
    facts = json.loads((tmp_path / "merged" / "mantissa.json").read_text())["adapter"]["merged"]
    assert facts["rows"] and facts["kl"] < 1e-9


def test_a_merge_that_changes_another_weight_has_a_large_distance(pair, tmp_path, monkeypatch) -> None:
    """The figures compare with base and adapter, not with the merged weights."""
    write_folder(tmp_path)
    overrides = cases.task_job(tmp_path, "adapter={kind: lora, r: 4}")
    checkpoint = cases.checkpoint_of(pair, tmp_path, "lora", overrides)
    monkeypatch.setattr(LoraLinear, "merge", lambda self, **options: None)
    facts, _ = exported(checkpoint, tmp_path / "merged", merged=True)
    assert facts["adapter"]["merged"]["kl"] > 1e-6


def test_an_adapter_of_a_run_with_another_model_config_says_how_its_base_is_loaded(pair, tmp_path) -> None:
    """`tools.generate` and the model card's lines compute what the merged model does."""
    base, rope = write_folder(tmp_path) / "base", {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    overrides = cases.task_job(tmp_path, "adapter={kind: lora, r: 4}", "precision.compute=fp32", "deepspeed.stage=2")
    overrides.append(f"model.config={{attention_dropout: 0.1, rope_parameters: {json.dumps(rope)}}}")
    checkpoint = cases.checkpoint_of(pair, tmp_path, "lora", overrides)
    facts, said = exported(checkpoint, tmp_path / "adapter")
    exported(checkpoint, tmp_path / "merged", merged=True)
    assert facts["adapter"]["model.config"] == {"rope_parameters": rope}
    assert f"model.config, which no file of peft holds: load it as {tmp_path / 'adapter/README.md'} does" in said[-3]
    by_card: dict[str, Any] = {"BASE": base, "FOLDER": tmp_path / "adapter"}
    exec((tmp_path / "adapter/README.md").read_text().partition("```python\n")[2].partition("```")[0], by_card)
    models = [load(tmp_path / name, dtype="fp32")[0] for name in ("merged", "adapter")]
    with torch.no_grad():
        wanted, *found = (model.eval()(torch.arange(40)[None]).logits for model in (*models, by_card["model"]))
    for logits in found:
        torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=0)


def test_a_run_without_adapter_has_none_to_merge(finished: Path, tmp_path: Path) -> None:
    checkpoint = finished / "runs/it/checkpoints/step-6"
    with pytest.raises(UserError, match="--merge-adapters: .* has adapter.kind = none"):
        exported(checkpoint, tmp_path / "out", "fp32", merged=True)


# Its settings are read when huggingface_hub is imported, so each case is a process of its own.
PROGRAM = """
import sys
from pathlib import Path
from config.errors import UserError
from tools.export_hf import hub
try:
    repo = hub.find_repo(sys.argv[1], private=sys.argv[2] == "private")
    print(hub.upload(repo, Path(sys.argv[3]), message="a message"))
except UserError as error:
    sys.exit(f"error: {error}")
assert "torch" not in sys.modules
"""


def upload(hub: Hub, folder: Path, name: str, visibility: str, **environment: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags: [mantissa]\n---\n")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    arguments = [name, visibility, str(folder)]
    variables = hub.environment(HF_HOME=str(folder.with_name("home")), **environment)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("visibility", "private"), [("private", True), ("public", False)])
def test_a_new_repository_is_created_and_gets_every_file(tmp_path: Path, visibility: str, private: bool) -> None:
    with running() as hub:
        done = upload(hub, tmp_path / "out", "team/new", visibility)
        assert done.returncode == 0, done.stderr
        assert hub.repos["team/new"].private is private and hub.repos["team/new"].messages == ["a message"]
        assert hub.repos["team/new"].files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        assert list(hub.large.values()) == [(tmp_path / "out/model.safetensors").read_bytes()]


@pytest.mark.parametrize(
    ("name", "environment", "message"),
    [
        ("a/b/c", {}, "--push-to-hub a/b/c: not a repository's name (Repo id must be in the form"),
        ("a", {"HF_HUB_OFFLINE": "1"}, "--push-to-hub a: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it"),
        ("a", {"TRANSFORMERS_OFFLINE": "1"}, "--push-to-hub a: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset"),
        ("a", {"HF_TOKEN": ""}, "--push-to-hub a: there is no token; set HF_TOKEN, or log in with `hf auth login`"),
        ("a", {"HF_TOKEN": "hf_wrong"}, "Invalid user token. The token from HF_TOKEN environment variable is invalid"),
        ("a", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9: [Errno 111] Connection refused; check the"),
        ("team/open", {}, "--push-to-hub team/open: is public already; make it private on the hub"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_sent(tmp_path, name, environment, message) -> None:
    with running() as hub:
        hub.repos["team/open"] = Repo(private=False)
        done = upload(hub, tmp_path / "out", name, "private", **environment)
        assert list(hub.repos) == ["team/open"] and not hub.repos["team/open"].files
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and TOKEN not in done.stderr


def test_the_token_is_not_in_what_the_hub_answers(tmp_path: Path) -> None:
    with running() as hub:
        hub.refuses = "/repos/create"
        done = upload(hub, tmp_path / "out", "team/new", "private")
    assert done.returncode == 1 and "Forbidden: your token *** may not write here" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and TOKEN not in done.stderr
    assert f"the export is whole in {tmp_path}/out; upload it with `hf upload team/new {tmp_path}/out`" in done.stderr
