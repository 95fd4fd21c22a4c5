"""A CUDA device in software: tensors that say they are on cuda:0 and hold CPU memory.

The project's GPU code runs through it on a machine without a GPU: what `device.type == "cuda"` chooses,
device mismatches (an error, as on a GPU), host syncs (noted with the place that asked), CUDA graphs (the
operations are recorded and replayed; a sync or a host copy inside a capture is an error) and Triton kernels
(through the interpreter, 16-bit operands widened before and rounded after). Speed, memory, races and compiled
code are beyond it.

It needs device_guard.cpp, compiled and preloaded: see test_emulated_gpu.py. One process, one device, no way
back.
"""

import contextlib
import itertools
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
HALF = (torch.bfloat16, torch.float16)

SYNCS: list[tuple[str, str]] = []
"""(what, where) of every wait for the device."""
LAUNCHES: list[str] = []
"""Names of the Triton kernels launched."""
UNGUARDED: set[str] = set()
"""Those launched while nobody had made their tensors' device the current one: with several GPUs, on the wrong
one."""

# Operations whose result's shape hangs on values, or whose result is a Python value.
WAITING = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.is_nonzero.default,
    aten._local_scalar_dense.default,
    aten.item.default,
}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._unsafe_index.Tensor}


class Device:
    """What the emulated device is doing. tape: operations of the graph being captured."""

    tape: list[tuple[Callable[..., Any], tuple, dict, Any]] | None = None
    launch_for_real = True
    guards = 0


class Emulated(Tensor):
    """A tensor on the emulated device; `inside` holds its values."""

    inside: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inside):
        return Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            layout=inside.layout,
            device=CUDA,
        )

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __repr__(self):
        return f"Emulated({self.inside})"

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            new = Emulated(self.inside.detach().clone())
            if getattr(self, "_is_param", False):
                new = torch.nn.Parameter(new, self.requires_grad)
            memo[id(self)] = new
        return memo[id(self)]

    def data_ptr(self):
        return self.inside.data_ptr()

    def tolist(self):
        wait("tolist")
        return self.inside.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")


def wait(what):
    """The host waits for the device: noted; an error while a graph is captured."""
    # Only the project's own lines say who asked.
    frames = [
        f for f in traceback.extract_stack() if str(ROOT) in f.filename and "site-packages" not in f.filename
    ]
    places = [
        f"{Path(f.filename).relative_to(ROOT)}:{f.name}" for f in frames if "tests/devices" not in f.filename
    ]
    SYNCS.append((what, " < ".join(reversed(places[-3:]))))
    if Device.tape is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def each(value, change):
    """`change` on the items of nested tuples and lists (torch's own walk is slower than operations)."""
    if not isinstance(value, (tuple, list)):
        return change(value)
    made = [each(item, change) for item in value]
    if isinstance(value, list):
        return made
    return type(value)(*made) if hasattr(value, "_fields") else tuple(made)


def tensors_in(*values):
    found = []
    each(values, lambda x: found.append(x) if isinstance(x, Tensor) else None)
    return found


def to_device(value):
    return Emulated(value) if isinstance(value, Tensor) and not isinstance(value, Emulated) else value


def to_host(value):
    return value.inside if isinstance(value, Emulated) else value


def on_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


# ---- operations
# -----------------------------------------------------------------------------------------------------


def run(func, args, kwargs):
    """One operation of torch, on the device or not."""
    tensors = tensors_in(args, *kwargs.values())
    emulated = [x for x in tensors if isinstance(x, Emulated)]
    name, target = str(func), kwargs.get("device")
    # Nothing of the device is involved.
    if not emulated and not on_cuda(target):
        return func(*args, **kwargs)
    if func is aten.is_pinned.default or func is aten.record_stream.default:
        return False
    if func is aten._to_copy.default or "_like" in name or ".new_" in name:
        return _placed(func, args, kwargs)
    if func is aten.copy_.default:
        return _copied(func, args)
    if func in WAITING and not (
        func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None
    ):
        wait(name)
    if func in (aten.item.default, aten._local_scalar_dense.default):
        return func(emulated[0].inside)
    # A GPU would refuse operands on two devices; so must this.
    _check_devices(func, args, tensors)
    host_args, host_kwargs = each(args, to_host), {key: each(x, to_host) for key, x in kwargs.items()}
    host_kwargs.pop("pin_memory", None)
    if on_cuda(target):
        host_kwargs["device"] = CPU
    out = _compute(func, host_args, host_kwargs)
    # The outside has a shape of its own.
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)
    _record(func, host_args, host_kwargs, out)
    # In-place operations return the very tensor they were given.
    known = {id(x.inside): x for x in emulated}
    return each(out, lambda x: known.get(id(x)) if id(x) in known else to_device(x))


