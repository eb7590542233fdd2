"""Bytes of a request-plane frame: two magic bytes, one version byte, then a msgpack envelope.

A release speaks its own version and the one before, so that workers can be replaced one by one by those of the next
release. Nobody has to ask which a peer speaks: whoever connects begins with the older of its two, each frame says what
else its sender could be spoken to in, and from the answer on both use the highest that both know. So from one version
to the next fields are only added, at the end and with a default, or taken away where they had one; and what else is new
(a kind of message, a value of a ``Literal``) is not sent to a peer of the older one: kinds stand in :data:`SINCE` for
that.

History of the wire:

* 1 -- first version, not released yet. Since its first draft: ``Grant.addresses`` (several) in place of
  ``Grant.address``, ``Handover.transport``, ``WorkerLoad.transport_fallbacks``, ``Tokens.logprobs``,
  ``Heartbeat.transfer``, and in ``SamplingParams`` penalties, ``min_p``, ``logit_bias`` and ``logprobs``.
* 2 -- ``SamplingParams.grammar``; ``PromptLogprobs``, and ``Prefill.prompt_logprobs`` and ``prompt_logprobs_from`` that
  ask for them; ``Prefill.forks``, ``Reserve.forks`` and ``Handover.fork_tokens``: several continuations of one prompt
  cross as one; several tokens of one decode step in one message; ``WorkerLoad.used_slots``, ``empty_slots``,
  ``decode_turns``, ``draft_tokens`` and ``accepted_tokens``; ``Prefill.seniority``, ``Reserve.seniority``,
  ``Reserve.prefill_rate``, ``WorkerLoad.swaps`` and ``WorkerLoad.swapped_blocks``; ``KVLayout.scales``, and eight-bit
  types of ``KVLayout.dtype``.
* 3 -- ``WorkerProfile.prefills``, and ``Prefill`` to decode workers that have it; ``WorkerLoad.step_gaps``;
  ``KVFollow``, ``KVEvents``, ``KVSnapshot`` and ``Heartbeat.kv_sequence``: routers know what workers have cached;
  ``WorkerLoad.step_fixed`` and ``step_per_token``, ``WorkerProfile.step_tokens``.
* 4 -- ``Prefill.traceparent``, ``Reserve.traceparent``, ``WorkerLoad.spans_exported`` and ``spans_dropped``;
  ``WorkerProfile.max_sequences``; ``WorkerLoad.step_mean_tokens``.
* 5 -- ``Cancel.satisfied``, ``WorkerProfile.link_rate``, ``Envelope.speaks``; frames of version 4 are spoken too.
  ``Handover`` goes out with the last ship, no longer after its answer, so it has no ``ship`` and no ``transport`` any
  more: decode sees them itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from protocol.errors import KVFerryError, MalformedFrame, VersionMismatch
from protocol.ids import Peer
from protocol.messages import Envelope, Message
from protocol.versions import Versions

MAGIC = b"KF"
VERSION = 5
"""The version of this release."""
OLDEST = 4
"""The version of the release before, which this one speaks as well."""
SPOKEN = Versions(OLDEST, VERSION)
SINCE: Mapping[type[Message], int] = MappingProxyType({})
"""Kinds of messages that the oldest version does not have, with the first that does."""
HEADER = MAGIC + bytes([VERSION])
MAX_FRAME_BYTES = 16 << 20
"""Longest frame that is sent or accepted; a million token ids fit."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(sender: Peer, body: Message, version: int = VERSION) -> bytes:
    """The frame of ``body`` from ``sender``, for a peer that speaks ``version``.

    Raises:
        MalformedFrame: the frame would be longer than MAX_FRAME_BYTES.
        VersionMismatch: that version has no such message.
    """
    if SINCE.get(type(body), version) > version:
        raise VersionMismatch(f"wire version {version} has no {type(body).__name__}")
    buffer = bytearray(MAGIC)
    buffer.append(version)
    _encoder.encode_into(Envelope(sender, body, SPOKEN), buffer, len(HEADER))
    if len(buffer) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"frame of {len(buffer)} bytes is over the bound of {MAX_FRAME_BYTES}")
    return bytes(buffer)


def decode(frame: bytes | memoryview) -> Envelope:
    """The envelope in ``frame``.

    Raises:
        VersionMismatch: it is of a version that is not spoken here; names both.
        MalformedFrame: it is not a frame of ours, or breaks a bound.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"frame of {len(frame)} bytes is over the bound of {MAX_FRAME_BYTES}")
    head = bytes(frame[: len(HEADER)])
    if head[:2] != MAGIC or len(head) != len(HEADER):
        raise MalformedFrame(f"not a kvferry frame: it begins with {head!r}")
    if not OLDEST <= head[2] <= VERSION:
        raise VersionMismatch(f"peer speaks wire version {head[2]}, this process speaks {SPOKEN}")
    try:
        return _decoder.decode(memoryview(frame)[len(HEADER) :])
    except (msgspec.MsgspecError, KVFerryError, ValueError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"frame does not decode: {error}") from error
