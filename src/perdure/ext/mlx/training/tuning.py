"""One run of mlx-lm's tuner on a folder.

The result is put in its place when it is whole: an adapter (`lora`, `dora`) as a folder that mlx-lm and
perdure take, or a model (`full`) as a model folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from perdure import InvalidInputError, ModelLoadError, OutOfMemoryError
from perdure.ext.mlx.folder import TOKENIZER, Folder, read_folder
from perdure.ext.mlx.packages import load
from perdure.ext.mlx.training.examples import Example
from perdure.ext.mlx.training.preference import Pair, check_here, preferred
from perdure.spi.base import TABLE_BYTES, check_whole, content_digest, read_file

KINDS = ("lora", "dora", "full")
CONFIG, WEIGHTS, LOSSES = "adapter_config.json", "adapters.safetensors", "losses.jsonl"
_KEPT = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """How to train. `layers` counts from the last one; 0 is all."""

    kind: str = "lora"
    steps: int = 100
    batch: int = 4
    layers: int = 0
    rank: int = 8
    scale: float = 20.0
    learning_rate: float = 1e-4
    longest: int = 2048
    seed: int = 0
    beta: float = 0.1
    """Of preference training: how much a model may leave what it was for it; less leaves more."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInputError(f"the kind of training is one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, low, high in (
            ("steps", 1, 10_000_000),
            ("batch", 1, 4096),
            ("layers", 0, 10_000),
            ("rank", 1, 4096),
            ("longest", 2, 1 << 20),
            ("seed", 0, 2**31 - 1),
        ):
            check_whole(name, getattr(self, name), low, high)
        if not 0 < self.beta <= 100:
            raise InvalidInputError(f"beta is above 0 and at most 100, got {self.beta}")
        if not 0 < self.learning_rate < 10 or not 0 < self.scale < 1000:
            raise InvalidInputError(
                f"learning_rate is above 0 and below 10, scale below 1000; got {self.learning_rate} and "
                f"{self.scale}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run made: where it is, and the loss on what was held out, before and after."""

    path: Path
    before: float
    after: float
    trained: int
    """Examples that were learned from."""
    held_out: int
    losses: tuple[tuple[int, float], ...] = field(default=())
    """Of the training, by step."""


def train(
    model: Path,
    examples: Sequence[Example] | Sequence[Pair],
    target: Path,
    recipe: TrainingRecipe,
    *,
    resume: bool = False,
    teacher: Path | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Result:
    """Train the model in a folder on `examples`, a tenth of which is held out to measure the loss.

    `resume` goes on from the adapter at `target`. With a `teacher`, the folder of a model with the same
    tokens, what that would say at each token of a reply is learned, and the loss is the KL from it. Of pairs
    of replies the better one becomes likelier than it was to the model before (DPO, by mlx-lm-lora's loss).
    `progress` is called with each step that has a loss. A run that fails leaves `target` as it was.
    """
    folder = read_folder(model)
    learned, held_out = _divided(examples, recipe)
    if resume and (recipe.kind == "full" or not (target / WEIGHTS).is_file()):
        raise InvalidInputError(f"there is no adapter at {target} to go on from")
    if not resume and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidInputError(f"{target} is there already: resume from it, or name another folder")
    taught = None if teacher is None else _same_tokens(folder, teacher)
    pairs = isinstance(examples[0], Pair)
    if pairs:
        if taught is not None:
            raise InvalidInputError("a teacher shows replies, and pairs are judged: give one of the two")
        check_here()
    load()
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
    from mlx_lm.utils import load_model, save_model

    parameters = {"rank": recipe.rank, "scale": recipe.scale, "dropout": 0.0}
    losses: list[tuple[int, float]] = []

    class LossRecorder(trainer.TrainingCallback):  # type: ignore[misc]
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            losses.append((int(train_info["iteration"]), float(train_info["train_loss"])))
            if progress is not None:
                progress(*losses[-1])

    target.parent.mkdir(parents=True, exist_ok=True)
    with _refused(model), tempfile.TemporaryDirectory(prefix=".training-", dir=target.parent) as room:
        made = Path(room) / "made"
        made.mkdir()
        # What the tuner prints is for its own command.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            mx.random.seed(recipe.seed)
            network, _ = load_model(folder.path)
            network.freeze()
            depth = len(network.layers)
            count = min(recipe.layers or depth, depth)
            if recipe.kind == "full":
                for layer in network.layers[-count:]:
                    layer.unfreeze()
            elif resume:
                load_adapters(network, str(target))
            else:
                linear_to_lora_layers(network, count, parameters, use_dora=recipe.kind == "dora")
            batch = min(recipe.batch, len(learned), len(held_out))
            # Without a seed the order of the batches would be that of the process.
            batches: Any = partial(trainer.iterate_batches, seed=recipe.seed)
            loss = trainer.default_loss
            if taught is not None:
                loss = _distilled(load_model(taught.path)[0])
            elif pairs:
                loss, batches = preferred(load_model(folder.path)[0], recipe.beta)
            how = {"loss": loss, "iterate_batches": batches}
            before = trainer.evaluate(network, held_out, batch, -1, recipe.longest, **how)
            arguments = trainer.TrainingArgs(
                batch_size=batch,
                iters=recipe.steps,
                steps_per_report=max(1, recipe.steps // 50),
                steps_per_save=recipe.steps + 1,
                max_seq_length=recipe.longest,
                adapter_file=str(made / WEIGHTS),
            )
            trainer.train(
                network,
                optim.Adam(learning_rate=recipe.learning_rate),
                learned,
                None,
                arguments,
                **how,
                training_callback=LossRecorder(),
            )
            after = trainer.evaluate(network, held_out, batch, -1, recipe.longest, **how)
            if recipe.kind == "full":
                (made / WEIGHTS).unlink()
                save_model(made, network)
                for name in _KEPT:
                    if (folder.path / name).is_file():
                        shutil.copyfile(folder.path / name, made / name)
        if recipe.kind != "full":
            config: dict[str, Any] = {
                "fine_tune_type": recipe.kind,
                "num_layers": count,
                "lora_parameters": parameters,
            }
            if resume:
                config = json.loads(read_file(target / CONFIG, TABLE_BYTES))
            (made / CONFIG).write_text(
                json.dumps({**config, "model": str(folder.path), "plan": asdict(recipe)}, indent=1)
            )
        lines = [{"step": step, "loss": loss} for step, loss in losses]
        (made / LOSSES).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        target.mkdir(exist_ok=True)
        for file in sorted(made.iterdir()):
            os.replace(file, target / file.name)
    return Result(
        path=target,
        before=before,
        after=after,
        trained=len(learned),
        held_out=len(held_out),
        losses=tuple(losses),
    )


def _same_tokens(folder: Folder, teacher: Path) -> Folder:
    """The teacher's folder. It has to give a number to the same tokens."""
    teacher_folder = read_folder(teacher)
    if content_digest(teacher_folder.path / TOKENIZER) != content_digest(folder.path / TOKENIZER):
        raise InvalidInputError(
            f"{teacher} has another tokenizer than {folder.path.name}: a teacher needs the same tokens"
        )
    sizes = [each.text.get("vocab_size") for each in (folder, teacher_folder)]
    if sizes[0] != sizes[1]:
        raise InvalidInputError(
            f"{teacher} gives logits for {sizes[1]} tokens, {folder.path.name} for {sizes[0]}: a teacher "
            "needs as many"
        )
    return teacher_folder


def _distilled(teacher: Any) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """A loss for the tuner: how far a model is from its teacher, on the tokens of replies."""
    import mlx.core as mx
    from mlx_lm.tuner.losses import kl_div_loss

    teacher.freeze()

    def loss(model: Any, batch: Any, lengths: Any) -> tuple[Any, Any]:
        inputs = batch[:, :-1]
        apart = kl_div_loss(model(inputs).astype(mx.float32), teacher(inputs).astype(mx.float32))
        steps = mx.arange(1, inputs.shape[1] + 1)
        mask = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
        count = mask.sum()
        return (apart * mask).sum() / count, count

    return loss


def _divided(examples: Sequence[Any], recipe: TrainingRecipe) -> tuple[list[Any], list[Any]]:
    """What is learned, and every tenth one, which is held out."""
    if len(examples) < 2:
        raise InvalidInputError(
            f"{len(examples)} replies of at most {recipe.longest} tokens: give at least 2, better some "
            "hundred"
        )
    order = list(examples)
    random.Random(recipe.seed).shuffle(order)
    count = max(1, len(order) // 10)
    return order[count:], order[:count]


@contextlib.contextmanager
def _refused(model: Path) -> Iterator[None]:
    """What the tuner or a model class raises, as errors of ours."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemoryError(f"{model.name} could not be trained in the memory there is: {error}") from None
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise ModelLoadError(
            f"mlx-lm could not train {model.name}: {type(error).__name__}: {error}"
        ) from None
