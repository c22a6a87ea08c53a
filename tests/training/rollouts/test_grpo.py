"""Steps on sampled answers equal plain torch on the recorded ones, and a sampler that is not the trainer is found."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from config.task import ALGORITHMS
from data.corpora import rollouts as files
from modeling.build import config_identity, weights_identity
from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models.plain_steps import require_equal
from tests.support.rows.chats import write_base, write_teacher
from tests.support.rows.prompts import write_prompts
from tests.training.checkpoint import resume_cases
from tests.training.rollouts import grpo_cases as cases
from tests.training.tasks import sft_cases
from training.checkpoint.contents import CONFIGS, REFERENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and 40 prompts."""
    made = tmp_path_factory.mktemp("grpo")
    for name, tied in (("base", False), ("tied", True)):
        write_base(made / name, tie_word_embeddings=tied)
        GenerationConfig(eos_token_id=list(range(60))).save_pretrained(made / name)  # so that answers end
    write_teacher(made / "teacher")
    write_prompts(made / "prompts.jsonl", 40)
    return made


def require_same(found: dict[str, Any], folder: Path, *overrides: str) -> None:
    if "task=opd" in overrides:
        exact = cases.taught_oracle(folder, found["steps"], cases.resolve(folder, overrides=overrides).config)
        require_equal(found, exact)
        assert [step["metrics"]["kl"] for step in found["steps"]] == pytest.approx(
            [step["kl"] for step in exact["steps"]], rel=1e-5
        )
        return
    exact = cases.oracle(folder, found["steps"], cases.resolve(folder, overrides=overrides).config)
    require_equal(found, exact, loss_error=1e-6)  # advantages of a group add up to 0
    for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
        assert mine["metrics"]["reward/mean"] == pytest.approx(theirs["reward"], rel=1e-6)


def test_one_and_two_ranks_equal_plain_torch(pair: ProcessGroup, solo: ProcessGroup, folder: Path) -> None:
    """Every ZeRO stage samples the same answers, of uneven length; a group stays on one rank."""
    answers: Any = None
    for group, stages in ((pair, (0, 1, 2, 3)), (solo, (2,))):
        for stage in stages:
            results = group.run(cases.steps, folder=folder, stage=stage, overrides=(cases.CORRECTED,))
            assert [step["loss"] for step in results[0]["steps"]] == [step["loss"] for step in results[-1]["steps"]]
            found = results[0]
            require_same(found, folder, cases.CORRECTED)
            first = found["steps"][0]["answers"]
            answers = answers if answers is not None else first
            assert first.answers.tolist() == answers.answers.tolist()
            assert len(np.unique(first.lengths)) > 2
            assert max(step["metrics"]["gap/of_bound"] for step in found["steps"]) < 1


def test_an_answer_ends_where_the_template_ends_a_turn(solo: ProcessGroup, tmp_path: Path) -> None:
    """Base models end documents by another token, which theirs is, and go on with turns that they make up."""
    tokenizer: Any = AutoTokenizer.from_pretrained(write_base(tmp_path / "base", "gpt2"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1)
        model.lm_head.weight[tokenizer.convert_tokens_to_ids("<|im_end|>")] = 1  # it says nothing else
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "own.jinja").write_text(tokenizer.chat_template)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").unlink(missing_ok=True)
    write_prompts(tmp_path / "prompts.jsonl", 40)
    [found] = solo.run(cases.steps, folder=tmp_path, overrides=(f"data.chat_template={tmp_path}/own.jinja",))
    for step in found["steps"]:
        assert step["answers"].ended.all() and (step["answers"].lengths == 1).all()


def test_an_evaluation_shows_prompts_with_answers_and_rewards(pair: ProcessGroup, folder: Path) -> None:
    """On every rank the same ones, each time: the first of the held-out prompts, with the same random numbers."""
    first, second = pair.run(cases.examples, folder=folder)
    assert first == second and first[0] == "" and first[1] == first[2]
    shown = re.findall(r"^reward (\S+) \(mean of 2: \S+\): (.+?) -> ", first[1], re.MULTILINE | re.DOTALL)
    assert 1 <= len(shown) <= 4 and all(float(reward) >= 0 for reward, _ in shown), first[1]
    assert len(first[1]) < 4 * 900


