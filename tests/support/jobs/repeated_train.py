"""train.py several times in one process, as in a notebook. The first argument is the runs: NAME:STAGE,NAME:STAGE."""

import sys

import train


def main(arguments: list[str]) -> int:
    """The first exit code that is not 0."""
    runs, *given = arguments
    codes = []
    for name, stage in (run.split(":") for run in runs.split(",")):
        codes.append(train.main([*given, f"run.name={name}", f"deepspeed.config=ds_configs/zero{stage}_fp32.json"]))
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
