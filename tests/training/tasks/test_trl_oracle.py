"""Every step equals that of TRL's own trainers, which get the same rows as a user writes them: loss, norm, weights.

TRL makes the tokens, masks, packing and padding itself, and runs in one plain process; Mantissa on one and two ranks at
every ZeRO stage. `make trl` installs it.
"""

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from config.cli import REPOSITORY
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.support.rows.chat_templates import SHAPES
from tests.support.rows.chats import LENGTH, WORDS, write_folder
from tests.training.tasks import dpo_cases
from tests.training.tasks import sft_cases as cases
from tests.training.tasks.sft_cases import GIVEN, LORA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.trl,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed; make trl"),
]
PLAIN = "optimizer.weight_decay=0"  # which norms and biases would have in TRL otherwise than embeddings
ROWS_PACKED = 3
"""Number of rows of equal length that fill a sequence."""
ENDS_WITH_THE_TURN = SHAPES["chatml"].jinja.replace(" + '\n' }}{% endfor %}", " }}{% endfor %}")


def write_equal_chats(path: Path, base: Path, rows: int) -> Path:
    """Conversations of which ROWS_PACKED fill a sequence, whichever they are."""
    draw, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(base)
    lines: list[str] = []
    while len(lines) < rows:
        said = (" ".join(draw.choices(WORDS, k=draw.randint(2, 8))) for _ in range(2))
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
        if len(tokenizer.apply_chat_template(turns)["input_ids"]) == LENGTH // ROWS_PACKED + 1:
            lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, chats of any and of one length, and pairs."""
    made = write_folder(tmp_path_factory.mktemp("trl"))
    write_equal_chats(made / "equal.jsonl", made / "base", 90)
    (made / "ends.jinja").write_text(ENDS_WITH_THE_TURN, encoding="utf-8")
    return made


def rows_of(path: Path, numbers: list[int]) -> list[Any]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(lines[number]) for number in numbers]


def trl(folder: Path, found: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """The same steps by TRL: its log of each, and the weights after them."""
    given = {"base": f"{folder}/base", "steps": cases.STEPS, "rate": cases.RATE, "clipping": cases.CLIPPING}
    given |= {"micro": 2, "accumulation": 4, "length": LENGTH + 1, "packed": False, "adapter": None}
    (folder / "spec.json").write_text(json.dumps(given | spec), encoding="utf-8")
    save_file(found["before"], folder / "first.safetensors")
    command = [sys.executable, "-m", "tests.support.models.trl_oracle", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    assert len(steps) == cases.STEPS
    return {"steps": steps, "after": load_file(folder / "weights.safetensors")}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_chats(pair: ProcessGroup, solo: ProcessGroup, folder: Path, packed: bool, adapter: bool) -> None:
    name = "equal" if packed else "chats"
    given = [PLAIN, f"data.path={folder}/{name}.jsonl", f"data.packing={'best_fit' if packed else 'none'}"]
    exact: dict[str, Any] | None = None
    for group in (pair, solo):
        for stage in (0, 1, 2, 3):
            overrides = (*given, LORA) if adapter else tuple(given)
            found = group.run(cases.steps, folder=folder, stage=stage, overrides=overrides)[0]
            if exact is None:
                numbers = [number for step in found["steps"] for number in step["rows"]]
                assert len(numbers) == cases.STEPS * cases.GLOBAL * (ROWS_PACKED if packed else 1)
                spec = {"rows": rows_of(folder / f"{name}.jsonl", numbers), "packed": packed, "task": "sft"}
                spec |= {"template": SHAPES["chatml, markers"].jinja, "adapter": GIVEN if adapter else None}
                spec |= {"length": LENGTH + ROWS_PACKED} if packed else {}
                exact = trl(folder, found, **spec)
            require_equal(found, exact)


@pytest.mark.parametrize(("loss", "adapter"), [("sigmoid", False), ("sigmoid", True), ("hinge", False)])
def test_pairs(pair: ProcessGroup, solo: ProcessGroup, folder: Path, loss: str, adapter: bool) -> None:
    given = [PLAIN, f"data.chat_template={folder}/ends.jinja", f"preference.loss={loss}", "preference.beta=0.3"]
    exact: dict[str, Any] | None = None
    for group in (pair, solo):
        for stage in (0, 1, 2, 3):
            overrides = (*given, LORA) if adapter else tuple(given)
            found = group.run(dpo_cases.steps, folder=folder, stage=stage, overrides=overrides)[0]
            if exact is None:
                numbers = [number for step in found["steps"] for number in step["pairs"]]
                spec = {"rows": rows_of(folder / "pairs.jsonl", numbers), "task": "dpo", "loss": loss, "beta": 0.3}
                spec |= {"template": ENDS_WITH_THE_TURN, "adapter": GIVEN if adapter else None}
                exact = trl(folder, found, **spec)
            require_equal(found, exact)
            for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
                for own, name in (("chosen", "chosen"), ("rejected", "rejected"), ("margin", "margins")):
                    reward = theirs[f"rewards/{name}"]
                    assert mine["metrics"][f"rewards/{own}"] == pytest.approx(reward, rel=1e-4, abs=1e-5)
