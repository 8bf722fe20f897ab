"""Weights of keys reach the engine, also one in another process, and metrics tell what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from decode.observed import toy
from perdure import InvalidInputError
from perdure.server.core.keys import Keys, new_key, parse_line
from server.live_server import hello, live_server, opened

CHAT = "/v1/chat/completions"


def test_the_weight_of_a_key_reaches_the_engine_and_metrics_name_what_it_had(tmp_path: Path) -> None:
    (ada, ada_key), (bob, bob_key) = new_key("ada", weight=3), new_key("bob")
    operator, metrics_key = new_key("metrics")
    file = tmp_path / "keys"
    file.write_text("".join(f"{key.line}\n" for key in (ada_key, bob_key, metrics_key)))
    with opened(toy()) as rt, live_server(rt, keys=Keys.read(file)) as server:
        for secret in (ada, bob):
            with server.client(secret) as client:
                assert client.post(CHAT, json=hello()).status_code == 200
        shares = rt.backend.shares()
        assert (shares["ada"]["weight"], shares["bob"]["weight"]) == (3, 1)
        with server.client(operator) as client:
            text = client.get("/metrics").text
        computed = int(shares["ada"]["served"])
        assert f'perdure_key_computed_tokens_total{{model="toy",namespace="ada"}} {computed}.0' in text
        assert 'perdure_key_lag_tokens{model="toy",namespace="bob"} 0.0' in text
        file.write_text(f"{ada_key.line.replace('weight=3', 'weight=5')}\n")
        server.state.keys.reload()
        server.state.limit_namespaces()
        with server.client(ada) as client:
            assert client.post(CHAT, json=hello()).status_code == 200
        assert rt.backend.shares()["ada"]["weight"] == 5


def test_an_engine_in_another_process_has_the_weights(zoo_path: Callable[[str], Path]) -> None:
    with perdure.open(zoo_path("llama"), isolated=True, n_ctx=256, slots=1) as rt:
        rt.backend.weights = {"ada": 4}
        rt.generate("Hello", max_tokens=3, temperature=0, ignore_eos=True, namespace="ada")
        share = rt.backend.shares()["ada"]
        assert share["weight"] == 4
        assert share["served"] >= 3


def test_the_largest_weight_of_a_namespaces_keys_counts() -> None:
    keys = Keys(new_key("ada", weight=weight)[1] for weight in (2, None, 7))
    assert keys.weights == {"ada": 7}


def test_a_weight_is_written_in_lines_and_in_toml(tmp_path: Path) -> None:
    key = new_key("ada", weight=2)[1]
    assert key.line.endswith(" weight=2")
    assert parse_line(key.line) == key
    file = tmp_path / "keys.toml"
    file.write_text(f'[keys]\nada = "{key.digest} weight=2"\n')
    assert list(Keys.read(file)) == [key]
    with pytest.raises(InvalidInputError, match="weight is a whole number from 1"):
        new_key("ada", weight=0)
