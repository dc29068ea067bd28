"""Modular mode on models with recurrent layers: transitions of segments, and states composed of
them. A scheduler loads it when it is first asked for a segment.
"""
