"""For every extension: checks of values, files, settings and the machine."""

from perdure import errors as errors, system as system
from perdure.atomic import (
    PRIVATE as PRIVATE,
    TABLE_BYTES as TABLE_BYTES,
    TEMPORARY as TEMPORARY,
    Readable as Readable,
    atomic_write as atomic_write,
    check_size as check_size,
    make_folder as make_folder,
    make_private as make_private,
    open_private as open_private,
    read_file as read_file,
    read_lines as read_lines,
    read_stream as read_stream,
    read_table as read_table,
    read_text as read_text,
    sync_folder as sync_folder,
    translate_os_errors as translate_os_errors,
    write_file as write_file,
    write_table as write_table,
)
from perdure.checks import (
    check_may_wait as check_may_wait,
    check_one_of as check_one_of,
    check_whole as check_whole,
    is_integer as is_integer,
    is_number as is_number,
    is_whole as is_whole,
)
from perdure.closing import Closing as Closing
from perdure.config import (
    SETTINGS as SETTINGS,
    choices as choices,
    settings as settings,
)
from perdure.engine_config import (
    CACHE_BITS as CACHE_BITS,
    EXACT_TYPES as EXACT_TYPES,
    N_BATCH as N_BATCH,
    N_CTX as N_CTX,
    SLOTS as SLOTS,
    STORE_BYTES as STORE_BYTES,
    ContextConfig as ContextConfig,
    EngineConfig as EngineConfig,
    KvType as KvType,
)
from perdure.engine_config.keywords import (
    FitKeywords as FitKeywords,
    FitOptions as FitOptions,
    LoadedModel as LoadedModel,
)
from perdure.extension import (
    brought as brought,
    extensions as extensions,
    imported as imported,
    left_out as left_out,
    optional_part as optional_part,
)
from perdure.identity import (
    Identity as Identity,
    content_digest as content_digest,
    file_version as file_version,
)
from perdure.options import (
    Option as Option,
    named_by as named_by,
    option as option,
    refuse_unknown as refuse_unknown,
)
from perdure.request_options import (
    SEED_LIMIT as SEED_LIMIT,
    draw_seed as draw_seed,
    options_of_replies as options_of_replies,
)
from perdure.system import processes as processes
