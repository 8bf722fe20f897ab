"""For extensions that read or write messages, templates and replies, or bring model families."""

from perdure.chat.chat_format import ChatFormat as ChatFormat
from perdure.chat.formats.llama3 import HEADER_MARKS as HEADER_MARKS
from perdure.chat.formats.registry import detect as detect
from perdure.chat.message import (
    DETAILS as DETAILS,
    Detail as Detail,
    Image as Image,
    is_sound as is_sound,
    parse_messages as parse_messages,
)
from perdure.chat.normaliser import MessageNormaliser as MessageNormaliser
from perdure.chat.options import ChatOptions as ChatOptions
from perdure.chat.parsing import ID as ID, INDEX as INDEX, Malformed as Malformed
from perdure.chat.parsing.call_writer import (
    LONGEST_HEADER as LONGEST_HEADER,
    SPACE as SPACE,
    CallForm as CallForm,
    CallFormat as CallFormat,
    CallParser as CallParser,
    CallText as CallText,
    CallWriter as CallWriter,
    filled as filled,
    marks_in as marks_in,
)
from perdure.chat.parsing.family import (
    CHATML_MARKS as CHATML_MARKS,
    ROLE_MARKS as ROLE_MARKS,
    THINK as THINK,
    Family as Family,
    JsonCalls as JsonCalls,
    Markers as Markers,
    json_object as json_object,
)
from perdure.chat.parsing.json_calls import (
    JsonObjectsParser as JsonObjectsParser,
    decoded_string as decoded_string,
)
from perdure.chat.parsing.json_scanner import JsonScanner as JsonScanner
from perdure.chat.parsing.reply_parser import parse_reply as parse_reply
from perdure.chat.parsing.rules import Rules as Rules
from perdure.chat.past_conversations import PastConversation as PastConversation
from perdure.chat.plans import (
    SUMMARY_REQUEST as SUMMARY_REQUEST,
    SUMMARY_TRIES as SUMMARY_TRIES,
    SummaryPasses as SummaryPasses,
)
from perdure.chat.prefetch import PAYER as PAYER, WORTH as WORTH, reading as reading
from perdure.chat.prompt_builder import (
    ImageFiles as ImageFiles,
    reasoning_markers as reasoning_markers,
    with_reasoning_apart as with_reasoning_apart,
)
from perdure.chat.prompt_rules import PromptRule as PromptRule, RuledPrompt as RuledPrompt
from perdure.chat.reply import ChatReply as ChatReply
from perdure.chat.template.capabilities import capabilities as capabilities
from perdure.chat.template.rewriting import MessageRewriter as MessageRewriter
from perdure.chat.template.template import (
    UNGUARDED as UNGUARDED,
    Guard as Guard,
    Template as Template,
)
from perdure.chat.transcript import (
    ChatTokenizer as ChatTokenizer,
    Transcript as Transcript,
    shared_length as shared_length,
)
