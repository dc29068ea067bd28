"""Blocks of chats that clients mark, and at which token each ends."""
