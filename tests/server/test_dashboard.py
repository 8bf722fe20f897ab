"""deploy/grafana.json asks for metrics that a server really has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from decode.observed import toy
from server.live_server import hello, live_server, opened

DASHBOARD = Path(__file__).parent.parent.parent / "deploy" / "grafana.json"


def test_every_metric_of_the_dashboard_is_there_with_its_labels(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    with opened(toy(), store=tmp_path) as rt, live_server(rt) as server, server.client() as client:
        for _ in range(2):
            assert client.post("/v1/chat/completions", json=hello()).status_code == 200
        told = client.get("/metrics").text
    known = dict.fromkeys(re.findall(r"^(perdure_\w+)", told, re.MULTILINE))
    names = {name for expression in asked for name in re.findall(r"perdure_\w+", expression)}
    assert names <= known.keys()
    # And what a server tells is shown somewhere.
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known if not name.endswith("_created")}
    assert bases == {re.sub(r"_bucket$", "", name) for name in names}
    for panel in panels:
        for target in panel["targets"]:
            for label in re.findall(r"by \(([^)]*)\)|\{\{(\w+)\}\}", target["expr"] + target["legendFormat"]):
                for each in ",".join(label).replace(" ", "").split(","):
                    metric = re.findall(r"perdure_\w+", target["expr"])[0]
                    assert not each or re.search(rf"^{metric}\{{[^}}]*\b{each}=", told, re.MULTILINE), (
                        metric,
                        each,
                    )
