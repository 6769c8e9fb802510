"""Launches a few plans of every kind once each, on small products, for compute-sanitizer:

compute-sanitizer --tool memcheck --target-processes all python tests/sanitize.py
compute-sanitizer --tool racecheck --target-processes all python tests/sanitize.py
"""

from jax_streamk import _ffi, planner
from jax_streamk.device import device_of
from jax_streamk.launch_policy import LaunchPolicy
from jax_streamk.problem import GemmProblem
from jax_streamk.tuning import measure
from jax_streamk.tuning.tuned import Candidate

measure.ROTATED_BYTES = {"cuda": 1e5}
KERNELS = {kernel.name: kernel for kernel in _ffi.kernels()}
SILU = dict(has_bias=True, activation=_ffi.Activation.silu)
ROW, COLUMN = _ffi.Major.row, _ffi.Major.column
# kernel, (m, n, k), (schedule, splits, reduction), epilogue, and majors of A and B where they are not the kernel's
LAUNCHES = [
    (
        "sm90_bf16_bf16_rr_64x176x64_4x1_pingpong_swap",
        (181, 136, 264),
        ("data_parallel", 1, "ordered"),
        dict(SILU, has_residual=True),
    ),
    (
        "sm90_bf16_bf16_rr_128x128x64_1x1_coop",
        (200, 264, 520),
        ("stream_k", 1, "ordered"),
        dict(SILU, has_residual=True),
    ),
    ("sm90_bf16_bf16_rr_128x128x64_1x1_coop", (200, 264, 520), ("split_k", 3, "ordered"), {}),
    (
        "sm90_bf16_bf16_rr_192x176x64_1x2_coop_swap",
        (360, 400, 520),
        ("split_k", 3, "ordered"),
        SILU,
    ),  # three warpgroups
    ("sm90_bf16_bf16_rr_128x160x64_2x4_pingpong_swap", (181, 264, 520), ("data_parallel", 1, "ordered"), {}),
    ("sm90_bf16_bf16_rr_64x80x64_1x4_pingpong_swap", (300, 136, 264), ("data_parallel", 1, "ordered"), SILU),
    (
        "sm90_bf16_bf16_rr_128x144x64_1x4_pingpong_swap",
        (181, 264, 520),
        ("data_parallel", 1, "ordered"),
        dict(SILU, has_residual=True),
    ),
    (
        "sm90_bf16_bf16_rr_192x88x64_1x2_pingpong_swap",
        (181, 264, 520),
        ("data_parallel", 1, "ordered"),
        SILU,
    ),  # a last block of 8 rows
    ("sm90_bf16_bf16_rr_64x224x64_4x2_pingpong", (181, 520, 520), ("data_parallel", 1, "ordered"), SILU),
    (
        "sm90_bf16_bf16_rr_128x224x64_2x1_coop",
        (300, 504, 520),
        ("data_parallel", 1, "ordered"),
        {},
    ),  # a last box of 32 columns
    (
        "sm90_bf16_bf16_rr_128x208x64_4x2_coop",
        (300, 504, 520),
        ("data_parallel", 1, "ordered"),
        SILU,
    ),  # the last box begins within the one before
    (
        "sm90_bf16_bf16_rr_64x104x64_4x2_pingpong_swap",
        (300, 520, 264),
        ("data_parallel", 1, "ordered"),
        {},
    ),  # boxes of 26 rows
    (
        "sm90_bf16_bf16_rr_128x136x64_1x2_pingpong_swap",
        (181, 264, 520),
        ("data_parallel", 1, "ordered"),
        dict(SILU, has_residual=True),
    ),  # ... of 64 rows twice
    (
        "sm90_bf16_bf16_rr_128x16x128_1x1_coop_swap",
        (24, 200, 1032),
        ("stream_k", 1, "ordered"),
        dict(SILU, has_residual=True),
    ),
    ("sm90_bf16_f32_rr_64x144x64_1x1_pingpong_swap", (264, 200, 1000), ("split_k", 5, "separate"), {}),
    ("sm90_bf16_f32_rr_192x144x64_1x2_coop_swap", (264, 400, 1000), ("split_k", 5, "separate"), SILU),  # in clusters
    ("sm90_bf16_f32_rr_64x64x128_1x1_pingpong", (72, 136, 2056), ("split_k", 7, "separate"), SILU),
    (
        "sm90_bf16_f32_rr_64x16x128_1x1_pingpong_swap",
        (13, 2000, 2056),
        ("split_k", 9, "separate"),
        {},
    ),  # three tiles a CTA
    ("sm90_bf16_f32_rr_64x64x128_1x1_pingpong", (37, 60, 9000), ("split_k", 64, "separate"), {}),  # warps share outputs
    ("sm90_bf16_f32_rr_64x64x128_1x1_pingpong", (37, 60, 19200), ("split_k", 150, "separate"), SILU),  # in rounds
    (
        "sm90_bf16_bf16_rr_64x128x64_1x1_pingpong",
        (70, 131, 101),
        ("data_parallel", 1, "ordered"),
        {},
    ),  # A and B are copied
    (
        "sm90_bf16_bf16_rr_64x16x128_1x1_pingpong_swap",
        (37, 131, 301),
        ("data_parallel", 1, "ordered"),
        dict(SILU, has_residual=True),
    ),
    ("sm90_bf16_bf16_rr_128x128x64_1x1_coop", (200, 261, 520), ("stream_k", 1, "ordered"), SILU),
    (
        "sm90_bf16_bf16_rr_64x16x64_1x1_single_swap",
        (37, 12000, 136),
        ("data_parallel", 1, "ordered"),
        dict(SILU, has_residual=True),
    ),
    ("sm90_bf16_bf16_rr_128x16x32_1x1_single_swap", (37, 24000, 136), ("data_parallel", 1, "ordered"), SILU),
    ("sm90_bf16_bf16_rr_128x16x64_1x1_single_swap", (16, 24000, 136), ("data_parallel", 1, "ordered"), {}),
    (
        "sm90_bf16_bf16_rr_64x16x128_1x1_pingpong_swap",
        (13, 12000, 1544),
        ("data_parallel", 1, "ordered"),
        {},
    ),  # stages stay empty, fewer in the second wave
    ("skinny_bf16_bf16_rr_64x8x128", (7, 1000, 1032), ("data_parallel", 1, "ordered"), SILU),
    ("skinny_bf16_bf16_rr_64x16x128", (16, 1000, 1032), ("split_k", 3, "ordered"), {}),
    ("skinny_bf16_f32_rr_64x16x128", (16, 136, 2056), ("split_k", 9, "separate"), {}),
    (
        "skinny_bf16_bf16_rr_64x32x128_shifted",
        (29, 1003, 1032),
        ("split_k", 3, "ordered"),
        dict(SILU, has_residual=True),
    ),
    ("skinny_bf16_f32_rr_128x8x128_shifted", (7, 301, 1032), ("split_k", 5, "separate"), {}),
    ("skinny_f64_f64_rr_64x16x128", (13, 136, 1032), ("split_k", 3, "ordered"), SILU),
    ("skinny_f64_f64_rr_64x8x128", (7, 136, 1032), ("split_k", 5, "separate"), {}),
    ("sm90_f32_f32_rr_128x128x32_1x1_coop_swap_tf32", (200, 264, 520), ("split_k", 3, "ordered"), SILU),
    (
        "sm90_f32_f32_rr_64x64x64_1x1_pingpong_swap_tf32",
        (37, 131, 301),
        ("split_k", 3, "separate"),
        {},
    ),  # A and B are copied
    (
        "sm90_f32_f32_rc_128x64x32_1x1_coop_swap_tf32x3",
        (200, 264, 520),
        ("split_k", 3, "ordered"),
        SILU,
    ),  # A and B are split
    ("sm90_f32_f32_rc_64x16x64_1x1_pingpong_tf32x3", (131, 37, 301), ("split_k", 3, "separate"), {}),
    (
        "sm90_f32_f32_rc_64x32x64_1x1_pingpong_swap_tf32x3",
        (37, 131, 301),
        ("data_parallel", 1, "ordered"),
        {},
        COLUMN,
        ROW,
    ),  # ... transposed
    (
        "sm90_f32_f32_rr_64x64x64_1x1_pingpong_swap_tf32",
        (132, 200, 301),
        ("data_parallel", 1, "ordered"),
        {},
        COLUMN,
        ROW,
    ),  # A is transposed
    ("sm80_f64_f64_rr_16x128x16_s5_a1", (13, 131, 301), ("split_k", 3, "ordered"), SILU),
    (
        "sm80_bf16_f32_rr_128x128x32_s4_a8",
        (130, 136, 1000),
        ("split_k", 3, "separate"),
        {},
    ),  # the last slice is a launch
]

if __name__ == "__main__":
    memory = measure.Memory(device_of(None))
    for name, (m, n, k), way, epilogue, *majors in LAUNCHES:
        kernel = KERNELS[name]
        major_a, major_b = majors or (kernel.major_a, kernel.major_b)
        types = kernel.type_a, kernel.type_a, kernel.type_a, kernel.math, major_a, major_b
        problem = GemmProblem(
            1, m, n, k, *types, k if major_a == ROW else m, n if major_b == ROW else k, n, 0, 0, 0, **epilogue
        )
        native = Candidate(name, *way, LaunchPolicy()).native()
        policy = planner.policy_in_order(name, problem, native, "m", 1, memory.device)
        result = memory.rotation(problem).result(name, native, policy)
        print(name, (m, n, k), *way, float(abs(result.astype("float32")).max()), flush=True)
