"""Several hosts on this machine: network namespaces on one switch, whose links can be cut, parted and slowed.

A thread is inside one namespace at a time, and what it makes there is of that host: sockets, and threads with all that
they make in turn. So one process may have its ends on several hosts. But UCX takes the devices and the routes of a
process as it first finds them; so a test session that is to be on a host must be started there: :meth:`Lan.session`.

It needs root and iproute2, and :func:`why_not` says so where they are missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

NEW_NET = 0x40000000
"""``CLONE_NEWNET``; ``os.setns`` comes with Python 3.12."""
NAMED = Path("/run/netns")
PREFIX = "kvferry"
DEVICE = "kv0"
VARIABLE = "KVFERRY_TEST_LAN"
"""Tells a session that it was started on a host of this network: its mark and the names of its hosts."""
NEEDED = ("ip", "tc", "bridge")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
"""iproute2 is where an ordinary PATH does not lead."""
REFUSALS = ("not permitted", "ermission denied", "not supported", "Unknown device type", "qdisc kind is unknown")
"""How a kernel says that it lacks something, or that this user lacks the rights."""


def run(*words: str) -> str:
    """Run a command of iproute2; what it prints."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "PATH": PATH})
    assert not done.returncode, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


class Host:
    """A namespace with a link to the switch."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Be on this host, with this thread and those that it starts meanwhile."""
        libc = ctypes.CDLL(None, use_errno=True)

        def enter(descriptor: int) -> None:
            if libc.setns(descriptor, NEW_NET):
                raise OSError(ctypes.get_errno(), "setns failed")

        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(NAMED / self.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(there)
            try:
                yield
            finally:
                enter(home)
        finally:
            os.close(there)
            os.close(home)

    def command(self, *words: str) -> tuple[str, ...]:
        """The command that runs ``words`` on this host."""
        ip = shutil.which("ip", path=PATH)
        assert ip is not None, "namespaces are used only where they work"
        return (ip, "netns", "exec", self.name, *words)

    def cut(self) -> None:
        """Take the link down on this side; the others see nothing but silence."""
        run("ip", "-n", self.name, "link", "set", "dev", DEVICE, "down")

    def mend(self) -> None:
        """Bring the link up again, whether it is down or not."""
        run("ip", "-n", self.name, "link", "set", "dev", DEVICE, "up")

    @contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Let no more than ``rate`` ("1gbit") out of this host."""
        shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
        run("tc", "-n", self.name, "qdisc", "replace", "dev", DEVICE, *shape)
        try:
            yield
        finally:
            run("tc", "-n", self.name, "qdisc", "del", "dev", DEVICE, "root")

    def received(self) -> int:
        """Bytes that have come over the link."""
        with self.inside():
            lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{DEVICE}:"))


class Lan:
    """Hosts on one switch, which is a bridge in a namespace of its own.

    Args:
        mark: what the names of its namespaces begin with.
        names: of its hosts.
    """

    def __init__(self, mark: str, names: Sequence[str]) -> None:
        self._mark = mark
        self._switch = f"{mark}-switch"
        self.hosts = {name: Host(f"{mark}-{name}", f"10.77.0.{number}") for number, name in enumerate(names, start=1)}

    @classmethod
    @contextmanager
    def made(cls, *names: str) -> Iterator[Lan]:
        """A network that lasts as long as the context."""
        _remove_orphans()
        # The number of this process lets the next one find what was left by a process that was killed.
        lan = cls(f"{PREFIX}-{os.getpid()}", names)
        with ExitStack() as stack:
            lan._add(stack, lan._switch)
            run("ip", "-n", lan._switch, "link", "add", "name", "lan", "type", "bridge")
            run("ip", "-n", lan._switch, "link", "set", "dev", "lan", "up")
            for name, host in lan.hosts.items():
                lan._add(stack, host.name)
                ends = ("name", name, "type", "veth", "peer", "name", DEVICE, "netns", host.name)
                run("ip", "-n", lan._switch, "link", "add", *ends)
                run("ip", "-n", lan._switch, "link", "set", "dev", name, "master", "lan", "up")
                run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", DEVICE)
                run("ip", "-n", host.name, "link", "set", "dev", "lo", "up")
                host.mend()
            yield lan

    @classmethod
    def joined(cls) -> Lan | None:
        """The network on whose first host this process was started; None where it was started on none."""
        words = os.environ.get(VARIABLE, "").split()
        return cls(words[0], words[1:]) if words else None

    def session(self, *arguments: str) -> None:
        """Run the tests marked ``apart`` that pytest finds by ``arguments``, in a process on the first host."""
        first = next(iter(self.hosts.values()))
        command = first.command(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments)
        environment = {**os.environ, VARIABLE: " ".join([self._mark, *self.hosts])}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert not done.returncode, done.stdout + done.stderr

    @contextmanager
    def parted(self, *names: str) -> Iterator[None]:
        """Let no frame pass between these hosts; all others are reached by them as before."""
        self._isolate(names, "on")
        try:
            yield
        finally:
            self._isolate(names, "off")

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """Pull the switch's end of a host's cable: nobody is told anything but that the carrier is gone."""
        run("ip", "-n", self._switch, "link", "set", "dev", name, "down")
        try:
            yield
        finally:
            run("ip", "-n", self._switch, "link", "set", "dev", name, "up")

    def _isolate(self, names: Sequence[str], state: str) -> None:
        for name in names:
            run("bridge", "-n", self._switch, "link", "set", "dev", name, "isolated", state)

    @staticmethod
    def _add(stack: ExitStack, name: str) -> None:
        run("ip", "netns", "add", name)
        stack.callback(run, "ip", "netns", "delete", name)


@cache
def why_not() -> str:
    """Why this machine, or this user, can have no such hosts; empty where they can be had."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if missing:
        return f"network namespaces need iproute2, and {', '.join(missing)} is not here"
    if os.geteuid():
        return "network namespaces need root"
    try:
        with Lan.made("a", "b") as lan, lan.parted("a", "b"), lan.hosts["a"].slowed("1gbit"), lan.hosts["b"].inside():
            return ""
    except AssertionError as error:
        # A fault of this module must not look like that.
        if not any(words in str(error) for words in REFUSALS):
            raise
        return f"network namespaces do not work here: {error}"


def _remove_orphans() -> None:
    for entry in NAMED.glob(f"{PREFIX}-*-*") if NAMED.is_dir() else ():
        owner = entry.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            # Another process may be at it as well.
            with suppress(AssertionError):
                run("ip", "netns", "delete", entry.name)
