"""`perdure run`: one prompt, one reply, to read or to pipe on."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from perdure import Delta, Grammar, Job, Model, Reply, Runtime, TokenLogprob

_SLOTS = 4
"""Samples that are written at once; more of them take turns."""

_Sampling = "Sampling"
_Shape = "Shape of the reply"
_Output = "Output"


def run(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The text to go on from, as it is. Without one, or as -, standard input is read; "
            "with both, standard input follows the prompt after an empty line.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A .gguf file, or any name that `models pull` takes.")
    ] = None,
    ctx: Annotated[
        int, typer.Option("--ctx", min=1, metavar="N", help="Tokens that prompt and reply may have in all.")
    ] = 4096,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=1, metavar="N", help="End the reply after N tokens."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End the reply before TEXT; may be given several times."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option("--samples", min=1, metavar="N", help="Write N replies to one reading of the prompt."),
    ] = 1,
    exact: Annotated[
        bool, typer.Option("--exact", help="Decode each reply alone, so that it never depends on others.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", "-t", help="0 always takes the likeliest token.", rich_help_panel=_Sampling
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="Draw from the likeliest tokens that make up this much.",
            rich_help_panel=_Sampling,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", help="Draw from the K likeliest tokens; 0 from all.", rich_help_panel=_Sampling
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", help="Drop tokens below this share of the likeliest.", rich_help_panel=_Sampling
        ),
    ] = None,
    repeat_penalty: Annotated[
        float | None,
        typer.Option("--repeat-penalty", help="Above 1, less of what was there.", rich_help_panel=_Sampling),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="The same seed gives the same reply.", rich_help_panel=_Sampling),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option("--schema", metavar="FILE", help="A JSON schema to keep to.", rich_help_panel=_Shape),
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(
            "--regex", metavar="PATTERN", help="A regular expression to match.", rich_help_panel=_Shape
        ),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(
            "--grammar", metavar="FILE", help="A .lark or .gbnf grammar to keep to.", rich_help_panel=_Shape
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object with everything.", rich_help_panel=_Output),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs",
            min=0,
            metavar="K",
            help="Log probabilities, with the K likeliest tokens beside each: in the JSON, or after the text "
            "on standard error.",
            rich_help_panel=_Output,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Tell counts and speeds on standard error.", rich_help_panel=_Output
        ),
    ] = False,
) -> None:
    """Go on from a prompt, printing the text as it comes."""
    import perdure
    from perdure import ContextOverflow, InvalidInputError, Sampling
    from perdure.cli import terminal

    # Whatever is wrong with the request is told before a model is fetched or loaded.
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "seed": seed,
    }
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    shape = _shape(schema, regex, grammar)
    if stop and not all(stop):
        raise InvalidInputError("--stop needs a text that is not empty")
    text = _text(prompt)
    loaded = terminal.load(model)
    # One prompt, so there is nothing to keep for later.
    with perdure.open(loaded, n_ctx=ctx, slots=min(samples, _SLOTS), exact=exact, cache=0) as runtime:
        try:
            job = runtime.submit(
                text,
                max_tokens=max_tokens,
                stop=stop or (),
                sampling=sampling,
                grammar=shape,
                n=samples,
                logprobs=logprobs,
            )
        except ContextOverflow as error:
            raise ContextOverflow(
                f"{error}. A larger --ctx makes room", needed=error.needed, fits=error.fits
            ) from None
        replies, stopped = _follow(job, Page(samples) if not as_json else None)
        _tell(runtime, loaded, replies, as_json=as_json, verbose=verbose, limited=max_tokens is not None)
    if stopped:
        raise typer.Exit(130)


class Page:
    """Samples one below the other: the first unfinished one shows as it comes, later ones wait their turn."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._shown = 0
        self._kept = [""] * samples
        self._ended = [False] * samples
        self._at_line_start = True
        self._head()

    def add(self, delta: Delta) -> None:
        self._kept[delta.index] += delta.text
        self._ended[delta.index] = delta.finish_reason is not None
        while self._shown < self._samples:
            text, self._kept[self._shown] = self._kept[self._shown], ""
            self._write(text)
            if not self._ended[self._shown]:
                break
            if not self._at_line_start:
                self._write("\n")
            self._shown += 1
            self._head()

    def _head(self) -> None:
        if 1 < self._samples > self._shown:
            self._write(f"[{self._shown + 1} of {self._samples}]\n")

    def _write(self, text: str) -> None:
        from perdure.cli.terminal import write

        if text:
            write(text)
            self._at_line_start = text.endswith("\n")


