"""Fine-tuning equals plain torch on the same rows, one at a time: loss, norm, weights, NEFTune, lost updates; of each
family of causal models, too, with plain peft."""

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from precision.dtypes import DTYPES
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.support.refusals import refused
from tests.support.rows.chats import VOCABULARY, write_folder
from tests.support.rows.jsonl import write_jsonl
from tests.training.tasks import sft_cases as cases
from tools.export_hf.export import build_skeleton
from training.tasks.shape import shape_of_model
from training.tasks.task import prepare


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("ranks", ["solo", "pair"])
def test_one_and_two_ranks_equal_plain_torch(request, folder, ranks, packing) -> None:
    group, exact = request.getfixturevalue(ranks), None
    for stage in (0, 1, 2, 3):
        found, *others = group.run(cases.steps, folder=folder, stage=stage, overrides=(f"data.packing={packing}",))
        exact = exact or cases.oracle(folder, found)
        require_equal(found, exact)
        assert all(other["steps"] == found["steps"] for other in others)


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"tie_word_embeddings": True, "sliding_window": 8, "head_dim": 16},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True, "head_dim": 16},
    "gpt2": {"tie_word_embeddings": True},
    "mixtral": {},
}
"""Features of their public models: tied embeddings, windows shorter than a row."""


@pytest.fixture(scope="module", params=FAMILIES)
def of_a_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of one family, chats and pairs."""
    return write_folder(tmp_path_factory.mktemp(request.param), request.param, **FAMILIES[request.param])


@pytest.mark.one_in(20)
@pytest.mark.parametrize("adapter", [(), (cases.LORA,)], ids=["whole", "lora"])
@pytest.mark.parametrize(("packing", "stages"), [("best_fit", (3, 2)), ("none", (1, 0))])
def test_each_family_equals_plain_torch(pair, of_a_family, packing, stages, adapter) -> None:
    exact, given = None, (f"data.packing={packing}", *adapter)
    for stage in stages:
        found, _ = pair.run(cases.steps, folder=of_a_family, stage=stage, overrides=given)
        exact = exact or cases.oracle(of_a_family, found, adapter=cases.GIVEN if adapter else None)
        require_equal(found, exact)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_the_mean_of_each_row_counts_the_same_however_it_is_cut(solo, pair, folder, packing) -> None:
    """`sft.loss: row`: chunked or not, micro-batches of 1 to 8 sequences, every ZeRO stage, one and two ranks."""
    chunked = ("model.loss=chunked", "model.loss_chunk_tokens=7")
    given, exact = (f"data.packing={packing}", "sft.loss=row"), None
    for group, stage, cut in (
        (solo, 0, ("batch.micro_size=8",)),
        (solo, 3, ("batch.micro_size=1", *chunked)),
        (pair, 1, ("batch.micro_size=1",)),
        (pair, 2, ("batch.micro_size=4", *chunked)),
        (pair, 3, ("batch.micro_size=2",)),
    ):
        found = group.run(cases.steps, folder=folder, stage=stage, overrides=(*given, *cut))[0]
        exact = exact or cases.oracle(folder, found, by_row=True)
        require_equal(found, exact)
        for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
            assert mine["metrics"] == pytest.approx({"token_loss": theirs["token_loss"]}, rel=1e-5)
            assert abs(theirs["token_loss"] - theirs["loss"]) > 1e-3, "the two means differ on these rows"


ALPHA = 5.0


def split_mix(state: np.ndarray, count: int) -> np.ndarray:
    """(..., count) uint64: the first numbers of SplitMix64 from each state, as its authors' C code writes it."""
    with np.errstate(over="ignore"):
        z = state[..., None] + np.arange(1, count + 1, dtype="u8") * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return z ^ z >> np.uint64(31)


