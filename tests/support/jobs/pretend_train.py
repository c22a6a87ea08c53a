"""Stands in for train.py where only the end of a run counts: writes the given events, and ends with the given code.

The environment's PRETEND is a JSON list: what to do at each start, the last one again and again. `steps`: last step
attempted, `saved`: step of a checkpoint, `end`: [exit code, reason] of its run_end, `exit`: its own exit code, `leave`:
leave a process behind that outlives it, `helper`: start one that has the RANK which torch gives a run without a
launcher, `wait`: until SIGUSR1 comes, `deadly`: that signal ends it, `terminate`: end a rank as DeepSpeed's launcher
does when another one has failed, and write to the file `terminated` how many seconds that took.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.support.jobs.pretend_trial import leave, opened, write


def main() -> int:
    settings, folder, asked = opened()
    with (folder / "starts").open("a+") as starts:
        starts.write(f"{time.time()} {settings.get('run.resume', 'never')}\n")
        starts.seek(0)
        count = len(starts.readlines())
    plan = json.loads(os.environ["PRETEND"])
    start = plan[min(count, len(plan)) - 1]
    if start.get("deadly"):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    write(folder, "run_start", 0)
    if start.get("steps"):
        write(folder, "step", start["steps"])
    if start.get("saved"):
        write(folder, "checkpoint", start["saved"])
    if start.get("leave"):
        leave(folder)
    if start.get("helper"):
        subprocess.Popen(["sleep", "1000"], env=os.environ | {"RANK": "0", "LOCAL_RANK": "0"})
    if start.get("terminate"):
        (folder / "terminated").write_text(str(terminate()))
    while start.get("wait") and not asked:
        time.sleep(0.05)
    if start.get("end"):
        write(folder, "run_end", start.get("steps", 0), exit_code=start["end"][0], reason=start["end"][1])
    return int(start["exit"])


def terminate() -> float:
    """Seconds that DeepSpeed's launcher needs to end a rank with a child that ends with it, as Python's own tracker."""
    from deepspeed.launcher.launch import terminate_process_tree

    program = "from multiprocessing import resource_tracker as t; t.ensure_running(); print(flush=True); input()"
    rank = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.stdout is not None
    rank.stdout.readline()
    began = time.monotonic()
    terminate_process_tree(rank.pid)
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