def _follow(job: Job, page: Page | None) -> tuple[list[Reply], bool]:
    """Show a job until it ends, or until Ctrl-C ends it: its replies, and whether that was so."""
    from perdure.cli.terminal import stopped_by_ctrl_c

    with stopped_by_ctrl_c(job) as stopped:
        for delta in job:
            if page is not None:
                page.add(delta)
        return job.replies(), stopped.is_set()


def _tell(
    runtime: Runtime, model: Model, replies: list[Reply], *, as_json: bool, verbose: bool, limited: bool
) -> None:
    from perdure.cli import terminal

    if as_json:
        shown = [_plain(reply, model) for reply in replies]
        typer.echo(json.dumps(shown[0] if len(shown) == 1 else {"samples": shown}, ensure_ascii=False))
    for reply in replies:
        if reply.finish_reason == "length" and not limited:
            terminal.note(
                f"the context of {runtime.n_ctx} tokens is full, so the text ends here; "
                "a larger --ctx makes room"
            )
        if reply.logprobs is not None and not as_json:
            for entry in reply.logprobs:
                typer.echo(_logprob_line(entry, model), err=True)
        if verbose:
            typer.echo(_timing_line(reply), err=True)


def _text(prompt: str | None) -> str:
    from perdure import InvalidInputError

    named = prompt not in (None, "-")
    if sys.stdin is None or sys.stdin.closed or (sys.stdin.isatty() and (named or prompt is None)):
        if not named:
            raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
        piped = ""
    else:
        try:
            piped = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"standard input is not UTF-8 text (byte {error.start})") from None
    # The one newline that every pipe ends with is nobody's wish.
    piped = piped.removesuffix("\n").removesuffix("\r")
    parts = [part for part in (prompt if named else None, piped) if part]
    if not parts:
        raise InvalidInputError("the prompt is empty")
    return "\n\n".join(parts)


def _shape(schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    from perdure import Grammar, InvalidInputError

    if sum(choice is not None for choice in (schema, regex, grammar)) > 1:
        raise InvalidInputError("give one of --schema, --regex and --grammar")
    if schema is not None:
        return Grammar.json_schema(_read(schema))
    if regex is not None:
        return Grammar.regex(regex)
    if grammar is None:
        return None
    kinds = {".lark": Grammar.lark, ".gbnf": Grammar.gbnf}
    if grammar.suffix.lower() not in kinds:
        raise InvalidInputError(f"{grammar} should end in .lark or .gbnf, which says how to read it")
    return kinds[grammar.suffix.lower()](_read(grammar))


def _read(path: Path) -> str:
    from perdure import InvalidInputError

    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is not UTF-8 text") from None


def _plain(reply: Reply, model: Model) -> dict[str, Any]:
    usage, timings = reply.usage, reply.timings
    return {
        "text": reply.text,
        "tokens": list(reply.tokens),
        "finish_reason": reply.finish_reason,
        "stop": reply.stop,
        "seed": reply.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": {
            "queued": timings.queued,
            "prefill": timings.prefill,
            "decode": timings.decode,
            "prefill_speed": timings.prefill_speed,
            "decode_speed": timings.decode_speed,
        },
        "logprobs": None
        if reply.logprobs is None
        else [
            _chance(entry.token, entry.logprob, model)
            | {"top": [_chance(each.token, each.logprob, model) for each in entry.top]}
            for entry in reply.logprobs
        ],
    }


def _chance(token: int, logprob: float, model: Model) -> dict[str, Any]:
    # JSON has no word for infinity.
    known = logprob if math.isfinite(logprob) else None
    return {"token": token, "text": _piece(token, model), "logprob": known}


def _piece(token: int, model: Model) -> str:
    return model.piece(token, special=True).decode("utf-8", "replace")


def _logprob_line(entry: TokenLogprob, model: Model) -> str:
    chances = [(entry.token, entry.logprob), *((each.token, each.logprob) for each in entry.top)]
    first, *rest = (f"{_piece(token, model)!r} {logprob:.3f}" for token, logprob in chances)
    return first + (f"  of  {', '.join(rest)}" if rest else "")


def _timing_line(reply: Reply) -> str:
    timings = reply.timings
    return (
        f"{timings.prefilled_tokens} tokens read in {timings.prefill:.2f} s ({timings.prefill_speed:.0f}/s), "
        f"{timings.decoded_tokens} written in {timings.decode:.2f} s ({timings.decode_speed:.1f}/s), "
        f"seed {reply.seed}, ended by {reply.finish_reason}"
    )
