"""Two machines on one: network, host name, mounts and processes of their own, an sshd each, a cable between.

They are Linux namespaces, so this needs root and an sshd; `SKIP` says why there can be none.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from config.cli import REPOSITORY
from tests.support.jobs.launches import children, wait_until

NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork"]
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin")
NEEDED = [name for name in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "mount") if shutil.which(name) is None]
ADDRESSES = {"left": "10.211.7.1", "right": "10.211.7.2"}
HOSTS = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())


def why_not() -> str:
    """Why there can be no two machines here; empty when there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if SSHD is None or NEEDED:
        missing = [*NEEDED, *([] if SSHD else ["sshd"])]
        return f"not installed: {', '.join(missing)}; apt-get install openssh-server iproute2"
    if subprocess.run([*NAMESPACES, "true"], check=False).returncode:
        return "this machine does not allow namespaces"
    return ""


SKIP = why_not()


class Machine:
    """One of them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        (self.folder / "python").mkdir()
        (self.folder / "hosts").write_text(HOSTS)
        (self.folder / "nsswitch.conf").write_text("hosts: files\n")
        (self.folder / "sshd_config").write_text(
            f"HostKey {folder}/key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
            f"SetEnv PYTHONPATH={self.folder}/python\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        start = (
            f"hostname {name}; mount --bind {self.folder}/hosts /etc/hosts;"
            f"mount --bind {self.folder}/nsswitch.conf /etc/nsswitch.conf; ip link set lo up;"
            f"mount --bind {folder}/ssh_config /etc/ssh/ssh_config;"
            f"exec {SSHD} -D -e -f {self.folder}/sshd_config"
        )
        self.outer = subprocess.Popen(
            [*NAMESPACES, "--kill-child", "--mount-proc", "sh", "-c", start],
            stderr=(self.folder / "sshd.log").open("w"),
        )
        [self.pid, *_] = wait_until(
            lambda: children(self.outer.pid), seconds=10, why=(self.folder / "sshd.log").read_text
        )

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` on it."""
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--pid", f"--wdns={REPOSITORY}", *words]

    def run(self, *words: str) -> None:
        """Run `words` on it."""
        subprocess.run(self.command(*words), check=True, timeout=20)


@contextmanager
def two_machines(folder: Path) -> Iterator[dict[str, Machine]]:
    """`left` and `right`, connected; in `folder` the key, `ssh_config` and `hostfile` that reach both.

    On the machines themselves `ssh_config` is the system's, so that programs which call ssh reach both too.
    """
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "ssh_config").write_text(
        f"Host *\n IdentityFile {folder}/key\n IdentitiesOnly yes\n StrictHostKeyChecking no\n"
        " UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
    )
    both = {name: Machine(folder, name) for name in ADDRESSES}
    try:
        ends = [f"netns {machine.pid}" for machine in both.values()]
        subprocess.run(f"ip link add eth0 {ends[0]} type veth peer name eth0 {ends[1]}", shell=True, check=True)
        for name, machine in both.items():
            machine.run("ip", "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")
        (folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in both))
        yield both
    finally:
        for machine in both.values():
            machine.outer.kill()
            machine.outer.wait()
