"""A vLLM server in its own environment: proven weights, answers, and faults that the proof names; `make test-rl`."""

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from config.cli import REPOSITORY
from config.errors import UserError
from config.machine.processes import free_port
from config.schema import AdapterSection, GrpoSection
from modeling.adapter import add_adapter
from precision.sampler_gap import FLOOR
from tests.support.jobs.launches import events, finish, last_attempts, start, wait_until
from training.distributed import World
from training.rollouts import vllm_sampler
from training.rollouts.transformers_sampler import Request, digest
from training.rollouts.vllm_sampler import VllmSampler

PYTHON, SMOLLM2 = (os.environ.get(name, "") for name in ("VLLM_PYTHON", "SMOLLM2_MODEL"))
pytestmark = [
    pytest.mark.rl,
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no Python with vLLM; make vllm makes one"),
]
LENGTH, END = 12, 2
CONFIG = {
    "task": "grpo",
    "run": {"name": "rollouts", "steps": 1},
    "model": {
        "architecture": "llama",
        "config": {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    },
    "grpo": {"rewards": ["length"], "group_size": 4, "max_new_tokens": LENGTH, "engine": "vllm"},
    "data": {"source": "jsonl", "tokenizer": "bytes", "sequence_length": 256},
    "batch": {"global_size": 8, "micro_size": 8},
    "precision": {"compute": "bf16"},
}


@contextmanager
def serving(folder: Path, url: str, *given: str) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Context manager: the folder with the architecture, and `launch.rollouts`, which watches over the server, whose
    environment's path has spaces."""
    spaced = folder / "path with spaces"
    spaced.symlink_to(Path(PYTHON).parent.parent)
    python = f"{spaced}/bin/{Path(PYTHON).name}"
    command = [sys.executable, "-m", "launch.rollouts", "--python", python, "--port", url.rpartition(":")[2], *given]
    with (folder / "log").open("wb") as log:
        watcher = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "--model" in (folder / "log").read_text(), seconds=300.0, why=(folder / "log").read_text)
        yield Path(re.search(r"--model (\S+)", (folder / "log").read_text())[1]), watcher
    finally:
        watcher.send_signal(signal.SIGTERM)
        watcher.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    """The address, and what `serving` yields."""
    folder, url = tmp_path_factory.mktemp("server"), f"http://127.0.0.1:{free_port()}"
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 16)
    data = {**CONFIG["data"], "path": str(folder / "prompts.jsonl")}
    grpo = {**CONFIG["grpo"], "urls": [url]}
    (folder / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "data": data, "grpo": grpo}))
    with serving(folder, url, "--config", f"{folder}/config.yaml") as (architecture, watcher):
        yield url, architecture, watcher


@pytest.fixture(scope="module")
def sampler(server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSampler]:
    url, architecture, _ = server
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(architecture)).to(torch.bfloat16).eval()
    section = replace(GrpoSection(), engine="vllm", urls=(url,), max_new_tokens=LENGTH, server_seconds=300.0)
    found = VllmSampler(model, section, World(0, 1, 0, torch.device("cpu")), ends=[END])
    found.folder = tmp_path_factory.mktemp("run") / "rollouts"
    yield found
    dist.destroy_process_group()


def changed(sampler: VllmSampler) -> dict[str, torch.Tensor]:
    """Other weights than the sampler has, under every name."""
    model = sampler.model
    new = {name: value + 0.05 * torch.randn_like(value) for name, value in model.named_parameters()}
    return new | {"lm_head.weight": new["model.embed_tokens.weight"]}


def differing(sampler: VllmSampler) -> list[str]:
    expected = {name: digest(value) for name, value in sampler.model.named_parameters(remove_duplicate=False)}
    return sampler.differing((), expected)


def requests(length: int = 4, count: int = 16) -> list[Request]:
    rng = np.random.default_rng(0)
    return [Request(rng.integers(3, 250, length), f"7/{k}") for k in range(count)]


