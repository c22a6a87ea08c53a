"""Train a Hugging Face causal language model with DeepSpeed.

    deepspeed train.py --config config/recipes/demo.yaml [key.sub=value ...]

The same with `accelerate launch`, `torchrun`, or plain `python` for one process. `--help` lists every key.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from config.cli import CONFIG_ERROR
from config.command_line import read_command_line
from config.errors import UserError, tell
from config.resolved import Resolved


def main(arguments: Sequence[str]) -> int:
    """Run one training job; returns the process's exit code."""
    resolved = read_command_line(arguments)  # --help, --show-config and every mistake in the config end here
    try:
        return run(resolved)
    except UserError as error:
        tell(error, resolved.rank)
        return CONFIG_ERROR


def run(resolved: Resolved) -> int:
    """Prepare the data, build the parts, restore, train, report."""
    # Imported here so that --help and a mistyped key answer at once.
    from data.prepare import prepare
    from modeling.build import model_config

    config = resolved.config
    corpus = prepare(config.data, progress=resolved.rank == 0)
    shape = model_config(config.model, vocab_size=corpus.vocab_size, sequence_length=config.data.sequence_length)

    from training import distributed
    from training.build import build
    from training.finish import finish
    from training.loop import train
    from training.watchdog import watch as lost_rank

    place = distributed.join(resolved)
    try:
        with lost_rank.watched(place):
            parts, progress = build(resolved, corpus, shape, place)
            ending = train(parts, progress)
            finish(parts, corpus, ending)
    except lost_rank.LostRank:
        return lost_rank.LOST
    finally:
        distributed.stop()
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
