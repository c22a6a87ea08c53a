"""A launcher whose ranks are forked from the server that has imported everything, for tools that start jobs.

A tool starts this file as it starts torchrun; it starts real ranks that join each other, in a tenth of the time.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
from threading import Thread


@contextmanager
def forked_launcher(ranks: int) -> Iterator[list[str]]:
    """The words before a script, or before -m and a module, that run it on so many ranks, one job after another."""
    with Listener(family="AF_UNIX") as listener:
        server = Thread(target=_serve, args=(listener, ranks))
        server.start()
        try:
            yield [sys.executable, __file__, str(listener.address)]
        finally:
            with Client(listener.address) as last:
                last.send(None)
            server.join()


def _serve(listener: Listener, ranks: int) -> None:
    from tests.support.jobs.forked import Job

    while True:
        with listener.accept() as client:
            given = client.recv()
            if given is None:
                return
            job = Job(*given, ranks)
            output, _ = job.communicate()
            client.send((job.returncode, output))


def main(address: str, *program: str) -> int:
    """Run a program on the ranks and print what they print; the exit code of the first of them that failed."""
    with Client(address) as server:
        server.send((["python", *program], dict(os.environ)))
        code, output = server.recv()
    sys.stdout.write(output)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
