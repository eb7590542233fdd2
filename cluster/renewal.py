"""Replaces all of a cluster that is up, by its own or another configuration, or by the release that is installed now.

The supervisor goes first, so that the release that is there now decides how the rest is replaced: workers one by one,
and then the router, whose port the next one shares before it leaves (:mod:`cluster.succession`). Tokens need no
supervisor, and one that is gone for good is made anew by this too.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import msgspec

from cluster.config import ClusterConfig
from cluster.operations import POLL_SECONDS, Operator, operator
from cluster.port import free_hub_port, port_of
from cluster.progress import Progress, Step, silent
from cluster.state import ClusterState, StateStore
from cluster.supervisor import SUPERVISOR_NAME, SupervisorOrder, SupervisorReport, create_supervisor, saved_record
from protocol.codec import SPOKEN
from protocol.errors import ClusterError, ConfigError, StartFailed, VersionMismatch

SUPERVISOR_SECONDS = 60.0
"""For one to end, and for the next one to answer."""


def restart(
    name: str,
    config: ClusterConfig | None = None,
    progress: Progress = silent,
    *,
    timeout: float = 1800.0,
    store: StateStore | None = None,
) -> SupervisorReport:
    """Replace every process, one by one, while the others serve.

    Args:
        name: of the cluster.
        config: of the new processes; None keeps the one there is. How many workers there are stays as it is.
        progress: told of each step.
        timeout: seconds to wait.
        store: where the cluster is recorded.

    Raises:
        ConfigError: ``config`` changes what only a cluster that comes up can take; names it.
        VersionMismatch: workers of the release that is installed now could not speak with the router that is up.
        StartFailed: a new supervisor did not begin; the cluster serves, and this may be tried again.
        ClusterNotFound, ClusterError: as they say.
    """
    store = StateStore() if store is None else store
    with operator(name, store) as (asked, state, ray):
        if state.wire.common(SPOKEN) is None:
            raise VersionMismatch(
                f"the router of cluster {name!r} speaks wire version {state.wire}, workers that begin now {SPOKEN}: "
                f"kvferry down {name}, and up again"
            )
        record = saved_record(name)
        if record is None:
            raise ClusterError(f"Ray keeps no record of cluster {name!r}: kvferry down {name}, and up again")
        present = record.config
        if config is not None:
            check_standing(config, present)
        state = _with_spare_hub(state, present, store)
        _replace_supervisor(ray, asked, state, present, progress)
        asked.ask("restart", msgspec.json.encode(config))
        report = asked.until(lambda report: report.settled, progress, timeout)
        stays = [member.name for member in report.members if member.fixed]
        for each in stays:
            progress(Step(actor=each, stage="stays: it is of a release that cannot share its port", fraction=1.0))
        if not stays:
            store.save(msgspec.structs.replace(state, wire=SPOKEN))
        return report


def check_standing(config: ClusterConfig, present: ClusterConfig) -> None:
    """Raise ConfigError, with the field, where ``config`` changes what a cluster that is up was told for good."""
    for section in ("name", "model", "served_name", "ray"):
        if getattr(config, section) != getattr(present, section):
            raise _stands(section)
    # Clients and workers were told of these; while both routers take connections, both must answer them alike.
    for field in ("host", "port", "hub_port"):
        if getattr(config.router, field) != getattr(present.router, field):
            raise _stands(f"router.{field}")
    if bool(config.router.tls_certificate) != bool(present.router.tls_certificate):
        raise _stands("router.tls_certificate")


def _stands(field: str) -> ConfigError:
    return ConfigError(f"{field} cannot change in a cluster that is up; bring it down and up again", field=field)


def _with_spare_hub(state: ClusterState, config: ClusterConfig, store: StateStore) -> ClusterState:
    """A cluster that an earlier release brought up has but one hub."""
    if state.spare_hub:
        return state
    taken = {port_of(state.url), port_of(state.hub)}
    spare = f"{state.hub.rpartition(':')[0]}:{free_hub_port(config, taken)}"
    state = msgspec.structs.replace(state, spare_hub=spare)
    store.save(state)
    return state


def _replace_supervisor(
    ray: Any, asked: Operator, state: ClusterState, config: ClusterConfig, progress: Progress
) -> None:
    """End the present one and have one of the release that is there now go on from its record."""
    progress(Step(actor=SUPERVISOR_NAME, stage="restarting"))
    order = SupervisorOrder(
        name=state.name, config=config, port=port_of(state.url), routers=state.hubs, secret=state.secret
    )
    with suppress(ValueError):  # there may be none
        ray.kill(ray.get_actor(SUPERVISOR_NAME), no_restart=True)
    deadline = time.monotonic() + SUPERVISOR_SECONDS
    while True:
        try:
            create_supervisor(ray, order)
            break
        except ValueError as error:  # Ray's word for a name that is taken
            if time.monotonic() > deadline:
                raise StartFailed(f"{SUPERVISOR_NAME}: the former one does not end: {error}") from error
            time.sleep(POLL_SECONDS)
    if not asked.report().begun:
        raise StartFailed(f"{SUPERVISOR_NAME} has begun without a record of cluster {state.name!r}")
    progress(Step(actor=SUPERVISOR_NAME, stage="ready", fraction=1.0))
