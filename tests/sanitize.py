"""Launches a few plans of every kind once, on small products, for compute-sanitizer:

compute-sanitizer --tool memcheck --target-processes all python tests/sanitize.py
compute-sanitizer --tool racecheck --target-processes all python tests/sanitize.py ragged

With an argument, only kernels whose names contain it.
"""

import sys

from jax_streamk import DataParallel, SplitK, StreamK, _ffi
from jax_streamk.device import device_of
from jax_streamk.plan import planner
from jax_streamk.plan.plan import native_schedule
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.tuning import measure

SILU = dict(has_bias=True, activation=_ffi.Activation.silu)
FUSED = dict(SILU, has_residual=True)
GATED = dict(SILU, gated=True)
GATE = dict(gated=True, activation=_ffi.Activation.silu)
LEADING = dict(leading_rows=True)
GATHER = dict(gathered_rows=200)
ROW, COLUMN = _ffi.Major.row, _ffi.Major.column
# kernel, (m, n, k), schedule, epilogue, and the majornesses of A and B if they are not the kernel's
LAUNCHES = [
    ("sm90_bf16_bf16_rr_64x176x64_4x1_pingpong_swap", (181, 136, 264), DataParallel(), FUSED),
    ("sm90_bf16_bf16_rr_128x256x64_1x2_coop", (200, 520, 520), StreamK(), FUSED),
    ("sm90_bf16_bf16_rr_128x256x64_1x2_coop", (200, 520, 520), SplitK(3), {}),
    ("sm90_bf16_bf16_rr_192x176x64_1x2_coop_swap", (360, 400, 520), SplitK(3), SILU),  # three warpgroups
    ("sm90_bf16_bf16_rr_64x80x64_1x4_pingpong_swap", (300, 136, 264), DataParallel(), SILU),
    ("sm90_bf16_bf16_rr_128x144x64_1x4_pingpong_swap", (181, 264, 520), DataParallel(), FUSED),
    ("sm90_bf16_bf16_rr_128x152x64_1x2_pingpong_swap", (181, 264, 520), DataParallel(), SILU),  # a last block of 8 rows
    ("sm90_bf16_bf16_rr_128x160x64_4x2_pingpong", (300, 520, 520), DataParallel(), SILU),
    ("sm90_bf16_bf16_rr_128x224x64_2x1_coop", (300, 504, 520), DataParallel(), {}),  # a last box of 32 columns
    ("sm90_bf16_bf16_rr_64x104x64_4x2_pingpong_swap", (300, 520, 264), DataParallel(), {}),  # boxes of 26 rows
    ("sm90_bf16_bf16_rr_128x136x64_1x2_pingpong_swap", (181, 264, 520), DataParallel(), FUSED),  # two boxes of 64 rows
    ("sm90_bf16_bf16_rr_256x160x64_1x2_coop_swap", (210, 200, 1032), StreamK(), FUSED),
    ("sm90_bf16_f32_rr_64x144x64_1x1_pingpong_swap", (264, 200, 1000), SplitK(5, "separate"), {}),
    ("sm90_bf16_f32_rr_128x176x64_2x1_coop", (264, 400, 1000), SplitK(5, "separate"), SILU),  # in clusters
    ("sm90_bf16_f32_rr_64x64x128_1x1_pingpong", (72, 136, 2056), SplitK(7, "separate"), SILU),
    ("sm90_bf16_f32_rr_64x16x128_1x1_pingpong_swap", (13, 2000, 2056), SplitK(9, "separate"), {}),  # three tiles a CTA
    ("sm90_bf16_f32_rr_64x64x128_1x1_pingpong", (37, 60, 9000), SplitK(64, "separate"), {}),  # warps share outputs
    ("sm90_bf16_f32_rr_64x64x128_1x1_pingpong", (37, 60, 19200), SplitK(150, "separate"), SILU),  # in rounds
    ("sm90_bf16_bf16_rr_64x128x64_1x1_pingpong", (70, 131, 101), DataParallel(), {}),  # A and B are copied
    ("sm90_bf16_bf16_rr_64x16x128_1x1_pingpong_swap", (37, 131, 301), DataParallel(), FUSED),
    ("sm90_bf16_bf16_rr_128x256x64_1x2_coop", (200, 517, 520), StreamK(), SILU),
    ("sm90_bf16_bf16_rr_64x16x64_1x1_single_swap", (37, 12000, 136), DataParallel(), FUSED),
    ("sm90_bf16_bf16_rr_128x16x32_1x1_single_swap", (37, 24000, 136), DataParallel(), SILU),
    ("sm90_bf16_bf16_rr_128x16x64_1x1_single_swap", (16, 24000, 136), DataParallel(), {}),
    # Stages stay empty, fewer in the second wave.
    ("sm90_bf16_bf16_rr_64x16x128_1x1_pingpong_swap", (13, 12000, 1544), DataParallel(), {}),
    ("skinny_bf16_bf16_rr_64x8x128", (7, 1000, 1032), DataParallel(), SILU),
    ("skinny_bf16_bf16_rr_64x16x128", (16, 1000, 1032), SplitK(3), {}),
    ("skinny_bf16_f32_rr_64x16x128", (16, 136, 2056), SplitK(9, "separate"), {}),
    ("skinny_bf16_bf16_rr_64x32x128_shifted", (29, 1003, 1032), SplitK(3), FUSED),
    ("skinny_bf16_f32_rr_128x8x128_shifted", (7, 301, 1032), SplitK(5, "separate"), {}),
    ("skinny_f64_f64_rr_64x16x128", (13, 136, 1032), SplitK(3), SILU),
    ("skinny_f64_f64_rr_64x8x128", (7, 136, 1032), SplitK(5, "separate"), {}),
    ("skinny_bf16_bf16_rr_64x8x128_narrow", (1003, 3, 1032), SplitK(3), FUSED),
    ("skinny_bf16_f32_cr_64x8x128_narrow", (136, 7, 1029), SplitK(5, "separate"), {}),
    ("skinny_f64_f64_cc_64x8x128_narrow", (136, 5, 1032), DataParallel(), SILU),
    ("skinny_bf16_bf16_rr_64x16x128_gated", (16, 1000, 1032), SplitK(3), GATED),
    ("skinny_bf16_bf16_rc_64x8x128_gated", (7, 136, 1032), DataParallel(), GATED),
    ("sm90_bf16_bf16_rr_128x16x32_1x1_single_swap_gated", (37, 24000, 136), DataParallel(), GATED),
    ("sm90_bf16_bf16_rr_128x16x128_1x1_pingpong_swap_gated", (13, 12000, 1544), DataParallel(), GATED),
    ("sm90_bf16_bf16_rc_128x64x64_1x1_pingpong_swap_gated", (70, 200, 520), DataParallel(), GATED),
    ("sm90_bf16_bf16_rr_128x128x64_1x1_pingpong_swap_gated", (181, 264, 520), DataParallel(), GATED),
    ("sm90_f32_f32_rr_128x192x32_1x1_coop_swap_tf32", (200, 264, 520), SplitK(3), SILU),
    # B is transposed in shared memory.
    ("sm90_f32_f32_cr_256x128x32_1x1_coop_tf32", (600, 1000, 520), StreamK(), SILU),
    ("sm90_f32_f32_cr_64x64x32_1x1_pingpong_tf32", (132, 6000, 520), DataParallel(), {}),
    # A and B are copied.
    ("sm90_f32_f32_rr_64x64x64_1x1_pingpong_swap_tf32", (37, 131, 301), SplitK(3, "separate"), {}),
    ("sm90_f32_f32_rc_128x64x32_1x1_coop_swap_tf32x3", (200, 264, 520), SplitK(3), SILU),  # A and B are split
    ("sm90_f32_f32_rc_64x16x64_1x1_pingpong_tf32x3", (131, 37, 301), SplitK(3, "separate"), {}),
    # A and B are split and transposed.
    ("sm90_f32_f32_rc_64x32x64_1x1_pingpong_swap_tf32x3", (37, 131, 301), DataParallel(), {}, COLUMN, ROW),
    # A is transposed.
    ("sm90_f32_f32_rr_64x64x64_1x1_pingpong_swap_tf32", (132, 200, 301), DataParallel(), {}, COLUMN, ROW),
    ("sm80_f64_f64_rr_64x64x16_s4_a1", (13, 131, 301), SplitK(3), SILU),
    (
        "sm80_bf16_f32_rr_128x128x32_s4_a8_atomic",
        (130, 136, 1000),
        SplitK(3, "separate"),
        {},
    ),  # the last slice is a launch
    # Groups of about one size; with leading_rows also rows in none.
    (
        "sm90_bf16_bf16_rr_128x128x64_1x1_pingpong_ragged_m",
        (700, 264, 520),
        DataParallel(),
        dict(SILU, **LEADING, groups=5),
    ),
    (
        "sm90_bf16_bf16_rc_256x128x64_1x1_coop_ragged_m",
        (1500, 264, 520),
        DataParallel(),
        dict(groups=512),
    ),  # some empty
    ("sm90_bf16_bf16_rr_64x16x128_1x1_pingpong_ragged_m", (60, 12000, 264), DataParallel(), dict(SILU, groups=40)),
    ("sm90_bf16_bf16_rr_128x128x64_1x1_pingpong_gated_ragged_m", (300, 264, 520), DataParallel(), dict(GATE, groups=3)),
    ("sm90_bf16_bf16_rr_256x128x64_1x1_coop_ragged_m", (1500, 264, 520), DataParallel(), dict(GATHER, groups=5)),
    (
        "sm90_bf16_bf16_rr_64x16x128_1x1_pingpong_ragged_m",
        (60, 12000, 264),
        DataParallel(),
        dict(GATHER, **LEADING, groups=40),
    ),
    (
        "sm90_bf16_bf16_rr_128x128x64_1x1_pingpong_gated_ragged_m",
        (300, 264, 520),
        DataParallel(),
        dict(GATHER, **GATE, groups=3),
    ),
    ("sm90_bf16_bf16_cr_128x256x64_1x1_coop_ragged_k", (136, 264, 700), DataParallel(), dict(groups=9)),
    ("sm90_bf16_bf16_cr_128x128x64_1x1_pingpong_ragged_k", (136, 264, 700), DataParallel(), dict(LEADING, groups=512)),
    ("sm80_bf16_bf16_rr_128x128x32_s4_a8_ragged_m", (1500, 264, 520), DataParallel(), dict(SILU, **LEADING, groups=5)),
    ("sm80_f16_f16_rc_64x64x32_s2_a1_ragged_m", (60, 1201, 133), DataParallel(), dict(SILU, groups=40)),
    ("sm80_f32_f32_cr_128x64x16_s4_a4_tf32_ragged_k", (136, 264, 700), DataParallel(), dict(LEADING, groups=9)),
    ("sm80_f64_f64_cr_64x64x16_s4_a1_ragged_k", (135, 263, 700), DataParallel(), dict(groups=512)),
]


