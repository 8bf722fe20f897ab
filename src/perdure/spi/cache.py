"""For extensions that keep blocks of state."""

from perdure.cache.block import AnyBlock, Block, BlockId, BlockMeta, block_id, block_id_of
from perdure.cache.cache_view import BlockInfo, PrefixRun
from perdure.cache.prefix_search import key_of
from perdure.cache.sorted_keys import SortedKeys
from perdure.cache.tiers.archive import block_folders
from perdure.cache.tiers.base import BlockTier, TierOpener
from perdure.cache.tiers.block_folder import BlockFolder
from perdure.cache.tiers.block_index import BlockTable, PrefixTable
from perdure.cache.tiers.codec import (
    BEGINNINGS,
    MARK,
    PLAIN,
    ChildLookup,
    Encryption,
    EncryptionChoice,
    StateCodec,
    codec_of,
    is_encrypted,
)
from perdure.cache.tiers.disk import DiskTier, delete_encrypted, lock_folder
from perdure.cache.tiers.shares import Shares
from perdure.cache.tiers.tiered import Tiers
from perdure.decode.request import KeptPrefix
from perdure.engine.media import FIRST_ID, NEXT_ID, spans
from perdure.store.index import Index

__all__ = [
    "BEGINNINGS",
    "FIRST_ID",
    "MARK",
    "NEXT_ID",
    "PLAIN",
    "AnyBlock",
    "Block",
    "BlockFolder",
    "BlockId",
    "BlockInfo",
    "BlockMeta",
    "BlockTable",
    "BlockTier",
    "ChildLookup",
    "DiskTier",
    "Encryption",
    "EncryptionChoice",
    "Index",
    "KeptPrefix",
    "PrefixRun",
    "PrefixTable",
    "Shares",
    "SortedKeys",
    "StateCodec",
    "TierOpener",
    "Tiers",
    "block_folders",
    "block_id",
    "block_id_of",
    "codec_of",
    "delete_encrypted",
    "is_encrypted",
    "key_of",
    "lock_folder",
    "spans",
]
