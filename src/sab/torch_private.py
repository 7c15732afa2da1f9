"""Every private name of torch that the library uses; no other file has one.

They spare a small layer most of the time of a call, or have no public counterpart. Any release of torch may drop them,
which is why `pyproject.toml` bounds its version. Each comment states what a name is for and what its loss would mean.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch._compile
from torch import Tensor, nn
from torch.utils import _pytree as _pytree_module
from torch.utils.data._utils import collate as _collating

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_forward_ad: Any = torch.autograd.forward_ad
_pytree: Any = _pytree_module
_C: Any = torch._C
_autograd: Any = getattr(_C, "_autograd", None)

# Whether `torch.func` transforms (vmap, grad, jvp, ...) are active, and which, outermost first.
# Without one of them: unknown ones always count as active, so that the reference runs everything, correct and slow.
_functorch: Any = getattr(_C, "_functorch", None)
_transforms: Any = getattr(_functorch, "get_interpreter_stack", None)
_are_transforms_active: Any = getattr(_C, "_are_functorch_transforms_active", lambda: True)

# What a transform's tensor wraps, and whether autograd was on outside of `torch.func.grad`.
# Without one of them: nothing requires a gradient there, so a second derivative raises an error, and no value of a
# mapped tensor can be checked.
_is_wrapped: Any = getattr(_functorch, "is_functorch_wrapped_tensor", lambda tensor: False)
_unwrapped: Any = getattr(_functorch, "get_unwrapped", None)
_grad_transform: Any = getattr(_functorch, "CGradInterpreterPtr", None)

# The gradients of `is_grads_batched=True` are tensors of an older vmap, which no transform shows: whether a tensor is
# one, at which level, and the wrapper off and on. Without one of them: such gradients fail, as they do in most nodes.
_is_old_batch: Any = getattr(_functorch, "is_legacy_batchedtensor", None)
_old_level: Any = getattr(_C, "_vmapmode_increment_nesting", None), getattr(_C, "_vmapmode_decrement_nesting", None)
_old_batch: Any = getattr(torch, "_add_batch_dim", None), getattr(torch, "_remove_batch_dim", None)


# Whether forward-mode gradients are computed (`torch.autograd.forward_ad`), which only the reference does.
# Without it: never, and then a tensor's tangent is lost without a word.
def computes_tangents() -> bool:
    """Whether a level of `torch.autograd.forward_ad` is entered."""
    return getattr(_forward_ad, "_current_level", -1) >= 0


# How many dispatch modes (fake tensors, profilers of operations, ...) would see an operation.
# Without it: there may be one, so each call goes through the dispatcher.
_dispatch_modes: Any = getattr(_C, "_len_torch_dispatch_stack", lambda: 1)

# Whether `torch.jit.trace` records. Without it: nothing is lost; tracing is deprecated.
_is_jit_tracing: Any = getattr(_C, "_is_tracing", lambda: False)

# A context in which operations do not record for autograd: an implementation's own products and copies.
# There is no way without it: the import fails, with its name.
below_autograd: Any = _C._AutoDispatchBelowAutograd

# The dispatch keys below autograd's, for the call that an autograd implementation hands on.
# There is no way without it: the import fails, with its name.
_keys_after_autograd: Any = _C._after_autograd_keyset

# Whether any of many arguments requires a gradient, lists among them. No way without it: the import fails.
any_requires_grad: Any = _C._any_requires_grad

# Whether the graph that runs backward is kept for another time. Without it: it always counts as kept, and what was
# saved is never overwritten.
keeps_graph: Any = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)

# The hooks that pack saved tensors. Without it: there always are some, and what was saved is never overwritten.
_saved_tensor_hooks: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: True)

# A context without autocast, in a tenth of the time of `torch.autocast`, and what it takes: dispatch keys by device.
# Without one of them: `torch.autocast`.
_exclude: Any = getattr(_C, "_ExcludeDispatchKeyGuard", None)
_AUTOCAST_KEYS = {
    device: _C.DispatchKeySet(getattr(_C.DispatchKey, key))
    for device, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU"))
    if _exclude is not None and hasattr(_C.DispatchKey, key)
}

# The address of the stream that a device's work goes to now. Without it: that of the public stream.
_raw_stream: Any = getattr(_C, "_cuda_getCurrentRawStream", None)

# Zeros, or other tensors, into several tensors of one type and device, on a GPU in one kernel.
# Without one of them: a kernel each.
_foreach_zero: Any = getattr(torch, "_foreach_zero_", None)
_foreach_copy: Any = getattr(torch, "_foreach_copy_", None)


def bare_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without its look at `torch.func`'s transforms, for calls where none is active."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


# What a subclass of Tensor sets as `__torch_function__` so that operations on it give plain tensors, at no cost.
# There is no way without it: the import fails, with its name.
no_torch_function: Any = _C._disabled_torch_function_impl

# How `default_collate` joins values of a type. Without it: it does not know ours, and says so.
collate_functions: dict[Any, Any] = getattr(_collating, "default_collate_fn_map", {})


def register_pytree(cls: type, flatten: Any, unflatten: Any, names: Any) -> None:
    """Let `torch.export`, `torch.func` and others see the leaves of a class; `names` are those of its leaves.

    The public way, `torch.export.register_dataclass`, loads all of torch's export.
    """

    def with_keys(value: Any) -> Any:
        leaves, context = flatten(value)
        keys = map(_pytree.GetAttrKey, names(context))
        return list(zip(keys, leaves, strict=True)), context

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda context: context,
        flatten_with_keys_fn=with_keys,
    )


# For torch.export: a check that the exported program makes when it runs, and what may be assumed of its symbols.
# There is no way without them: the import fails, with their names.
assert_when_run: Any = torch._assert_async  # pyright: ignore[reportPrivateImportUsage]
assume: Any = torch._check


def constant_result(function: FunctionT) -> FunctionT:
    """Let torch.compile call a function once, while it traces, and take its result as a constant.

    This is `torch.compiler.assume_constant_result` without the import of torch's compiler, which takes as long as that
    of torch. Without the name: torch.compile traces the function, and fails where it reads files.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


