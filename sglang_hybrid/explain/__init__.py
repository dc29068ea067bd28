"""Explains why a prompt was not hit further: the notes for the answer, and the answer.

No decision of the cache depends on anything here.
"""
