"""A pretended GPU: tensors that say they are on `cuda:0`, and streams that run as late as they may.

`Gpu.watching()` reports what the host thread would wait for. A tensor of the device has its numbers
in the memory of the host, so that code runs as it is; each call of torch that would make the host
wait for a real device is noted with the function that made it.

`Gpu` also stands for the module of streams and events that SGLang's transfers use. What a stream
other than the scheduler's is given is done when somebody who is ordered behind it needs it, and not
before. Whatever lacks an order finds numbers that are old, or new too early.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import sglang_hybrid
from sglang_hybrid.hooks.patching import NOTE

HERE = Path(__file__)
TESTS = HERE.parents[1]
PACKAGES = {each.__name__: Path(str(each.__file__)).parent for each in (sglang, sglang_hybrid)}
WAITING = 2
"""Polls after which a copy has arrived that nobody needed, where streams run at once."""

ARRIVES = 0.15
"""The probability that a stream has done all its work at a poll."""


@dataclass(frozen=True)
class Wait:
    """The host thread waits for the device: `what` it calls, in a function of a file."""

    what: str
    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.what} in {self.function} ({self.file})"


class OnDevice(Tensor):
    """A tensor of the pretended device."""

    def record_stream(self, stream: Any) -> None:
        """Memory is never used again here."""


def pinned(tensor: Tensor, device: Any = None) -> Any:
    """`Tensor.pin_memory`."""
    copy: Any = tensor.clone()
    copy._is_pinned = True
    return copy


class Stream:
    """Work in an order. `at_once`: it is done when it is given."""

    def __init__(self, gpu: Gpu, name: str, *, at_once: bool) -> None:
        self.gpu, self.name, self.at_once = gpu, name, at_once
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.waits = 0  # that it was told to wait for others

    def __repr__(self) -> str:
        return f"<stream {self.name}>"

    def give(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        if self.at_once:
            self.run()

    def run(self, up_to: int | None = None) -> None:
        """Do all work, or the first `up_to` pieces of it."""
        last = len(self.work) if up_to is None else up_to
        while self.done < last:
            self.done += 1
            self.work[self.done - 1]()

    def wait_event(self, event: Event) -> None:
        stream, up_to = event.stream, event.up_to
        self.waits += 1
        if stream is not None and stream is not self:
            self.give(lambda: stream.run(up_to))

    def wait_stream(self, other: Stream) -> None:
        up_to = len(other.work)
        self.waits += 1
        if other is not self:
            self.give(lambda: other.run(up_to))

    def synchronize(self) -> None:
        self.gpu.note("Stream.synchronize")
        self.run()


class Event:
    """A point in a stream."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.up_to, self.poll = gpu, 0, 0
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.gpu.current_stream()
        self.up_to, self.poll = len(self.stream.work), self.gpu.polls

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.current_stream()).wait_event(self)

    def query(self) -> bool:
        if self.stream is None:
            return True
        late = self.gpu.at_once and self.stream.name != "schedule"
        if late and self.gpu.polls < self.poll + WAITING:
            return False
        return self.stream.done >= self.up_to

    def synchronize(self) -> None:
        self.gpu.note("Event.synchronize" + (" (reached)" if self.query() else ""))
        if self.stream is not None:
            self.stream.run(self.up_to)
        self.poll = -WAITING  # it has happened

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "the time of an event that has not happened"
        return 1.0