def apart(sampler: VllmSampler, asked: list[Request], version: str = "v") -> float:
    """k3 of the trainer's log-probabilities and those that the server says, over all tokens."""
    found = []
    for request, answer in zip(asked, sampler.sample(asked, version=version), strict=True):
        ids = torch.tensor(np.concatenate([request.prompt, answer.ids]))[None]
        with torch.no_grad():
            scores = torch.log_softmax(sampler.model(input_ids=ids).logits[0].float(), -1)
        own = scores[len(request.prompt) - 1 : -1].gather(1, ids[0, len(request.prompt) :, None])[:, 0].double()
        found.append(own - torch.from_numpy(answer.log_probs).double())
    whole = torch.cat(found)
    return float((torch.expm1(whole) - whole).mean())


def test_what_it_computes_with_is_what_was_sent_and_answers_repeat(sampler):
    sampler.receive(changed(sampler).items())
    assert differing(sampler) == []
    first, again = (sampler.sample(requests(), version="v") for _ in range(2))
    assert [answer.ids.tolist() for answer in first] == [answer.ids.tolist() for answer in again]
    assert all(answer.ended == (answer.ids[-1] == END and len(answer.ids) <= LENGTH) for answer in first)
    assert max(FLOOR, apart(sampler, requests())) < 1e-3


def test_prompts_that_one_prefill_does_not_hold_are_answered(sampler):
    """3,200 tokens, where vLLM takes 2,048 at once on a CPU."""
    sampler.receive(changed(sampler).items())
    assert apart(sampler, requests(200)) < 1e-3


def test_weights_that_never_arrive_are_named(sampler, monkeypatch):
    monkeypatch.setattr(sampler, "_send", lambda url: None)
    sampler.receive(changed(sampler).items())
    assert set(differing(sampler)) == {name for name, _ in sampler.model.named_parameters(remove_duplicate=False)}


def test_one_tensor_left_out_is_named(sampler, monkeypatch):
    save = vllm_sampler.save_file
    left_out = "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setattr(
        vllm_sampler, "save_file", lambda whole, path: save({k: v for k, v in whole.items() if k != left_out}, path)
    )
    sampler.receive(changed(sampler).items())
    # vLLM loads layers whole: of a fused one that lacks a part, none of the parts is new
    assert left_out in differing(sampler) and all("layers.1.mlp" in name for name in differing(sampler))


def test_a_stale_tied_head_is_named(sampler, monkeypatch):
    call = vllm_sampler._call

    def without_repacking(url: str, path: str, body=None):
        return None if body == {"method": "repack_tied_head"} else call(url, path, body)

    monkeypatch.setattr(vllm_sampler, "_call", without_repacking)
    sampler.receive(changed(sampler).items())
    assert differing(sampler) == ["lm_head.weight"]


def test_an_adapter_is_merged_and_one_that_is_never_delivered_is_named(sampler, monkeypatch):
    lora = AdapterSection(kind="lora", r=4, target_modules=("down_proj", "q_proj"))
    monkeypatch.setattr(sampler, "model", add_adapter(copy.deepcopy(sampler.model), lora, seed=0).eval())
    new = dict(sampler.model.named_parameters(remove_duplicate=False))
    new |= {name: value + 0.05 * torch.randn_like(value) for name, value in new.items() if ".lora_" in name}
    expected = {name: digest(value) for name, value in new.items()}
    sampler.receive(new.items())
    assert sampler.differing(new.items(), expected) == []
    assert max(FLOOR, apart(sampler, requests())) < 1e-3
    whole = sampler._whole
    base = {name.replace(".base_layer", ""): value for name, value in new.items() if ".lora_" not in name}
    monkeypatch.setattr(sampler, "_whole", lambda *, tied=True: whole() if tied else without_tied(base))
    sampler.receive(new.items())
    layers = [f"model.layers.{n}.{name}.weight" for n in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]
    assert set(layers) <= set(found := sampler.differing(new.items(), expected)) and all("layers" in n for n in found)


def without_tied(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if name != "lm_head.weight"}


