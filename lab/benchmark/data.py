"""Speed and memory of preparing a corpus from text, by tokenizer, amount of text and number of processes.

    python -m lab.benchmark.data [--path FILES] [--tokenizers bytes,bpe:4096] [--megabytes 4,8,16,32] [--processes 1,2]
        [--json FILE]

FILES is a text file, a folder or a glob, as in data.path; without it the running Python's standard library is read.
Each amount is prepared from the first documents, in its own process with an empty cache. A BPE is trained first and
timed separately, because its sample stops growing at 32 MiB; MB/s covers the rest. Memory is the peak resident set of
the process that reads and writes, and of the largest worker that tokenizes.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.errors import UserError
from config.machine.processes import peak_resident_bytes
from config.options import comma_separated, positive_int, positive_number
from config.schema import DataSection
from lab.benchmark.harness import in_own_process, polling, write_json

_POLL_SECONDS = 0.02


COLUMNS = {
    "tokenizer": "{}",
    "megabytes": "{:g}",
    "processes": "{}",
    "train_s": "{:.1f}",
    "rest_s": "{:.2f}",
    "mb_per_s": "{:.1f}",
    "reader_cpu_s": "{:.2f}",
    "worker_cpu_s": "{:.2f}",
    "reader_mib": "{:,.0f}",
    "worker_mib": "{:,.0f}",
}
"""Figures of a row and their format. `processes`: number that tokenize; `train_s`: drawing the sample and training a
tokenizer; `rest_s`: the rest, including the start of the processes; memory: peaks of the process that reads and writes,
and of the largest that tokenizes."""


def write_documents(source: DataSection, megabytes: float, folder: Path) -> None:
    """Write the first documents of the source into `folder`, one file each.

    The last one is cut to size. Raises UserError if the source has less text.
    """
    from data.sources.sources import open_source

    left = int(megabytes * 1e6)
    opened = open_source(source)
    for number, text in enumerate(opened.documents(Counter())):
        raw = text.encode()
        cut = raw[:left].decode(errors="ignore")  # a character may be cut in two
        (folder / f"{number:07d}.txt").write_bytes(cut.encode())
        left -= len(raw)
        if left <= 0:
            return
    raise UserError(f"--megabytes {megabytes:g}: {opened.label} has {left / 1e6:.1f} MB less; ask for less")


def measure(path: str, tokenizer: str, megabytes: float, processes: int, scratch: str) -> dict[str, Any]:
    """Prepare the text in `path` into an empty cache. Runs in its own process, whose peak memory it reports."""
    from data.sources.sources import open_source
    from data.text.prepare import prepare
    from data.text.tokenizer import make_tokenizer

    section = DataSection(
        source="text", path=path, tokenizer=tokenizer, cache_dir=f"{scratch}/cache", workers=processes
    )
    trained = 0.0
    if tokenizer.startswith("bpe:"):
        started = time.perf_counter()
        make_tokenizer(tokenizer, open_source(section), section.validation_fraction).save_pretrained(f"{scratch}/bpe")
        trained, section = time.perf_counter() - started, replace(section, tokenizer=f"{scratch}/bpe")
    peaks = [0]

    def look_at_workers() -> None:
        peaks.extend(peak_resident_bytes(str(child.pid)) for child in multiprocessing.active_children())

    with polling(look_at_workers, seconds=_POLL_SECONDS):
        started, computed = time.perf_counter(), _cpu_seconds()
        prepare(section, progress=False)
        seconds = time.perf_counter() - started
        reader, worker = (after - before for after, before in zip(_cpu_seconds(), computed, strict=True))
    memory = [peak / 2**20 for peak in (peak_resident_bytes("self"), max(peaks))]
    figures = (tokenizer, megabytes, processes, trained, seconds, megabytes / seconds, reader, worker, *memory)
    return dict(zip(COLUMNS, figures, strict=True))


def _cpu_seconds() -> list[float]:
    """CPU time of this process, and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [usage.ru_utime + usage.ru_stime for usage in used]


def benchmark(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every amount, tokenizer and number of processes in turn. Raises UserError."""
    source = DataSection(source="text", path=options.path) if options.path else DataSection(source="stdlib")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as texts:
            write_documents(source, megabytes, Path(texts))
            for tokenizer, processes in product(options.tokenizers, options.processes):
                with tempfile.TemporaryDirectory() as scratch:
                    yield in_own_process(measure, texts, tokenizer, megabytes, processes, scratch)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = Arguments("python -m lab.benchmark.data", __doc__)
    parser.add_argument("--path", help="text file, folder or glob (default: the standard library)")
    for name, one, default, what in (
        ("--tokenizers", str, "bytes,bpe:4096", "as in data.tokenizer"),
        ("--megabytes", positive_number, "4,8,16,32", "amounts of text, 10^6 bytes"),
        ("--processes", positive_int, "1,2", "processes that tokenize"),
    ):
        parser.add_argument(name, type=comma_separated(one), default=default, help=f"{what} (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the rows as JSON")
    options = parser.parse_args(arguments)
    if options.json is not None:
        try:
            options.json.touch()
        except OSError as error:
            problem = f"cannot be written ({error.strerror}); name another file"
            raise UserError(f"--json {options.json}: {problem}") from error
    return options


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options, rows = read_options(arguments), []
    print("  ".join(COLUMNS), flush=True)
    for row in benchmark(options):
        rows.append(row)
        cells = [form.format(row[name]).rjust(len(name)) for name, form in COLUMNS.items()]
        print("  ".join(cells), flush=True)
    if options.json:
        write_json(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
