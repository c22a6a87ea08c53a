"""Supervised fine-tuning: the answers in rows of chats, instructions or texts. Only their tokens have labels."""

from data.prepare_rows import prepare_rows as prepare

__all__ = ["prepare"]
