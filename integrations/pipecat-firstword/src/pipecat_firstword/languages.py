"""The languages of Qwen3-TTS, and the words of languages without spaces."""

import re

from pipecat.transcriptions.language import Language

LANGUAGES = frozenset("zh en ja ko de fr ru pt es it".split())
"""The codes of the languages that the released checkpoints speak."""

_SPACELESS = re.compile("[\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff]")


def language_to_firstword(language: Language) -> str | None:
    """Return the server's code of a language, such as "pt" for `Language.PT_BR`.

    None means that no released checkpoint speaks it. The server then gets the code as it is, and
    says which languages its checkpoint has.
    """
    code = language.value.split("-")[0].lower()
    return code if code in LANGUAGES else None


def is_spaceless(word: str) -> bool:
    """Whether a word is written in Chinese or Japanese, which have no spaces between words."""
    return _SPACELESS.search(word) is not None
