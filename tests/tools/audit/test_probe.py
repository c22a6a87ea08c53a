"""Other people's loops with the probe in them: sound ones are left alone, each planted mistake is found."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from config.cli import CONFIG_ERROR, DIVERGED, DONE
from lab.audit import SHAPE, main
from tests.support.marks import slow
from tools.audit import mantissa_probe
from tools.audit.command import main as command
from tools.audit.judge import audit_folder

PLANTS = "tests.tools.audit.probe_cases"
FP32_SUMS = ["--set", 'communication_data_type="fp32"', 'data_types.grad_accum_dtype="fp32"']
# plant, or nothing: loop, stage, dtype, more arguments, kind of the finding, words in it
PLANTED: list[tuple[str, str, int, str, list[str], str, str]] = [
    ("dropped_micro_batch", "bare", 2, "bf16", [], "gradients", "micro-batch 2 is lost"),
    ("doubled_micro_batch", "accelerate", 2, "fp32", [], "gradients", "micro-batch 2 is doubled"),
    ("doubled_gradient", "hf", 1, "fp16", [], "gradients", "reduced gradient is doubled"),
    ("skipped_rank", "bare", 3, "bf16", [], "gradients", "rank 1's gradients are lost"),
    ("dropped_parameter", "hf", 2, "bf16", [], "gradients", "is lost, in some parameters"),
    ("forgotten_parameter", "bare", 3, "bf16", [], "updates", "was not given stand still: lm_head.weight"),
    ("old_gradients", "bare", 0, "fp32", [], "gradients", "not what plain torch makes"),
    ("rounded_start", "bare", 2, "fp32", ["--fp32-weights"], "masters", "start as BF16 numbers"),
    ("", "accelerate", 2, "bf16", ["--fp32-weights"], "masters", "start as BF16 numbers"),
    ("rounded_masters", "bare", 2, "fp32", [], "masters", "BF16 numbers after an update"),
    ("clipped_before_unscaling", "bare", 2, "fp16", [], "clipping", "norm of the scaled gradient"),
    ("partial_norm", "bare", 2, "fp32", [], "clipping", "norm of a part"),
    ("norm_of_a_group", "hf", 1, "bf16", [], "clipping", "norm of a part"),
    ("other_weights", "bare", 0, "fp32", [], "ranks", "rank 1 has other weights"),
    ("stale_weights", "bare", 2, "bf16", [], "ranks", "other weights than its rounded masters"),
    ("changed_masters", "bare", 2, "bf16", [], "updates", "change between two steps"),
    ("rate_one_step_ahead", "accelerate", 1, "fp32", [], "learning rate", "ahead of the updates"),
    ("other_rate", "bare", 2, "bf16", [], "learning rate", "another learning rate"),
    ("lost_update", "bare", 1, "bf16", [], "updates", "is lost"),
    ("coarse_moments", "bare", 2, "fp32", [], "updates", "second moment"),
    ("shifted_labels", "bare", 2, "fp32", [], "loss", "the token after the next"),
    ("stale_batch", "accelerate", 2, "fp32", [], "loss", "trained on again"),
    ("same_batch_on_ranks", "bare", 2, "bf16", [], "loss", "ranks train on the same batch"),
    ("loss_in_16_bits", "bare", 2, "bf16", [], "dtypes", "the loss is BF16"),
    ("reported_sum", "hf", 2, "fp32", [], "loss", "reported is not the mean"),
    ("", "bare", 2, "fp32", ["--unequal"], "loss", "mean of the micro-batches' means"),
    ("", "accelerate", 1, "bf16", ["--unequal"], "loss", "mean of the micro-batches' means"),
    ("", "bare", 2, "bf16", [], "reduction", "summed in BF16"),
    ("", "hf", 0, "fp16", [], "gradients", "divided by a loss scale"),
    ("", "bare", 0, "bf16", [], "updates", "has counted other updates"),
]
SOUND = [
    *((loop, stage, "fp32", []) for loop in ("bare", "accelerate", "hf") for stage in range(4)),
    *((loop, 2, "fp32", ["--unequal"]) for loop in ("hf",)),
    *((loop, stage, dtype, FP32_SUMS) for loop in ("bare", "hf") for stage in (1, 2, 3) for dtype in ("bf16", "fp16")),
    *(("accelerate", stage, "bf16", FP32_SUMS) for stage in (1, 2, 3)),
    ("bare", 2, "bf16", [*FP32_SUMS, "--accumulation", "1"]),
    ("bare", 2, "fp16", [*FP32_SUMS, "fp16.initial_scale_power=32"]),  # whose first steps are skipped
    ("bare", 3, "fp32", ["--accumulation", "4"]),
]


def audited(out: Path, loop: str, stage: int, dtype: str, *more: str, plant: str = "") -> dict[str, Any]:
    """The report of a loop's probe."""
    given = ["--trainer", loop, "--stage", str(stage), "--dtype", dtype, "--out", str(out), *more]
    main([*given, *(["--plant", f"{PLANTS}:{plant}"] if plant else [])])
    found: dict[str, Any] = json.loads((out / f"{loop}-{stage}-{dtype}.json").read_text())
    return found