def test_answers_without_a_reward_are_not_in_the_mean_of_an_evaluation(pair: ProcessGroup, folder: Path) -> None:
    some = pair.run(cases.evaluated, folder=folder, reward="even")
    assert 0.1 < some[0][0] < 0.9 and some[0] == some[1]
    assert "an evaluation uses 4 of the " in some[0][1], "prompts, not answers"
    assert [mean for mean, _ in pair.run(cases.evaluated, folder=folder, reward="even_alone")] == [1.0, 1.0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("loss", ["reverse_kl, temperature: 1.5", "forward_kl", "jsd, beta: 0.3, sharded: true"])
def test_a_teacher_on_own_answers_equals_plain_torch(pair, solo, folder, loss) -> None:
    given = ("task=opd", "grpo.rewards=[]", f"distill={{teacher: {folder}/teacher, loss: {loss}}}")
    for group, stages in ((pair, (0, 3) if loss == "forward_kl" else (1, 2)), (solo, (2,))):
        for stage in stages:
            found = group.run(cases.steps, folder=folder, stage=stage, overrides=given)[0]
            require_same(found, folder, *given)
            assert max(step["metrics"]["gap/of_bound"] for step in found["steps"]) < 1


def test_a_student_that_is_its_teacher_has_nothing_to_learn(solo: ProcessGroup, folder: Path) -> None:
    given = (*cases.TASK, f"data.path={folder}/prompts.jsonl", "data.validation_fraction=0.2", "task=opd")
    given = (*given, f"distill={{teacher: {folder}/base}}")
    [found] = solo.run(sft_cases.sets, folder=folder, overrides=given)
    metrics = found["of step"]
    assert found["step"] == metrics["kl"] == found["whole"] == 0 and found["norm"] < 1e-6
    assert metrics["teacher_agreement"] == found["held out"].metrics["teacher_agreement"] == 1
    assert metrics["reward/none"] == 0 and metrics["reward/mean"] > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_equals_plain_torch(solo: ProcessGroup, folder: Path, algorithm: str) -> None:
    given = (f"grpo.algorithm={algorithm}", "grpo.updates=2", "grpo.correction=truncate")
    [found] = solo.run(cases.steps, folder=folder, overrides=given)
    require_same(found, folder, *given)
    if algorithm == "gspo":
        assert any(step["metrics"]["clip_share"] > 0 for step in found["steps"])


def test_groups_without_signal_are_sampled_again(solo: ProcessGroup, folder: Path) -> None:
    rewards = "grpo.rewards=[tests.support.rows.prompts:even]"
    once, again = (
        solo.run(cases.steps, folder=folder, overrides=(rewards, f"grpo.resamples={times}"))[0]["steps"][0]
        for times in (0, 9)
    )
    before, after = once["answers"], again["answers"]
    silent = before.rewards[:, 0, 0] == before.rewards[:, 1, 0]
    assert once["metrics"]["reward/no_signal"] == silent.mean() > 0
    assert again["metrics"]["reward/no_signal"] == 0 and (after.rewards[:, 0, 0] != after.rewards[:, 1, 0]).all()
    for n in np.flatnonzero(~silent):
        assert after.answers[n][after.mask[n]].tolist() == before.answers[n][before.mask[n]].tolist()


TIED = ("model.name_or_path={folder}/tied", "data.tokenizer={folder}/base")
PLANTED = {
    "no sync": "computes with other weights than the trainer in 21 of 21 tensors",
    "one tensor not synced": "in 1 of 21 tensors, after they were sent 2 times: model.layers.1.mlp.down_proj.weight;",
    "stale tied head": "in 1 of 21 tensors, after they were sent 2 times: lm_head.weight;",
    "adapter never delivered": "tensors, after they were sent 2 times: model.layers.0.mlp.down_proj.lora_",
}
LORA = ("adapter={kind: lora, r: 4}",)
NONE = ("grpo.correction=none",)
BOTH = ("grpo.rewards=[tests.support.rows.prompts:divided, tests.support.rows.prompts:even]",)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_sampler_with_other_weights_ends_the_run(pair: ProcessGroup, folder: Path, fault: str) -> None:
    """At the first step the copy has the start weights, whatever is sent: a lost sync shows at the second one."""
    overrides = tuple(item.format(folder=folder) for item in TIED) if "tied" in fault else LORA * ("adapter" in fault)
    for found in pair.run(cases.first_metrics, folder=folder, compute="bf16", fault=fault, overrides=overrides):
        assert len(found["steps"]) == 1
        assert PLANTED[fault].partition("21 of")[0] in found["stopped"] or PLANTED[fault] in found["stopped"]


BETA = ("grpo.beta=0.1",)
ENDS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "cut before the end": (0, "the sampler cut an answer wrongly: number ", ()),
    "one seed for a group": (0, "the sampler repeated answer number 1 in its group, whose probability is e^-", ()),
    "log-probabilities that are not finite": (0, "the sampler says a log-probability that is not finite of ", NONE),
    "off by one after the end": (0, "the sampler cut an answer wrongly: number ", ()),
    "another scale of the adapter": (0, "the sampler has other settings than the trainer: model.layers.0.", LORA),
    "answers of the step before": (1, "the answers are to other prompts than this step's; nothing was learned", ()),
    "another rope": (0, "the sampler has other settings than the trainer: model.rotary_emb.inv_freq", ()),
    "a reference that follows the policy": (1, "the reference of grpo.beta has other weights than at the start", BETA),
    "rewards see other texts": (0, "rewards saw row ", ()),
    "rewards of another function": (0, "rewards saw row ", BOTH),
}
"""Faults found before anything is learned from them: after how many steps, in which words, with which overrides."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", ENDS)
def test_what_no_gap_would_show_ends_the_run(solo: ProcessGroup, folder: Path, fault: str) -> None:
    """Sampler and trainer agree on the tokens, or nearly so."""
    steps, said, given = ENDS[fault]
    [found] = solo.run(cases.first_metrics, folder=folder, fault=fault, compute="bf16", overrides=given)
    assert len(found["steps"]) == steps and found["stopped"].startswith(said), found
    if fault.startswith("rewards"):
        assert "with another answer, or as another function for the prompt of row" in found["stopped"]


def test_answers_to_what_was_not_asked_are_sampled_again(solo: ProcessGroup, folder: Path, tmp_path: Path) -> None:
    """A reward function, a temperature or prompts that have changed since, as many as before."""
    rows = (folder / "prompts.jsonl").read_text(encoding="utf-8")
    (tmp_path / "other.jsonl").write_text(rows.replace("the", "no"), encoding="utf-8")
    rewards = [f"grpo.rewards=[tests.support.rows.prompts:{name}]" for name in ("even", "even", "divided", "divided")]
    given = [*rewards, "grpo.temperature=0.9", f"data.path={tmp_path}/other.jsonl", f"data.path={tmp_path}/other.jsonl"]
    [found] = solo.run(cases.samplings, folder=folder, to=tmp_path / "rollouts", given=given)
    assert found == [1, 0, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("which", ["the row before", "other answers"])
def test_a_reward_that_sees_the_wrong_row_ends_the_run(solo: ProcessGroup, folder: Path, which: str) -> None:
    """Neither loss nor gap would show it. Rows are named by their numbers in the prepared data."""
    [found] = solo.run(cases.first_metrics, folder=folder, fault=f"rewards see {which}")
    said = re.match(r"rewards saw row (\d+)(.*) for the prompt of row (\d+); nothing was learned$", found["stopped"])
    assert found["steps"] == [] and said is not None, found
    assert said[2] == (" with another answer, or as another function" if said[1] == said[3] else "")
    assert (said[1] == said[3]) == (which == "other answers")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("wrong", [None, *cases.WRONG])
def test_steps_are_recomputed_from_recorded_answers(pair: ProcessGroup, folder: Path, wrong: str | None) -> None:
    """Neither sampler nor gap can show how a step uses its rewards."""
    outside, single, notes = pair.run(cases.recomputed, folder=folder, wrong=wrong, seconds=300)[0]
    assert bool(outside) == (wrong is not None), outside
    assert bool(single) == (wrong in cases.LOSSES), single
    if single:
        assert "task_loss" in single and notes[0].startswith("grpo.temperature 0.9 where 1 is asked"), notes


def test_answers_are_told_apart_where_a_step_was_skipped_or_reuses_them(solo: ProcessGroup, folder: Path) -> None:
    """New answers come from the same weights after skipped steps; reused ones need weights from before an update."""
    [(applied, wrong, notes)] = solo.run(cases.recomputed_later, folder=folder, seconds=300)
    assert not any(applied[:2]) and any(applied) and wrong == []
    judged = [note for note in notes if "recomputed" in note]
    assert [note.partition(",")[0] for note in judged] == [
        "not recomputed: step 6", "recomputed from its masters: step 7"
    ]  # fmt: skip


def test_a_group_that_would_be_split_over_ranks_is_refused(pair: ProcessGroup, folder: Path) -> None:
    wanted = (
        "batch.global_size = 8: a group of grpo.group_size = 8 answers stays on one rank; make it a multiple of 8 x 2"
    )
    for said in pair.run(cases.refused, folder=folder, overrides=("grpo.group_size=8",)):
        assert said.startswith(wanted)


def test_a_reference_of_another_dtype_is_refused(solo: ProcessGroup, folder: Path) -> None:
    [said] = solo.run(cases.other_reference, folder=folder)
    assert (
        said.startswith("the reference of grpo.beta has another dtype or other weights") and "in 21 tensors: " in said
    )


OTHERS: dict[str, tuple[str, ...]] = {
    "off by one": (),
    "dropout in the old log-probs": (
        "model.config={attention_dropout: 0.3}",
        "precision.loss_scale.initial=256",
        *LORA,
    ),
    "answers of other prompts": (),
    "repetition penalty on one side": (),
    "padding is attended to": (),
    "scored with other weights": (),
}


BY_PROMPT = "padding is attended to"
"""Hurts as much as a step's prompts differ in length: in BF16 it was 0.4 of the bound in one step, 82 in the next."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("fault", ["", "temperature on one side", "top-p on one side", *OTHERS])
def test_the_gap_finds_another_policy(solo: ProcessGroup, folder: Path, fault: str, compute: str) -> None:
    given = {"overrides": OTHERS.get(fault, ())}
    found = solo.run(cases.first_metrics, folder=folder, compute=compute, fault=fault, **given)[0]["steps"]
    beyond = [step["metrics"]["gap/of_bound"] > 1 for step in found]
    assert any(beyond) == bool(fault), found
    assert all(beyond) or fault in ("", BY_PROMPT), found
    for step, seen in zip(found, beyond, strict=True):
        assert step["verdict"] == ("SKIP" if seen else "STEP")
        assert ("the sampler's policy is not the trainer's" in step["reason"]) == seen


