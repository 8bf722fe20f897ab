"""Sinks: where events can go. `rt.observe(sink)` and `observe=sink` call one with one event at a time.

`rt.observe(JsonLines("events.jsonl"))` writes lines such as {"kind": "TokenDrawn", "time": 1763391265.1, …};
`rt.observe(OpenTelemetry())` makes a span of each request (pip install 'perdure[otel]').
"""

from perdure.ext.inspection.sinks.json_lines import JsonLines as JsonLines
from perdure.ext.inspection.sinks.json_lines import json_line as json_line
from perdure.ext.inspection.sinks.spans import OpenTelemetry as OpenTelemetry