def are_equal(first: Path, second: Path) -> bool:
    """Whether two files hold the same weights, bit for bit."""
    weights, others = torch.load(first), torch.load(second)
    return all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare BF16 loop at ZeRO-2, run without the probe and with it, in the same processes."""
    out = tmp_path_factory.mktemp("probed")
    audited(out, "bare", 2, "bf16", "--weights-to", str(out / "weights"), plant="without_probe_first")
    assert are_equal(out / "weights", out / "bare-2-bf16.unprobed")
    return out


def test_a_probe_changes_no_step_and_its_run_is_audited(probed: Path) -> None:
    report = json.loads((probed / "bare-2-bf16.json").read_text())
    [found] = report["findings"]
    assert (found["kind"], found["severity"], report["verdict"]) == ("reduction", "note", "nothing wrong was found")
    assert "grad_accum_dtype" in found["instead"] and not report["not_checked"]
    first = report["steps"][0]
    assert first["shares"] == pytest.approx([1.0] * 4, abs=0.02) and first["rate_ratio"] == pytest.approx(1.0, abs=1e-4)
    page = (probed / "bare-2-bf16.html").read_text()
    assert "gradients are summed in BF16" in page and "nothing wrong was found" in page


def test_a_probe_in_a_folder_with_steps_or_in_none_says_so_and_ends_no_training(probed: Path) -> None:
    for rank in (0, 1):
        held, file = (probed / f"bare-2-bf16.said.{rank}").read_text().splitlines()
        assert "nothing is recorded: " in held and "bare-2-bf16.held holds a training's steps already" in held
        assert "nothing is recorded: FileExistsError: " in file


def test_a_folder_is_audited_without_its_checkpoint(probed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([str(probed / "bare-2-bf16")]) == DONE
    assert "whether masters start rounded: they start as BF16" in capsys.readouterr().out


def _pad(recorded: dict[str, Any]) -> None:
    recorded["micros"][1]["calls"][0]["inputs"]["attention_mask"][0, -3:] = 0


def _evaluate(recorded: dict[str, Any]) -> None:
    recorded["micros"][0]["calls"][0]["training"] = False


def _llama(folder: Path, **shape: Any) -> str:
    """The folder of an untrained Llama that differs from lab.audit's in its shape."""
    LlamaForCausalLM(LlamaConfig(**SHAPE | shape)).save_pretrained(folder / "llama")
    return str(folder / "llama")


def _mixtral(folder: Path, **config: Any) -> str:
    """The folder of an untrained Mixtral."""
    torch.manual_seed(3)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.05}
    MixtralForCausalLM(MixtralConfig(**SHAPE | experts | config)).save_pretrained(folder / "mixtral")
    return str(folder / "mixtral")


def _same_tokens(recorded: dict[str, Any]) -> None:
    first, second = (micro["calls"][0]["inputs"] for micro in recorded["micros"])
    second.update({key: value.clone() for key, value in first.items()})


