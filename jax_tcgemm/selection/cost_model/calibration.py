"""Constants of the cost model, fitted to measured times of a device."""

import dataclasses

from jax_tcgemm.selection.cost_model import library_cost


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants of an H200; clocks are SM clocks, and rates in bytes per clock are per SM."""

    clocks_per_us: float = 1650.0  # of a busy tensor core, as limited by power and issue
    launch_us: float = 0.682
    fill_kib_per_us: float = 33.1  # of a CTA's first loads, which nothing hides
    cluster_us: float = 0.815  # synchronized start and end of a cluster
    cluster_k_us: float = 0.494  # wait for the partial accumulators of other CTAs
    # A k-tile: the MMAs, which read N x K from shared memory for every 64 rows.
    shared_clocks_per_row: float = 0.311
    overhead_clocks: tuple[float, float] = (21.5, 16.1)  # ping-pong, cooperative
    least_clocks: float = 191.0
    # Bandwidth from L2: of one SM alone; of each SM when all load in clusters; and of each when all
    # load without clusters, where neighboring CTAs receive common data together.
    l2_bytes_per_clock: tuple[float, float, float] = (154.0, 62.0, 76.3)
    # Bandwidth into an SM, multicast data included.
    arriving_bytes_per_clock: float = 171.0
    padding_weight: float = 1.79  # weight of loads beyond a tile, which are boxes of their own
    straddling: float = 1.53  # for rows not aligned to a 128-byte line: each load takes two lines
    # Loads that take TMA longer than L2: 128 bytes of a row that starts inside a 32-byte sector,
    # and 128 bytes outside the operand.
    cut_clocks: float = 3.17
    cut_arrival_clocks: float = 1.8  # multicast data included
    outside_clocks: float = 4.93
    # A tile: the time that ping-pong cannot hide, and the epilogue.
    handover_us: float = 0.333
    epilogue_us: float = 0.111
    epilogue_kib_per_us: float = 65.5
    exchange_kib_per_us: float = 47.3  # from other CTAs, where a cluster splits K
    # Time of an epilogue function for 1024 elements of a warpgroup: for each unit of work
    # (`Function.cost`), for each scalar, row vector or column vector that the function reads, and
    # for each 16-bit matrix that it reads or stores.
    function_work_us: float = 0.009
    function_vector_us: float = 0.02
    function_read_us: float = 0.12
    function_stored_us: float = 0.12
    # Where the function's code is too long to be unrolled for each accumulator, one copy runs in a
    # loop over epilogue subtiles. The work is multiplied, since accumulators move to and from that
    # copy's registers. Each row or column vector adds us, since each iteration loads it behind the
    # next tile's operands (fitted to one product, sin 6874x3072x384 on an H200).
    function_turns_work: float = 1.24
    function_turns_us: float = 0.145
    # Time per 1024 elements of each result that the function reduces over columns, and over rows;
    # XLA's final reduction is included.
    function_reduced_us: tuple[float, float] = (0.05, 0.11)
    # Additional time per 1024 elements where N is no multiple of 8, and for each matrix that the
    # function reads then: threads of tiles without swap_ab read and store single elements.
    function_single_us: tuple[float, float] = (1.4, 2.6)
    # Matrices that the function reads: ping-pong threads load them from global memory, and the
    # epilogue waits for them. The rate scales with memory bandwidth.
    function_box_kib_per_us: float = 5.5
    # The unrolled function and the rest of the kernel share an instruction cache of 128 KiB. Code
    # of the function beyond this size is fetched again by each ping-pong epilogue, since the other
    # warpgroup's main loop runs meanwhile; two cooperative warpgroups share the fetched code.
    function_cached_kib: float = 94.0
    function_fetched_kib_per_us: float = 3.9
    # Additional us per 1024 elements where a thread has more than 128 accumulators, so that an
    # epilogue function spills registers: measured for erf with cooperative tiles that spill.
    # Assumed not to be hidden by ping-pong, whose tiles that spill were not measured.
    function_spilled_us: float = 0.12
    # Two ping-pong warpgroups alternate between the tensor cores and the epilogue. One tile of each
    # takes a main loop, plus the norm of this order of a main loop and an epilogue: slightly more
    # than the longer one, since times vary between tiles.
    function_exchange: float = 3.1
    # Time of an XLA loop for a unit of work per 1024 elements.
    loop_work_us: float = 0.0065
    # Clocks of a thread for each accumulator and k-tile of 8-bit floats: for promotion, for scaling
    # it, and for reading the block scale. Each for ping-pong, which hides none of them, for two
    # cooperative warpgroups, and for three. Measured on an H100.
    promotion_clocks: tuple[float, float, float] = (2.5, 1.2, 2.1)
    scaled_clocks: tuple[float, float, float] = (0.3, 1.1, 4.0)
    scale_read_clocks: tuple[float, float, float] = (6.0, 4.0, 4.0)
    # Where rows of D are not 16-byte aligned: additional us of a tile, and additional bytes of each
    # of its rows, whose first and last sectors are written partially.
    unaligned_tile_us: float = 0.77
    unaligned_piece_bytes: float = 250.0
    hbm_bytes_per_us: float = 4.43e6  # memory bandwidth
    overlap: float = 2.53  # order of the norm that combines overlapping times
    stage_overlap: float = 8.82  # order of that norm inside a k-tile
    # The split-K reduction: its launch, and the time for every eight splits; then both with an
    # epilogue function, as measured on an H100.
    reduction_us: tuple[float, float] = (2.02, 0.0863)
    reduction_function_us: tuple[float, float] = (3.4, 0.7)
    reduction_epilogues_per_us: float = 2.2e5  # elements, where the reduction runs an epilogue
    # A launch that copies operands.
    copy_us: float = 2.94
    copy_bytes_per_us: float = 4.03e6
    # cuBLASLt's time, relative to our fastest kernel without operand copies. For TF32 layouts that
    # our kernels would transpose, a constant is added. cuBLASLt splits K of unbatched products
    # only. `libraries` covers rows that are not 16-byte aligned.
    cublaslt: float = 1.03
    cublaslt_tf32: float = 1.06
    cublaslt_tf32_us: float = 2.0
    # cuBLASLt's epilogues: activations, and bytes read or written besides A, B and D.
    cublaslt_activations_per_us: float = 1.8e6
    cublaslt_epilogue_bytes_per_us: float = 5.0e6
    # An XLA loop: launch time for few elements, measured on an H100, and for many elements.
    small_loop_us: float = 1.3
    loop_launch_us: float = 2.8
    loop_launch_bytes: float = 3e6  # traffic from which on a launch takes `loop_launch_us`
    libraries: library_cost.Libraries = library_cost.H200

    def with_memory(self, factor: float) -> "Calibration":
        """Return the constants for memory whose bandwidth is `factor` times as high."""
        rates = ("hbm_bytes_per_us", "copy_bytes_per_us", "cublaslt_epilogue_bytes_per_us")
        rates = (*rates, "function_box_kib_per_us")
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) * factor for name in rates},
            libraries=self.libraries.with_memory(factor),
        )


H200 = Calibration()
# An H100 has the SMs of an H200, and 3.35 TB/s of memory bandwidth instead of 4.8.
H100 = H200.with_memory(3.35 / 4.8)


def calibration_of(device: str) -> Calibration:
    """Return the constants of the device with this name; an H200's for other devices."""
    return H100 if device == "NVIDIA H100 80GB HBM3" else H200