# A function that torch.compile does not look into: `torch.compiler.disable`, which imports torch's compiler when the
# function is first called and not when it is made. There is no way without it: the import fails, with its name.
uncompiled: Any = torch._compile._disable_dynamo


@constant_result
def is_compiler_loaded() -> bool:
    """Whether torch's compiler is imported, so that something may be compiled."""
    return "torch._dynamo" in sys.modules


def are_transforms_active() -> bool:
    """Whether `torch.func` transforms are active; a compiler that traces takes care of them itself."""
    return not torch.compiler.is_compiling() and _are_transforms_active()


def active_transforms() -> list[str]:
    """The names of the active transforms, outermost first: vmap, grad, jvp and others."""
    return ["unknown"] if _transforms is None else [transform.key().name.lower() for transform in _transforms() or ()]


def outside_transforms() -> Any:
    """A context outside of all transforms: what is made there can be looked at after they have ended."""
    if not are_transforms_active():
        return contextlib.nullcontext()
    return importlib.import_module("torch._functorch.pyfunctorch").temporarily_clear_interpreter_stack()


def records_outside_grad(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd itself records one of these tensors outside of `torch.func.grad`, vjp or jacrev.

    Then the gradient that these return can be differentiated once more.
    """
    if not are_transforms_active() or _transforms is None or _unwrapped is None or _grad_transform is None:
        return False
    outermost = next((one for one in _transforms() or () if one.key().name == "Grad"), None)
    if outermost is None or not _grad_transform(outermost).prevGradMode():
        return False
    return any(tensor is not None and unwrapped(tensor).requires_grad for tensor in tensors)


def unwrapped(tensor: Tensor) -> Tensor:
    """A tensor outside of all transforms, whose values can be looked at: with one more dimension where it is mapped."""
    while not torch.compiler.is_compiling() and _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor


def are_batched(gradients: Sequence[Tensor | None]) -> bool:
    """Whether one of these gradients comes from `is_grads_batched=True`."""
    return _is_old_batch is not None and any(one is not None and _is_old_batch(one) for one in gradients)


def map_batched(
    rule: Callable[[int, list[int | None], list[Tensor | None]], tuple[Sequence[Tensor], Sequence[int]]],
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """What a rule returns, `(results, dimensions)`, for gradients that `are_batched`.

    It gets their number, and each gradient with the dimension that numbers them, or None.
    """
    level = _old_level[0]() - 1
    _old_level[1]()
    add, remove = _old_batch
    dims = [0 if one is not None and _is_old_batch(one) else None for one in gradients]
    plain = [one if dim is None else remove(one, level, 1, 0) for one, dim in zip(gradients, dims, strict=True)]
    count = next(len(one) for one, dim in zip(plain, dims, strict=True) if one is not None and dim is not None)
    return [add(result, dim, level) for result, dim in zip(*rule(count, dims, plain), strict=True)]


def is_observed() -> bool:
    """Whether something other than autograd would see a call of an operation."""
    return torch.compiler.is_compiling() or _dispatch_modes() > 0 or _is_jit_tracing()


def counts_values_alone() -> bool:
    """Whether nothing sees a call of an operation, transforms or differentiates it forwards; no compiler may ask."""
    return _dispatch_modes() == 0 and not _is_jit_tracing() and not _are_transforms_active() and not computes_tangents()


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` records; a compiler that traces cannot ask."""
    return not torch.compiler.is_compiling() and _is_jit_tracing()


def has_saved_tensor_hooks() -> bool:
    """Whether the tensors that a node saves are packed by a hook, which may keep them."""
    return _saved_tensor_hooks(True) is not None


def redispatch(op: Any, keyset: Any, *arguments: Any) -> Any:
    """Call an operation's implementation below autograd, from its autograd implementation."""
    with below_autograd():
        return op.redispatch(keyset & _keys_after_autograd, *arguments)


def raw_stream(device: int | None) -> int:
    """The address of the current stream of a CUDA device; None for the current device."""
    if _raw_stream is None or device is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device)


class Explaining(nn.Module):
    """A module that explains why weights do not fit into it. Without the method's private name: only torch's errors."""

    def misfits(self, weights: Mapping[str, Any], prefix: str) -> list[str]:
        """Sentences for the error of `load_state_dict`, of weights whose names begin with this prefix."""
        return []

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        others = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, *others)
        error_msgs += self.misfits(state_dict, prefix)


def zero_all(tensors: Sequence[Tensor]) -> None:
    """Fill tensors of one type and device with zeros."""
    if _foreach_zero is not None and len(tensors) > 1:
        _foreach_zero(tensors)
        return
    for tensor in tensors:
        tensor.zero_()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of one type into others of one type, which have their shapes."""
    if _foreach_copy is not None and len(targets) > 1:
        _foreach_copy(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def without_autocast(device: str) -> Any:
    """A context without autocast for a type of device."""
    keys = _AUTOCAST_KEYS.get(device)
    return torch.autocast(device, enabled=False) if keys is None else _exclude(keys)
