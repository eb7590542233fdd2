"""How every KV connection begins: versions, who is there, and the proof that both ends know the cluster's secret.

Each end draws a nonce and answers the other's with an HMAC-SHA256 over both nonces, both hellos and its role, under the
secret. So what was heard on another connection, or by another transport, proves nothing on this one, no clock is
compared, and neither end can be talked out of it, or into another name, by a changed hello. The receiver keeps nothing
for a stranger but the connection itself, and no length that a stranger names is above MAX_NAME.

There is no I/O here. Each side is a generator: it yields bytes that are to be sent, or the number of bytes that it
wants next and is sent them; it returns whom it has met. All fields are single bytes or strings of bytes::

    hello     both ways, once    magic "KVFH", scheme, lowest version, highest version, 1 if the cluster has a secret,
                                 else 0, length of the name, then the name; if there is a secret the next three follow:
    challenge to the sender      magic "KVFC", nonce
    proof     to the receiver    magic "KVFP", nonce, HMAC
    welcome   to the sender      magic "KVFW", 1 if the proof was accepted, HMAC; else 0 and zeros
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Generator
from dataclasses import dataclass

from kv_transfer.transport import MAX_NAME, NAME, TransportConfig
from protocol.errors import AuthenticationFailed, MalformedFrame, VersionMismatch

NONCE_BYTES = 32
PROOF_BYTES = 32

HELLO = struct.Struct("!4s8sBBBB")
CHALLENGE = struct.Struct("!4s32s")
PROOF = struct.Struct("!4s32s32s")
WELCOME = struct.Struct("!4sB32s")

HELLO_MAGIC = b"KVFH"
CHALLENGE_MAGIC = b"KVFC"
PROOF_MAGIC = b"KVFP"
WELCOME_MAGIC = b"KVFW"


@dataclass(frozen=True, slots=True)
class Met:
    """What one end knows when the hello is over.

    Attributes:
        name: of the peer.
        key: 32 bytes that only these two ends can reckon, fresh for each connection; empty where there is no secret.
    """

    name: str
    key: bytes


Talk = Generator[bytes | int, bytes, Met]
"""One side of it; see the module."""


@dataclass(frozen=True, slots=True)
class Party:
    """One end, as it introduces itself.

    Attributes:
        scheme: of the transport, at most 8 bytes.
        versions: of its wire, the lowest and the highest that this end speaks.
        config: its name and its secret.
    """

    scheme: str
    versions: tuple[int, int]
    config: TransportConfig

    @property
    def guarded(self) -> bool:
        """Whether there is a secret."""
        return bool(self.config.secret)

    def hello(self) -> bytes:
        """The first message."""
        name = self.config.name.encode()
        return HELLO.pack(HELLO_MAGIC, self.scheme.encode(), *self.versions, self.guarded, len(name)) + name


@dataclass(frozen=True, slots=True)
class Heard:
    """A hello that came.

    Attributes:
        raw: its bytes.
        guarded: whether the peer has a secret.
        name: of the peer.
    """

    raw: bytes
    guarded: bool
    name: str


def greet(me: Party) -> Talk:
    """The sender's side.

    Raises:
        VersionMismatch: no common version; names both ranges.
        MalformedFrame: something else answers there.
        AuthenticationFailed: one end has no secret, or not the same one.
    """
    mine = me.hello()
    yield mine
    theirs = yield from _hello(me)
    if theirs.guarded != me.guarded:
        raise AuthenticationFailed(
            "the receiver does not know the cluster's secret"
            if me.guarded
            else "the receiver wants the cluster's secret"
        )
    if me.guarded:
        challenge = _parsed(CHALLENGE, CHALLENGE_MAGIC, (yield CHALLENGE.size))[0]
        nonce = secrets.token_bytes(NONCE_BYTES)
        story = (mine, theirs.raw, challenge, nonce)
        yield PROOF.pack(PROOF_MAGIC, nonce, _proof(me, b"sender", *story))
        accepted, proof = _parsed(WELCOME, WELCOME_MAGIC, (yield WELCOME.size))
        if not accepted:
            raise AuthenticationFailed("the receiver has another secret")
        if not hmac.compare_digest(proof, _proof(me, b"receiver", *story)):
            raise AuthenticationFailed("the receiver does not know the cluster's secret")
        return Met(theirs.name, _proof(me, b"key", *story))
    return Met(theirs.name, b"")


def admit(me: Party) -> Talk:
    """The receiver's side.

    Raises:
        VersionMismatch: no common version; names both ranges.
        MalformedFrame: the peer speaks something else.
        AuthenticationFailed: the peer does not know the secret, or there is one here only.
    """
    mine = me.hello()
    try:
        theirs = yield from _hello(me)
    except VersionMismatch:
        # The peer shall learn which versions there are before it is turned away.
        yield mine
        raise
    if theirs.guarded != me.guarded:
        yield mine
        raise AuthenticationFailed(
            "the peer knows no secret" if me.guarded else "the peer wants a secret, there is none"
        )
    if not me.guarded:
        yield mine
        return Met(theirs.name, b"")
    challenge = secrets.token_bytes(NONCE_BYTES)
    yield mine + CHALLENGE.pack(CHALLENGE_MAGIC, challenge)
    nonce, proof = _parsed(PROOF, PROOF_MAGIC, (yield PROOF.size))
    story = (theirs.raw, mine, challenge, nonce)
    if not hmac.compare_digest(proof, _proof(me, b"sender", *story)):
        yield WELCOME.pack(WELCOME_MAGIC, False, bytes(PROOF_BYTES))
        raise AuthenticationFailed("the peer does not know the cluster's secret")
    yield WELCOME.pack(WELCOME_MAGIC, True, _proof(me, b"receiver", *story))
    return Met(theirs.name, _proof(me, b"key", *story))


def _hello(me: Party) -> Generator[bytes | int, bytes, Heard]:
    head = yield HELLO.size
    magic, scheme, lowest, highest, guarded, length = HELLO.unpack(head)
    if magic != HELLO_MAGIC or scheme.rstrip(b"\0") != me.scheme.encode() or guarded > 1 or lowest > highest:
        raise MalformedFrame(f"not a hello of the {me.scheme} transport: {head!r}")
    if min(highest, me.versions[1]) < max(lowest, me.versions[0]):
        ranges = f"peer speaks {lowest} to {highest}, this process {me.versions[0]} to {me.versions[1]}"
        raise VersionMismatch(f"no common version of the {me.scheme} transport: {ranges}")
    if length > MAX_NAME:
        raise MalformedFrame(f"a name of {length} bytes is longer than {MAX_NAME}", field="name")
    name = (yield length) if length else b""
    text = name.decode("ascii", "replace")
    if text and not NAME.fullmatch(text):
        raise MalformedFrame(f"not a name: {name!r}", field="name")
    return Heard(head + name, bool(guarded), text)


def _parsed(kind: struct.Struct, magic: bytes, data: bytes) -> tuple[bytes, ...]:
    found, *fields = kind.unpack(data)
    if found != magic:
        raise MalformedFrame(f"{magic.decode()} was to come on the KV connection, not {found!r}")
    return tuple(fields)


def _proof(me: Party, role: bytes, hello: bytes, answer: bytes, challenge: bytes, nonce: bytes) -> bytes:
    # A hello tells its own length, every other piece but the role has a fixed one, and the role comes last.
    said = b"".join((b"kvferry KV", hello, answer, challenge, nonce, role))
    return hmac.digest(me.config.secret.encode(), said, hashlib.sha256)
