"""Bytes of a request-plane frame: two magic bytes, one version byte, then a msgpack envelope.

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
* 5 -- ``Cancel.satisfied``, ``WorkerProfile.link_rate``.
"""

from __future__ import annotations

import msgspec

from protocol.errors import KVFerryError, MalformedFrame, VersionMismatch
from protocol.ids import Peer
from protocol.messages import Envelope, Message

MAGIC = b"KF"
VERSION = 5
"""The one version this release speaks."""
HEADER = MAGIC + bytes([VERSION])
MAX_FRAME_BYTES = 16 << 20
"""Longest frame that is sent or accepted; a million token ids fit."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(sender: Peer, body: Message) -> bytes:
    """The frame of ``body`` from ``sender``.

    Raises:
        MalformedFrame: the frame would be longer than MAX_FRAME_BYTES.
    """
    buffer = bytearray(HEADER)
    _encoder.encode_into(Envelope(sender, body), buffer, len(HEADER))
    if len(buffer) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"frame of {len(buffer)} bytes is over the bound of {MAX_FRAME_BYTES}")
    return bytes(buffer)


def decode(frame: bytes | memoryview) -> Envelope:
    """The envelope in ``frame``.

    Raises:
        VersionMismatch: it begins with another version; names both.
        MalformedFrame: it is not a frame of ours, or breaks a bound.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise MalformedFrame(f"frame of {len(frame)} bytes is over the bound of {MAX_FRAME_BYTES}")
    head = bytes(frame[: len(HEADER)])
    if head[:2] != MAGIC or len(head) != len(HEADER):
        raise MalformedFrame(f"not a kvferry frame: it begins with {head!r}")
    if head[2] != VERSION:
        raise VersionMismatch(f"peer speaks wire version {head[2]}, this process speaks {VERSION}")
    try:
        return _decoder.decode(memoryview(frame)[len(HEADER) :])
    except (msgspec.MsgspecError, KVFerryError, ValueError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"frame does not decode: {error}") from error
