"""For extensions of the server: routes, protocols, callers and answers."""

from perdure.server.api.page import HEADERS as HEADERS, as_policy as as_policy
from perdure.server.api.sessions import Named as Named, receive_file as receive_file
from perdure.server.app import served as served
from perdure.server.core.api_error import (
    ApiError as ApiError,
    deadline as deadline,
    for_client as for_client,
    invalid as invalid,
    rate_limited as rate_limited,
    stopping as stopping,
    to_api_error as to_api_error,
    unauthorised as unauthorised,
    unreadable as unreadable,
    validation as validation,
)
from perdure.server.core.app_state import (
    AppState as AppState,
    AppStateDep as AppStateDep,
    CallerDep as CallerDep,
    ServedDep as ServedDep,
)
from perdure.server.core.body_route import (
    LARGE as LARGE,
    BodyRoute as BodyRoute,
    read_json as read_json,
    with_linked_images as with_linked_images,
)
from perdure.server.core.event_log import EventLog as EventLog, followed as followed
from perdure.server.core.follow import (
    EventResponse as EventResponse,
    Follower as Follower,
    Recorded as Recorded,
    Sink as Sink,
    answer as answer,
    deliver as deliver,
    while_connected as while_connected,
)
from perdure.server.core.keys import (
    METRICS as METRICS,
    SAVED_AFTER as SAVED_AFTER,
    DayUsage as DayUsage,
    Key as Key,
    KeyAccount as KeyAccount,
    Keys as Keys,
    KeyStore as KeyStore,
    KeyUsage as KeyUsage,
    new_key as new_key,
    parse_line as parse_line,
    usage_file as usage_file,
)
from perdure.server.core.metrics import RequestObserver as RequestObserver, StreamEnd as StreamEnd
from perdure.server.core.middleware import (
    ASSETS as ASSETS,
    FILE_TYPE as FILE_TYPE,
    FORM_TYPE as FORM_TYPE,
    JsonScan as JsonScan,
    session_id as session_id,
    too_large as too_large,
)
from perdure.server.core.protocol import (
    JSON_LINES as JSON_LINES,
    SSE as SSE,
    CallBuffer as CallBuffer,
    Events as Events,
    EventTemplate as EventTemplate,
    Framing as Framing,
    Protocol as Protocol,
    ProtocolEvent as ProtocolEvent,
    WholeCall as WholeCall,
    Writer as Writer,
    call_input as call_input,
    event as event,
    named_event as named_event,
)
from perdure.server.core.schemas import (
    NO_BODY as NO_BODY,
    PAGE as PAGE,
    CompletionExtension as CompletionExtension,
    Items as Items,
    Limit as Limit,
    RequestSchema as RequestSchema,
    ResponseSchema as ResponseSchema,
    ReuseAnswer as ReuseAnswer,
    SamplingSchema as SamplingSchema,
    StreamOptions as StreamOptions,
    TimingsAnswer as TimingsAnswer,
    Token as Token,
    UsageAnswer as UsageAnswer,
    errors as errors,
    ignored_fields as ignored_fields,
    option_value as option_value,
    refuse_fields as refuse_fields,
    streamed as streamed,
)
from perdure.server.core.server_state import (
    ModelDirectory as ModelDirectory,
    ServedModel as ServedModel,
    ServerService as ServerService,
    ServerState as ServerState,
)
from perdure.server.core.settings import (
    LOOPBACK as LOOPBACK,
    Limits as Limits,
    ReplyDefaults as ReplyDefaults,
    host_name as host_name,
)
from perdure.server.core.visit import (
    VISIT as VISIT,
    Caller as Caller,
    Sign as Sign,
    Visit as Visit,
    is_operator as is_operator,
)
from perdure.server.http_server import check_address as check_address
from perdure.server.pool import (
    PooledModel as PooledModel,
    model_files as model_files,
    parse_duration as parse_duration,
    spec_of_file as spec_of_file,
)
from perdure.server.protocols.chat import (
    ChatRequest as ChatRequest,
    ExtensionAnswer as ExtensionAnswer,
    check_chat_options as check_chat_options,
    extension as extension,
    reply_request as reply_request,
)
from perdure.server.protocols.image_input import (
    KEPT as KEPT,
    image_of_base64 as image_of_base64,
    image_of_url as image_of_url,
    sound_of_base64 as sound_of_base64,
)
from perdure.server.protocols.naming_fields import NamingFields as NamingFields, is_id as is_id
from perdure.server.protocols.openai import (
    MARKS as MARKS,
    AnswerHead as AnswerHead,
    ChunkWriter as ChunkWriter,
    PromptCacheOptions as PromptCacheOptions,
    cache_marks as cache_marks,
    fill_in as fill_in,
    finish_word as finish_word,
    finite as finite,
    has_breakpoint as has_breakpoint,
    logprobs_of as logprobs_of,
    tier_options as tier_options,
)
from perdure.server.protocols.reply_request import (
    NamedConversations as NamedConversations,
    NoSession as NoSession,
    ReplyRequest as ReplyRequest,
    SessionExtension as SessionExtension,
    extend as extend,
    named_conversations as named_conversations,
    options_in_session as options_in_session,
    submit_turn as submit_turn,
)