class Gpu:
    """One device, and what stands for `torch.cuda` there. at_once: copies are done when they are
    begun, and known to have arrived after some polls; otherwise as late as streams allow.
    """

    def __init__(self, *, at_once: bool = False, seed: int = 0) -> None:
        self.at_once = at_once
        self.polls = 0
        self._chance = random.Random(seed)
        self.waits: list[Wait] = []
        self.streams: list[Stream] = []
        self.schedule = self.Stream(name="schedule")
        self.forwards = self.Stream(name="forwards")
        self._current = [self.schedule]
        self._watching = False

    # What SGLang's `device_module` has.

    def Stream(self, priority: int = 0, *, name: str = "copies") -> Stream:
        self.streams.append(Stream(self, name, at_once=self.at_once or name == "schedule"))
        return self.streams[-1]

    def Event(self, **kwargs: Any) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Any:
        return self._current[-1]

    @contextmanager
    def stream(self, chosen: Any) -> Iterator[None]:
        self._current.append(chosen)
        try:
            yield
        finally:
            self._current.pop()

    def synchronize(self, device: Any = None) -> None:
        self.note("synchronize")
        for stream in self.streams:
            stream.run()

    __name__ = "pretended"

    # What tests ask.

    def poll(self, *, finish: bool = False) -> None:
        """Time passes: some streams do all that they were given. finish: all of them do."""
        self.polls += WAITING if finish else 1
        for stream in self.streams:
            if finish or self._chance.random() < ARRIVES:
                stream.run()

    def note(self, what: str) -> None:
        """The host thread would wait: say for what, unless a test's own code does."""
        place = _caller()
        if self._watching and place is not None:
            self.waits.append(Wait(what, *place))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tensors that are made for `cuda` are the device's, and waits are noted."""
        self._watching = True
        try:
            with _Pretending(self):
                yield
        finally:
            self._watching = False


