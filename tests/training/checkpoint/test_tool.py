"""`python -m training.checkpoint`, older manifests, costs by the number of ranks, and files read without unpickling."""

import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from config.cli import REPOSITORY
from config.json_text import sealed, unsealed
from tests.training.checkpoint import checkpoint_cases
from tests.training.checkpoint.checkpoint_cases import flip
from training.checkpoint import commit
from training.checkpoint import tool as checkpoint_tool
from training.checkpoint.inventory import tensors_of
from training.checkpoint.manifest import MANIFEST, Damaged, read_manifest, shares_of
from training.checkpoint.tool import tensors_in


@pytest.fixture(scope="module")
def run(pair, tmp_path_factory):
    """A run with checkpoints of steps 1, 2 and 3 of a ZeRO-3 BF16 run on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    arguments = {"folder": str(folder / "checkpoints"), "stage": 3, "compute": "bf16"}
    pair.run(checkpoint_cases.save_steps, steps=3, **arguments)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    """A copy of it to break."""
    return shutil.copytree(run, tmp_path / "run")


def tool(*arguments):
    """Exit code and lines of one command."""
    lines = []
    return checkpoint_tool.main([str(argument) for argument in arguments], lines.append), lines


def test_whole_checkpoints_verify_and_are_listed(run):
    code, lines = tool("verify", run)
    assert code == 0
    assert [": complete; " in line for line in lines] == [True] * 3
    code, lines = tool("list", run)
    assert [line.split()[0] for line in lines] == ["step-3", "step-2", "step-1"]
    assert lines[0].endswith("2 ranks, ZeRO-3, bf16  LATEST")


def test_the_command_runs_on_its_own(run):
    """A user's command line starts neither DeepSpeed nor a process group."""
    verify = ["training.checkpoint", "verify", str(run / "checkpoints" / "step-2")]
    command = [sys.executable, "-X", "importtime", "-m", *verify]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0 and ": complete; " in done.stdout
    assert "deepspeed" not in done.stderr and "transformers" not in done.stderr


def test_any_flipped_bit_is_found_in_its_file(copy):
    """One random bit in every file of a checkpoint, one file after another."""
    draw, path = random.Random(5), copy / "checkpoints" / "step-2"
    names = [*read_manifest(path)["files"], MANIFEST]
    assert len(names) == 8
    for name in names:
        content = (path / name).read_bytes()
        flip(path / name, draw.randrange(len(content)))
        code, lines = tool("verify", path)
        assert code == 3 and name in lines[0], name
        (path / name).write_bytes(content)
    assert tool("verify", path)[0] == 0


def test_a_missing_and_a_truncated_shard_are_named(copy):
    path = copy / "checkpoints" / "step-2"
    shard = path / "deepspeed" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    size = f"has {len(content) - 7:,} bytes; the manifest says {len(content):,}"
    assert tool("verify", path) == (3, [f"{path}: deepspeed/{shard.name} {size}"])
    shard.unlink()
    assert tool("verify", copy)[1][1] == f"{path}: deepspeed/{shard.name} is missing"
    assert tool("verify", copy)[0] == 3


def test_tensors_are_listed_as_torch_loads_them(run):
    """The reader that executes nothing against torch's own; and against what was in memory when it was written."""
    for path in sorted((run / "checkpoints" / "step-3").rglob("*.pt")):
        found = tensors_in(path)
        assert found == tensors_of(torch.load(path, weights_only=False))
        name = path.relative_to(run / "checkpoints" / "step-3").as_posix()
        manifest = read_manifest(run / "checkpoints" / "step-3")
        recorded = manifest["layouts"][manifest["files"][name]["layout"]]
        assert {tensor: (dtype, shape) for tensor, (dtype, shape) in recorded.items()} == found
        assert found


