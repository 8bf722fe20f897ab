"""For extensions that keep blocks of state."""

from perdure.cache.block import (
    AnyBlock as AnyBlock,
    Block as Block,
    BlockId as BlockId,
    BlockMeta as BlockMeta,
    block_id as block_id,
    block_id_of as block_id_of,
)
from perdure.cache.cache_view import BlockInfo as BlockInfo, PrefixRun as PrefixRun
from perdure.cache.prefix_search import key_of as key_of
from perdure.cache.sorted_keys import SortedKeys as SortedKeys
from perdure.cache.tiers.archive import block_folders as block_folders
from perdure.cache.tiers.base import BlockTier as BlockTier, TierOpener as TierOpener
from perdure.cache.tiers.block_folder import BlockFolder as BlockFolder
from perdure.cache.tiers.block_index import BlockTable as BlockTable, PrefixTable as PrefixTable
from perdure.cache.tiers.codec import (
    BEGINNINGS as BEGINNINGS,
    MARK as MARK,
    PLAIN as PLAIN,
    ChildLookup as ChildLookup,
    Encryption as Encryption,
    EncryptionChoice as EncryptionChoice,
    StateCodec as StateCodec,
    codec_of as codec_of,
    is_encrypted as is_encrypted,
)
from perdure.cache.tiers.disk import (
    DiskTier as DiskTier,
    delete_encrypted as delete_encrypted,
    lock_folder as lock_folder,
)
from perdure.cache.tiers.shares import Shares as Shares
from perdure.cache.tiers.tiered import Tiers as Tiers
from perdure.decode.request import KeptPrefix as KeptPrefix
from perdure.engine.media import FIRST_ID as FIRST_ID, NEXT_ID as NEXT_ID, spans as spans
from perdure.store.index import Index as Index