def _other_images(recorded: dict[str, Any]) -> None:
    _same_tokens(recorded)
    for number, micro in enumerate(recorded["micros"]):
        micro["calls"][0]["inputs"]["pixel_values"] = torch.full((2, 3), number, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "loss", "found"),
    [
        (_same_tokens, "Trainer.compute_loss", True),
        (_same_tokens, "GRPOTrainer.compute_loss", False),
        (_other_images, "Trainer.compute_loss", False),
    ],
)
def test_a_batch_is_the_same_if_all_of_it_is_and_the_loss_takes_it_once(change, loss, found, probed, tmp_path) -> None:
    folder = _step_two(probed, tmp_path)
    _change(folder / "probe.json", lambda held: held["trainer"].update(loss=loss))
    _change(folder / "step-000002.rank0.pt", change)
    report = audit_folder(folder, None, None).report
    assert ("batch-again" in {each["id"] for each in report["findings"]}) is found
    assert ("batches trained on again" in report["not_checked"]) is loss.startswith("GRPO")


@pytest.mark.parametrize(("counts", "found"), [((0, 0, 0), False), ((0, 0, 1), False), ((1, 3, 5), True)])
def test_a_schedule_that_stands_while_updates_go_on_is_not_judged(counts, found, probed, tmp_path) -> None:
    """As where it is stepped after each epoch."""
    folder = shutil.copytree(probed / "bare-2-bf16", tmp_path / "probe")
    for number, count in zip((1, 2, 4), counts, strict=True):
        _change(folder / f"step-{number:06d}.rank0.pt", lambda held, count=count: held.update(schedule=count))
    report = audit_folder(folder, None, None).report
    assert ("schedule" in {each["id"] for each in report["findings"]}) is found
    assert ("the step of the learning rate" in report["not_checked"]) is not found


@pytest.mark.parametrize(
    ("facts", "moments", "told"),
    [
        ({"preferences": {"f_divergence_type": "js_divergence"}}, False, "DPO with f_divergence_type = js_div"),
        ({"preferences": {"sync_ref_model": True}}, False, "DPO with sync_ref_model = True is not known here"),
        ({"resumed_from": 20}, False, "was resumed, so step 1's policy is not the reference; give --reference"),
        ({"preferences": {"f_divergence_type": "reverse_kl"}}, True, "was resumed, so step 1's policy"),
        ({"resumed_from": 0, "preferences": {"use_weighting": False}}, False, "pairs cannot be told"),
    ],
)
def test_of_a_preference_loss_only_the_plain_sigmoid_is_known(facts, moments, told, probed, tmp_path) -> None:
    folder = shutil.copytree(probed / "bare-2-bf16", tmp_path / "probe")
    trainer = {"class": "DPOTrainer", "loss": "DPOTrainer.compute_loss", "loss_type": ["sigmoid"], "beta": 0.1}
    _change(folder / "probe.json", lambda held: held.update(trainer=trainer | facts))
    if moments:
        moved = lambda held: held.update(exp_avg_sq_before=held["exp_avg_sq_after"])  # noqa: E731
        _change(folder / "step-000001.rank0.pt", moved)
    assert told in audit_folder(folder, None, None).report["not_checked"]["gradients and losses"]


def _step_two(probed: Path, tmp_path: Path) -> Path:
    """A copy of the probe's folder with its second step alone."""
    folder = shutil.copytree(probed / "bare-2-bf16", tmp_path / "probe")
    for number in (1, 4):
        (folder / f"step-{number:06d}.rank0.pt").unlink()
        (folder / f"step-{number:06d}.rank1.pt").unlink()
    return folder


