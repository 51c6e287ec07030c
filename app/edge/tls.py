"""The certificate by which a replica speaks TLS, read again when it changes."""

from __future__ import annotations

import logging
import ssl

from app.core.errors import ConfigError

log = logging.getLogger(__name__)


class Certificate:
    """A certificate with its chain, and its key: both files in PEM, the key without a password.

    context: of connections. Those that are open keep the certificate that they began with.
    """

    def __init__(self, cert: str, key: str, protocol: str) -> None:
        """protocol: spoken over TLS, as ALPN names it. Raises ConfigError."""
        self.files = (cert, key)
        self._protocol = protocol
        self.context = self._loaded()

    def reload(self) -> None:
        """Reads the files again. Raises ConfigError while they do not fit each other, and then the
        certificate stays."""
        self._loaded()  # first elsewhere: what fails half-way would leave a context useless
        self._load_into(self.context)
        log.info("the certificate is that of %s now", self.files[0])

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols([self._protocol])
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(*self.files, _no_password)
        except (OSError, ValueError) as error:
            cert, key = self.files
            raise ConfigError(f"tls_cert {cert}, tls_key {key}: {error}") from None


def _no_password() -> str:
    """Raises ValueError: else OpenSSL would ask for a password at the terminal."""
    raise ValueError("the key is encrypted")


def certificate_of(cert: str, key: str, protocol: str = "http/1.1") -> Certificate | None:
    """Returns the certificate; None if neither file is named. Raises ConfigError."""
    if not cert and not key:
        return None
    if not cert or not key:
        missing, given = ("tls_key", "tls_cert") if cert else ("tls_cert", "tls_key")
        raise ConfigError(f"{given} is set, and {missing} is not")
    return Certificate(cert, key, protocol)
