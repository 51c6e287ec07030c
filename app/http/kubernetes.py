"""Access to the API of the Kubernetes cluster that a process runs in."""

from __future__ import annotations

from kubernetes_asyncio import client, config
from kubernetes_asyncio.config.config_exception import ConfigException

from app.core.errors import ConfigError


async def load_configuration() -> client.Configuration:
    """Returns the configuration of the process's pod, or else of the user. Raises ConfigError."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        try:
            await config.load_kube_config(client_configuration=configuration)
        except (ConfigException, OSError) as error:
            raise ConfigError(f"no access to a cluster: {error}") from None
    return configuration
