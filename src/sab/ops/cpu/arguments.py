"""The arguments of the compiled loops: `Arguments` and `Step` of loop.cpp once more, for ctypes."""

from __future__ import annotations

import ctypes
import struct
from typing import ClassVar

from torch import Tensor

# The members in their order. The loader refuses a library whose structures have another size.
SIZES = """
    steps batch n key_size first_slots slots k_top k_att k_trunc seen bias_size
    cell scorer weighting dense incorporation threads shared input_size unpacked saves rounds
    sketch_slots sketch_begin max_memory forget places remembered block_size blocks
""".split()
POINTERS = """
    w_hidden w_hidden_back b_hidden w_query w_query_back w_memory w_memory_back
    scorer_bias v w_incorporate w_incorporate_back w_summary w_summary_back b_incorporate
    norm_ih norm_hh b_input norm_c_weight norm_c_bias h_mask x w_x b_x
    store c gates hidden_new h_hat query keys weights norms summary mapped key_scale query_scale scores
    x_normed x_scale h_normed h_scale
    selected turn_rates lengths
    hidden_gates dh chain dh_hat masked dsummary_now
    dstore dc dcells dgates dhidden dquery dkeys dsummary dweights dincorporated dv
    dnorm_ih dnorm_hh db_ih db_hh dnorm_c_weight dnorm_c_bias
    microstates numbers sketch_codes sketch_scales sketch_facts live reads find block_keys
""".split()


class Arguments(ctypes.Structure):
    """What a pass reads and writes; a pointer is null where there is no such tensor."""

    _fields_: ClassVar = [(name, ctypes.c_int64) for name in SIZES] + [(name, ctypes.c_void_p) for name in POINTERS]

    def set(self, **values: Tensor | int | None) -> None:
        for name, value in values.items():
            if value is not None:  # the structure starts with nulls
                setattr(self, name, value.data_ptr() if isinstance(value, Tensor) else value)


class Step(ctypes.Structure):
    """What changes from step to step of a stream."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("batch", "slots", "capacity", "seen", "threads", "remembered")),
        *((name, ctypes.c_void_p) for name in ("x", "h", "c", "h_new", "c_new")),
        *((name, ctypes.c_void_p) for name in ("microstates", "keys", "numbers", "live", "reads")),
        *((name, ctypes.c_void_p) for name in ("sketch_codes", "sketch_scales", "sketch_facts", "block_keys")),
        ("begin", ctypes.c_int64),
        ("find", ctypes.c_void_p),
    ]


pack_step = struct.Struct(f"{len(Step._fields_)}q").pack
"""(the members of `Step` as numbers, 0 for a null pointer) -> its bytes, in a tenth of the time that ctypes takes."""
