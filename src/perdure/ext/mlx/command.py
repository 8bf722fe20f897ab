"""`perdure train`: an adapter, or a model, from conversations."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure import InvalidInputError
from perdure.spi.cli import Json, StoreFolder, sessions_in, tell, working

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perdure import Message

_BARS = "▁▂▃▄▅▆▇█"


def train(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of an MLX model.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to write; its name is the adapter's name.")
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", "-d", metavar="FILE", help="Chats, one a line as JSON; may be given several times."
        ),
    ] = None,
    pairs: Annotated[
        list[Path] | None,
        typer.Option(
            "--pairs",
            metavar="FILE",
            help="Pairs of replies, the better one first, one a line as JSON: make that one likelier (DPO).",
        ),
    ] = None,
    beta: Annotated[
        float, typer.Option("--beta", metavar="X", help="Of --pairs: less lets the model change more.")
    ] = 0.1,
    session: Annotated[
        list[str] | None,
        typer.Option("--session", metavar="NAME", help="A session of the store; may be given several times."),
    ] = None,
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help="lora, dora or full.")] = "lora",
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Steps of one batch each.")] = 100,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Examples of a step.")] = 4,
    layers: Annotated[int, typer.Option("--layers", metavar="N", help="The last N layers; 0: all.")] = 0,
    rank: Annotated[int, typer.Option("--rank", metavar="N", help="Rank of a LoRA.")] = 8,
    scale: Annotated[float, typer.Option("--scale", metavar="X", help="Scale of a LoRA.")] = 20.0,
    rate: Annotated[
        float, typer.Option("--learning-rate", metavar="X", help="Learning rate of Adam.")
    ] = 1e-4,
    longest: Annotated[
        int, typer.Option("--longest", metavar="N", help="Leave out what has more tokens.")
    ] = 2048,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the order and the first weights.")] = 0,
    teacher: Annotated[
        Path | None,
        typer.Option(
            "--teacher",
            metavar="FOLDER",
            show_default="none: the replies themselves are learned",
            help="Learn what this model would say at each token of the replies; it needs the same tokenizer.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the adapter at OUT.")] = False,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Train an MLX model on conversations. By mlx-lm's tuner; the result is an adapter, usable at once."""
    from perdure import Template
    from perdure.ext.mlx.engine import ENGINE
    from perdure.ext.mlx.training import ChatEncoder, TrainingRecipe, from_messages, pair_of, read_pairs
    from perdure.ext.mlx.training import train as run

    recipe = TrainingRecipe(
        kind=kind,
        steps=steps,
        batch=batch,
        layers=layers,
        rank=rank,
        scale=scale,
        learning_rate=rate,
        longest=longest,
        seed=seed,
        beta=beta,
    )
    if not data and not session and not pairs:
        raise InvalidInputError("give something to learn from: --data FILE, --session NAME or --pairs FILE")
    if pairs and (data or session):
        raise InvalidInputError("pairs are judged, and other conversations are learned: give one of the two")
    chats = list(_chats(data or (), session or (), store))
    judged = [pair for file in pairs or () for pair in read_pairs(file)]
    opened = ENGINE.open(ENGINE.fetch(model), cells=0)
    try:
        info = opened.info
        encoder = ChatEncoder(opened, Template.of_model(info.template, info.bos, info.eos))
        examples: Sequence[Any] = [
            each for messages in chats for each in from_messages(encoder, messages, recipe.longest)
        ]
        if pairs:
            tokenised = [pair_of(encoder, pair, recipe.longest) for pair in judged]
            examples = [pair for pair in tokenised if pair is not None]
    finally:
        opened.close()
    with working("Training") as bar:
        made = run(
            model,
            examples,
            out,
            recipe,
            resume=resume,
            teacher=teacher,
            progress=lambda step, _: bar(step, recipe.steps),
        )
    losses = [loss for _, loss in made.losses]
    use = f"perdure run -m {model} --lora {made.path.absolute()} …"
    if kind == "full":
        use = f"perdure run -m {made.path} …"
    text = (
        f"loss of {made.held_out} held out: {made.before:.3f} before, {made.after:.3f} after "
        f"({made.trained} learned, {recipe.steps} steps)\n{_plot(losses)}\nuse it: {use}"
    )
    tell(as_json, text, {**asdict(made), "path": str(made.path), "losses": losses})


def _plot(losses: Sequence[float]) -> str:
    """The losses of the training as one line."""
    if not losses:
        return ""
    low, high = min(losses), max(losses)
    places = [int((loss - low) / (high - low) * (len(_BARS) - 1)) if high > low else 0 for loss in losses]
    return f"{''.join(_BARS[place] for place in places)}  {losses[0]:.3f} → {losses[-1]:.3f}"


def _chats(files: Sequence[Path], names: Sequence[str], store: Path | None) -> Iterator[Sequence[Message]]:
    from perdure import Message
    from perdure.ext.mlx.training import read_chats

    for file in files:
        yield from read_chats(file)
    if not names:
        return
    with sessions_in(store, readonly=True) as sessions:
        for name in names:
            session = sessions.get(name)
            messages = [Message(role="system", content=session.system)] if session.system else []
            for turn in session.history():
                messages += [each for each in turn.messages if each.role != "system"]
                if turn.reply is not None:
                    messages.append(turn.reply)
            yield messages