@pytest.mark.parametrize(
    ("change", "dropout", "told"),
    [
        (_pad, False, "the model learns padding: labels count where the attention mask is 0"),
        (_evaluate, True, "the model has dropout and is trained in evaluation mode, which turns it off"),
    ],
)
def test_a_mistake_is_found_in_what_was_recorded(change, dropout, told, probed, tmp_path) -> None:
    folder = _step_two(probed, tmp_path)
    _change(folder / "probe.json", lambda held: held.update(dropout=dropout))
    assert told not in {each["says"] for each in audit_folder(folder, None, None).told}
    _change(folder / "step-000002.rank0.pt", change)
    [found] = [each for each in audit_folder(folder, None, None).told if each["says"] == told]
    assert (found["severity"], found["steps"]) == ("wrong", "2")


@pytest.mark.parametrize(
    ("applied", "code", "said"),
    [
        (True, DIVERGED, "a step whose gradients are not finite is applied"),
        (False, CONFIG_ERROR, "nothing was compared"),
    ],
)
def test_a_step_that_is_not_finite_is_wrong_if_applied_and_never_reads_as_clean(
    applied, code, said, probed, tmp_path, capsys
) -> None:
    def overflow(held: dict[str, Any]) -> None:
        after = {name: value.reshape(-1)[:: held["stride"]].clone() for name, value in held.get("before", {}).items()}
        lost = {name: torch.full_like(value, math.nan) for name, value in after.items()}
        held.update(applied=applied, norm=math.nan, after=lost if applied else after)
        held["optimizer_step"] -= not applied
        for value in held["gradient"].values():
            value.fill_(math.inf)

    folder = _step_two(probed, tmp_path)
    _change(folder / "step-000002.rank0.pt", overflow)
    _change(folder / "step-000002.rank1.pt", lambda held: held.update(applied=applied, norm=math.nan))
    assert command([str(folder)]) == code
    out = capsys.readouterr().out
    assert said in out and "step 2: its gradients are not finite" in out and "nothing wrong" not in out
    assert ("WRONG" in out) is applied and "rank 1" not in out


@pytest.mark.parametrize("given", [False, True])
def test_of_another_class_of_model_all_is_audited_that_needs_no_model(given, probed, tmp_path, capsys) -> None:
    """Its parameters are not those of the checkpoint either, as for an adapter."""
    folder = _step_two(probed, tmp_path)
    base = _llama(tmp_path, num_hidden_layers=1)
    _change(folder / "probe.json", lambda held: held.update(model="LlamaForSequenceClassification"))
    assert command([str(folder), *(["--model", base] if given else [])]) == DONE
    report = audit_folder(folder, base if given else None, None).report
    why = report["not_checked"]["gradients and losses"]
    assert ("is another model than the one trained" if given else "is no causal language model") in why
    assert {"reported_norm", "update_error"} <= report["steps"][0].keys() and not report["findings"]


def test_experts_are_recomputed_in_fp64(tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 1, "fp32", "--steps", "2", "--model", _mixtral(tmp_path))
    assert not report["findings"] and not report["not_checked"]


@pytest.mark.parametrize(("loop", "more"), [("hf", ["--unequal"]), ("bare", [])])
def test_the_loss_of_routers_counts_once(loop: str, more: list[str], tmp_path: Path) -> None:
    """The Trainer adds it to each micro-batch's part of the step's mean, so that it counts four times."""
    model = _mixtral(tmp_path, output_router_logits=True, router_aux_loss_coef=0.1)
    report = audited(tmp_path, loop, 1, "fp32", "--steps", "2", *more, "--model", model)
    found = [(each["id"], each["measured"]) for each in report["findings"]]
    assert found == [("routers-in-each-micro-batch", "4 times router_aux_loss_coef")] * (loop == "hf")
    assert not report["not_checked"]


def test_smoothed_labels_are_recomputed(tmp_path: Path) -> None:
    report = audited(tmp_path, "hf", 1, "fp32", "--steps", "2", plant="smoothed_labels")
    assert not report["findings"] and not report["not_checked"]


def test_labels_that_only_the_loader_shifts_are_recomputed(tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 1, "fp32", "--steps", "2", plant="own_cross_entropy")
    assert not report["findings"] and not report["not_checked"]


