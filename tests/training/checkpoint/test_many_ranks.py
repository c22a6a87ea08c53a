"""Costs of a checkpoint by the number of ranks, counted in files; and older manifests."""

import re
from collections import Counter
from pathlib import Path

import pytest

from config.json_text import sealed, unsealed
from tests.training.checkpoint import checkpoint_cases, many_ranks_cases
from tests.training.checkpoint.test_tool import tool
from training.checkpoint.manifest import MANIFEST, shares_of


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_touches_its_own_files_and_rank_0_looks_for_each_once(pair, tmp_path, stage):
    pair.run(checkpoint_cases.save_steps, folder=str(tmp_path), stage=stage, compute="bf16", steps=1)
    files = unsealed((tmp_path / "step-1" / MANIFEST).read_bytes())[0]["files"]
    ranks = pair.run(many_ranks_cases.resumed, folder=str(tmp_path), stage=stage)
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
    (files, layouts), (mine, own) = pair.run(many_ranks_cases.agreed, broken=False)
    assert [*files] == ["0-0.pt", "1-0.pt", "0-1.pt", "1-1.pt"]
    assert {file.layout for file in files.values()} == layouts.keys()
    assert {name: layouts[file.layout] for name, file in files.items()} == {
        **{f"0-{rank}.pt": {"a": ("float32", [rank])} for rank in (0, 1)},
        **{f"1-{rank}.pt": {"b": ("int64", [])} for rank in (0, 1)},
    }
    assert [*mine] == ["0-1.pt", "1-1.pt"] and len(own) == 2
    failed = "checkpoint step-1 was not saved: rank 1 cannot write"
    assert pair.run(many_ranks_cases.agreed, broken=True) == [failed, failed]


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
    pair.run(many_ranks_cases.resumed, folder=str(folder), stage=3)
    entry = next(entry for entry in content["files"].values() if "tensors" in entry)
    entry["tensors"][next(iter(entry["tensors"]))] = ["float16", [1]]
    path.write_text(sealed({**content, "format": 2}))
    code, lines = tool("verify", tmp_path)
    assert code == 3 and "the manifest says ('float16', [1])" in lines[0]
