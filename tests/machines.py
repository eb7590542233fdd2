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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from namespaces import PATH, Host, Lan

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("machine_init.py")
READY_SECONDS = 20.0
NEEDED = ("sshd", "ssh", "ssh-keygen", "rsync", "unshare", "nsenter", "setpriv")


def missing() -> list[str]:
    """Programs that machines need and that are not here."""
    return [name for name in NEEDED if shutil.which(name, path=PATH) is None]


def found(name: str) -> str:
    """Where a program is that machines need."""
    path = shutil.which(name, path=PATH)
    assert path is not None, "machines are used only where everything is there"
    return path


class Machine:
    """One of them, running."""

    def __init__(self, host: Host, process: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
        self.host, self.address = host, host.address
        self._process, self._environment = process, environment

    def run(self, *words: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run a command there, and wait for its end."""
        (init,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        inside = [found("nsenter"), "-t", init, "-m", "-p", "-n", "-u", "--", *words]
        return subprocess.run(
            inside, env=self._environment, cwd="/", capture_output=True, text=True, timeout=timeout, check=False
        )

    def ran(self, *words: str, timeout: float = 120.0) -> str:
        """The same for one that must go well; what it prints."""
        done = self.run(*words, timeout=timeout)
        assert not done.returncode, f"{' '.join(words)}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def processes(self) -> list[str]:
        """Command lines of all that runs there, but the first process and what serves logins."""
        listed = self.ran("bash", "-c", 'for f in /proc/[0-9]*/cmdline; do tr "\\0" " " < $f; echo; done 2>/dev/null')
        lines = [line.strip() for line in listed.splitlines() if line.strip()]
        return [line for line in lines if not any(word in line for word in (PROGRAM.name, "sshd", "bash -c", "tr "))]


@contextmanager
def machines(folder: Path, lan: Lan, *logged_in_to: str, kept: tuple[Path, ...] = ()) -> Iterator[dict[str, Machine]]:
    """A machine on each host of ``lan``, until the context ends.

    Args:
        folder: where their keys and settings lie; the same on all of them.
        lan: their network.
        logged_in_to: those that have an sshd.
        kept: further folders that are the same on all of them.
    """
    key = folder / "key"
    subprocess.run([found("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    search = os.pathsep.join(
        [str(Path(sys.executable).parent), *dict.fromkeys(str(Path(found(name)).parent) for name in NEEDED)]
        + ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    )
    environment = {
        "PATH": search,
        "PYTHONPATH": str(ROOT),
        "HOME": "/root",
        "USER": "root",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_UP_enable_autoscaler_v2": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Of a node whose agents need longer Ray gives up; these share few cores.
        "RAY_agent_register_timeout_ms": "120000",
    }
    everywhere = {folder, ROOT, Path(sys.prefix), Path(sys.base_prefix), *kept}
    everywhere |= {Path(found(name)).resolve().parents[1] for name in ("sshd", "rsync")}
    with ExitStack() as stack:
        running = {}
        for name, host in lan.hosts.items():
            config = folder / f"{name}.sshd"
            config.write_text(
                f"ListenAddress {host.address}\nHostKey {key}\nAuthorizedKeysFile {key}.pub\nUsePAM no\n"
                f"StrictModes no\nPidFile none\nMaxStartups 100:30:200\nMaxSessions 100\nSetEnv PATH={search}\n"
            )
            plan = {
                "kept": sorted(map(str, everywhere)),
                "profile": "".join(f"export {key}='{value}'\n" for key, value in environment.items()),
                "sshd": found("sshd") if name in logged_in_to else "",
                "sshd_config": str(config),
                "ready": str(folder / f"{name}.ready"),
            }
            (folder / f"{name}.json").write_text(json.dumps(plan))
            # However this process ends, the machine ends with it.
            words = (
                found("setpriv"),
                "--pdeathsig",
                "KILL",
                found("unshare"),
                "-m",
                "-p",
                "-f",
                "-u",
                "--kill-child",
                "--mount-proc",
                sys.executable,
            )
            command = host.command(*words, str(PROGRAM), str(folder / f"{name}.json"))
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            stack.callback(_end, process)
            running[name] = Machine(host, process, environment)
        limit = time.monotonic() + READY_SECONDS
        while not all((folder / f"{name}.ready").exists() for name in running):
            assert time.monotonic() < limit, "the machines did not come up"
            time.sleep(0.02)
        yield running


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
