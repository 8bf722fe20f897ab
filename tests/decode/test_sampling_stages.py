"""A chain is a list of stages, and the draws of a chain stay what they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from perdure import Sampling
from perdure.decode.sampling import sampler as together
from perdure.decode.sampling.sampler import STAGES, LateStage, Sampler, Temperature, TopK, TopP, draw
from perdure.decode.sampling.stage import Breakers

BREAKERS: Breakers = {3: [()], 5: [(4,)], 9: [(1, 2)]}
RECORDED: Sequence[tuple[Mapping[str, Any], Sequence[int]]] = (
    ({}, [303, 325, 547, 486, 483, 337, 322, 103, 237, 359, 438, 311, 96, 345, 123, 454]),
    ({"temperature": 0}, [471, 239, 107, 516, 261, 85, 523, 161, 60, 201, 336, 109, 67, 285, 435, 405]),
    ({"top_k": 0}, [445, 106, 322, 406, 384, 446, 18, 247, 359, 167, 150, 313, 210, 222, 567, 359]),
    (
        {"top_k": 0, "top_p": 1.0},
        [497, 513, 324, 255, 114, 502, 198, 310, 276, 164, 371, 518, 123, 555, 536, 120],
    ),
    (
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        [0, 518, 403, 58, 118, 261, 152, 414, 115, 418, 364, 503, 259, 391, 584, 485],
    ),
    (
        {"typical_p": 0.6, "top_k": 0},
        [137, 315, 306, 324, 35, 184, 102, 414, 384, 347, 478, 194, 49, 83, 419, 377],
    ),
    ({"top_n_sigma": 1.5}, [562, 112, 561, 386, 495, 436, 412, 154, 520, 235, 478, 554, 227, 299, 317, 123]),
    (
        {"xtc_probability": 0.6, "xtc_threshold": 0.05},
        [85, 313, 490, 183, 161, 33, 146, 528, 161, 175, 169, 248, 124, 529, 123, 492],
    ),
    (
        {"repeat_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": -0.5},
        [432, 563, 399, 338, 225, 323, 117, 520, 229, 150, 304, 551, 250, 263, 226, 204],
    ),
    (
        {"dry_multiplier": 0.9, "dry_last_n": 40},
        [60, 1, 473, 302, 201, 470, 233, 371, 388, 517, 207, 242, 361, 382, 510, 46],
    ),
    ({"mirostat": 1}, [223, 15, 75, 298, 471, 378, 365, 302, 423, 84, 38, 178, 275, 463, 503, 291]),
    (
        {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 1.3},
        [343, 72, 235, 450, 570, 121, 268, 498, 501, 264, 289, 273, 527, 566, 590, 454],
    ),
    (
        {"logit_bias": {3: 4.0, 7: -math.inf}, "temperature": 1.6, "top_k": 90},
        [401, 203, 356, 595, 284, 471, 13, 494, 3, 484, 8, 368, 325, 353, 226, 3],
    ),
)
"""Chains and what they drew when each stage was still a condition in one function."""


def test_chains_draw_what_was_recorded() -> None:
    """Side by side, so that each line of the table has its own stages."""
    dice = np.random.default_rng(11)
    samplers = []
    for seed, (settings, _) in enumerate(RECORDED):
        samplers.append(Sampler(Sampling(seed=seed, **settings), n_ctx=128, breakers=lambda _: BREAKERS))
        samplers[-1].prime([token % 29 for token in range(70)])
    drawn: list[list[int]] = [[] for _ in samplers]
    for step in range(16):
        rows = dice.normal(0, 2.5, (len(samplers), 600)).astype(np.float32)
        streams = [(each, each.select(row), step) for each, row in zip(samplers, rows, strict=True)]
        for tokens, token in zip(drawn, draw(streams), strict=True):
            tokens.append(token)
    for (settings, expected), tokens in zip(RECORDED, drawn, strict=True):
        assert tokens == expected, settings


def test_every_setting_but_the_seed_belongs_to_a_stage() -> None:
    read = {name for stage in STAGES for name in stage.settings}
    assert read == {field.name for field in fields(Sampling)} - {"seed"}


def test_a_late_stage_names_the_settings_that_its_class_reads() -> None:
    for stage in STAGES:
        if isinstance(stage, LateStage):
            module = import_module(f"perdure.decode.sampling.{stage.module}")
            assert getattr(module, stage.name).settings == stage.settings


def test_a_chain_has_only_the_stages_that_its_settings_ask_for() -> None:
    sampler = Sampler(Sampling(min_p=0.0), n_ctx=64)
    assert [type(stage) for stage in sampler.stages] == [TopK, TopP, Temperature]


@pytest.mark.parametrize("settings", [{"temperature": 0, "top_k": 5}, {"mirostat": 2, "top_p": 0.5}])
def test_greedy_and_mirostat_stand_for_all_cuts(settings: dict[str, Any]) -> None:
    assert len(Sampler(Sampling(**settings), n_ctx=64).stages) == 1


def test_the_compiled_path_runs_no_list_with_a_stage_that_it_does_not_know() -> None:
    lists: dict[str, dict[str, Any]] = {
        "typical": {"typical_p": 0.5},
        "sigma": {"top_n_sigma": 1.0},
        "penalties": {"repeat_penalty": 1.1},
    }
    for kind, settings in lists.items():
        assert together.CompiledChain.of(Sampler(Sampling(**settings), n_ctx=64)) is None, kind
    biased = Sampling(logit_bias={1: -math.inf})
    assert together.CompiledChain.of(Sampler(biased, n_ctx=64)) is not None