@pytest.mark.parametrize(("reaction", "updates"), [("promote", 1), slow("promote", 2), ("correct", 1)])
def test_the_guard_reacts_to_a_gap(pair: ProcessGroup, folder: Path, reaction: str, updates: int) -> None:
    """The head in FP32 on both sides closes a gap that it made; masking tokens lets the run go on with the gap."""
    given = (f"guard.reactions=[{reaction}, abort]", "grpo.beta=0.1", "guard.self_check_every=1")
    given += (f"grpo.updates={updates}",)
    how: dict[str, Any] = {"compute": "fp16", "stage": 3 if reaction == "promote" else 2, "overrides": given}
    [found] = pair.run(cases.reactions, folder=folder, fault="rounded head", **how)[0]
    checked = [
        check for event in found["events"] if event["event"] == "self_check" for check in event["checks"].values()
    ]
    assert len(checked) >= 12 and not any(check["breaches"] for check in checked)
    first, *others = (step["gap/of_bound"] for step in found["metrics"])
    assert first > 1
    [incident] = [event for event in found["events"] if event["event"] == "incident"]
    applied = [event["applied"] for event in found["events"] if event["event"] == "step"]
    assert applied == [False, True, True, True]
    if reaction == "promote":
        assert max(others) < 1 and found["changed"] == {"lm_head": "fp32"}
        assert incident["verdict"] == "PROMOTE" and incident["promoted_to"] == "fp32"
        assert incident["modules"] == ["lm_head"]
    else:
        assert min(others) > 1 and found["changed"] == {"grpo.correction": "mask"}
        assert incident["verdict"] == "CORRECT" and incident["corrected_by"] == "mask"
        assert all(step["left_out"] == 0 and step["gap/corrected"] == 1 for step in found["metrics"][1:])


