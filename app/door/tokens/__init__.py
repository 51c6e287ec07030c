"""Text and messages -> token ids, exactly as the engines make them. No HTTP, no Redis.

load           a model's Renderer, from a folder or from the local Hugging Face cache
Renderer       of_chat and of_text: the ids of a prompt
Unrenderable   what only the engine itself can render; TokenizerUnavailable, Overloaded
"""

from app.door.tokens.errors import Overloaded, TokenizerUnavailable, Unrenderable
from app.door.tokens.pool import Pool
from app.door.tokens.renderer import Renderer, load

__all__ = ["Overloaded", "Pool", "Renderer", "TokenizerUnavailable", "Unrenderable", "load"]
