"""For extensions that read or write messages, templates and replies, or bring model families."""

from perdure.chat.chat_format import ChatFormat
from perdure.chat.formats.llama3 import HEADER_MARKS
from perdure.chat.formats.registry import detect
from perdure.chat.message import DETAILS, Detail, Image, is_sound, parse_messages
from perdure.chat.normaliser import MessageNormaliser
from perdure.chat.options import ChatOptions
from perdure.chat.parsing import ID, INDEX, Malformed
from perdure.chat.parsing.call_writer import (
    LONGEST_HEADER,
    SPACE,
    CallForm,
    CallFormat,
    CallParser,
    CallText,
    CallWriter,
    filled,
    marks_in,
)
from perdure.chat.parsing.family import (
    CHATML_MARKS,
    ROLE_MARKS,
    THINK,
    Family,
    JsonCalls,
    Markers,
    json_object,
)
from perdure.chat.parsing.json_calls import JsonObjectsParser, decoded_string
from perdure.chat.parsing.json_scanner import BoundedText, JsonScanner
from perdure.chat.parsing.reply_parser import parse_reply
from perdure.chat.parsing.rules import Rules
from perdure.chat.past_conversations import PastConversation
from perdure.chat.plans import SUMMARY_REQUEST, SUMMARY_TRIES, SummaryPasses
from perdure.chat.prefetch import PAYER, WORTH, reading
from perdure.chat.prompt_builder import ImageFiles, reasoning_markers, with_reasoning_apart
from perdure.chat.prompt_rules import PromptRule, RuledPrompt
from perdure.chat.reply import ChatReply
from perdure.chat.template.capabilities import capabilities
from perdure.chat.template.rewriting import MessageRewriter
from perdure.chat.template.template import UNGUARDED, Guard, Template
from perdure.chat.transcript import ChatTokenizer, Transcript, shared_length

__all__ = [
    "CHATML_MARKS",
    "DETAILS",
    "HEADER_MARKS",
    "ID",
    "INDEX",
    "LONGEST_HEADER",
    "PAYER",
    "ROLE_MARKS",
    "SPACE",
    "SUMMARY_REQUEST",
    "SUMMARY_TRIES",
    "THINK",
    "UNGUARDED",
    "WORTH",
    "BoundedText",
    "CallForm",
    "CallFormat",
    "CallParser",
    "CallText",
    "CallWriter",
    "ChatFormat",
    "ChatOptions",
    "ChatReply",
    "ChatTokenizer",
    "Detail",
    "Family",
    "Guard",
    "Image",
    "ImageFiles",
    "JsonCalls",
    "JsonObjectsParser",
    "JsonScanner",
    "Malformed",
    "Markers",
    "MessageNormaliser",
    "MessageRewriter",
    "PastConversation",
    "PromptRule",
    "RuledPrompt",
    "Rules",
    "SummaryPasses",
    "Template",
    "Transcript",
    "capabilities",
    "decoded_string",
    "detect",
    "filled",
    "is_sound",
    "json_object",
    "marks_in",
    "parse_messages",
    "parse_reply",
    "reading",
    "reasoning_markers",
    "shared_length",
    "with_reasoning_apart",
]
