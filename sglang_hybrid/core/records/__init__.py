"""The record of a cache node, the tree of records, and what clients pin in it."""
