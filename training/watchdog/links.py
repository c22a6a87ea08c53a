"""A connection between rank 0 and every rank of another machine, over which nothing is said while all is well.

The kernels keep it alive (SO_KEEPALIVE in socket(7), TCP_KEEPIDLE and others in tcp(7)). They answer for a process that
is stopped, swapped out or holds its interpreter for minutes; so silence means that the machine or the network is gone.
The end of a process closes its connections at once. The store of the process group can tell neither.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from training.distributed import Place
from training.watchdog.process import Member, how_it_ended
from training.watchdog.witness import start_witness

SILENT_MACHINE_SECONDS = 60.0
"""After how long without an answer a machine is lost. A network with spanning tree may take 50 s to find another way
(IEEE 802.1D: 20 s until the old one has aged, twice 15 s until the new one forwards); gloo and NCCL outlive that."""
JOIN_SECONDS = 30.0
"""How long rank 0 waits for the connections of the others, and they try."""
_PROBES = 5
_BYE = b"bye"


class Links:
    """This rank's connections; a thread listens to them."""

    def __init__(
        self,
        place: Place,
        me: Member,
        others: Sequence[Member],
        *,
        ended: Callable[[str, int | None], None],
        gone: Callable[[str], None],
    ) -> None:
        """A collective. The callbacks get the part of the line about the rank, and how it ended where that is known."""
        self._me, self._ended, self._gone = me, ended, gone
        self._far = {member.rank: member for member in others if member.machine != me.machine}
        self._alone = all(member.machine != me.machine for member in others)
        self._links: dict[int, tuple[socket.socket, Member]] = {}
        self._witness: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._server = _server() if place.is_main else None
        self._port, self._token = place.from_main(
            (self._server.getsockname()[1], secrets.token_hex(16)) if self._server else None
        )
        if self._server or 0 in self._far:
            threading.Thread(target=self._watch, daemon=True).start()

    def close(self, *, well: bool) -> None:
        """From now on this rank may leave, and the others may. well: it leaves as agreed, and says so."""
        with self._lock:  # a witness that is being started is waited for
            if self._over.is_set():
                return
            self._over.set()
            if not well:
                return  # what the process beside it sees of its end is news for the others
            for link, _ in list(self._links.values()):
                with suppress(OSError):
                    link.send(_BYE)
        if self._witness is not None:
            self._witness.kill()
            self._witness.wait()

    def _watch(self) -> None:
        ends = time.monotonic() + JOIN_SECONDS
        if self._server:
            self._accept(self._server, ends)
        else:
            self._connect(self._far[0], ends)
        with self._lock:
            if self._alone and self._links and not self._over.is_set():
                self._witness = start_witness(self._me.rank, [link for link, _ in self._links.values()])
        poller = select.poll()
        for number in self._links:
            poller.register(number, select.POLLIN)
        while not self._over.is_set():
            for number, _ in poller.poll(1000):
                poller.unregister(number)  # one word, or the end
                link, member = self._links[number]
                self._hear(link, member)

    def _hear(self, link: socket.socket, member: Member) -> None:
        try:
            said = link.recv(1000).decode(errors="replace")
        except ConnectionResetError:
            said = ""
        except OSError as error:
            if not self._over.is_set():
                self._gone(
                    f"{member} is out of reach: no answer from {member.host} for {SILENT_MACHINE_SECONDS:.0f} s "
                    f"({error.strerror}), so that machine is down or the network is"
                )
            return
        if said.startswith(_BYE.decode()) or self._over.is_set():
            return
        status, _, text = said.partition(" ")
        seen = f"seen at {time.strftime('%H:%M:%S', time.gmtime())} UTC"
        self._ended(text or f"{member} {how_it_ended(None)}, {seen}", int(status) if status else None)

    def _accept(self, server: socket.socket, ends: float) -> None:
        """Take the connections of all ranks of other machines, and of nobody else."""
        server.settimeout(1.0)
        missing = dict(self._far)
        while missing and time.monotonic() < ends and not self._over.is_set():
            with suppress(OSError, ValueError):
                link, _ = server.accept()
                link.settimeout(5.0)
                token, _, rank = link.recv(len(self._token) + 12).decode().partition(" ")
                if hmac.compare_digest(token, self._token) and int(rank) in missing:
                    self._keep(link, missing.pop(int(rank)))
                else:
                    link.close()
        server.close()
        if missing and not self._over.is_set():
            sys.stderr.write(
                f"{len(missing)} of {len(self._far)} ranks of other machines made no connection with {self._me.host}, "
                "port chosen by the system: if their machine goes, that is noticed only after run.timeout_minutes\n"
            )

    def _connect(self, main: Member, ends: float) -> None:
        """Reach rank 0 by the address that the launcher gave, or by its machine's name."""
        while time.monotonic() < ends and not self._over.is_set():
            for host in (os.environ.get("MASTER_ADDR", main.host), main.host):
                with suppress(OSError):
                    link = socket.create_connection((host, self._port), timeout=5.0)
                    link.sendall(f"{self._token} {self._me.rank}".encode())
                    self._keep(link, main)
                    return
            self._over.wait(1.0)

    def _keep(self, link: socket.socket, member: Member) -> None:
        step = max(1, round(SILENT_MACHINE_SECONDS / (_PROBES + 1)))
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, step)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, step)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        # What was sent and never acknowledged is not probed: the same limit for that.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * SILENT_MACHINE_SECONDS))
        self._links[link.fileno()] = (link, member)


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
