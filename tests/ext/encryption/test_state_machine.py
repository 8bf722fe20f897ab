"""An encrypted disk tier lives a random life beside a dict; they always agree."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from perdure.ext.encryption.folder import DiskKey
from store.test_state_machine import Life


class EncryptedLife(Life):
    """The same, where nothing that lies there can be read."""

    encryption = DiskKey(b"k" * 32, "key")


TestEncryptedLife = EncryptedLife.TestCase
TestEncryptedLife.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