def _placed(func, args, kwargs):
    """Operations that may leave the device of their input."""
    source, target = args[0], kwargs.get("device")
    lands = on_cuda(target) if target is not None else isinstance(source, Emulated)
    rest = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if func is aten._to_copy.default:
        if lands and not isinstance(source, Emulated) and Device.tape is not None:
            raise RuntimeError("cannot copy from host memory while a graph is captured")
        if not lands and isinstance(source, Emulated):
            wait("copy to the host")
    elif target is not None or not isinstance(source, Emulated):
        rest["device"] = CPU if lands else target
    host_args = each(args, to_host)
    out = _compute(func, host_args, rest)
    _record(func, host_args, rest, out)
    return to_device(out) if lands else out


def _copied(func, args):
    target, source = args[:2]
    if isinstance(source, Emulated) and not isinstance(target, Emulated):
        wait("copy to the host")
    if (
        isinstance(target, Emulated)
        and not isinstance(source, Emulated)
        and source.dim()
        and Device.tape is not None
    ):
        raise RuntimeError("cannot copy from host memory while a graph is captured")
    host_args = each(args, to_host)
    func(*host_args)
    _record(func, host_args, {}, None)
    return target


def _check_devices(func, args, tensors):
    """Raise as torch does when operands are on several devices; single numbers of the host are fine."""
    # Tensors without axes are numbers, which may come from the host.
    strays = [x for x in tensors if not isinstance(x, Emulated) and x.dim() > 0]
    if func in INDEXING:
        if strays and isinstance(args[0], Emulated) and all(any(x is i for i in args[1]) for x in strays):
            wait("index from the host")
            strays = []
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)]
        if masks and func is aten.index.Tensor:
            wait("index by a mask")
    if strays:
        shown = [(tuple(x.shape), str(x.device)) for x in tensors]
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {shown}")


def _compute(func, args, kwargs):
    name = str(func)
    if not Device.launch_for_real and name.startswith(("aten.empty", "aten.new_empty")):
        # What a kernel would have filled.
        return func(*args, **kwargs).zero_()
    # A lazy conjugate would be lost on the way.
    if func is aten._conj.default:
        return torch.conj_physical(*args)
    # 16-bit operands, wide result: cuBLAS only.
    if name in ("aten.bmm.dtype", "aten.mm.dtype"):
        if args[0].dtype not in HALF or args[0].dtype != args[1].dtype or args[2] != torch.float32:
            raise RuntimeError(f"{name}: {args[0].dtype} x {args[1].dtype} -> {args[2]} is not supported")
        return getattr(aten, name.split(".")[1]).default(args[0].to(args[2]), args[1].to(args[2]))
    if name == "aten.addmm.dtype_out":
        total, left, right, wide = args
        if left.dtype not in HALF or left.dtype != right.dtype or not wide == total.dtype == torch.float32:
            raise RuntimeError(f"{name}: {total.dtype} + {left.dtype} x {right.dtype} is not supported")
        return kwargs["out"].copy_(aten.addmm.default(total, left.to(wide), right.to(wide)))
    return func(*args, **kwargs)


def _record(func, args, kwargs, out):
    if Device.tape is not None:
        Device.tape.append((func, args, kwargs, out))


