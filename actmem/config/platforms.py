"""The platforms that a configuration may name: all of them are understood, and torch alone is run on."""

from __future__ import annotations

from actmem.config.schema import RunConfig
from actmem.errors import PlatformError


def refuse_other_platforms(config: RunConfig) -> None:
    """Raise `PlatformError` for a configuration that is for another platform than torch."""
    if config.platform != "torch":
        raise PlatformError(
            f"platform: {config.platform} is not supported; actmem runs on torch alone: platform: torch"
        )
