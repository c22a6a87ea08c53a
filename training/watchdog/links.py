"""An idle TCP connection between rank 0 and every rank of another machine: it breaks when a process or machine is gone.

The kernels keep it alive (tcp(7)) and answer even for a process that is stopped, swapped out or blocks its interpreter
for minutes, so silence means that the machine or the network is gone. The end of a process closes it at once.
"""

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

from config.machine.members import Member, describe_status
from training.distributed import World
from training.start.rendezvous import listen
from training.watchdog.witness import start_witness

SILENT_MACHINE_SECONDS = 60.0
"""A machine silent for this long counts as lost. A network with spanning tree may take 50 s to find another path (IEEE
802.1D: 20 s until the old one ages out, twice 15 s until the new one forwards); gloo and NCCL survive it."""
JOIN_SECONDS = 30.0
"""How long rank 0 accepts the other ranks' connections, and they try to connect."""
_PROBES = 5
_BYE = b"bye"


class Links:
    """This rank's connections; a thread listens to them."""

    def __init__(
        self,
        world: World,
        me: Member,
        others: Sequence[Member],
        *,
        on_exit: Callable[[str, int | None], None],
        on_unreachable: Callable[[str], None],
    ) -> None:
        """A collective. Both callbacks get a text about the rank; on_exit also its exit status, None if unknown."""
        self._me, self._on_exit, self._on_unreachable = me, on_exit, on_unreachable
        self._remote = {member.rank: member for member in others if member.machine != me.machine}
        self._alone = all(member.machine != me.machine for member in others)
        self._links: dict[int, tuple[socket.socket, Member]] = {}
        self._witness: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._server = listen(0) if world.is_main else None
        port = self._server.getsockname()[1] if self._server else 0
        self._port, self._token = world.from_main((port, secrets.token_hex(16)))
        if self._server or 0 in self._remote:
            threading.Thread(target=self._watch, daemon=True).start()

    def close(self, *, agreed: bool) -> None:
        """Stop watching: from now on any rank may exit. agreed: all ranks are done, so the others are told."""
        with self._lock:  # wait for a witness that is being started
            if self._over.is_set():
                return
            self._over.set()
            if not agreed:
                return  # the witness has to report how this rank ends
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
            self._connect(self._remote[0], ends)
        with self._lock:
            if self._alone and self._links and not self._over.is_set():
                self._witness = start_witness(self._me.rank, [link for link, _ in self._links.values()])
        poller = select.poll()
        for number in self._links:
            poller.register(number, select.POLLIN)
        while not self._over.is_set():
            for number, _ in poller.poll(1000):
                poller.unregister(number)  # at most one message comes, or the end of the connection
                link, member = self._links[number]
                self._receive(link, member)

    def _receive(self, link: socket.socket, member: Member) -> None:
        try:
            message = link.recv(1000).decode(errors="replace")
        except ConnectionResetError:
            message = ""
        except OSError as error:
            if not self._over.is_set():
                self._on_unreachable(
                    f"{member} is out of reach: no answer from {member.host} for {SILENT_MACHINE_SECONDS:.0f} s "
                    f"({error.strerror}), so that machine is down or the network is"
                )
            return
        if message.startswith(_BYE.decode()) or self._over.is_set():
            return
        status, _, text = message.partition(" ")
        seen = f"seen at {time.strftime('%H:%M:%S', time.gmtime())} UTC"
        self._on_exit(text or f"{member} {describe_status(None)}, {seen}", int(status) if status else None)

    def _accept(self, server: socket.socket, ends: float) -> None:
        """Accept one connection from each rank of another machine, and refuse any without the token."""
        server.settimeout(1.0)
        missing = dict(self._remote)
        while missing and time.monotonic() < ends and not self._over.is_set():
            with suppress(OSError, ValueError):
                link, _ = server.accept()
                link.settimeout(5.0)
                token, _, rank = link.recv(len(self._token) + 12).decode().partition(" ")
                if hmac.compare_digest(token, self._token) and int(rank) in missing:
                    self._register(link, missing.pop(int(rank)))
                else:
                    link.close()
        server.close()
        if missing and not self._over.is_set():
            sys.stderr.write(
                f"{len(missing)} of {len(self._remote)} ranks of other machines made no connection with "
                f"{self._me.host}, port chosen by the system: if their machine goes down, that is noticed only after "
                "run.timeout_minutes\n"
            )

    def _connect(self, main: Member, ends: float) -> None:
        """Connect to rank 0 at the launcher's MASTER_ADDR, or at its machine's name."""
        while time.monotonic() < ends and not self._over.is_set():
            for host in (os.environ.get("MASTER_ADDR", main.host), main.host):
                with suppress(OSError):
                    link = socket.create_connection((host, self._port), timeout=5.0)
                    link.sendall(f"{self._token} {self._me.rank}".encode())
                    self._register(link, main)
                    return
            self._over.wait(1.0)

    def _register(self, link: socket.socket, member: Member) -> None:
        step = max(1, round(SILENT_MACHINE_SECONDS / (_PROBES + 1)))
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, step)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, step)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        # Keepalive does not probe while sent data is unacknowledged: the same limit for that.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * SILENT_MACHINE_SECONDS))
        self._links[link.fileno()] = (link, member)
