"""A process at its start: what it imports, builds, refuses and leaves behind, and the cores it takes."""

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from config.cli import REPOSITORY
from config.errors import UserError
from config.load import load_config
from config.machine.cores import cpus_text, divide_cores, read_cores
from config.machine.processes import free_port
from training.distributed import ALLOCATORS
from training.engine.health import NORM_ROUNDING, difference
from training.session import refuse_unordered
from training.tasks.shape import require_model, settle_orthogonalization

PROGRAM = """
import json, os, sys, torch
from pathlib import Path
from training.distributed import start
rank = int(sys.argv[1])
world = start(rank=rank, world_size=2, local_rank=rank, bind_cores="always", deterministic=rank == 1)
threads = torch.get_num_threads()
torch.set_num_threads(threads + 2)
torch.ones(1 << 20).exp()  # which makes torch's threads
masks = {task.name: sorted(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}
matmul = torch.backends.cuda.matmul
sums = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
print("fp32", torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, *sums)
print("one order", torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
index, values = torch.arange(200_000) % 7, torch.randn(200_000)
added = {tuple(torch.zeros(7).index_put_((index,), values, accumulate=True).tolist()) for _ in range(20)}
print("added by index", len(added))
print("cores", json.dumps([threads, list(masks.values())]))
print("sum", int(world.sum(torch.ones(1))), os.path.exists(sys.argv[2]), flush=True)
sys.stdin.read()
"""


def begin(rank: int, port: int, name: str, **environment: str) -> subprocess.Popen[str]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_SIZE": "2", **environment}
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(rank), name],
        env=inherited | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> list[str]:
    """The output of two ranks where nothing can be built; they are killed then."""
    folder = tmp_path_factory.mktemp("nothing")
    port = free_port()
    name = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_"
    variables = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "PATH": str(folder)}
    variables["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] = "1"
    ranks = [begin(rank, port, f"{name}{rank}", **variables) for rank in (0, 1)]
    texts = []
    try:
        for rank in ranks:
            lines = []
            while not (lines and lines[-1].startswith("sum")):
                lines.append(rank.stdout.readline())
                assert lines[-1], "the process ended"
            texts.append("".join(lines))
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()
    left = [*folder.iterdir(), *Path("/dev/shm").glob(Path(name).name + "*")]
    return [*texts, " ".join(map(str, left))]


def test_ranks_on_a_cpu_build_nothing_and_leave_no_shared_memory(outputs):
    """DeepSpeed would build an op that training does not use, and leave 66 MiB of shared memory for each rank."""
    assert "sum 2 False" in outputs[0]
    assert "sum 2 False" in outputs[1]
    assert outputs[2] == ""


def test_fp32_is_no_tf32_whatever_the_image_sets(outputs):
    assert all("fp32 highest False False False" in output for output in outputs[:2]), "nor sums in 16 bits"


def test_a_run_sums_in_one_order_where_it_is_asked_to(outputs):
    assert "one order True None" in outputs[0] and "one order True :4096:8" in outputs[1]


def test_torch_knows_the_options_of_its_allocators():
    """It ignores a name that it does not know."""
    library = (Path(torch.__file__).parent / "lib/libc10.so").read_bytes()
    names = [option.partition(":")[0] for option in ALLOCATORS.split(",")]
    assert names and all(name.encode() in library for name in names)


def test_a_cpu_sums_in_one_order_by_itself(outputs):
    """torch adds what has the same index from several threads, as the backward pass of x[index] does."""
    assert all("added by index 1\n" in output for output in outputs[:2])


def test_an_operator_without_an_order_is_refused_by_name():
    own = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        with pytest.raises(UserError, match="^run.deterministic = true: put_ has"), ExitStack() as ends:
            ends.push(refuse_unordered)
            torch.zeros(2).put_(torch.tensor([1, 1]), torch.ones(2))
        with pytest.raises(RuntimeError, match="another"), ExitStack() as ends:
            ends.push(refuse_unordered)
            raise RuntimeError("another")
    finally:
        torch.set_deterministic_debug_mode(own)


@pytest.mark.skipif(
    sum(map(len, read_cores(frozenset(os.sched_getaffinity(0))).values())) < 2, reason="two ranks need two cores"
)
def test_ranks_are_bound_to_cores_of_their_own_with_all_their_threads(outputs):
    expected = divide_cores(read_cores(frozenset(os.sched_getaffinity(0))), 2)
    assert not expected[0].cpus & expected[1].cpus
    for share, output in zip(expected, outputs[:2], strict=True):
        (told,) = [line for line in output.splitlines() if line.startswith("cores [")]
        threads, masks = json.loads(told.removeprefix("cores "))
        assert threads == len(share.own)
        # Those that gloo had made before, and those that torch made after.
        assert len(masks) > threads + 3 and all(mask == sorted(share.cpus) for mask in masks)
    assert "cores: bound to CPU" in outputs[0] and f" {cpus_text(expected[0].cpus)} of NUMA node" in outputs[0]
    assert f"; {len(expected[0].own)} thread" in outputs[0] and "OMP_NUM_THREADS" not in outputs[0]
    assert "cores: bound" not in outputs[1]


def test_no_shared_memory_op_is_built_once_that_is_said(tmp_path: Path) -> None:
    """torch could not link it below a path with a space, and contestants of the benchmark would end there.

    The group meets in a file: a port that is free now may be taken once DeepSpeed is imported.
    """
    program = (
        "import sys\n"
        "from training.distributed import build_no_shared_memory_op as no_op; no_op()\n"
        "import deepspeed\n"
        "met = {'init_method': sys.argv[1], 'rank': 0, 'world_size': 1}\n"
        "deepspeed.init_distributed('gloo', auto_mpi_discovery=False, verbose=False, **met)\n"
        "print('built:', deepspeed.comm.comm.cdb.shm_comm_op)\n"
    )
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program, f"file://{tmp_path}/met"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert "built: None" in found.stdout, found.stderr


def test_norms_may_differ_by_the_rounding_of_other_devices() -> None:
    assert difference("the norm", [3.0, 3.0 * (1 + NORM_ROUNDING / 2)], most=NORM_ROUNDING) == ""
    text = difference("the norm", [3.0, 3.0 * (1 + 2 * NORM_ROUNDING)], most=NORM_ROUNDING)
    assert text.startswith("the norm differs between ranks: rank 0 has 3.0, rank 1 has 3.00004")
    assert difference("the norm", [3.0, 3.0000000000000004]) and difference("the norm", [1.0, math.inf], most=1.0)
    assert not difference("the norm", [math.inf, math.inf], most=NORM_ROUNDING)
    assert difference("the norm", [math.inf, 1.0], most=NORM_ROUNDING)


@pytest.mark.slow
def test_what_a_step_frees_is_kept_for_the_next_one_unless_the_user_tuned_glibc() -> None:
    code = (
        "import resource, torch; from training import distributed\n"
        "def faults():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    for _ in range(20): torch.ones(1 << 24)\n"  # 64 MiB each, 16,384 pages
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "first = faults(); distributed._keep_freed_memory(); faults(); print(first, faults())"
    )
    for variables, kept in (({}, True), ({"MALLOC_TRIM_THRESHOLD_": "0"}, False)):
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        found = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=REPOSITORY, check=True, capture_output=True, text=True
        )
        before, after = map(int, found.stdout.split()[-2:])
        assert (5 * after < before) == kept


