"""Training of MLX models by mlx-lm's tuner.

examples    chats, from files and sessions, as tokens
preference  pairs of replies, and the loss by which the better one becomes likelier
tuning      one run: a loss before and after, an adapter or a whole model as its result
"""

from perdure.training.examples import Example as Example
from perdure.training.examples import from_messages as from_messages
from perdure.training.examples import read_chats as read_chats
from perdure.training.preference import pair_of as pair_of
from perdure.training.preference import read_pairs as read_pairs
from perdure.training.tuning import Plan as Plan
from perdure.training.tuning import Result as Result
from perdure.training.tuning import train as train
