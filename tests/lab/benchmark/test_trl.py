"""TRL's trainers, and the Trainer on rows, as contestants of the benchmark: they train what Mantissa trains.

The jobs need TRL, which `make trl` installs into a folder of its own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import load_from_disk

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.launcher import as_launched
from data.batches.loader import IGNORED_LABEL, Batches
from lab.benchmark import command as benchmark
from lab.benchmark.rows import _sample, write_rows
from tests.support.refusals import refused
from tests.support.rows.chats import write_base
from training.session import batch_shape
from training.tasks.task import prepare


def rows(folder: Path) -> None:
    """A hundred rows and a hundred pairs."""
    generator = np.random.default_rng(0)

    def words(most: int) -> str:
        return " ".join(generator.choice(["red", "blue", "a", "of", "sea"], generator.integers(1, most)))

    for name, keys in (("sft", ("completion",)), ("dpo", ("chosen", "rejected"))):
        lines = [
            json.dumps({"prompt": f"{words(20)}\n"} | {key: f"{words(9)} {number} {key}" for key in keys})
            for number in range(100)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and data."""
    made = tmp_path_factory.mktemp("trl")
    write_base(made / "base")
    rows(made)
    return made


def arguments(folder: Path, task: str, *overrides: str) -> list[str]:
    return [
        *("--config", str(REPOSITORY / f"config/recipes/{'sft_full' if task == 'sft' else 'dpo'}.yaml")),
        *(f"model.name_or_path={folder}/base", f"data.path={folder}/{task}.jsonl", f"data.cache_dir={folder}/cache"),
        *("data.sequence_length=64", "data.validation_fraction=0", "evaluate.every_steps=0"),
        *("batch.global_size=8", "batch.micro_size=2", "schedule.warmup_steps=2"),
        "data.packing=none" if task == "sft" else "preference.sft_weight=0",
        *overrides,
    ]


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_the_peers_get_the_rows_and_labels_of_every_step(task: str, folder: Path, tmp_path: Path) -> None:
    resolved = read_command_line(arguments(folder, task, "run.steps=5"), as_launched(1))
    corpus = prepare(resolved.config, progress=False)
    inputs = write_rows(resolved, corpus, tmp_path / "rows", warm_up=2)
    found: list[dict[str, Any]] = load_from_disk(str(tmp_path / "rows")).to_list()
    assert len(found) == 5 * 8
    batches = Batches(corpus.train, seed=resolved.config.run.seed, **batch_shape(resolved, corpus))
    steps = [batches.next_step() for _ in range(5)]
    batches.close()
    assert inputs == np.mean([step.tokens for step in steps[2:]])
    for number, row in enumerate(found):
        # what the loader made of it, micro-batch by micro-batch, without its padding
        step, (micro, place) = steps[number // 8], divmod(number % 8, 2)
        if task == "sft":
            sides = [(row["input_ids"], row["labels"])]
            mine = [(step.input_ids[micro, place], step.labels[micro, place])]
        else:
            prompt = row["prompt_ids"]
            sides = [
                (prompt + row[key], [IGNORED_LABEL] * len(prompt) + row[key]) for key in ("chosen_ids", "rejected_ids")
            ]
            mine = list(zip(step.input_ids[micro, place], step.further["targets"][micro, place], strict=True))
        for (ids, labels), (own, own_labels) in zip(sides, mine, strict=True):
            assert own[: len(ids) - 1].tolist() == ids[:-1] and not own[len(ids) - 1 :].any()
            assert own_labels[: len(ids) - 1].tolist() == labels[1:] and (own_labels[len(ids) - 1 :] < 0).all()


def test_pairs_that_trl_would_see_otherwise_are_refused() -> None:
    def side(ids: list[int], trained: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.array(ids), np.array(trained, dtype=bool)

    good = side([1, 2, 3], [0, 0, 1])
    assert _sample([good, side([1, 2, 4, 5], [0, 0, 1, 1])])["rejected_ids"] == [4, 5]
    assert "do not end it" in refused(_sample, [good, side([1, 2, 4, 5], [0, 0, 1, 0])])
    assert "prompts of a pair differ" in refused(_sample, [good, side([1, 9, 4], [0, 0, 1])])


@pytest.mark.parametrize(
    ("task", "override", "said"),
    [
        ("sft", "data.packing=best_fit", "data.packing = best_fit would not be the same for all contestants; set none"),
        ("dpo", "preference.loss=ipo", "preference.loss = ipo would not be the same for all contestants; set sigmoid"),
        ("sft", "task=distill", "task = distill would not be the same for all contestants; set pretrain or sft or dpo"),
    ],
)
def test_work_that_only_mantissa_has_is_refused(task, override, said, folder, tmp_path, refusal) -> None:
    given = [*arguments(folder, task), override]
    if "distill" in override:
        given.remove("data.packing=none")
        given.append(f"distill.teacher={folder}/base")
    assert said in refusal(benchmark.main, ["--contestants", "mantissa", "--out", str(tmp_path), *given])
