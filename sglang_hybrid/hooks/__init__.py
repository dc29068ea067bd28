"""Changes of SGLang: hooks on its functions (`table.py`) and patches of its files.

A hook is taken to its function at the moment when the function's module is imported, so it is there
before any other module can copy the function, in every process that imports the module. SGLang's
own registry of hooks (`sglang/srt/plugins/hook_registry.py`) has the same kinds, but

* it applies them when a process loads its plugins: HTTP workers (`--tokenizer-worker-num`) load
  none, and any other process imports every hooked module then, whether it needs it or not;
* it replaces a function that a module has imported by name in all modules, not in that one;
* a class that it replaces stays the base of the classes that were derived from it before;
* a hook that does not take hold is a line in its log.

Hooks that other plugins register there go around ours.
"""