@pytest.mark.parametrize(("loop", "plant", "dropout"), [("hf", "noisy_embeddings", 0.0), ("bare", "", 0.1)])
def test_a_forward_pass_that_draws_random_numbers_is_not_judged(loop, plant, dropout, tmp_path) -> None:
    """Attention drops values by a function, not a module."""
    torch.manual_seed(3)
    model = _llama(tmp_path, attention_dropout=dropout)
    report = audited(tmp_path, loop, 1, "fp32", "--steps", "2", "--model", model, plant=plant)
    assert not report["findings"] and "draws random numbers" in report["not_checked"]["gradients and losses"]


def test_a_loss_of_the_trainers_own_is_not_called_wrong(tmp_path: Path) -> None:
    report = audited(tmp_path, "hf", 1, "fp32", "--steps", "2", plant="own_loss")
    assert not report["findings"] and {"reported_norm", "update_error"} <= report["steps"][0].keys()
    assert (
        "own_loss.<locals>.Penalised.compute_loss makes another loss" in report["not_checked"]["gradients and losses"]
    )


def test_losses_that_a_resumed_trainer_logs_are_those_of_the_probes_steps(tmp_path: Path) -> None:
    given = ["--trainer", "hf", "--stage", "1", "--dtype", "fp32", "--out", str(tmp_path)]
    main([*given, "--steps", "1", "--without-probe", "--plant", f"{PLANTS}:resumed_trainer"])
    report = audited(tmp_path, "hf", 1, "fp32", "--steps", "3", plant="resumed_trainer")
    lines = (tmp_path / "hf-1-fp32" / "reported.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [row["step"] for row in report["steps"]] == [1, 2]
    assert not report["findings"]


def test_gradients_that_plain_torch_cannot_make_are_not_right(probed: Path, tmp_path: Path) -> None:
    folder = _step_two(probed, tmp_path)
    _change(folder / "step-000002.rank0.pt", lambda held: held["before"]["lm_head.weight"].fill_(math.inf))
    found = audit_folder(folder, None, None).report["not_checked"]
    assert found["gradients and losses"] == "those of plain torch are not finite"


def test_a_step_that_a_crash_cut_short_is_left_out(probed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(probed / "bare-2-bf16", tmp_path / "probe")
    (folder / "step-000004.rank1.pt").unlink()
    report = audit_folder(folder, None, None).report
    assert [row["step"] for row in report["steps"]] == [1, 2] and "step 4" in report["not_checked"]


def _change(path: Path, change: Any) -> None:
    """Write a file again with what `change` makes of its content."""
    if path.suffix == ".json":
        facts = json.loads(path.read_text())
        change(facts)
        path.write_text(json.dumps(facts))
    else:
        recorded = torch.load(path)
        change(recorded)
        torch.save(recorded, path)


def _tokens(recorded: dict[str, Any]) -> None:
    recorded["micros"][0]["calls"][0]["inputs"]["input_ids"] += 1000


# file of a probe's folder; what becomes of its content: an edit of what it holds, other bytes, or None: it is not there
DAMAGED: list[tuple[str, Any, str]] = [
    ("step-000001.rank1.pt", None, "step 1 has files of rank 0, and probe.json is of 2 ranks"),
    ("step-000002.rank0.pt", lambda held: held.update(training=1), "is not of step 2 of rank 0 of the training"),
    ("step-000002.rank0.pt", lambda held: held.update(rank=1), "is not of step 2 of rank 0 of the training"),
    ("step-000002.rank0.pt", b"PK" + bytes(5000), "step-000002.rank0.pt cannot be read"),
    ("step-000001.rank1.pt", lambda held: held.pop("micros"), "step-000001.rank1.pt cannot be read"),
    ("step-000001.rank0.pt", _tokens, "another tokenizer or model"),
    ("probe.json", lambda held: held.update(world=1), "has files of rank 0, 1, and probe.json is of 1 ranks"),
    ("probe.json", lambda held: held["model_config"].update(vocab_size=128), "is another model than the one trained"),
    ("probe.json", b"{", "not valid JSON: line 1, column 2"),
    ("probe.json", lambda held: held.pop("world"), "probe.json has no world"),
    ("probe.json", None, "has no probe.json"),
    ("reported.jsonl", b'{"step": 1}\n', "has no step and loss"),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGED)
def test_bad_input_is_one_line(name, damage, words, probed, tmp_path, capsys) -> None:
    folder = shutil.copytree(probed / "bare-2-bf16", tmp_path / "probe")
    if damage is None:
        (folder / name).unlink()
    elif isinstance(damage, bytes):
        (folder / name).write_bytes(damage)
    else:
        _change(folder / name, damage)
    assert command([str(folder), "--json", str(tmp_path / "report.json")]) == CONFIG_ERROR
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1) and words in error and not (tmp_path / "report.json").exists()


def test_checksums_copy_no_whole_parameter_to_fp64() -> None:
    largest = [0]

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.dtype == torch.float64:
                largest.append(found.numel())
            return found

    values = torch.full((2**24 + 1,), 0.5)
    with Seen():
        assert mantissa_probe._sum(values) == [2**23 + 0.5, 2**22 + 0.25]
    assert max(largest) == 2**24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "stage", "dtype"), [("bare", 3, "bf16"), ("hf", 1, "fp16"), ("accelerate", 0, "bf16")]
)
def test_other_loops_end_with_the_same_bits(loop: str, stage: int, dtype: str, tmp_path: Path) -> None:
    """Started twice, since Accelerate keeps its state in the process."""
    audited(tmp_path, loop, stage, dtype, "--weights-to", str(tmp_path / "probed"))
    given = ["--trainer", loop, "--stage", str(stage), "--dtype", dtype, "--out", str(tmp_path)]
    main([*given, "--without-probe", "--weights-to", str(tmp_path / "plain")])
    assert are_equal(tmp_path / "probed", tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "loop", "stage", "dtype", "more", "kind", "words"), PLANTED)
