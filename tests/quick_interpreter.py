"""Triton's interpreter, made quick enough for a suite: what it computes stays the same."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Patch `triton.language` once a launch; the interpreter does it again at every call of a device function."""
    patch = interpreter._patch_lang
    patched: set[str] = set()

    class Outermost:
        def __init__(self, scope):
            self._scope = scope

        def restore(self):
            patched.clear()
            self._scope.restore()

    @functools.cache
    def modules(fn) -> frozenset[str]:
        seen = fn.__globals__.values()
        return frozenset(
            name for name, module in (("tl", tl), ("core", tl.core)) if any(value is module for value in seen)
        )

    def quick(fn):
        if patched and modules(fn) <= patched:
            return interpreter._LangPatchScope()
        outermost = not patched
        scope = patch(fn)
        patched.update(modules(fn))
        return Outermost(scope) if outermost else scope

    interpreter._patch_lang = quick


def know_types() -> None:
    """Remember numpy's type for each of Triton's; the interpreter makes its table of all of them again at every load."""
    look_up, known = interpreter._get_np_dtype, {}

    def quick(dtype):
        scalar = dtype.element_ty if type(dtype) is tl.block_type else dtype
        if type(scalar) is not tl.dtype:  # pointers have no hash
            return look_up(dtype)
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = quick


def leave_out_lost_checks() -> None:
    """Whether each addition overflows is computed for an assertion that the interpreter then leaves out, as it is not debugging."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def share_shapes() -> None:
    """Make a shape's tuples and its product once; the interpreter makes them again, element by element, for every value and its type."""
    make_type, make_tensor = tl.block_type.__init__, tl.core.tensor.__init__
    types: dict[tuple, tuple] = {}
    tensors: dict[tuple, tuple] = {}

    def block_type(self, element_ty, shape):
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes in types:
            self.element_ty = element_ty
            self.shape, self.numel, words = types[sizes]
            self.name = f"<{words}, {element_ty}>"
        else:
            make_type(self, element_ty, shape)
            types[sizes] = (self.shape, self.numel, str(self.shape))

    def tensor(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes in tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = tensors[sizes]
        else:
            make_tensor(self, handle, type)
            tensors[sizes] = (self.shape, self.numel)

    tl.block_type.__init__, tl.core.tensor.__init__ = block_type, tensor


def sort_in_numpy(monkeypatch) -> None:
    """`tl.sort` and `tl.topk` of vectors through numpy."""

    def wrap(values, like):
        return tl.core.tensor(
            interpreter.TensorHandle(values, like.dtype.scalar), tl.block_type(like.dtype, list(values.shape))
        )

    def sort(x, dim=None, descending=False):
        ordered = np.sort(x.handle.data)
        return wrap(ordered[::-1].copy() if descending else ordered, x)

    def topk(x, k, dim=None):
        k = int(getattr(k, "value", k))
        assert x.handle.data.ndim == 1 and 2 <= k <= x.handle.data.size and k & (k - 1) == 0, (x.handle.data.shape, k)
        return wrap(np.sort(x.handle.data)[::-1][:k].copy(), x)

    monkeypatch.setattr(tl, "sort", sort)
    monkeypatch.setattr(tl, "topk", topk)