def _caller() -> tuple[str, str] | None:
    """File and function of SGLang's or ours that make the call under way; None if a test does."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename.removesuffix(NOTE))
        for name, folder in PACKAGES.items():
            if file.is_relative_to(folder):
                return f"{name}/{file.relative_to(folder)}", frame.f_code.co_name
        if file != HERE and file.is_relative_to(TESTS):
            return None
        frame = frame.f_back
    return None


READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}
READS |= {"__contains__", "__repr__", "__format__", "nonzero", "argwhere", "masked_select", "equal"}
READS |= {"unique", "unique_consecutive", "is_nonzero", "bincount", "allclose", "isin"}
"""Functions whose result, or its shape, the host reads from the device."""

ATTRIBUTES = {"device": torch.device("cuda", 0), "is_cuda": True, "is_cpu": False}

MADE_OF_LISTS = {"tensor", "as_tensor", "asarray", "new_tensor"}

INDEXING = {"__getitem__", "__setitem__"}

ROW_COPIES = {"index_select", "index_copy_"}
"""Copies of rows whose numbers the device has."""


class _Pretending(TorchFunctionMode):
    """Tensors on `cuda` are `OnDevice`, with their numbers on the host."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return self._call(func, _name(func), list(args), kwargs)

    def _call(self, func: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        inside = any(isinstance(one, OnDevice) for one in _flat((args, kwargs)))
        own = args[0] if args else None
        if name == "__get__":  # an attribute
            what = getattr(func, "__self__", None)
            what = getattr(what, "__name__", "")
            if isinstance(own, OnDevice) and what in ATTRIBUTES:
                return ATTRIBUTES[what]
            return _wrapped(func(*args), inside)
        if name in READS and inside:
            self._gpu.note(name)
        elif name in MADE_OF_LISTS and inside and not isinstance(args[-1], OnDevice):
            self._gpu.note(f"{name} of numbers")
        elif name in ("cpu", "cuda", "to", "copy_", "type_as"):
            return self._copy(func, name, args, kwargs)
        elif name in INDEXING:
            self._index(name, args)
        elif name in ROW_COPIES and inside:
            self._gpu.current_stream().run()  # as in `_index`
        elif inside and _has_an_unknown_shape(name, args, kwargs):
            self._gpu.note(name)
        wanted = kwargs.get("device")
        to_device = wanted is not None and torch.device(wanted).type == "cuda"
        if to_device:
            kwargs["device"] = "cpu"
            if name in MADE_OF_LISTS:
                self._gpu.note(f"{name} of host memory")
        host_wanted = wanted is not None and not to_device
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if pinned:
            result._is_pinned = True
        return _wrapped(result, (inside and not host_wanted) or to_device)

    def _copy(self, func: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        own = args[0]
        from_device = isinstance(own, OnDevice)
        if name == "copy_":
            source = args[1]
            if from_device != isinstance(source, OnDevice) and source.dim():
                self._note_copy(own, source, args[2] if len(args) > 2 else kwargs)
            return func(*args, **kwargs)
        wanted, rest = _device_of(args[1:], kwargs)
        if name in ("cpu", "cuda"):
            wanted = torch.device(name)
        if wanted is None:
            return _wrapped(func(*args, **kwargs), from_device)
        to_device = wanted.type == "cuda"
        if from_device != to_device:
            self._note_copy(None, own, kwargs)
        moved = own.as_subclass(Tensor)
        if rest or kwargs.get("dtype") is not None or kwargs.get("copy"):
            more = {key: kwargs[key] for key in ("dtype", "copy") if kwargs.get(key) is not None}
            moved = moved.to(*rest, **more)
        if from_device != to_device and moved.data_ptr() == own.data_ptr():
            moved = moved.clone()
        elif moved is own.as_subclass(Tensor) and from_device == to_device:
            return own
        return _wrapped(moved, to_device)

    def _note_copy(self, target: Any, source: Tensor, how: Any) -> None:
        """The host waits for such a copy, unless it is told not to and its memory is pinned."""
        host = target if isinstance(source, OnDevice) else source
        blocks = not (how.get("non_blocking") if isinstance(how, dict) else how)
        if blocks:
            self._gpu.note("a copy between host and device")
        elif host is None or not getattr(host, "_is_pinned", False):
            self._gpu.note("a copy of memory that is not pinned")

    def _index(self, name: str, args: list[Any]) -> None:
        own = args[0]
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        if not isinstance(own, OnDevice):
            assert not any(isinstance(one, OnDevice) for one in indices), (
                "host memory cannot be indexed by the device"
            )
            return
        self._gpu.current_stream().run()  # it is done now, and after all that was given before
        for one in indices:
            if isinstance(one, OnDevice):
                if not one.dim():  # torch reads it, to make a view
                    self._gpu.note(f"{name} by a number of the device")
                elif one.dtype is torch.bool:
                    self._gpu.note(f"{name} by a mask")
            elif isinstance(one, list) or (isinstance(one, Tensor) and one.dim()):
                self._gpu.note(f"{name} by numbers of the host")
        value = args[2] if name == "__setitem__" else None
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, OnDevice):
            self._gpu.note(f"{name} of host memory")


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", ""))


def _has_an_unknown_shape(name: str, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """True if the shape of the result is known to the device only."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return name == "where" and len(args) == 1


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _device_of(args: list[Any], kwargs: dict[str, Any]) -> tuple[torch.device | None, list[Any]]:
    """The device that `Tensor.to` names, and its other arguments that say a type."""
    device, rest = kwargs.get("device"), []
    for one in args:
        if isinstance(one, (str, torch.device)):
            device = one
        elif isinstance(one, Tensor):
            device = torch.device("cuda") if isinstance(one, OnDevice) else torch.device("cpu")
            rest.append(one.dtype)
        elif isinstance(one, torch.dtype):
            rest.append(one)
    return None if device is None else torch.device(device), rest


def _wrapped(result: Any, on_device: bool) -> Any:
    if isinstance(result, Tensor):
        if on_device and not isinstance(result, OnDevice):
            return result.as_subclass(OnDevice)
        if not on_device and isinstance(result, OnDevice):
            return result.as_subclass(Tensor)
        return result
    if isinstance(result, (list, tuple)) and any(isinstance(one, Tensor) for one in result):
        found = [_wrapped(one, on_device) for one in result]
        return type(result)(found)
    return result