def test_a_planted_mistake_is_found(plant, loop, stage, dtype, more, kind, words, tmp_path) -> None:
    report = audited(tmp_path, loop, stage, dtype, *more, plant=plant)
    assert any(each["kind"] == kind and words in each["says"] for each in report["findings"]), report["findings"]


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "severity", "entry"), [(8, "note", "sums"), (32, "wrong", "many-sums")])
def test_sums_in_16_bits_are_judged_alike_by_config_and_probe(accumulation, severity, entry, tmp_path, capsys) -> None:
    report = audited(tmp_path, "bare", 2, "bf16", "--accumulation", str(accumulation), "--steps", "2")
    assert [each["severity"] for each in report["findings"]] == [severity]
    document = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    document |= {"gradient_accumulation_steps": accumulation}
    (tmp_path / "ds.json").write_text(json.dumps(document))
    code = command(["--deepspeed-config", str(tmp_path / "ds.json"), "--json", str(tmp_path / "static.json")])
    assert code == (DIVERGED if report["verdict"].startswith("wrong") else DONE)
    found = {each["id"]: each for each in json.loads((tmp_path / "static.json").read_text())["findings"]}
    assert found[f"{entry}-in-16-bits"]["severity"] == severity


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "stage", "dtype", "more"), SOUND)
def test_a_sound_run_is_not_blamed(loop: str, stage: int, dtype: str, more: list[str], tmp_path: Path) -> None:
    assert not audited(tmp_path, loop, stage, dtype, *more)["findings"]


@pytest.mark.parametrize("plant", ["warm_up", slow("long_warm_up"), slow("longer_warm_up")])
def test_a_warm_up_is_not_blamed(plant: str, tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 2, "bf16", *FP32_SUMS, plant=plant)
    assert not report["findings"] and not report["not_checked"]
    assert [row["masters"] for row in report["steps"]] == [""] * 3


def test_a_probe_with_little_space_keeps_a_part_of_the_values(tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 2, "bf16", *FP32_SUMS, plant="little_space")
    assert not report["findings"] and not report["not_checked"] and len(report["steps"]) == 3
    assert _strides(tmp_path / "bare-2-bf16") == [(1, True)] * 3
    assert _size(tmp_path / "bare-2-bf16") < 2_100_000


