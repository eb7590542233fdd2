"""The first process of a test's machine: ``python machine_init.py PLAN``, in namespaces of its own.

Life cycle: gives the machine folders that no other one sees, an sshd where it shall have one, says that it is ready,
and then only buries its dead. When it is killed, everything on the machine ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

PRIVATE = ("/tmp", "/dev/shm", "/run", "/root")
SSHD_USER = "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin\n"


def mount(*words: str, held: tuple[int, ...] = ()) -> None:
    """Run ``mount``, with the descriptors that its words name."""
    subprocess.run(["mount", *words], check=True, pass_fds=held)


def make_private(folder: str, kept: list[str]) -> None:
    """An empty folder in place of the host's, but for what of it the machine needs."""
    inside = [path for path in kept if Path(path).is_relative_to(folder)]
    held = {path: os.open(path, os.O_PATH) for path in inside}
    mount("-t", "tmpfs", "-o", "size=1g,mode=1777", "machine", folder)
    for path, descriptor in held.items():
        Path(path).mkdir(parents=True, exist_ok=True)
        mount("--no-canonicalize", "--bind", f"/proc/self/fd/{descriptor}", path, held=(descriptor,))
        os.close(descriptor)


def serve_logins(sshd: str, config: str) -> None:
    """Start an sshd. It wants a user of its own, which a host that has never had one lacks."""
    known = Path("/etc/passwd").read_text()
    if "\nsshd:" not in known:
        users = Path("/run/passwd")
        users.write_text(known + SSHD_USER)
        mount("--bind", str(users), "/etc/passwd")
    Path("/run/sshd").mkdir()
    subprocess.Popen([sshd, "-D", "-f", config])


def main(plan: dict[str, Any]) -> None:
    """Set the machine up as ``plan`` says, then bury its dead until it is killed."""
    mount("--make-rprivate", "/")
    for folder in PRIVATE:
        make_private(folder, plan["kept"])
    Path("/root/.bashrc").write_text(plan["profile"])
    Path("/root/.profile").write_text(". ~/.bashrc\n")
    if plan["sshd"]:
        serve_logins(plan["sshd"], plan["sshd_config"])
    Path(plan["ready"]).touch()
    while True:
        # Orphans of this machine become this process's children.
        signal.sigwait({signal.SIGCHLD})
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    main(json.loads(Path(sys.argv[1]).read_text()))
