"""What is remembered on disk about a cluster that is up: one JSON file per cluster.

Life cycle: :meth:`StateStore.reserve` claims the name before anything is started, :meth:`StateStore.save` replaces the
record as the cluster comes up, :meth:`StateStore.remove` ends it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import msgspec
import platformdirs
import psutil

from cluster.phases import Phase
from protocol.errors import ClusterError, ClusterExists, ClusterNotFound
from protocol.versions import UNTOLD, Versions

MAX_STATE_BYTES = 1 << 20
NONE_UP = "no cluster is up here; one that somebody else, or another machine, has brought up: kvferry top URL"
CLOCK_SLACK_SECONDS = 2.0


class ProcessMark(msgspec.Struct, frozen=True, kw_only=True):
    """One process, told from a later one with the same pid by its creation time.

    Attributes:
        pid: process id.
        created: creation time, seconds since the epoch, as the operating system says.
    """

    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        """The mark of a live process."""
        return cls(pid=pid, created=psutil.Process(pid).create_time())

    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            process = psutil.Process(self.pid)
            # The clock may have been set since, and creation times are reckoned from the boot time.
            same = abs(process.create_time() - self.created) < CLOCK_SLACK_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The Ray node a cluster runs on.

    Attributes:
        address: host:port of Ray's control store; "" until it is known.
        token: Ray's access token for it; "" where the cluster was joined.
        temp_dir: of our own node; "" where the cluster was joined.
        daemon: process of our own node; None where the cluster was joined.
    """

    address: str = ""
    token: str = ""
    temp_dir: str = ""
    daemon: ProcessMark | None = None

    @property
    def owned(self) -> bool:
        """Whether the node was started for this cluster alone."""
        return bool(self.temp_dir)


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster that is up, or coming up.

    Attributes:
        name: of the cluster.
        starter: the process that brings it up.
        created: seconds since the epoch.
        node: see there; None before it is known.
        actors: name of each actor, router first.
        url: of the router's HTTP server; "" until it is known.
        hub: hub endpoint of the router that the cluster came up with.
        spare_hub: that of the one that takes its place; the next one has the first again. "" of a cluster that an
            earlier release brought up.
        model: what clients call the model.
        transport: of the KV blocks.
        secret: what every process of the cluster must know to be spoken with; the file is readable by its owner alone.
        ready: whether it came up.
        phases: how long each phase of its coming up took.
        wire: versions of the wire that its router speaks.
    """

    name: str
    starter: ProcessMark
    created: float
    node: NodeState | None = None
    actors: tuple[str, ...] = ()
    url: str = ""
    hub: str = ""
    spare_hub: str = ""
    model: str = ""
    transport: str = ""
    secret: str = ""
    ready: bool = False
    phases: tuple[Phase, ...] = ()
    wire: Versions = UNTOLD

    @property
    def hubs(self) -> tuple[str, ...]:
        """Every hub endpoint that workers are told of, or those that are known yet."""
        return tuple(each for each in (self.hub, self.spare_hub) if each)

    def __repr__(self) -> str:
        # Whatever is logged or raised with a state in it must not tell the secret.
        return f"ClusterState(name={self.name!r}, ready={self.ready})"


class StateStore:
    """The folder of state files.

    Args:
        folder: None takes ``$KVFERRY_STATE_DIR``, or else the user's state folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        default = os.environ.get("KVFERRY_STATE_DIR") or platformdirs.user_state_dir("kvferry")
        self.folder = Path(default) if folder is None else folder

    def path(self, name: str) -> Path:
        """The file of a cluster."""
        return self.folder / f"{name}.json"

    def names(self) -> list[str]:
        """Every cluster with a file, sorted."""
        return sorted(file.stem for file in self.folder.glob("*.json"))

    def reserve(self, name: str) -> ClusterState:
        """Claim ``name`` for this process.

        Raises:
            ClusterExists: it is taken.
        """
        state = ClusterState(name=name, starter=ProcessMark.of(os.getpid()), created=time.time())
        written = self._write(state)
        try:
            os.link(written, self.path(name))
        except FileExistsError as error:
            raise ClusterExists(f"cluster {name!r} is already up; bring it down with: kvferry down {name}") from error
        finally:
            written.unlink()
        return state

    def save(self, state: ClusterState) -> None:
        """Replace the record of ``state.name``."""
        self._write(state).replace(self.path(state.name))

    def load(self, name: str) -> ClusterState:
        """The record of a cluster.

        Raises:
            ClusterNotFound: there is none; lists those there are.
            ClusterError: the file is damaged.
        """
        file = self.path(name)
        try:
            with file.open("rb") as stream:
                raw = stream.read(MAX_STATE_BYTES)
        except OSError as error:
            known = ", ".join(self.names()) or "none"
            raise ClusterNotFound(f"no cluster {name!r} is up (clusters that are: {known})") from error
        try:
            return msgspec.json.decode(raw, type=ClusterState)
        except msgspec.DecodeError as error:
            raise ClusterError(f"state file {file} is damaged: {error}") from error

    def only(self) -> str:
        """The name of the one cluster that is up.

        Raises:
            ClusterNotFound: there is none, or more than one.
        """
        names = self.names()
        if len(names) == 1:
            return names[0]
        raise ClusterNotFound(f"several clusters are up, name one of: {', '.join(names)}" if names else NONE_UP)

    def remove(self, name: str) -> None:
        """Forget a cluster; no error when it is not known."""
        self.path(name).unlink(missing_ok=True)

    def _write(self, state: ClusterState) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        # The file holds Ray's access token: mkstemp makes it readable by its owner alone.
        handle, name = tempfile.mkstemp(prefix=f".{state.name}.", dir=self.folder)
        with os.fdopen(handle, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(state), indent=2))
        return Path(name)
