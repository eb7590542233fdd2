"""Keys of the request plane: CURVE, ZeroMQ's own encryption, for whoever knows the cluster's secret.

Both key pairs are drawn from the secret. CURVE has a client prove with its first frame that it knows the server's
public key, which is never sent; ours is known by the secret alone, so a stranger is not answered at all, and needs no
list of clients to be kept out by. What a hub and its peers say is encrypted under keys of the one connection, and a
record of it cannot be read by who learns the secret later. See https://rfc.zeromq.org/spec/26/.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85


@dataclass(frozen=True, slots=True)
class Pair:
    """One key pair, in ZeroMQ's Z85 letters.

    Attributes:
        public: the public key.
        private: the private key.
    """

    public: bytes = field(repr=False)
    private: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The keys of one cluster.

    Attributes:
        hub: of every bound socket.
        spoke: of every connected one.
    """

    hub: Pair
    spoke: Pair

    @classmethod
    def drawn_from(cls, secret: str) -> CurveKeys | None:
        """The keys of the cluster with that secret; None where there is none, and frames go in the clear."""
        return cls(_pair(secret, "hub"), _pair(secret, "spoke")) if secret else None

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that is to be bound hear nobody without the keys."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.hub.private)

    def present(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that is to be connected speak to nobody without the keys."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.hub.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.spoke.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.spoke.private)


def _pair(secret: str, end: str) -> Pair:
    private = z85.encode(hmac.digest(secret.encode(), f"kvferry request plane, {end}".encode(), hashlib.sha256))
    return Pair(zmq.curve_public(private), private)