def noise_of(name: str, start: int, tokens: int, width: int) -> torch.Tensor:
    """Noise of a row that begins at a place of the sequence of that name, from FP64."""
    state = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8, person=b"mantissa-noise").digest(), "<u8")
    keys = split_mix(state, start + tokens)[0, start:]
    epsilon = ((split_mix(keys, width) >> np.uint64(41)) + 0.5) * 2.0**-22 - 1
    return torch.tensor(epsilon * ALPHA / (tokens * width) ** 0.5, dtype=torch.float32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_every_layout_trains_on_the_noise_of_the_paper(solo, pair, folder, packing) -> None:
    """L is a row's own length, packed or padded; the same where blocks are recomputed and logits come in chunks."""
    names: list[list[tuple[str, int]]] = []

    def noise(step: int, row: int, shape: Any) -> torch.Tensor:
        return noise_of(*names[step][row], *shape)

    given = (f"data.packing={packing}", f"sft.neftune_alpha={ALPHA}")
    chunked = ("model.loss=chunked", "model.loss_chunk_tokens=7")
    recomputed = ("model.activation_checkpointing=full", "batch.micro_size=1")
    for group, stage, further in ((solo, 0, ("batch.micro_size=8", *chunked)), (pair, 3, recomputed)):
        found = group.run(cases.steps, folder=folder, stage=stage, overrides=(*given, *further))[0]
        if group is solo:
            names += [step["noise_names"] for step in found["steps"]]
            oracle = cases.oracle(folder, found, noise=noise)
        require_equal(found, oracle)
    plain = cases.oracle(folder, found)
    assert abs(plain["steps"][0]["loss"] - oracle["steps"][0]["loss"]) > 1e-3, "the noise is large enough to be seen"


def test_evaluation_has_no_noise(solo: ProcessGroup, folder: Any) -> None:
    given = ("data.validation_fraction=0.2", "evaluate.batches=4")
    [(plain, trained)] = solo.run(cases.evaluated, folder=folder, overrides=given)
    [(found, noisy)] = solo.run(cases.evaluated, folder=folder, overrides=(*given, f"sft.neftune_alpha={ALPHA}"))
    assert found == plain and noisy != trained


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "compute", "overrides"),
    [
        (0, "auto", ("precision.manifest=config/manifests/bf16.json",)),
        (1, "bf16", ()),
        (2, "fp16", ()),
        (3, "bf16", ()),
        (3, "bf16", ("adapter={kind: lora, r: 4}",)),
        (2, "bf16", ("adapter={kind: lora, r: 4}",)),
    ],
)
def test_it_counts_what_rounding_hides(pair, folder, stage, compute, overrides) -> None:
    for rate in (1e-5, 1e-2):
        options = {"stage": stage, "compute": compute, "overrides": overrides, "rate": rate}
        found, other = pair.run(cases.lost_updates, folder=folder, **options)
        assert found["said"] == other["said"]
        dtype = DTYPES[compute if compute != "auto" else "bf16"]
        modules = dict.fromkeys(name.rpartition(".")[0] for name in found["before"])
        assert found["said"].keys() <= modules.keys()
        for module in modules if compute != "auto" else found["said"]:  # a manifest's norms compute in FP32
            lost = updated = 0
            for name, old in found["before"].items():
                if name.rpartition(".")[0] == module:
                    new = found["after"][name]
                    updated += int((new != old).sum())
                    lost += int(((new != old) & (new.to(dtype) == old.to(dtype))).sum())
            assert found["said"].get(module, 0.0) == pytest.approx(lost / max(updated, 1), rel=1e-5)
        if rate == 1e-5 and compute != "fp16":
            assert max(found["said"].values()) > 0.5


def test_there_is_none_where_the_masters_compute(pair: ProcessGroup, folder: Path) -> None:
    found = pair.run(cases.lost_updates, folder=folder, stage=2, compute="fp32", rate=1e-5)[0]
    assert found["said"] == {}


def test_only_rows_with_a_token_that_the_model_lacks_are_refused(solo: ProcessGroup, tmp_path: Path) -> None:
    """As the tokenizer of Gemma 3's text models knows an image's token, which their embedding ends before."""
    tokenizer: Any = AutoTokenizer.from_pretrained(write_folder(tmp_path) / "base")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path / "base")
    [found] = solo.run(cases.steps, folder=tmp_path)
    assert len(found["steps"]) == cases.STEPS
    skeleton, _ = build_skeleton(cases.resolve(tmp_path).config, tokenizer, dtype=torch.float32)
    assert skeleton.config.vocab_size == VOCABULARY == len(tokenizer) - 1
    (tmp_path / "image.jinja").write_text(f"<image>{tokenizer.chat_template}")
    write_jsonl(tmp_path / "ids.jsonl", [{"ids": [*range(100), VOCABULARY]}] * 9)
    documents = (f"data.path={tmp_path}/ids.jsonl", "data.input_ids_field=ids", "data.source=jsonl")
    for overrides in ((f"data.chat_template={tmp_path}/image.jinja",), ("task=pretrain", *documents)):
        config = cases.resolve(tmp_path, overrides=overrides).config
        said = refused(shape_of_model, config, prepare(config, progress=False))
        assert f"/base: has no embedding of the token '<image>' (id {VOCABULARY}) of data.tokenizer = " in said


def test_machines_that_prepare_for_themselves_have_one_name_for_the_same_tokens(
    pair: ProcessGroup, folder: Path, tmp_path: Path
) -> None:
    """A large file is known by its time, which copies do not have: each rank would go on from another checkpoint."""
    shutil.copytree(folder / "base", tmp_path / "base")
    chats = (folder / "chats.jsonl").read_text(encoding="utf-8")
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / f"{rank}/chats.jsonl").write_text(chats, encoding="utf-8")
        os.utime(tmp_path / f"{rank}/chats.jsonl", (rank, rank))
    first, second = pair.run(cases.own_identity, folder=tmp_path)
    assert first == second
    names = [path.name for rank in range(2) for path in tmp_path.glob(f"{rank}/cache/*.lock")]
    assert len(set(names)) == 2 and first["data fingerprint"] in names[0]
    (tmp_path / "1/chats.jsonl").write_text(chats + chats.splitlines()[0], encoding="utf-8")
    for said in pair.run(cases.own_identity, folder=tmp_path):
        assert re.match(r"data.path=\S+: rank 1 on \S+ has other tokens than rank 0 on \S+; give all mach", said)


def test_a_machine_may_prepare_for_longer_than_a_collective_waits(pair: ProcessGroup, folder: Path) -> None:
    first, second = pair.run(cases.after_a_slow_preparation, folder=folder)
    assert first == second != ""