def test_a_run_is_identified_by_the_reference_that_it_has(solo: ProcessGroup, folder: Path) -> None:
    [found], [without] = (
        solo.run(cases.identity, folder=folder, overrides=(f"grpo.beta={beta}",)) for beta in (0.1, 0)
    )
    assert found[REFERENCE] == weights_identity(f"{folder}/base") and without == found | {
        REFERENCE: None,
        CONFIGS: None,
    }
    assert found[CONFIGS] == config_identity(f"{folder}/base")


def test_a_rollback_skips_the_answers_that_it_rolls_back_for(solo: ProcessGroup, folder: Path, tmp_path: Path) -> None:
    """The third step, of two to a sample, has answers of another temperature, which the fourth would learn from."""
    [found] = solo.run(cases.rolled_back, folder=folder, saved=tmp_path)
    verdicts, positions, sampled = zip(*found, strict=True)
    assert verdicts == ("STEP", "STEP", "ROLLBACK", "STEP", "STEP")
    assert positions == (1, 2, 4, 5, 6) and sampled == (["1"], [], ["3"], ["5"], [])


def test_frozen_weights_are_held_once(solo: ProcessGroup, folder: Path) -> None:
    """ZeRO-3 has none of them whole."""
    [adapter], [whole] = (solo.run(cases.held_twice, folder=folder, overrides=given) for given in (LORA, ()))
    assert len(adapter) == 28 and all(".lora_" in name for name in adapter) and len(whole) == 21
    [sharded] = solo.run(cases.held_twice, folder=folder, stage=3, overrides=LORA)
    assert len(sharded) == 49


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_is_sampled_from_and_has_its_base_as_reference(pair: ProcessGroup, folder: Path, stage: int) -> None:
    given = (*LORA, "grpo.beta=0.5")
    found, other = pair.run(cases.first_metrics, folder=folder, stage=stage, compute="bf16", overrides=given)
    assert found == other | {"steps": found["steps"]} and not found.get("stopped")
    first, second = (step["metrics"] for step in found["steps"])
    assert first["kl"] == 0.0 < second["kl"]
    assert max(first["gap/of_bound"], second["gap/of_bound"]) < 1