def _strides(folder: Path) -> list[tuple[int, bool]]:
    """The stride of the masters before each step, and whether that of all else is larger than 1."""
    steps = [torch.load(path) for path in sorted(folder.glob("step-*.rank0.pt"))]
    return [(step["start_stride"], step["stride"] > 1) for step in steps]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.rank0.*"))


def test_a_probe_records_fewer_steps_rather_than_none(tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 2, "bf16", *FP32_SUMS, plant="room_for_two_steps")
    assert not report["findings"] and _strides(tmp_path / "bare-2-bf16")[:2] == [(1, True)] * 2
    assert "max_bytes=51640" in report["not_checked"]["later steps"] and _size(tmp_path / "bare-2-bf16") < 1_400_000


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_that_have_no_room_are_those_of_the_checkpoint_in_the_first_step(stage: int, tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", stage, "bf16", *FP32_SUMS, plant="room_for_no_masters")
    folder = tmp_path / f"bare-{stage}-bf16"
    assert not report["findings"] and all(step > 1 for step, _ in _strides(folder)) and _size(folder) < 600_000
    assert ["gradient_error" in row for row in report["steps"]] == [True, False, False]
    assert all("update_error" in row for row in report["steps"])
    assert "give --model, where step 1 began" in report["not_checked"]["gradients and losses, steps 2, 4"]
    assert "gradients and losses" in audit_folder(folder, None, None).report["not_checked"]


def test_an_audit_says_why_nothing_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--trainer", "bare", "--stage", "1", "--dtype", "fp32", "--steps", "2", "--out", str(tmp_path)]
    assert main([*given, "--plant", f"{PLANTS}:no_room"]) == CONFIG_ERROR
    said = "the probe said: nothing is recorded from step 1 on: 0 bytes are left; max_bytes=51640"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("plant", ["frozen_matrices", "large_frozen_matrices"])
def test_frozen_parameters_are_kept_once_and_within_max_bytes(plant: str, tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 2, "fp32", "--steps", "3", plant=plant)
    kept = [torch.load(path)["frozen"] for path in sorted((tmp_path / "bare-2-fp32").glob("step-*.rank0.pt"))]
    assert [bool(each) for each in kept] == [True, False, False]
    assert plant == "frozen_matrices" or _size(tmp_path / "bare-2-fp32") < 300_000
    assert not report["findings"] and all("gradient_error" in row for row in report["steps"]), report["not_checked"]


def test_products_of_tf32_are_not_called_wrong_and_lost_gradients_are(tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 1, "fp32", "--steps", "2", plant="tf32")
    assert not report["findings"] and not report["not_checked"]
    assert report["steps"][0]["gradient_error"] > 1e-4
    folder = tmp_path / "bare-1-fp32"
    _change(folder / "probe.json", lambda held: held.update(product_bits=23))  # as if they were of FP32
    assert [each["id"] for each in audit_folder(folder, None, None).told] == ["other-gradient"]
    report = audited(tmp_path, "bare", 2, "fp32", "--steps", "2", plant="tf32_without_a_micro_batch")
    assert [each["says"] for each in report["findings"]] == ["the gradient of micro-batch 2 is lost"]


@pytest.mark.parametrize(
    ("loop", "plant", "graphs"),
    [
        ("bare", "compiled", 1),
        slow("bare", "compiled_later", 1),
        slow("bare", "compiled_model", 1),
        slow("bare", "compiled_layers", 2),
        ("hf", "compiled_by_the_trainer", 1),
    ],
)
def test_a_model_is_compiled_once_in_as_few_graphs_as_without_a_probe(loop, plant, graphs, tmp_path) -> None:
    report = audited(tmp_path, loop, 1, "fp32", plant=plant)
    counted = (tmp_path / f"{loop}-1-fp32.graphs.0").read_text().split()
    assert counted == [str(graphs)] * 4
    assert not report["findings"] and all("gradient_error" in row for row in report["steps"])
    assert report["not_checked"] == {"dtypes that modules return": "the model was compiled"}


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        ("fails_forward", "ended in step 2: OutOfMemoryError: _before_forward"),
        ("fails_backward", "ended in step 2: OutOfMemoryError: _before_backward"),
        ("fails_before_step", "ended in step 2: OutOfMemoryError: _strides"),
        ("fails_to_keep", "ended in step 2: AttributeError"),
        ("fails_after_step", "ended in step 2: AttributeError"),
    ],
)
def test_a_probe_that_fails_on_one_rank_ends_no_training(plant: str, said: str, probed: Path, tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 2, "bf16", "--weights-to", str(tmp_path / "weights"), plant=plant)
    assert are_equal(tmp_path / "weights", probed / "weights")
    assert [row["step"] for row in report["steps"]] == [1] and said in report["not_checked"]["later steps"]


