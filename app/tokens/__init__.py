"""Text and messages -> token ids, exactly as the engines make them. No HTTP, no Redis.

variables_of   what a chat request gives its template besides messages and tools
load           a model's Renderer, from a folder or from the local Hugging Face cache
Renderer       of_chat, of_response and of_text: the ids of a prompt
chat_of_…      requests of other APIs, as the chats that engines make of them
Unrenderable   what only the engine itself can render; TooManyTokens, Overloaded,
               TokenizerUnavailable
"""

from app.tokens.anthropic import Habits, chat_of_messages
from app.tokens.errors import Overloaded, TokenizerUnavailable, TooManyTokens, Unrenderable
from app.tokens.messages import MAX_MESSAGES, variables_of
from app.tokens.pool import TokenizerThreads
from app.tokens.renderer import Renderer, load
from app.tokens.responses import chat_of_response

__all__ = [
    "MAX_MESSAGES",
    "Habits",
    "Overloaded",
    "Renderer",
    "TokenizerThreads",
    "TokenizerUnavailable",
    "TooManyTokens",
    "Unrenderable",
    "chat_of_messages",
    "chat_of_response",
    "load",
    "variables_of",
]
