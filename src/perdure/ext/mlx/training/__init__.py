"""Training of MLX models by mlx-lm's tuner.

examples    chats, from files and sessions, as tokens
preference  pairs of replies, and the loss by which the better one becomes likelier
tuning      one run: a loss before and after, an adapter or a whole model as its result
"""

from perdure.ext.mlx.training.examples import ChatEncoder as ChatEncoder
from perdure.ext.mlx.training.examples import Example as Example
from perdure.ext.mlx.training.examples import from_messages as from_messages
from perdure.ext.mlx.training.examples import read_chats as read_chats
from perdure.ext.mlx.training.preference import pair_of as pair_of
from perdure.ext.mlx.training.preference import read_pairs as read_pairs
from perdure.ext.mlx.training.tuning import Result as Result
from perdure.ext.mlx.training.tuning import TrainingRecipe as TrainingRecipe
from perdure.ext.mlx.training.tuning import train as train
