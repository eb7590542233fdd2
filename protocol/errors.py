"""The one error tree of kvferry.

Each class has a stable ``code`` (it travels on the wire and in HTTP answers) and says whether a fresh attempt may
succeed (``retryable``). Exceptions of other libraries are mapped to these at the edge, with ``from``.

::

    KVFerryError                      internal_error
    ├── InvalidRequest                invalid_request            the client sent something wrong; names the field
    │   ├── UnknownModel              model_not_found
    │   ├── UnknownRequest            request_not_found
    │   ├── ContextLengthExceeded     context_length_exceeded
    │   ├── UnsupportedField          unsupported_field
    │   ├── Unauthorized              unauthorized               no key, or one that is not known
    │   ├── PayloadTooLarge           payload_too_large
    │   └── UnsupportedMediaType      unsupported_media_type
    ├── RequestCancelled              request_cancelled
    ├── ServiceError                  service_error
    │   ├── NoWorkerAvailable         no_worker_available
    │   ├── Overloaded                overloaded                 retryable
    │   │   ├── RateLimited           rate_limited               retryable, after a while
    │   │   └── TargetOutOfReach      target_out_of_reach        retryable, after a while
    │   ├── DeadlineExceeded          deadline_exceeded
    │   ├── AttemptsExhausted         attempts_exhausted
    │   └── ConnectionFailed          connection_failed          retryable: a client could not reach the router
    ├── WorkerError                   worker_error               retryable
    │   ├── WorkerLost                worker_lost                retryable
    │   ├── Preempted                 preempted                  retryable; does not count as an attempt
    │   ├── EngineFailure             engine_failure             retryable
    │   └── WorkerDraining            worker_draining            retryable
    ├── TransferError                 transfer_error             retryable
    │   ├── LeaseRefused              lease_refused              retryable
    │   ├── LeaseExpired              lease_expired              retryable
    │   ├── ImportExpired             import_expired             retryable
    │   ├── ChannelLost               channel_lost               retryable
    │   ├── TicketRejected            ticket_rejected            retryable
    │   ├── IntegrityMismatch         integrity_mismatch         retryable
    │   ├── LayoutMismatch            layout_mismatch
    │   ├── UnknownTransport          unknown_transport
    │   └── TransportRefused          transport_refused          retryable
    ├── ProtocolError                 protocol_error
    │   ├── VersionMismatch           version_mismatch
    │   ├── AuthenticationFailed      authentication_failed
    │   └── MalformedFrame            malformed_frame
    ├── ConfigError                   config_error               names the field and the value
    ├── ModelError                    model_error
    │   ├── UnsupportedArchitecture   unsupported_architecture
    │   ├── WeightMismatch            weight_mismatch
    │   └── CheckpointUnavailable     checkpoint_unavailable
    ├── PoolExhausted                 pool_exhausted             retryable
    ├── ClusterError                  cluster_error
    │   ├── ClusterExists             cluster_exists
    │   ├── ClusterNotFound           cluster_not_found
    │   └── StartFailed               start_failed
    └── InvariantViolation            invariant_violation        a fault of ours
        └── IllegalTransition         illegal_transition
"""

from __future__ import annotations

from typing import ClassVar


class KVFerryError(Exception):
    """Root of the tree.

    Attributes:
        code: stable identifier, the same in every process and release.
        retryable: whether a fresh attempt of the same work may succeed.
        message: one sentence for a person.
        field: the name of the offending input field, where there is one.
    """

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidRequest(KVFerryError):
    """The caller sent something that can never be served; ``field`` names what."""

    code = "invalid_request"


class UnknownModel(InvalidRequest):
    """The named model is not served here."""

    code = "model_not_found"


class UnknownRequest(InvalidRequest):
    """The named request is not known here, or not any more."""

    code = "request_not_found"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output do not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedField(InvalidRequest):
    """A field that OpenAI's API knows and this server does not serve."""

    code = "unsupported_field"


class Unauthorized(InvalidRequest):
    """The caller shows no key, or one that is not known here."""

    code = "unauthorized"


class PayloadTooLarge(InvalidRequest):
    """A body, header or list is longer than its bound."""

    code = "payload_too_large"


class UnsupportedMediaType(InvalidRequest):
    """A body is said to be something else than it has to be."""

    code = "unsupported_media_type"


class RequestCancelled(KVFerryError):
    """The client went away or asked to stop."""

    code = "request_cancelled"


class ServiceError(KVFerryError):
    """The service as a whole could not answer a valid request."""

    code = "service_error"


class NoWorkerAvailable(ServiceError):
    """No live worker of a needed role."""

    code = "no_worker_available"


class Overloaded(ServiceError):
    """A bounded queue is full; try again later.

    Attributes:
        retry_after: seconds until the caller may ask again; 1 where that is not known.
    """

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, retry_after: float = 1.0, *, field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.retry_after = retry_after


class RateLimited(Overloaded):
    """The caller's key has used up what it may ask for."""

    code = "rate_limited"


