"""The certificate by which a replica speaks TLS, read again when it changes."""

from __future__ import annotations

import asyncio
import logging
import ssl

from app.core.errors import ConfigError
from app.edge.file_stamp import LOOK_EVERY_S, stamp_of

log = logging.getLogger(__name__)


class Certificate:
    """A certificate with its chain, and its key: both files in PEM, the key without a password.

    context: of connections. Those that are open keep the certificate that they began with.
    """

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError."""
        self._files = (cert, key)
        self._stamps = [stamp_of(path) for path in self._files]
        self.context = self._loaded()

    async def run(self) -> None:
        """Read the files again whenever one has changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if [stamp_of(path) for path in self._files] != self._stamps:
                self.reload()

    def reload(self) -> None:
        """Read the files again. While they do not fit each other, the certificate stays."""
        self._stamps = [stamp_of(path) for path in self._files]
        try:
            self._loaded()  # first elsewhere: what fails half-way would leave a context useless
            self.context.load_cert_chain(*self._files, _no_password)
        except (ConfigError, OSError) as error:
            log.error("the certificate stays as it was: %s", error)
        else:
            log.info("the certificate is that of %s now", self._files[0])

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(*self._files, _no_password)
        except (OSError, ValueError) as error:
            cert, key = self._files
            raise ConfigError(f"tls_cert {cert}, tls_key {key}: {error}") from None
        return context


def _no_password() -> str:
    """Else OpenSSL would ask for one at the terminal."""
    raise ValueError("the key is encrypted")


def certificate_of(cert: str, key: str) -> Certificate | None:
    """None: neither file is named. Raises ConfigError."""
    if not cert and not key:
        return None
    if not cert or not key:
        missing, given = ("tls_key", "tls_cert") if cert else ("tls_cert", "tls_key")
        raise ConfigError(f"{given} is set, and {missing} is not")
    return Certificate(cert, key)
