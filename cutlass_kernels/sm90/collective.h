// Changes to the collectives that CUTLASS's builder makes.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_rs_warpspecialized.hpp"
#include "cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp"
#include "cutlass_kernels/sm90/wgmma.h"

namespace jax_streamk::sm90 {

// For an M-major TF32 A, which goes through registers, and an N-major B, which is transposed, the builder chooses rows
// of 32 bytes, each a TMA request. Rows of 128 bytes need fewer requests; operand_registers.h and transposition.h read
// them without bank conflicts.
template <class Collective>
struct WithWideRows {
  using type = Collective;
};
template <int kStages, class Cluster, class KernelSchedule, class Tile, class StrideA, class StrideB, class Mma,
          class CopyA, class LayoutA, class FromA, class CopyB, class LayoutB, class FromB>
struct WithWideRows<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90TmaGmmaRmemAWarpSpecialized<kStages, Cluster, KernelSchedule>, Tile, float, StrideA,
    float, StrideB, Mma, CopyA, LayoutA, FromA, cute::identity, CopyB, LayoutB, FromB, cute::identity>> {
  using Wide = cute::GMMA::Layout_MN_SW128_Atom<cutlass::tfloat32_t>;
  using WideB = std::conditional_t<cute::is_static<cute::tuple_element_t<0, StrideB>>::value, Wide, LayoutB>;
  using type = cutlass::gemm::collective::CollectiveMma<
      cutlass::gemm::MainloopSm90TmaGmmaRmemAWarpSpecialized<kStages, Cluster, KernelSchedule>, Tile, float, StrideA,
      float, StrideB, Mma, CopyA, Wide, FromA, cute::identity, CopyB, WideB, FromB, cute::identity>;
};

// A collective of kWarpgroups, stacked along m, whose instructions are as wide as its tile. The builder knows one or
// two warpgroups and few widths.
template <int kWarpgroups, class Collective>
struct WithWgmma;
template <int kWarpgroups, class Dispatch, class Tile, class A, class StrideA, class B, class StrideB, class Mma,
          class... Copies>
struct WithWgmma<kWarpgroups,
                 cutlass::gemm::collective::CollectiveMma<Dispatch, Tile, A, StrideA, B, StrideB, Mma, Copies...>> {
  template <int kN>
  using WideMma = typename WgmmaLike<Mma, kWarpgroups, kN>::type;
  using type = cutlass::gemm::collective::CollectiveMma<Dispatch, Tile, A, StrideA, B, StrideB,
                                                        WideMma<cute::size<1>(Tile{})>, Copies...>;
};

}  // namespace jax_streamk::sm90