def test_a_manifest_that_tells_other_tensors_is_found(copy):
    path = copy / "checkpoints" / "step-2"
    manifest = read_manifest(path)
    entry = manifest["files"]["deepspeed/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    tensors = manifest["layouts"][entry["layout"]]
    name = next(name for name in tensors if name.endswith("exp_avg"))
    tensors[name] = ["float16", tensors[name][1]]
    commit.seal_folder(path, manifest, lambda phase: None)
    code, lines = tool("verify", path)
    assert code == 3 and f"{name} holds ('float32', " in lines[0]


def test_reading_the_tensors_of_a_file_runs_nothing_of_it(tmp_path):
    class Bomb:
        def __init__(self, function):
            self.function = function

        def __reduce__(self):
            return self.function, (str(tmp_path / "there"),)

    weight, there = torch.ones(2, 3, dtype=torch.bfloat16), tmp_path / "there"
    torch.save({"weight": weight, "bomb": Bomb(shutil.rmtree), "nested": [(torch.ones(()),)]}, tmp_path / "a.pt")
    torch.save({"weight": weight, "bomb": Bomb(os.rmdir)}, tmp_path / "b.pt")
    there.mkdir()
    assert tensors_in(tmp_path / "a.pt") == {"weight": ("bfloat16", [2, 3]), "nested/0/0": ("float32", [])}
    with pytest.raises(Damaged, match="^b.pt names code, GLOBAL posix.rmdir$"):  # of the system, which torch refuses
        tensors_in(tmp_path / "b.pt")
    assert there.exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert not there.exists()


def test_what_is_no_file_of_torch_is_said(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"no archive")
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        archive.writestr("b/data.pkl", b"\x80\x02garbage")
    for name in ("a.pt", "b.pt"):
        with pytest.raises(Damaged, match=f"{name} is not a file of torch.save"):
            tensors_in(tmp_path / name)


def test_inspect_tells_dtypes_and_ranks(run):
    code, lines = tool("inspect", run, "--tensors")
    text = "\n".join(lines)
    assert code == 0
    assert lines[0].startswith(f"{run}/checkpoints/step-3: step 3, ")
    assert "deepspeed 0." in text and "stage = 3" in text
    sizes = {line.split()[1]: line.split()[2] for line in lines if line.startswith("  rank ")}
    assert set(sizes) == {"0", "1"}
    masters = [line for line in lines if "fp32_flat_groups" in line]
    assert masters and all(line.split()[0] == "float32" for line in masters)


def test_prune_keeps_the_newest_whole_ones(copy):
    folder = copy / "checkpoints"
    flip(folder / "step-3" / MANIFEST)
    (folder / "step-7.damaged").mkdir()
    code, lines = tool("prune", copy, "--keep", "1")
    assert code == 0 and lines[-1] == "1 stay, the newest is step-2"
    assert {path.name for path in folder.iterdir()} == {"LATEST", "RUN", "step-2"}
    assert (folder / "LATEST").read_text() == "step-2\n"
    assert tool("prune", copy, "--keep", "0")[0] == 2
    flip(folder / "step-2" / MANIFEST)
    assert tool("prune", copy, "--keep", "1")[0] == 2
    assert (folder / "step-2").is_dir()
    assert tool("list", copy / "nowhere")[0] == 2


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_touches_its_own_files_and_rank_0_looks_for_each_once(pair, tmp_path, stage):
    pair.run(checkpoint_cases.save_steps, folder=str(tmp_path), stage=stage, compute="bf16", steps=1)
    files = unsealed((tmp_path / "step-1" / MANIFEST).read_bytes())[0]["files"]
    ranks = pair.run(checkpoint_cases.resumed, folder=str(tmp_path), stage=stage)
    looked = [Counter({name: n for (kind, name), n in rank["choosing"].items() if kind == "stat"}) for rank in ranks]
    assert {name: looked[0][name] for name in files} == dict.fromkeys(files, 1)
    shares = shares_of({"files": files}, 2)
    assert {name for _, name in ranks[1]["choosing"]} == set(shares[1])
    for rank, found in enumerate(ranks):
        shared = {"mp_rank_00_model_states.pt"} if stage < 3 else set()
        names = {Path(name).name for _, name in found["loading"]} - {MANIFEST, "state.json", *shared}
        assert len(names) == 2 + (stage == 3) and all(re.search(rf"rank[_-]{rank}\b|rank_{rank}_", n) for n in names)
        assert not [name for kind, name in found["loading"] if kind.startswith("os.")]


def test_layouts_that_rank_0_has_not_are_sent_to_it_alone(pair):
    (files, layouts), (mine, own) = pair.run(checkpoint_cases.agreed, broken=False)
    assert [*files] == ["0-0.pt", "1-0.pt", "0-1.pt", "1-1.pt"]
    assert {file.layout for file in files.values()} == layouts.keys()
    assert {name: layouts[file.layout] for name, file in files.items()} == {
        **{f"0-{rank}.pt": {"a": ("float32", [rank])} for rank in (0, 1)},
        **{f"1-{rank}.pt": {"b": ("int64", [])} for rank in (0, 1)},
    }
    assert [*mine] == ["0-1.pt", "1-1.pt"] and len(own) == 2
    failed = "checkpoint step-1 was not saved: rank 1 cannot write"
    assert pair.run(checkpoint_cases.agreed, broken=True) == [failed, failed]


def test_a_manifest_of_format_2_is_read_by_all_that_reads_one(pair, tmp_path):
    """Such a manifest lists the tensors of each file."""
    folder = tmp_path / "checkpoints"
    pair.run(checkpoint_cases.save_steps, folder=str(folder), stage=3, compute="bf16", steps=1)
    path = folder / "step-1" / MANIFEST
    content, _ = unsealed(path.read_bytes())
    layouts = content.pop("layouts")
    now = tool("verify", tmp_path), tool("inspect", tmp_path, "--tensors")
    for entry in content["files"].values():
        layout = entry.pop("layout")
        if layout:
            entry["tensors"] = layouts[layout]
    path.write_text(sealed({**content, "format": 2}))
    assert (tool("verify", tmp_path)[0], tool("inspect", tmp_path, "--tensors")) == (0, now[1])
    pair.run(checkpoint_cases.resumed, folder=str(folder), stage=3)
    entry = next(entry for entry in content["files"].values() if "tensors" in entry)
    entry["tensors"][next(iter(entry["tensors"]))] = ["float16", [1]]
    path.write_text(sealed({**content, "format": 2}))
    code, lines = tool("verify", tmp_path)
    assert code == 3 and "the manifest says ('float16', [1])" in lines[0]
