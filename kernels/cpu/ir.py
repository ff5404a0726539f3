"""Small pieces of LLVM IR that the compiled loops of the CPU kernels are written in, and what the processor can do."""

from __future__ import annotations

import functools

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils


class _BFloat(ir.Type):
    """LLVM's bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


FLOAT = ir.FloatType()
HALF = ir.HalfType()
BFLOAT = _BFloat()
INT8, INT16, INT32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
LINE = 64  # bytes of the processor's cache
LANES = 16  # of a vector of 32-bit numbers: one register of AVX-512, two of AVX2


@functools.cache
def features() -> frozenset[str]:
    """Instruction sets that numba compiles for, by LLVM's names: the processor's, or what NUMBA_CPU_FEATURES says instead."""
    told = numba.config.CPU_FEATURES  # type: ignore[attr-defined]  # made at import, out of the environment
    if told is not None:
        return frozenset(name[1:] for name in told.split(",") if name.startswith("+"))
    return frozenset(name for name, there in binding.get_host_cpu_features().items() if there)


def int64(value: int) -> ir.Constant:
    return ir.Constant(ir.IntType(64), value)


def pointers(context, builder, signature, arguments, places):
    """Data pointers of the contiguous array arguments at `places`."""
    return [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in places]


def integers(context, builder, signature, arguments, places):
    """The integer arguments at `places`, as 64 bits."""
    return [context.cast(builder, arguments[i], signature.args[i], types.int64) for i in places]


def at(builder, data, place):
    """Pointer to element `place` (an int or an int64 value)."""
    return builder.gep(data, [int64(place) if isinstance(place, int) else place])


def load_as(builder, pointer, kind, align):
    """What lies at `pointer` read as `kind`, which is aligned to `align` bytes at least."""
    loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    loaded.align = align
    return loaded


def load_wide(builder, data, place, lanes, dtype):
    """Elements place..place+lanes-1 as float32, stored as `cpu.math.widen` knows them."""
    pointer = at(builder, data, place)
    wide = ir.VectorType(FLOAT, lanes)
    if dtype == types.int16:
        return builder.fpext(load_as(builder, pointer, ir.VectorType(HALF, lanes), 2), wide)
    if dtype == types.uint16:
        words = ir.VectorType(INT32, lanes)
        bits = builder.zext(load_as(builder, pointer, ir.VectorType(INT16, lanes), 2), words)
        return builder.bitcast(builder.shl(bits, ir.Constant(words, [16] * lanes)), wide)
    assert dtype == types.float32, dtype
    return load_as(builder, pointer, wide, 4)


def store(builder, data, place, value):
    """float32 vector `value` from element `place` on."""
    instruction = builder.store(value, builder.bitcast(at(builder, data, place), value.type.as_pointer()))
    instruction.align = 4


def prefetch(builder, pointer):
    """Asks for the cache line at `pointer`, which is read soon."""
    data = builder.bitcast(pointer, INT8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [data.type, INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [data, *(ir.Constant(INT32, value) for value in (0, 2, 1))])  # to read, second-level cache, data


def take(builder, vector, lanes):
    mask = ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def splat(builder, scalar, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(INT32, 0))
    lanes = ir.Constant(ir.VectorType(INT32, vector.count), None)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes)


def call(builder, name, result, *arguments):
    """An intrinsic of LLVM."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def switch(builder, value, cases, emit):
    """What emit(case) makes, for the one of the integers `cases` that `value` is."""
    end = builder.append_basic_block("end")
    choice = builder.switch(value, end)
    for case in cases:
        block = builder.append_basic_block("case")
        choice.add_case(ir.Constant(value.type, case), block)
        builder.position_at_end(block)
        emit(case)
        builder.branch(end)
    builder.position_at_end(end)


def multiply_add(builder, x, y, z):
    """x * y + z, in one rounding."""
    return call(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)
