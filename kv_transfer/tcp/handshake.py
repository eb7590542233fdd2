"""How a connection begins: versions, and the proof that both ends know the cluster's secret, where there is one.

Each end draws a nonce and answers the other's with an HMAC-SHA256 over both, its role and both hellos, under the
secret. So what was heard on another connection proves nothing on this one, no clock is compared, and neither end can
be talked out of it by a changed hello. The receiver keeps nothing for a stranger but the connection itself.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator

from kv_transfer.tcp import wire
from kv_transfer.tcp.steps import Connected, Conversation, Cursor, Fill, Inbox, Read, Step, Write
from kv_transfer.transport import TransportConfig
from protocol.errors import AuthenticationFailed, VersionMismatch

Buffer = bytes | bytearray | memoryview


def greet(config: TransportConfig) -> Conversation:
    """The sender's side, from the connect on.

    Raises:
        ChannelLost: there is no connection.
        VersionMismatch: no common version.
        MalformedFrame: something else answers there.
        AuthenticationFailed: one end has no secret, or not the same one.
    """
    guarded = bool(config.secret)
    yield Connected(timeout=config.timeout)
    mine = wire.pack_hello(guarded=guarded)
    yield _write(mine, config)
    theirs = yield from _read(wire.HELLO.size, config)
    wire.check_hello(theirs)
    if wire.is_guarded(theirs) != guarded:
        raise AuthenticationFailed(
            "the receiver does not know the cluster's secret" if guarded else "the receiver wants the cluster's secret"
        )
    if guarded:
        challenge = wire.parse_challenge((yield from _read(wire.CHALLENGE.size, config)))
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        story = (mine, theirs, challenge, nonce)
        yield _write(wire.PROOF.pack(wire.PROOF_MAGIC, nonce, _proof(config.secret, b"sender", *story)), config)
        proof = wire.parse_welcome((yield from _read(wire.WELCOME.size, config)))
        if proof is None:
            raise AuthenticationFailed("the receiver has another secret")
        if not hmac.compare_digest(proof, _proof(config.secret, b"receiver", *story)):
            raise AuthenticationFailed("the receiver does not know the cluster's secret")
    return None


def admit(inbox: Inbox, config: TransportConfig) -> Generator[Step, bool, None]:
    """The receiver's side.

    Raises:
        ChannelLost: the peer went away, or took too long.
        VersionMismatch: no common version.
        MalformedFrame: the peer speaks something else.
        AuthenticationFailed: the peer does not know the secret, or there is one here only.
    """
    guarded = bool(config.secret)
    yield Fill(inbox, wire.HELLO.size, timeout=config.timeout)
    theirs = bytes(inbox.take(wire.HELLO.size))
    mine = wire.pack_hello(guarded=guarded)
    try:
        wire.check_hello(theirs)
    except VersionMismatch:
        # The peer shall learn which versions there are before it is turned away.
        yield _write(mine, config)
        raise
    if wire.is_guarded(theirs) != guarded:
        yield _write(mine, config)
        raise AuthenticationFailed("the peer knows no secret" if guarded else "the peer wants a secret, there is none")
    if not guarded:
        yield _write(mine, config)
        return
    challenge = secrets.token_bytes(wire.NONCE_BYTES)
    yield _write(mine + wire.CHALLENGE.pack(wire.CHALLENGE_MAGIC, challenge), config)
    if inbox.held < wire.PROOF.size:
        yield Fill(inbox, wire.PROOF.size, timeout=config.timeout)
    nonce, proof = wire.parse_proof(inbox.take(wire.PROOF.size))
    story = (theirs, mine, challenge, nonce)
    if not hmac.compare_digest(proof, _proof(config.secret, b"sender", *story)):
        yield _write(wire.pack_welcome(None), config)
        raise AuthenticationFailed("the peer does not know the cluster's secret")
    yield _write(wire.pack_welcome(_proof(config.secret, b"receiver", *story)), config)


def _proof(secret: str, role: bytes, hello: Buffer, answer: Buffer, challenge: Buffer, nonce: Buffer) -> bytes:
    # Every piece has a fixed length but the role, which comes last.
    said = b"".join((b"kvferry KV", hello, answer, challenge, nonce, role))
    return hmac.digest(secret.encode(), said, hashlib.sha256)


def _read(size: int, config: TransportConfig) -> Generator[Step, bool, bytearray]:
    buffer = bytearray(size)
    yield Read(Cursor([memoryview(buffer)]), timeout=config.timeout)
    return buffer


def _write(data: bytes, config: TransportConfig) -> Write:
    return Write(Cursor([memoryview(data)]), timeout=config.timeout)