def test_ranks_with_other_steps_do_not_wait_for_each_other(tmp_path: Path, capsys) -> None:
    given = ["--trainer", "bare", "--stage", "1", "--dtype", "fp32", "--out", str(tmp_path)]
    assert main([*given, "--plant", f"{PLANTS}:other_steps", "--weights-to", str(tmp_path / "weights")])
    said = (tmp_path / "bare-1-fp32.log").read_text()
    assert "nothing is recorded: ranks were given other steps" in said and (tmp_path / "weights").exists()


def test_inputs_of_a_loop_that_never_steps_are_not_kept_for_ever(tmp_path: Path, capsys) -> None:
    given = ["--trainer", "bare", "--stage", "1", "--dtype", "fp32", "--steps", "2", "--out", str(tmp_path)]
    assert main([*given, "--plant", f"{PLANTS}:never_stepped"]) == CONFIG_ERROR
    assert "the probe said: recording ended in step 1: MemoryError: its inputs have more" in capsys.readouterr().err


def test_passes_that_are_repeated_are_recorded_once(tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 1, "fp32", plant="retried_passes")
    assert not report["findings"] and not report["not_checked"]


def test_a_copy_of_the_model_has_nothing_of_the_probe(tmp_path: Path) -> None:
    report = audited(tmp_path, "bare", 1, "fp32", plant="copied_model")
    assert not report["findings"] and len(report["steps"]) == 3


@pytest.mark.parametrize(("loop", "plant"), [("hf", "busy_trainer"), ("bare", "two_engines")])
def test_other_passes_and_engines_are_not_mixed_up_with_the_recorded(loop: str, plant: str, tmp_path: Path) -> None:
    audited(tmp_path, loop, 1, "fp32", "--weights-to", str(tmp_path / "probed"), plant=plant)
    for folder in (tmp_path / f"{loop}-1-fp32", *tmp_path.glob("*.other")):
        report = audit_folder(folder, None, None).report
        assert not report["findings"] and all("gradient_error" in row for row in report["steps"])
        assert report["not_checked"].keys() <= {"the step of the learning rate"}
    given = ["--trainer", loop, "--stage", "1", "--dtype", "fp32", "--out", str(tmp_path), "--without-probe"]
    main([*given, "--plant", f"{PLANTS}:{plant}", "--weights-to", str(tmp_path / "plain")])
    assert are_equal(tmp_path / "probed", tmp_path / "plain")


def test_a_batch_is_held_in_chosen_steps_alone(tmp_path: Path) -> None:
    audited(tmp_path, "hf", 1, "fp32", plant="held_batches")
    assert (tmp_path / "hf-1-fp32.held.0").read_text() == "++++--++"


def test_a_trainer_without_deepspeed_trains_on(tmp_path: Path, capsys) -> None:
    given = ["--trainer", "hf", "--dtype", "fp32", "--stage", "0", "--out", str(tmp_path)]
    assert main([*given, "--weights-to", str(tmp_path / "weights"), "--plant", f"{PLANTS}:without_deepspeed"])
    assert (tmp_path / "weights").exists() and "has no probe.json" in capsys.readouterr().err
    assert "the probe is for DeepSpeed, and this is a Distributed" in (tmp_path / "hf-0-fp32.log").read_text()
