"""The router's side of TLS."""

from __future__ import annotations

import ssl

from protocol.errors import ConfigError


def server_context(certificate: str, key: str) -> ssl.SSLContext | None:
    """What clients are spoken to with; None where neither file is named.

    Args:
        certificate: file of the certificate, and of those between it and its authority, in PEM.
        key: file of its private key, in PEM, without a password.

    Raises:
        ConfigError: a file cannot be read, or the two do not belong together; names the field.
    """
    if not certificate:
        return None
    for field, file in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{field} {file}: {error.strerror}", field=field) from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # It would be asked for on the terminal that a router does not have.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls_certificate {certificate} and tls_key {key}: {error}", field="tls_certificate"
        ) from error
    return context
