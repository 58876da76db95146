"""What can be wrong with text and with the files that describe it.

    TextError
      +- ModelFilesError   a model folder's tokenizer or template can't be used; found when it is loaded
      +- EncodeError       a text is no sequence of Unicode characters
      +- TemplateError     the chat template can't render these messages

Each message says what to change.
"""

from __future__ import annotations


class TextError(Exception):
    """Text, or a file that describes text, can't be used."""


class ModelFilesError(TextError):
    """A file of the model folder is missing, damaged or of a kind that isn't supported."""


class EncodeError(TextError):
    """The text can't be tokenized."""


class TemplateError(TextError):
    """The messages don't fit the model's chat template."""
