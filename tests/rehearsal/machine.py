"""One process that takes itself for a machine with NVIDIA GPUs, on a machine without.

Packages of a GPU installation are replaced by empty ones, `torch.cuda` tells of the pretended
device, and tensors that are made on it have no memory (torch's meta device). No kernel runs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

MIB = 1 << 20
SYSTEM_MIB = 600
"""The part of a GPU's memory that the driver and the context take."""


@dataclass(frozen=True)
class Machine:
    """A GPU: its name, compute capability, memory in MiB, multiprocessors, and CUDA's version."""

    name: str
    capability: tuple[int, int]
    memory_mib: int
    processors: int
    cuda: str = "13.0"

    @property
    def free_bytes(self) -> int:
        return (self.memory_mib - SYSTEM_MIB) * MIB


MACHINES = {
    "H100": Machine("NVIDIA H100 80GB HBM3", (9, 0), 81_559, 132),
    "H200": Machine("NVIDIA H200", (9, 0), 143_771, 132),
    "A100": Machine("NVIDIA A100-SXM4-80GB", (8, 0), 81_920, 108),
    "B200": Machine("NVIDIA B200", (10, 0), 183_359, 148),
}

REPLACED = frozenset(
    {"cuda", "cutlass", "deep_gemm", "flash_attn", "flash_mla", "flashinfer", "nvidia", "pynvml"}
    | {"quack", "sgl_kernel", "sglang_kernel", "tilelang", "torch_memory_saver"}
)
"""Packages of a GPU installation that are replaced by empty ones, if they are imported."""


class _Kind(type):
    """A class of an empty module: it has parameters and attributes of any name."""

    def __getitem__(cls, parameters: Any) -> type:
        return cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{cls.__name__}.{name}")


class _Empty(types.ModuleType):
    """A module of which every name is something: a class if it is capitalised, a mock if not."""

    __path__: ClassVar[list[str]] = []
    __version__ = "99.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():  # others derive from these, or ask isinstance()
            value: Any = _Kind(name, (), {"__init__": lambda *_, **__: None})
        else:
            value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Replacements(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `REPLACED`; `imported` are those that somebody wanted."""

    def __init__(self) -> None:
        self.imported: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in REPLACED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        self.imported.add(spec.name.partition(".")[0])
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is empty."""


class Pretence:
    """This process from here on. It cannot be undone.

    loaded: bytes of the GPU that weights take, as `torch.cuda.mem_get_info` then tells.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.loaded = 0
        self._replacements = _Replacements()
        import tvm_ffi  # noqa: F401, asks for classes of cuda.bindings if there are some

        sys.meta_path.insert(0, self._replacements)
        self._tell_of_the_device()
        _tell_of_packages()
        self._tell_of_the_driver()

    @property
    def replaced(self) -> set[str]:
        """The packages that were wanted and are not here."""
        return self._replacements.imported

    def _tell_of_the_device(self) -> None:
        machine, total = self.machine, self.machine.memory_mib * MIB
        properties = types.SimpleNamespace(
            name=machine.name,
            major=machine.capability[0],
            minor=machine.capability[1],
            total_memory=total,
            multi_processor_count=machine.processors,
            shared_memory_per_block_optin=227 * 1024,
            L2_cache_size=50 * MIB,
            gcnArchName="",
            uuid="GPU-0",
            warp_size=32,
            is_integrated=False,
        )
        stream = type(
            "Stream",
            (),
            {
                "__init__": lambda *_, **__: None,
                "wait_stream": lambda *_: None,
                "synchronize": lambda *_: None,
                "cuda_stream": 0,
            },
        )
        event = type(
            "Event",
            (),
            {
                "__init__": lambda *_, **__: None,
                "query": lambda _: True,
                **dict.fromkeys(("record", "wait", "synchronize"), lambda *_, **__: None),
            },
        )
        told = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "init": lambda: None,
            "device_count": lambda: 8,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "get_device_capability": lambda device=None: machine.capability,
            "get_device_name": lambda device=None: machine.name,
            "get_device_properties": lambda device=None: properties,
            "get_arch_list": lambda: ["sm_80", "sm_90", "sm_100"],
            "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "mem_get_info": lambda device=None: (machine.free_bytes - self.loaded, total),
            "Stream": stream,
            "Event": event,
            "current_stream": lambda device=None: stream(),
            "cudart": lambda: types.SimpleNamespace(
                cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
            ),
        }
        for name, value in told.items():
            setattr(torch.cuda, name, value)
        torch._C._cuda_getCurrentRawStream = lambda device: 0
        torch.version.cuda = machine.cuda
        torch.get_device_module = lambda device=None: torch.cuda  # type: ignore[assignment]

    def _tell_of_the_driver(self) -> None:
        real, machine = subprocess.run, self.machine
        answers = {
            "--query-gpu=memory.total": str(machine.memory_mib),
            "--query-gpu=compute_cap": "{}.{}".format(*machine.capability),
        }

        def run(program: Any, *more: Any, **keywords: Any) -> Any:
            if isinstance(program, list | tuple) and program[:1] in (
                ["nvidia-smi"],
                ("nvidia-smi",),
            ):
                answer = answers.get(program[1], machine.name)
                return subprocess.CompletedProcess(program, 0, f"{answer}\n", "")
            return real(program, *more, **keywords)

        subprocess.run = run  # type: ignore[assignment]


def _tell_of_packages() -> None:
    """Versions of replaced packages, newer than any that is asked for."""
    real = importlib.metadata.version
    families = ("flashinfer", "sgl-", "sgl_", "sglang-", "sglang_k", "nvidia")

    def version(name: str) -> str:
        try:
            return real(name)
        except importlib.metadata.PackageNotFoundError:
            if name.startswith(families):
                return "99.0.0"
            raise

    importlib.metadata.version = version


@contextmanager
def made_on(device: str) -> Iterator[None]:
    """Tensors that torch is told to make on a GPU are made on `device` instead."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device(device)
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            return device
        return value

    class Moved(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            keywords = {name: moved(value) for name, value in (kwargs or {}).items()}
            if isinstance(keywords.get("device"), int):  # torch.cuda.current_device()
                keywords["device"] = device
            keywords.pop("pin_memory", None)
            return func(*map(moved, args), **keywords)

    with Moved():
        yield
