"""lm-eval, the harness that others measure models with, against our server (soak).

It needs no torch: `pip install --no-deps lm-eval` with what its `local-completions` imports, in a folder that
PYTHONPATH names. docs/quality.md has the command.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from server.live_server import live_server
from zoo import folders

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not folders.HERE, reason="needs a folder with a tokenizer"),
]
WORDS = ("the man", "the rain", "her mother", "the garden", "the street", "a token", "the week", "the text")
TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def test_lm_eval_finds_the_log_likelihoods_that_we_find(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    items = [
        {
            "question": f"what of {WORDS[at % 8]}",
            "choices": [WORDS[(at + n) % 8] for n in (1, 3, 6)],
            "answer": 0,
        }
        for at in range(6)
    ]
    (tmp_path / "tiny.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=tmp_path / "tiny.jsonl"))
    folder = zoo_path("mlx-llama")
    with perdure.open(str(folder), n_ctx=256, slots=1) as rt, live_server(rt) as server:
        arguments = f"model=toy,base_url={server.url}/v1/completions,tokenizer_backend=huggingface"
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--tasks", "tiny_choice"]
        command += ["--model_args", f"{arguments},tokenizer={folder},num_concurrent=1,max_length=200"]
        command += ["--include_path", str(tmp_path), "--log_samples", "--output_path", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
        found = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(found) == len(items)
        for sample in found:
            item = sample["doc"]
            theirs = [float(each[0]) for each in sample["filtered_resps"]]
            ours = {
                each.index: each.logprob
                for each in rt.choose(item["question"], [f" {text}" for text in item["choices"]], by="total")
            }
            assert [ours[place] for place in range(3)] == pytest.approx(theirs, abs=1e-3)
