"""Fine-tuning teaches: the model answers questions exactly that it answered wrongly before, and stops."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.jobs.process_group import ProcessGroup
from tests.support.rows.chats import WORDS, write_base
from tests.support.runs.exports import exported
from tests.training.checkpoint import resume_cases

STEPS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, and questions for the partner of a word; a fifth of them are kept for the test."""
    made, draw = tmp_path_factory.mktemp("learning"), random.Random(0)
    write_base(made / "base")
    partners = dict(zip(WORDS, draw.sample(WORDS, len(WORDS)), strict=True))
    lines = []
    for word, partner in partners.items():
        for before in draw.sample(WORDS, 10):
            asked = {"role": "user", "content": f"{before} and then {word}"}
            lines.append({"messages": [asked, {"role": "assistant", "content": partner}]})
    draw.shuffle(lines)
    for name, part in (("held-out", lines[::5]), ("chats", [line for n, line in enumerate(lines) if n % 5])):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part), encoding="utf-8")
    return made


def answered(model: Path, folder: Path) -> float:
    """Share of the questions that were kept which the model answers to the letter, its end of turn included."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    right, rows = 0, [json.loads(line)["messages"] for line in (folder / "held-out.jsonl").read_text().splitlines()]
    for turns in rows:
        ids = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            given = net.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=end, pad_token_id=0)
        right += tokenizer.decode(given[0, ids.shape[1] :]) == turns[1]["content"] + "<|im_end|>"
    return right / len(rows)


@pytest.mark.slow
def test_questions_are_answered_to_the_letter(solo: ProcessGroup, folder: Path, tmp_path: Path) -> None:
    overrides = resume_cases.task_job(folder, "model.config={}")
    overrides += [f"data.validation=[{{path: {folder}/held-out.jsonl}}]", f"evaluate.every_steps={STEPS}"]
    overrides += [f"run.steps={STEPS}", "batch.micro_size=8", "checkpoint.every_steps=0"]
    overrides += ["optimizer.learning_rate=0.01", "optimizer.weight_decay=0", "schedule.name=cosine"]
    before = answered(folder / "base", folder)
    [done] = solo.run(resume_cases.job, folder=str(folder), name="it", overrides=overrides, passes=None)
    assert done["exit_code"] == 0
    exported(folder / f"runs/it/checkpoints/step-{STEPS}", tmp_path / "out")
    after = answered(tmp_path / "out", folder)
    assert before == 0
    assert after > 0.6
