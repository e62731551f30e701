"""Keep secrets of the environment out of configs: `${oc.env:NAME}` cannot read a variable that looks like a secret."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from realign.config.errors import ConfigError
from realign.secrets import allowed_variables, check_url, refusal, secret_variables

_NO_DEFAULT = object()


class SecretRefused(ConfigError):
    """A value of a config reads a variable of the environment that looks like a secret."""


@contextmanager
def without_secrets(may_insert: bool = True, key: str = "") -> Iterator[None]:
    """Let `${oc.env:NAME}` refuse secrets while configs are resolved in this context.

    A secret that `REALIGN_URL_VARIABLES` lists stays an interpolation, so that no config contains it. Its client
    inserts the value into the URL of a reward or MCP server.

    Args:
        may_insert: Whether the value that is resolved may contain an allowed secret.
        key: Key of this value, for messages.

    Raises:
        SecretRefused: in place of OmegaConf's exception, if a value reads a secret.
    """
    refused: list[str] = []

    def env(name: str, default: Any = _NO_DEFAULT) -> Any:
        if name in secret_variables(os.environ):
            if may_insert and name in allowed_variables(os.environ):
                return f"${{oc.env:{name}}}"
            refused.append(refusal(key or "an override", name))
            raise SecretRefused(refused[-1])
        return oc.env(name) if default is _NO_DEFAULT else oc.env(name, default)

    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    try:
        yield
    except OmegaConfBaseException as error:  # OmegaConf wraps what a resolver raises
        if refused:
            raise SecretRefused(refused[0]) from error
        raise
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def check_no_secrets(composed: DictConfig, values: Iterable[tuple[str, Any]]) -> None:
    """Check that no value reads a secret, and that no URL of a server and no variable for servers contains one.

    Ignores other errors of interpolations, which resolving the config reports.

    Args:
        composed: config without the `hydra` node.
        values: key and unresolved value of every leaf.

    Raises:
        ConfigError: a value contains or reads a secret. The message does not contain the secret.
    """
    for key, written in values:
        value = written
        if isinstance(written, str) and "${" in written:
            is_url = written.startswith(("http://", "https://")) and _is_server(key)
            # Each value by itself, before all are resolved together, so that the message names the key.
            with suppress(OmegaConfBaseException), without_secrets(is_url, key):
                value = OmegaConf.select(composed, key)
        parent, _, name = key.rpartition(".")
        variable = {name: str(value)} if parent.endswith(".sampler.environment") and not str(value).isdigit() else {}
        if secret_variables(variable):
            raise ConfigError(
                f"{key} looks like a secret, which would be written to config.yaml. Set {name} in the environment of "
                "the run instead, which its servers inherit."
            )
        reward = key.endswith(".function")
        is_url = isinstance(value, str) and ("://" in value if reward else value.startswith(("http://", "https://")))
        if is_url and _is_server(key):
            try:
                check_url(value, "reward function" if reward else "MCP server")
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None


def _is_server(key: str) -> bool:
    """Return whether a key is that of a reward function or of an MCP server, which can be URLs."""
    return key.endswith(".function") or re.search(r"\.mcp(\.\d+|\[\d+\])$", key) is not None
