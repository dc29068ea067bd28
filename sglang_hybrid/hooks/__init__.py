"""Functions of SGLang that ours run before, after or around (`table.py` lists them all).

A hook is taken to its function at the moment when the function's module is imported, so it is there
before any other module can copy the function, in every process that imports the module. SGLang's
own registry of hooks (`sglang/srt/plugins/hook_registry.py`) has the same kinds, but is too late
for three of ours and not enough for a fourth:

* It applies them when a process loads its plugins. HTTP workers (`--tokenizer-worker-num`) load
  none, and a process imports every hooked module then, whether it needs it or not.
* A function that a module has imported by name cannot be replaced there alone: the registry
  replaces it in every module.
* A class that is replaced stays the base of the classes that were derived from it before.
* A hook that does not take hold is a line in the log.

Hooks that other plugins register there go around ours.
"""
