"""A mistake is told once, and by somebody."""

from pathlib import Path

from config.cli import REPOSITORY
from tests.support.jobs.launches import start


def torchrun(program: Path, *arguments: str) -> tuple[int, str]:
    launch = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    job = start([*launch, str(program), *arguments])
    output, _ = job.communicate(timeout=120)
    return job.returncode, output


def test_ranks_tell_of_a_mistake_once_whoever_meets_it(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from config import errors\n"
        "errors.WAIT_SECONDS = 0.5\n"
        "rank = int(os.environ['RANK'])\n"
        "if str(rank) not in sys.argv[1]:\n"
        "    time.sleep(60)\n"
        "errors.report_error(errors.UserError('no such folder'), rank)\n"
        "sys.exit(2)\n"
    )
    code, text = torchrun(program, "012")
    assert code and text.count("no such folder") == 1 and "error: no such folder\n" in text
    code, text = torchrun(program, "1")
    assert code and text.count("error: no such folder (rank 1)\n") == 1