def problem_of(kernel, m, n, k, epilogue, majors):
    """What such a row says of a kernel, as a ``GemmProblem`` whose result has the operands' type."""
    major_a, major_b = majors or (kernel.major_a, kernel.major_b)
    types = kernel.type_a, kernel.type_a, kernel.type_a, kernel.math, major_a, major_b
    lda, ldb = k if major_a == ROW else m, n if major_b == ROW else k
    groups, epilogue = epilogue.get("groups", 1), {name: x for name, x in epilogue.items() if name != "groups"}
    if kernel.ragged != _ffi.Ragged.none:
        epilogue |= dict(ragged=kernel.ragged, batch_stride_bias=n if epilogue.get("has_bias") else 0)
    strides = {_ffi.Ragged.none: (0, 0, 0), _ffi.Ragged.m: (0, k * n, 0), _ffi.Ragged.k: (0, 0, m * n)}[kernel.ragged]
    return GemmProblem(groups, m, n, k, *types, lda, ldb, n, *strides, **epilogue)


if __name__ == "__main__":
    measure.ROTATED_BYTES = {"cuda": 1e5}
    kernels = {kernel.name: kernel for kernel in _ffi.kernels()}
    memory = measure.Memory(device_of(None))
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, extents, schedule, epilogue, *majors in LAUNCHES:
        if part not in name:
            continue
        problem = problem_of(kernels[name], *extents, epilogue, majors)
        native = native_schedule(schedule)
        policy = planner.policy_in_order(name, problem, native, "m", 1, memory.device)
        result = memory.rotation(problem).result(name, native, policy)
        print(name, extents, schedule, float(abs(result.astype("float32")).max()), flush=True)
