"""`perdure chat`: a conversation in the terminal, or with a pipe, a line a message."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perdure import Job, Model, Reply, Sampling

_HELP = """\
/reset   forget the conversation and start anew
/quit    leave (so does Ctrl-D)
Ctrl-C   stop a reply; what there is of it stays in the conversation"""


def chat(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A .gguf file, or any name that `models pull` takes.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="What the model is to be.")] = None,
    ctx: Annotated[
        int, typer.Option("--ctx", min=1, metavar="N", help="Tokens that the conversation may have.")
    ] = 4096,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help="0 always takes the likeliest token.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same replies.")] = None,
) -> None:
    """Chat with a model. From a pipe, each line is a message and each is answered."""
    from perdure import PerdureError, Sampling
    from perdure.cli import terminal

    given = {"temperature": temperature, "seed": seed}
    sampling = Sampling(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    loaded = terminal.load(model)
    conversation = Conversation(loaded, system=system, ctx=ctx, sampling=sampling)
    watched = sys.stdin.isatty()
    if watched:
        typer.echo(f"{loaded.path.name}. /help tells what else can be typed, Ctrl-D leaves.", err=True)
    good = True
    for message in _typed() if watched else _piped():
        if watched and message.startswith("/"):
            _obey(message, conversation)
            continue
        try:
            answered = _answer(conversation, message)
        except PerdureError as error:
            terminal.note(str(error))
            answered = False
        good = good and answered
    conversation.close()
    if not watched and not good:
        raise typer.Exit(1)


class Conversation:
    """A chat as the tokens that the model has read and written.

    Only what is new is tokenised; a reply's own tokens stand for its text. A message that cannot be
    answered is not part of it.
    """

    def __init__(self, model: Model, *, system: str | None, ctx: int, sampling: Sampling) -> None:
        import perdure

        self._model = model
        self._sampling = sampling
        self._start, self._end = _marks(model)
        self._system = system
        self._runtime = perdure.open(model, n_ctx=ctx, slots=1)
        self.ctx = ctx
        self.tokens: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Start anew, with the system message alone."""
        bos = self._model.bos
        self.tokens = [bos] if bos is not None and self._model.tokenize("")[:1] == [bos] else []
        if self._system is not None:
            self.tokens += self._turn("system", self._system)

    def say(self, message: str) -> tuple[Job, list[int]]:
        """The reply on its way, and the tokens that it answers."""
        from perdure import ContextOverflow

        new = [*self._turn("user", message), self._start, *self._text("assistant\n")]
        prompt = self.tokens + new
        if len(prompt) > self.ctx:
            raise ContextOverflow(
                f"this message takes {len(new)} tokens and the conversation has {len(self.tokens)}, but "
                f"{self.ctx} fit in all. It was not sent. /reset starts anew; --ctx makes more fit",
                needed=len(prompt),
                fits=self.ctx,
            )
        return self._runtime.submit(prompt, sampling=self._sampling), prompt

    def keep(self, prompt: list[int], reply: Reply) -> None:
        """Make a message and its reply, whole or not, part of the conversation."""
        self.tokens = [*prompt, *reply.tokens, self._end, *self._text("\n")]

    def close(self) -> None:
        self._runtime.close()

    def _turn(self, role: str, text: str) -> list[int]:
        return [self._start, *self._text(f"{role}\n{text}"), self._end, *self._text("\n")]

    def _text(self, text: str) -> list[int]:
        return self._model.tokenize(text, bos=False)


def _marks(model: Model) -> tuple[int, int]:
    """The tokens around a turn. This chat knows one format, ChatML; a model without it is refused."""
    from perdure import ModelError

    found = []
    for mark in ("<|im_start|>", "<|im_end|>"):
        ids = model.tokenize(mark, special=True, bos=False)
        if len(ids) != 1 or not model.is_control(ids[0]):
            raise ModelError(
                f"{model.path.name} has no {mark} token, so its chat template is not ChatML, and others are "
                "not supported yet; `perdure run` goes on from any text"
            )
        found += ids
    return found[0], found[1]


def _answer(conversation: Conversation, message: str) -> bool:
    """Show the reply to a message as it comes. Whether it could be given whole."""
    from perdure.cli import terminal

    job, prompt = conversation.say(message)
    text = ""
    with terminal.stopped_by_ctrl_c(job) as stopped:
        for delta in job:
            terminal.write(delta.text)
            text = delta.text or text
    reply = job.reply()
    conversation.keep(prompt, reply)
    terminal.write("" if text.endswith("\n") else "\n")
    if stopped.is_set() and not sys.stdin.isatty():
        raise typer.Exit(130)
    if reply.finish_reason == "length":
        terminal.note(
            f"the context of {conversation.ctx} tokens is full, so the reply ends here. "
            "/reset starts anew; --ctx makes more fit"
        )
    return reply.finish_reason != "length"


def _obey(command: str, conversation: Conversation) -> None:
    name = command.split()[0]
    if name == "/reset":
        conversation.reset()
        typer.echo("The conversation is forgotten.", err=True)
    elif name in ("/help", "/?"):
        typer.echo(_HELP, err=True)
    else:
        typer.echo(f"There is no {name}; /help tells what there is.", err=True)


def _typed() -> Iterator[str]:
    """Messages from a terminal until Ctrl-D or /quit."""
    with contextlib.suppress(ImportError):
        # Imported for what it does: input() then has a history and can be edited.
        import readline  # noqa: F401
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            typer.echo("", err=True)
            return
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D or /quit leaves.", err=True)
            continue
        if line in ("/quit", "/exit"):
            return
        if line:
            yield line


def _piped() -> Iterator[str]:
    for line in sys.stdin.buffer:
        text = line.decode("utf-8", "replace").strip()
        if text:
            yield text
