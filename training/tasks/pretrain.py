"""The next token of documents, which fill every sequence end to end."""

from data.prepare import prepare

__all__ = ["prepare"]
