"""The live page of the cache (`--hybrid-ui`): the tree, what happens to it, and questions."""
