"""`perdure why` and `perdure report`: what of prompts was computed again, asked of a server."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from perdure import PerdureError
from perdure.spi.cli import Json, Key, Url, ask, print_json, terminal


def why(
    request: Annotated[
        int | None,
        typer.Argument(metavar="REQUEST", help="Number of the request; the latest, if not said.", min=1),
    ] = None,
    url: Url = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show why tokens were computed again. The first line that differed, and its cost.

    The exit code is 1 where there is no such request.
    """
    before = "" if request is None else f"&before={request + 1}"
    requests = ask(f"/v1/requests?limit=1{before}", url, key)["data"]
    if not requests or (request is not None and requests[0]["number"] != request):
        raise PerdureError("there is no such request; `GET /v1/requests` lists the latest 200")
    if as_json:
        print_json(requests[0])
        return
    _show(requests[0])


def report(url: Url = None, key: Key = None, as_json: Json = False) -> None:
    """Show what the cache saved in a week. And what was computed again, by cause and client."""
    report = ask("/v1/report", url, key)
    if as_json:
        print_json(report)
        return
    rows: list[list[str]] = []
    week: dict[str, Any] = {**dict.fromkeys(_SUMS, 0), "written_bytes": None, "misses": {}}
    for day in report["days"]:
        for name in _SUMS:
            week[name] += day[name]
        if day["written_bytes"] is not None:
            week["written_bytes"] = (week["written_bytes"] or 0) + day["written_bytes"]
        for cause, clients in day["misses"].items():
            sums = week["misses"].setdefault(cause, {})
            for client, tokens in clients.items():
                sums[client] = sums.get(client, 0) + tokens
        if day["requests"] or day["written_bytes"]:
            rows.append(_day(day["day"], day))
    rows.append(_day("the week", week))
    heads = ["day (UTC)", "requests", "reused", "", "computed", "hours saved", "written"]
    terminal.write_columns([heads, *rows], right=frozenset(range(1, 7)))
    for cause, clients in sorted(week["misses"].items(), key=lambda each: -sum(each[1].values())):
        named = ", ".join(f"{name} {count:,}" for name, count in sorted(clients.items(), key=lambda c: -c[1]))
        terminal.write_line(f"again     {sum(clients.values()):,} tokens by {cause}: {named}", indent=10)


_SUMS = ("requests", "reused_tokens", "computed_tokens", "prefill_seconds", "saved_seconds")


def _day(name: str, sums: dict[str, Any]) -> list[str]:
    """A line of the report."""
    reused, computed, written = sums["reused_tokens"], sums["computed_tokens"], sums["written_bytes"]
    share = f"{100 * reused / (reused + computed):.1f}%" if reused + computed else "-"
    size = "-" if written is None else f"{written / 2**20:,.1f} MiB"
    hours = f"{sums['saved_seconds'] / 3600:.2f}"
    return [name, f"{sums['requests']:,}", f"{reused:,}", share, f"{computed:,}", hours, size]


def _show(request: dict[str, Any]) -> None:
    reuse, miss = request["reuse"], request["miss"]
    tiers = ", ".join(f"{count:,} from {tier}" for tier, count in reuse["tiers"].items()) or "none"
    title = f"request {request['number']}" + (f" of {request['agent']}" if request["agent"] else "")
    terminal.write_line(f"{title}: reused {tiers}; computed {reuse['computed']:,} tokens")
    if miss is None:
        terminal.write_line("Only new tokens were computed.")
        return
    terminal.write_line(f"{miss['tokens']:,} tokens computed again in {miss['seconds']:.1f} s: {miss['why']}")
    # Text of a conversation: nothing in it may steer the terminal.
    for sign, line, colour in (("-", miss["before"], "red"), ("+", miss["now"], "green")):
        if line:
            typer.secho(f"{sign} {terminal.harmless(line)}", fg=colour)
    terminal.write_line(miss["advice"])
