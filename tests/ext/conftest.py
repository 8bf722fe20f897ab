"""Fixtures of servers, and the commands of extensions, for their tests."""

from perdure.cli.app import add_extensions
from server.conftest import client, here, server

__all__ = ["client", "here", "server"]

# Tests in process look for commands in `app` itself, which has them once a word asks for one.
add_extensions()