class Mode(TorchDispatchMode):
    """Sees the operations that make tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


# ---- Triton
# ---------------------------------------------------------------------------------------------------------


def _interpret(call, args, kwargs):
    """The interpreter gets 16-bit numbers wrong: whole storages are widened before and rounded after."""
    wide = {}

    def widened(x):
        if not isinstance(x, Tensor) or x.dtype not in HALF:
            return x
        # Views that overlap must stay views of one widened memory.
        storage = x.untyped_storage()
        if storage.data_ptr() not in wide:
            flat = torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // 2,))
            wide[storage.data_ptr()] = (flat, flat.float())
        return wide[storage.data_ptr()][1].as_strided(x.size(), x.stride(), x.storage_offset())

    with _disable_current_modes(), torch.no_grad():
        call(*[each(x, widened) for x in args], **{key: each(x, widened) for key, x in kwargs.items()})
        for flat, values in wide.values():
            flat.copy_(values)


def _patch_triton():
    from triton.runtime import interpreter

    original = interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        if len({isinstance(x, Emulated) for x in tensors_in(args, *kwargs.values())}) > 1:
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        # Noted also when nothing is computed.
        LAUNCHES.append(self.fn.__name__)
        if not Device.guards:
            UNGUARDED.add(self.fn.__name__)
        if not Device.launch_for_real:
            return
        plain = lambda x: to_host(x).detach() if isinstance(x, Tensor) else x
        args, kwargs = each(args, plain), {key: each(x, plain) for key, x in kwargs.items()}
        replay = lambda *a, **k: _interpret(lambda *b, **c: original(self, *b, **c), a, k)
        replay(*args, **kwargs)
        _record(replay, args, kwargs, None)

    interpreter.GridExecutor.__call__ = launch


# ---- torch.cuda
# -----------------------------------------------------------------------------------------------------


class Properties:
    name = "emulated GPU"
    total_memory = 139 * 2**30
    multi_processor_count = 132
    major, minor = 9, 0
    warp_size = 32
    L2_cache_size = 50 * 2**20


class Stream:
    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, other): ...
    def synchronize(self): ...


class Event:
    def __init__(self, *args, **kwargs): ...
    def synchronize(self): ...
    def record(self, *args):
        self.seconds = time.perf_counter()

    def elapsed_time(self, other):
        return max(1e-3, 1e3 * (other.seconds - self.seconds))


class Graph:
    """Operations of a capture; a replay computes them again into the same results."""

    tape: list[tuple[Callable[..., Any], tuple, dict, Any]]

    def pool(self):
        return (0, 0)

    def replay(self):
        with _disable_current_modes(), torch.no_grad():
            for func, args, kwargs, out in self.tape:
                again = _compute(func, args, kwargs)
                # Later operations of the graph read the old places.
                for old, new in zip(tensors_in(out), tensors_in(again)):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def capture(graph, *args, **kwargs):
    Device.tape = graph.tape = []
    try:
        yield
    finally:
        Device.tape = None


@contextlib.contextmanager
def current(device):
    """torch.cuda.device."""
    Device.guards += 1
    try:
        yield
    finally:
        Device.guards -= 1


def _patch_cuda():
    cuda = torch.cuda
    answers = {"is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 1}
    answers |= {"get_device_capability": (9, 0), "get_device_name": Properties.name}
    answers |= {"get_device_properties": Properties, "mem_get_info": (2**37, 2**37)}
    zero = "current_device memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    answers |= dict.fromkeys(zero.split(), 0) | {"is_current_stream_capturing": False}
    nothing = "synchronize reset_peak_memory_stats empty_cache manual_seed manual_seed_all set_device init"
    answers |= dict.fromkeys(f"{nothing} _lazy_init set_rng_state".split())
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
    cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    cuda.Stream, cuda.Event, cuda.CUDAGraph, cuda.graph = Stream, Event, Graph, capture
    cuda.current_stream = cuda.default_stream = lambda *args: Stream()
    cuda.device = current
    cuda.stream = cuda.device_of = lambda *args: contextlib.nullcontext()
    torch.version.cuda = "13.0"
    Tensor.pin_memory = lambda self, *args: self
    Tensor.record_stream = lambda self, *args: None
    original = torch.Generator

    class Generator(original):
        def __new__(cls, device="cpu"):
            return original.__new__(cls, "cpu")

    torch.Generator = Generator


def _patch_varlen():
    """Flash attention over variable lengths by its definition, with its limits."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return

    def varlen_attn(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        return_aux=None,
        scale=None,
        window_size=(-1, -1),
        **others,
    ):
        assert query.is_cuda and query.dtype in HALF and cu_seq_q.is_cuda and cu_seq_q.dtype == torch.int32
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
        ends, outs, normalisers = to_host(cu_seq_q).tolist(), [], []
        for start, stop in itertools.pairwise(ends):
            q, k, v = (x[start:stop].transpose(0, 1).float() for x in (query, key, value))
            k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
            logits = q @ k.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
            if tuple(window_size) == (-1, 0):
                seen = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).tril()
                logits = logits.masked_fill(~seen, float("-inf"))
            outs.append((logits.softmax(-1) @ v).transpose(0, 1).to(query.dtype))
            normalisers.append(logits.logsumexp(-1))
        return torch.cat(outs), torch.cat(normalisers, 1)

    varlen.varlen_attn = varlen_attn


def install():
    """From here on there is one CUDA device. Keep the result."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # Torch.tensor(..., device=): made on the host, then moved.
    torch._C._set_only_lift_cpu_tensors(True)
    _patch_cuda()
    _patch_varlen()
    _patch_triton()
    mode = Mode()
    # Never left: there is no way back to a process without the device.
    mode.__enter__()
    return mode
