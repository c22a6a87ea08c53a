"""Start the vLLM server that a run of task grpo samples from, and restart it when it dies.

    python -m launch.rollouts --config FILE --python VLLM/bin/python [--port 8105] [key.sub=value ...]

--python names the Python of vLLM's own environment (docs/rl.md). The server gets the config's architecture and dtype
but no weights: the run sends its own, and proves that the server computes with them, before the first token. Options
for vLLM itself: --vllm "--max-num-seqs 64". Start several servers on a port each, and list them in grpo.urls.

Exit code 0: stopped by Ctrl-C or SIGTERM; 2: wrong config or command line; 1: it died three times in a row within five
minutes of its start.
"""

import os
import shlex
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from config.cli import CRASH, DONE, Arguments, entry_point
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.options import positive_int
from config.schema import SAMPLING_TASKS
from launch.job import Job, exit_on_sigterm, log

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SHORT_SECONDS, _SHORT_LIVES = 300.0, 3  # a server that dies earlier, so many times in a row, is given up


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """Start the server, and restart it until it is stopped; returns the exit code."""
    from launch.plan.model import model_of  # brings torch, which is not needed to start

    parser = Arguments("python -m launch.rollouts", __doc__, allow_abbrev=False)
    parser.add_argument("--python", required=True, help="Python of the environment that has vLLM")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=positive_int, default=8105, help="port to listen on (%(default)s)")
    parser.add_argument("--vllm", default="", help="further options of vLLM's server, as one word")
    options, rest = parser.parse_known_args(arguments)
    resolved = read_command_line(rest, as_launched(1))
    if resolved.config.task not in SAMPLING_TASKS:
        raise UserError(f"{resolved.config_path}: task = {resolved.config.task} samples no answers")
    python = Path(options.python).absolute()
    if not python.is_file():
        raise UserError(f"--python {options.python}: no such file; docs/rl.md makes vLLM's environment")
    with tempfile.TemporaryDirectory(prefix="mantissa-rollouts-") as folder:
        model_of(resolved.config).config.save_pretrained(folder)  # without weights
        if " " in str(python):  # vLLM's LD_PRELOAD and the command line of torch's compiler are split there
            Path(folder, "environment").symlink_to(python.parent.parent)
            python = Path(folder, "environment/bin", python.name)
        own = [
            *("-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", "policy"),
            *("--dtype", _DTYPES[resolved.compute], "--max-model-len", str(resolved.config.data.sequence_length)),
            *("--load-format", "dummy", "--skip-tokenizer-init", "--generation-config", "vllm", "--enforce-eager"),
            *("--logprobs-mode", "processed_logprobs", "--enable-scale-out", "--host", options.host),
            "--no-enable-chunked-prefill",  # after a chunk vLLM 0.32 rewinds the seed's generator: on a CPU it crashes
            *("--worker-extension-cls", "vllm_worker.ProvenWeights", "--port", str(options.port)),
            *("--weight-transfer-config", '{"backend": "mantissa"}', *shlex.split(options.vllm)),
        ]
        return _serve([str(python), *own])


def _serve(command: Sequence[str]) -> int:
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    unless_given = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment = {**unless_given, **os.environ, **own, "PYTHONPATH": str(Path(__file__).parent)}
    log(shlex.join(command), "rollouts")
    job, short = None, 0
    try:
        with exit_on_sigterm():
            while short < _SHORT_LIVES:
                started = time.monotonic()
                job = Job(command, environment=environment)
                log(f"the server ended with exit code {job.wait()}", "rollouts")
                short = short + 1 if time.monotonic() - started < _SHORT_SECONDS else 0
    except (KeyboardInterrupt, SystemExit):
        if job is not None:
            job.kill(signal.SIGTERM)
            job.wait()
        return DONE
    return CRASH


if __name__ == "__main__":
    raise SystemExit(main())
