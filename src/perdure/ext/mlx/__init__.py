"""MLX: models as folders of safetensors, computed by mlx-lm's model classes.

engine          which sources it opens; nothing of MLX is imported before one of them is opened
packages        whether mlx and mlx-lm are here, and their first import
folder          the files of a model, judged before anything is loaded
tokenizer       text to tokens and back, from the folder's tokenizer.json
weights         the model class with its weights, one computation at a time
caches          what a layer keeps, as rows by token, a window, or a state
sequence_state  all layers of one sequence, and its bytes
adapters        LoRAs and DoRAs in mlx-lm's format
core            the calls of the contract
figures         how much memory a folder takes, from its headers and its config, and its card
model           a model, and the contexts opened on it
training        adapters trained on conversations, by mlx-lm's tuner
command         `perdure train`
"""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="mlx",
    needs=("weights",),
    engines=("perdure.ext.mlx.engine:ENGINE",),
    commands=(ExtensionCommand(name="train", target="perdure.ext.mlx.command:train", section="Models"),),
)