JOB = ("grpo.updates=2", "grpo.beta=0.1", "precision.compute=bf16", "deepspeed.stage=2")


def test_a_job_that_breaks_off_ends_as_one_that_does_not(pair: ProcessGroup, folder: Path) -> None:
    given = resume_cases.task_job(folder, *cases.TASK[1:], *JOB, task="grpo", rows="prompts")
    resume_cases.ends_as_whole(pair, folder, "answers", given, breaks=(19, 13), seconds=300)
    kept = files.read(files.path_of(folder / "runs/answers/rollouts", 3))
    assert kept is not None and kept.lengths.shape == (4, cases.GROUP)


@pytest.mark.slow
def test_fewer_ranks_go_on_with_the_same_answers(pair: ProcessGroup, solo: ProcessGroup, folder: Path) -> None:
    """Losses differ by the order of sums, which the second update on the same answers magnifies: 6e-5 were seen."""
    given = (*cases.TASK[1:], *JOB[:2], "deepspeed.stage=2", "model.config={}")
    overrides = resume_cases.task_job(folder, *given, task="grpo", rows="prompts")
    how: dict[str, Any] = {"folder": str(folder), "overrides": overrides, "seconds": 300}
    pair.run(resume_cases.job, name="two", passes=None, **how)
    pair.run(resume_cases.job, name="fewer", passes=30, **how)
    [ended] = solo.run(resume_cases.job, name="fewer", passes=None, **how)
    assert ended["exit_code"] == 0 and resume_cases.sessions_resumed(str(folder), "fewer") == 1
    two, fewer = (resume_cases.last_by_step(str(folder), name) for name in ("two", "fewer"))
    assert [step["loss"] for step in fewer] == pytest.approx([step["loss"] for step in two], abs=3e-4)
    for step in range(1, len(two) + 1, 2):
        kept, other = (files.read(files.path_of(folder / f"runs/{name}/rollouts", step)) for name in ("two", "fewer"))
        assert kept is not None and other is not None
        assert kept.answers.tolist() == other.answers.tolist()