class TargetOutOfReach(Overloaded):
    """No worker is predicted to give the first token in the time that the request allows for it."""

    code = "target_out_of_reach"


class DeadlineExceeded(ServiceError):
    """The request's own time limit passed."""

    code = "deadline_exceeded"


class AttemptsExhausted(ServiceError):
    """Every allowed attempt failed; the message tells why the last one did."""

    code = "attempts_exhausted"


class ConnectionFailed(ServiceError):
    """A client could not reach the router, or lost it in mid-answer."""

    code = "connection_failed"
    retryable = True


class WorkerError(KVFerryError):
    """A worker could not finish its leg."""

    code = "worker_error"
    retryable = True


class WorkerLost(WorkerError):
    """A worker died, stopped answering, or came back as a new incarnation."""

    code = "worker_lost"


class Preempted(WorkerError):
    """A decode worker gave the request back for a fresh prefill, to make room for older ones."""

    code = "preempted"


class EngineFailure(WorkerError):
    """The forward step raised."""

    code = "engine_failure"


class WorkerDraining(WorkerError):
    """The worker takes no new work."""

    code = "worker_draining"


class TransferError(KVFerryError):
    """A KV handoff could not be finished."""

    code = "transfer_error"
    retryable = True


class LeaseRefused(TransferError):
    """The lease is unknown, closed, or belongs to another incarnation."""

    code = "lease_refused"


class LeaseExpired(TransferError):
    """The prefill side waited its lease time and nobody settled."""

    code = "lease_expired"


class ImportExpired(TransferError):
    """The decode side waited its time and the blocks did not all land."""

    code = "import_expired"


class ChannelLost(TransferError):
    """The connection under a transfer broke or was aborted."""

    code = "channel_lost"


class TicketRejected(TransferError):
    """The receiver does not know this ticket, or a span lies outside what it granted."""

    code = "ticket_rejected"


class IntegrityMismatch(TransferError):
    """Blocks, bytes or generations that arrived are not those that were granted."""

    code = "integrity_mismatch"


class LayoutMismatch(TransferError):
    """The two pools differ in a way no plan covers; names both values."""

    code = "layout_mismatch"
    retryable = False


class UnknownTransport(TransferError):
    """No transport is registered for this URI scheme."""

    code = "unknown_transport"
    retryable = False


class TransportRefused(TransferError):
    """The receiver cannot read by this transport what the sender offers; another one may do."""

    code = "transport_refused"


class ProtocolError(KVFerryError):
    """A frame that the peer should not have sent."""

    code = "protocol_error"


class VersionMismatch(ProtocolError):
    """The peer speaks a wire version outside the supported range."""

    code = "version_mismatch"


class AuthenticationFailed(ProtocolError):
    """The peer does not know the cluster's secret."""

    code = "authentication_failed"


class MalformedFrame(ProtocolError):
    """Bytes that do not decode to a known message within its bounds."""

    code = "malformed_frame"


class ConfigError(KVFerryError):
    """A configuration value is wrong; names the field and the value."""

    code = "config_error"


class ModelError(KVFerryError):
    """A model cannot be loaded."""

    code = "model_error"


class UnsupportedArchitecture(ModelError):
    """No model family is registered for this architecture; lists the known ones."""

    code = "unsupported_architecture"


class WeightMismatch(ModelError):
    """A tensor is missing, extra or of the wrong shape; names it."""

    code = "weight_mismatch"


class CheckpointUnavailable(ModelError):
    """The checkpoint is not on disk, or failed its digest."""

    code = "checkpoint_unavailable"


class PoolExhausted(KVFerryError):
    """Fewer free blocks than were asked for; nothing was taken."""

    code = "pool_exhausted"
    retryable = True


class ClusterError(KVFerryError):
    """The cluster could not be brought to the wanted state."""

    code = "cluster_error"


class ClusterExists(ClusterError):
    """A cluster of this name is already up."""

    code = "cluster_exists"


class ClusterNotFound(ClusterError):
    """No cluster of this name is up."""

    code = "cluster_not_found"


class StartFailed(ClusterError):
    """A process did not become ready within its time; names it and why."""

    code = "start_failed"


class InvariantViolation(KVFerryError):
    """Something that cannot happen did: a fault of ours, never the caller's."""

    code = "invariant_violation"


class IllegalTransition(InvariantViolation):
    """An event that the transition table does not allow in this state; carries the key's story."""

    code = "illegal_transition"


def _collect(root: type[KVFerryError]) -> dict[str, type[KVFerryError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_collect(child))
    return found


ERRORS_BY_CODE: dict[str, type[KVFerryError]] = _collect(KVFerryError)
"""Every class of the tree by its code."""


def error_from_code(code: str, message: str, *, field: str | None = None) -> KVFerryError:
    """Rebuild an error that travelled as ``(code, message, field)``; an unknown code gives the root class."""
    return ERRORS_BY_CODE.get(code, KVFerryError)(message, field=field)