def test_half_a_file_ends_in_one_line_or_is_named(sampler, monkeypatch):
    save = vllm_sampler.save_file

    def half(whole, path):
        save(whole, path)
        os.truncate(path, path.stat().st_size // 2)

    monkeypatch.setattr(vllm_sampler, "save_file", half)
    monkeypatch.setattr(sampler, "_section", replace(sampler._section, server_seconds=5.0))
    with pytest.raises(
        UserError, match=r"^grpo\.urls: http://\S+: /update_weights: 500 .*server_seconds = 5 are over$"
    ):
        sampler.receive(changed(sampler).items())


def test_a_cached_prefix_of_other_weights_answers_nothing(sampler, monkeypatch):
    """Blocks of 128 tokens: the same long prompts, before and after an update that leaves the cache as it is."""
    sampler.receive(changed(sampler).items())
    asked = requests(length=200, count=4)
    assert differing(sampler) == [] and apart(sampler, asked, version="old") < 3e-3
    call = vllm_sampler._call

    def without_reset(url: str, path: str, body=None):
        leaves = path.startswith(("/pause", "/resume", "/reset_prefix_cache"))
        return None if leaves else call(url, path, body)

    monkeypatch.setattr(vllm_sampler, "_call", without_reset)
    sampler.receive(changed(sampler).items())
    assert differing(sampler) == [] and apart(sampler, asked, version="new") < 3e-3
    assert apart(sampler, asked, version="old") > 1e-2  # what the salt keeps away


@pytest.fixture(params=["file", "collective"])
def sending(sampler, request: pytest.FixtureRequest) -> VllmSampler:
    """A sampler that sends weights in a file, or by broadcast, which here is gloo's."""
    section = replace(sampler._section, transfer=request.param)
    found = VllmSampler(copy.deepcopy(sampler.model), section, sampler._world, ends=[END])
    found.folder = sampler.folder
    return found


def test_weights_that_are_broadcast_arrive_and_one_that_was_left_out_is_named(sending, monkeypatch):
    path = sending.folder / vllm_sampler._FILE
    path.unlink(missing_ok=True)
    for _ in range(2):
        sending.receive(changed(sending).items())
        assert differing(sending) == []
    assert path.exists() == (sending._section.transfer == "file")
    whole, left_out = sending._whole, "model.layers.1.mlp.down_proj.weight"
    monkeypatch.setattr(
        sending, "_whole", lambda *, tied=True: {k: v for k, v in whole(tied=tied).items() if tied or k != left_out}
    )
    sending.receive(changed(sending).items())
    assert differing(sending) == [left_out]


def test_a_killed_server_is_given_its_weights_again_and_repeats_its_answers(sending, server):
    sampler = sending
    sampler.receive(changed(sampler).items())
    assert differing(sampler) == []
    before = sampler.sample(requests(), version="v")
    child = int(Path(f"/proc/{server[2].pid}/task/{server[2].pid}/children").read_text().split()[0])
    os.killpg(child, signal.SIGKILL)
    after = sampler.sample(requests(), version="v")
    assert [answer.ids.tolist() for answer in after] == [answer.ids.tolist() for answer in before]


def test_a_server_that_hangs_is_waited_for_after_it_was_noticed(sampler, server, monkeypatch):
    """A request's own limit is longer here than the time to wait, as both are ten minutes by default."""
    sampler.receive(changed(sampler).items())
    assert differing(sampler) == []
    before = sampler.sample(requests(), version="v")
    monkeypatch.setattr(vllm_sampler, "_CLIENT", httpx.Client(timeout=20.0))
    monkeypatch.setattr(sampler, "_section", replace(sampler._section, server_seconds=15.0))
    child = int(Path(f"/proc/{server[2].pid}/task/{server[2].pid}/children").read_text().split()[0])
    os.killpg(child, signal.SIGSTOP)
    threading.Timer(22.0, os.killpg, (child, signal.SIGCONT)).start()
    after = sampler.sample(requests(), version="v")
    assert [answer.ids.tolist() for answer in after] == [answer.ids.tolist() for answer in before]


@pytest.mark.parametrize("arrived", [False, True])
def test_an_update_whose_sender_died_does_not_keep_others_away(sampler, server, arrived: bool):
    sampler.receive(changed(sampler).items())
    vllm_sampler._call(server[0], "/pause?mode=wait", {})
    vllm_sampler._call(server[0], "/start_weight_update", {})
    if arrived:
        vllm_sampler._call(
            server[0], "/update_weights", {"update_info": {"path": str(sampler.folder / vllm_sampler._FILE)}}
        )
    sampler.receive(changed(sampler).items())
    assert differing(sampler) == []


def test_a_whole_training_of_an_adapter_resumes_after_sigkill_with_the_published_answers(server, tmp_path: Path):
    """Killed while it learns from the third step's answers; and once more from the start on the same answers, whole."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 16)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(server[1])).save_pretrained(tmp_path / "base")
    config = {
        **CONFIG,
        "model": {"name_or_path": str(tmp_path / "base")},
        "adapter": {"kind": "lora", "r": 4},
        "grpo": {**CONFIG["grpo"], "urls": [server[0]], "rewards": ["tests.support.rows.prompts:even"]},
        "data": {**CONFIG["data"], "path": str(tmp_path / "prompts.jsonl"), "cache_dir": str(tmp_path / "cache")},
        "checkpoint": {"every_steps": 1},
        "tracking": {"wandb": "disabled"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def job(name: str) -> list[str]:
        given = (f"run.dir={tmp_path}/runs", f"run.name={name}", "run.steps=5", "run.resume=auto")
        return [sys.executable, f"{REPOSITORY}/train.py", "--config", f"{tmp_path}/config.yaml", *given]

    rollouts = tmp_path / "runs/killed/rollouts"
    killed = start(job("killed"))
    third = rollouts / "step-000003.safetensors"
    wait_until(lambda: third.exists() or killed.poll() is not None, seconds=300.0)
    os.killpg(killed.pid, signal.SIGKILL)
    output, _ = killed.communicate()
    assert third.exists() and killed.returncode == -signal.SIGKILL, output
    published = {path.name: path.read_bytes() for path in rollouts.glob("step-*.safetensors")}
    finish(job("killed"))
    assert {name: (rollouts / name).read_bytes() for name in published} == published
    shutil.copytree(rollouts, tmp_path / "runs/whole/rollouts")
    finish(job("whole"))
    resumed, whole = (last_attempts(tmp_path, name) for name in ("killed", "whole"))
    assert len(whole) == 5 and resumed == whole and any(step["loss"] != 0 for step in whole)
    for path in rollouts.glob("step-*.safetensors"):
        assert path.read_bytes() == (tmp_path / "runs/whole/rollouts" / path.name).read_bytes()


@pytest.mark.skipif(not SMOLLM2, reason="SMOLLM2_MODEL names no folder with SmolLM2-135M; make test-rl makes one")
def test_a_pretrained_model_learns_from_a_server_as_from_the_embedded_sampler(tmp_path: Path):
    """`config/recipes/grpo_smol.yaml` whole, about 15 minutes on two cores."""
    url = f"http://127.0.0.1:{free_port()}"
    given = [
        *("--config", f"{REPOSITORY}/config/recipes/grpo_smol.yaml", f"model.name_or_path={SMOLLM2}"),
        *("grpo.engine=vllm", f"grpo.urls=[{url}]", "grpo.server_seconds=300", f"run.dir={tmp_path}/runs"),
    ]
    with serving(tmp_path, url, *given):
        line = [sys.executable, f"{REPOSITORY}/train.py", *given, "tracking.wandb=disabled"]
        output = finish(line, seconds=1500.0)
    before, after = (-event["loss"] for event in events(tmp_path, "grpo_smol", "eval"))
    assert before < 0.3 and after > 0.8, output
    gaps = [event["metrics"]["gap/of_bound"] for event in events(tmp_path, "grpo_smol", "step")]
    assert len(gaps) == 15 and max(gaps) < 0.5 and "healthy" in output