IMPORTS = """
import sys
from deepspeed.runtime import compiler
from training.engine.optimizer import import_muon_uncompiled
import_muon_uncompiled()
print("deepspeed.runtime.zero.muon.original_muon" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
import torch
print(compiler.compile() is torch.compile)
"""


@pytest.mark.slow
def test_muon_is_imported_without_a_compiler() -> None:
    """DeepSpeed imports Muon in every first backward pass; compiling its kernels takes longer than the pass."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, check=True)
    printed = [line for line in done.stdout.splitlines() if set(line.split()) <= {"True", "False"}]
    assert printed == ["True False", "True"]


LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4}


def require(folder: Path, architecture: str, given: dict[str, Any]) -> None:
    path = folder / "run.yaml"
    path.write_text("model: {architecture: llama}\n")
    config = load_config(path, [], None)
    require_model(replace(config, model=replace(config.model, architecture=architecture, config=given)))


@pytest.mark.parametrize(
    ("architecture", "usual", "key", "value", "said"),
    [
        ("llama", LLAMA, "hidden_size", 65, "(The hidden size (65) is not a multiple of the number of attention"),
        ("llama", LLAMA, "num_key_value_heads", 3, "does not divide model.config.num_attention_heads = 4; change one"),
        ("llama", LLAMA, "num_hidden_layers", -1, "is not a valid size; give 1 or more"),
        ("llama", LLAMA, "hidden_act", "gellu", "no llama can be built with it (KeyError: 'gellu'); change it"),
        ("llama", LLAMA, "head_dim", 15, "RoPE requires an even rotary dimension"),
        ("llama", LLAMA, "pad_token_id", 1 << 20, "Padding_idx must be within num_embeddings"),
        ("llama", LLAMA, "attention_dropout", 1.5, "is not a probability; give 0 or more, and less than 1"),
        ("gpt2", GPT2, "n_embd", 65, "`embed_dim` must be divisible by num_heads"),
        ("gpt2", GPT2, "n_inner", -5, "is not a valid size; give 0 or more"),
        ("mixtral", LLAMA | {"num_local_experts": 2, "num_key_value_heads": 2}, "num_experts_per_tok", 4, "2 experts"),
    ],
)
def test_a_wrong_size_is_one_line(tmp_path, architecture, usual, key, value, said) -> None:
    require(tmp_path, architecture, usual)
    with pytest.raises(UserError) as caught:
        require(tmp_path, architecture, usual | {key: value})
    text = str(caught.value)
    assert text.startswith(f"model.config.{key} = ") and said in text and "\n" not in text


def test_a_key_of_older_versions_is_told_the_new_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rope_theta: .* no such key; set model.config.rope_parameters=") as caught:
        require(tmp_path, "llama", LLAMA | {"rope_theta": 1e6})
    assert "\n" not in str(caught.value)


def test_muon_orthogonalizes_in_bf16_on_gpus_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {architecture: llama}\noptimizer: {name: muon}\n")
    config = load_config(path, [], None)
    for on_gpu, chosen in ((True, "bf16"), (False, "fp32")):
        assert settle_orthogonalization(config, on_gpu=on_gpu).optimizer.orthogonalization == chosen
    told = replace(config, optimizer=replace(config.optimizer, orthogonalization="fp32"))
    assert settle_orthogonalization(told, on_gpu=True) is told
