"""Somebody at the page of a server that dies finds question and part after a reload, and continues (C12)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from sessions.test_pending_kills import ROUNDS, SEED, hunted

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")


def test_c12_a_few_kills(browser: Browser, tmp_path: Path) -> None:
    # Skipped where there is no Chromium.
    assert browser.version
    hunted("page", 3, 1, tmp_path, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_c12_many_kills(seed: int, browser: Browser, tmp_path: Path) -> None:
    found = hunted("page", -(-ROUNDS // 4), seed, tmp_path, tmp_path)
    assert found["parts"] > ROUNDS // 40
