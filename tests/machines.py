"""Whole machines on this one, as far as Ray can tell: network, processes, names and temporary folders of their own.

Each is a :class:`namespaces.Host` with further namespaces around one first process; what runs there cannot see, or
end, what runs elsewhere, as ``ray stop`` would. They need root, and where they are to be logged in to, an sshd.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from namespaces import PATH, Host, Lan
from platformdirs import user_cache_path

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("machine_init.py")
READY_SECONDS = 60.0
END_SECONDS = 20.0
POLL_SECONDS = 0.02
NEEDED = ("sshd", "ssh", "ssh-keygen", "rsync", "unshare", "nsenter", "setpriv")


def missing() -> list[str]:
    """Programs that machines need and that are not here."""
    return [name for name in NEEDED if shutil.which(name, path=PATH) is None]


def found(name: str) -> str:
    """Where a program is that machines need."""
    path = shutil.which(name, path=PATH)
    assert path is not None, "machines are used only where everything is there"
    return path


class Running(NamedTuple):
    """A process of a machine.

    Attributes:
        pid: as this host has it.
        inside: as the machine has it.
        command: its command line.
    """

    pid: int
    inside: int
    command: str


class Machine:
    """One of them, running."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
        self.host, self.address = host, host.address
        self._process, self._environment = process, environment
        self._init = 0

    def become_ready(self) -> None:
        """Its first process is there."""
        (init,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._init = int(init)

    def start(self, line: str, folder: Path) -> subprocess.Popen[str]:
        """Run a line of a shell there, in a folder."""
        inside = [found("nsenter"), "-t", str(self._init), "-m", "-p", "-n", "-u", "-i", "--", "bash", "-c"]
        inside.append(f"cd {folder} && {line}")
        ends = subprocess.PIPE
        return subprocess.Popen(inside, env=self._environment, cwd="/", stdout=ends, stderr=ends, text=True)

    def result(self, process: subprocess.Popen[str], timeout: float) -> str:
        """What it prints, once it has ended well."""
        try:
            told, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            told, errors = process.communicate()
            raise AssertionError(f"{process.args[-1]} takes over {timeout:g} s: {told}\n{errors}") from error
        assert not process.returncode, f"{process.args[-1]}: {told}\n{errors}"
        return told

    def ray_logs(self) -> str:
        """The end of what its Ray node has logged; empty where none has been."""
        logs = "for f in /tmp/ray/session_latest/logs/{raylet,monitor}.*; do tail -n 30 $f; done 2>/dev/null; true"
        return self.result(self.start(logs, Path("/")), 20.0)

    def processes(self) -> list[Running]:
        """All that runs there, but the first process and what serves logins."""
        space = os.stat(f"/proc/{self._init}/ns/pid").st_ino
        there = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.stat(folder / "ns" / "pid").st_ino == space:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    status = (folder / "status").read_text()
                    inside = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
                    there.append(Running(int(folder.name), int(inside), command))
        # One without a command is dead, and only not buried yet.
        return [each for each in there if each.command and each.inside != 1 and "sshd" not in each.command]

    def end(self) -> None:
        """Kill everything there, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        limit = time.monotonic() + END_SECONDS
        while self._init and _lives(self._init):
            assert time.monotonic() < limit, "a machine outlives being killed"
            time.sleep(POLL_SECONDS)


@contextmanager
def machines(
    folder: Path, lan: Lan, *logged_in_to: str, environment: Mapping[str, str], kept: tuple[Path, ...] = ()
) -> Iterator[dict[str, Machine]]:
    """A machine on each host of ``lan``, until the context ends.

    Args:
        folder: where their keys and settings lie; the same on all of them.
        lan: their network.
        logged_in_to: those that have an sshd, which lets in who has the key in ``folder``.
        environment: further variables of all that runs there.
        kept: further folders that are the same on all of them.
    """
    key = folder / "key"
    subprocess.run([found("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    cache = user_cache_path("kvferry", ensure_exists=True)
    variables = _variables(cache) | environment
    everywhere = {folder, ROOT, cache, Path(sys.prefix), Path(sys.base_prefix), *kept}
    everywhere |= {Path(found(name)).resolve().parents[1] for name in ("sshd", "rsync")}
    with ExitStack() as stack:
        running = {}
        for name, host in lan.hosts.items():
            config = folder / f"{name}.sshd"
            config.write_text(
                f"ListenAddress {host.address}\nHostKey {key}\nAuthorizedKeysFile {key}.pub\nUsePAM no\n"
                "StrictModes no\nPidFile none\nMaxStartups 100:30:200\nMaxSessions 100\n"
                f"SetEnv PATH={variables['PATH']}\n"
            )
            plan = {
                "kept": sorted(map(str, everywhere)),
                "profile": "".join(f"export {key}='{value}'\n" for key, value in variables.items()),
                "sshd": found("sshd") if name in logged_in_to else "",
                "sshd_config": str(config),
                "ready": str(folder / f"{name}.ready"),
            }
            order = folder / f"{name}.json"
            order.write_text(json.dumps(plan))
            command = host.command(*_apart(), sys.executable, str(PROGRAM), str(order))
            process = subprocess.Popen(command, env=variables, start_new_session=True)
            running[name] = Machine(host, process, variables)
            stack.callback(running[name].end)
        limit = time.monotonic() + READY_SECONDS
        for name, machine in running.items():
            while not (folder / f"{name}.ready").exists():
                assert time.monotonic() < limit, f"machine {name} did not come up"
                time.sleep(POLL_SECONDS)
            machine.become_ready()
        yield running


def _apart() -> tuple[str, ...]:
    """How a command begins whose process is alone with its descendants, and ends with this one however that ends."""
    kinds = ("--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
    return (found("setpriv"), "--pdeathsig", "KILL", found("unshare"), *kinds)


def _variables(cache: Path) -> dict[str, str]:
    folders = [str(Path(sys.executable).parent), *(str(Path(found(name)).parent) for name in NEEDED)]
    folders += ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    return {
        "PATH": os.pathsep.join(dict.fromkeys(folders)),
        "PYTHONPATH": str(ROOT),
        "HOME": "/root",
        "USER": "root",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        # What has been built for this processor is not built once more on each of them.
        "XDG_CACHE_HOME": str(cache.parent),
    }


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
