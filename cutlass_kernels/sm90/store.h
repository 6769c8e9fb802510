// The store of D by TMA, through boxes in shared memory.
#pragma once

#include <cstring>
#include <type_traits>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass_kernels/sm90/accumulators.h"
#include "cutlass_kernels/sm90/ragged.h"

namespace jax_streamk::sm90 {

// Of every kWarpgroups * 64 rows of a tile, each warpgroup has 64. A box is 64 rows x kColumns of the kernel's own
// result: a warpgroup fills one while TMA stores another. If kColumns does not divide the tile's columns, the last box
// overlaps the one before it, and some columns are stored twice. kRun: a tile's coordinate ends with the RowRun of D
// that begins with the tile; requires kSwap.
template <class Element, bool kSwap, int kTileM, int kTileN, int kWarpgroups, int kColumns, bool kRun = false>
class BoxStore {
  static constexpr int kWarpgroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr int kSize = sizeof(Element), kRows = 64;
  static constexpr int kMmas = kTileM / (kRows * kWarpgroups), kBoxesPerMma = (kTileN + kColumns - 1) / kColumns,
                       kBoxes = kMmas * kBoxesPerMma;
  static constexpr int kStages = cute::min(kBoxes, 2);
  // A row in shared memory is part of a row of D, and at most 128 bytes. With swap_ab a box may be several such parts.
  static constexpr int kParts = kSwap ? kRows * kSize / 128 : 1;
  static constexpr int kRowBytes = kSwap ? 128 : kColumns * kSize, kBoxBytes = kRows * kColumns * kSize;
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  static_assert(kColumns % (kSwap && kSize == 2 ? 8 : 16) == 0 && kTileN >= kColumns &&
                kTileM % (kRows * kWarpgroups) == 0);

 public:
  // Integer results are integer sums.
  using Sum = std::conditional_t<std::is_same_v<Element, int32_t>, int32_t, float>;
  using Accumulators = sm90::Accumulators<kMmas, kTileN, Sum>;
  struct alignas(1024) TensorStorage {
    char boxes[kWarpgroups][kStages][kBoxBytes];
  };

  static CUresult set_up(cute::TmaDescriptor& map, OwnShape const& shape, GemmProblem const& p, void const* d) {
    auto const [m, n, k, batch] = shape;
    if constexpr (kRun) return RowRun::encode<Element>(map, d, m, p.d.ld, kRowBytes / kSize, kColumns, kRowBytes);
    return encode_tensor_map<Element>(map, d, kSwap ? m : n, kSwap ? n : m, batch, p.d.ld, p.d.batch_stride,
                                      kRowBytes / kSize, kSwap ? kColumns : kRows, kRowBytes);
  }

  // `thread` is the index among the threads that share a tile; the named barrier is its warpgroup's.
  CUTLASS_DEVICE BoxStore(cute::TmaDescriptor const& map, TensorStorage& storage, int thread, uint32_t barrier)
      : map_(map), boxes_(storage.boxes[thread / kWarpgroup][0]), thread_(thread), barrier_(barrier) {
    int const lane = thread % 32, warp = thread / 32 % 4;
    int offset;
    if constexpr (kSize == 2) {
      // stmatrix takes from each lane the address of one row of four 8 x 8 squares.
      int const square = lane / 8, row = lane % 8;
      offset = kSwap ? (square / 2 * 8 + row) * kRowBytes + (warp * 2 + square % 2) * 16
                     : (warp * 16 + square % 2 * 8 + row) * kRowBytes + square / 2 * 16;
    } else {
      int const row = lane / 4, column = lane % 4 * 2;
      offset = kSwap ? warp / 2 * (kBoxBytes / 2) + column * kRowBytes + (warp % 2 * 16 + row) * 4
                     : (warp * 16 + row) * kRowBytes + column * 4;
    }
    // TMA's swizzle: address bits 7 and up are XORed into the 16-byte piece within a row.
    at_ = cute::cast_smem_ptr_to_uint(storage.boxes[thread / kWarpgroup]) + (offset ^ (offset >> 3 & kRowBytes - 16));
    if (kValues < 192) asm("" : "+r"(at_));  // opaque, or it would be computed between the main loop and the store
  }

  // Converts and stores accumulators begin ... end - 1, which must be whole boxes.
  template <class Tile>
  CUTLASS_DEVICE void store_converted(Tile const& tile, Accumulators const& accumulators, int begin = 0,
                                      int end = kValues) {
#pragma unroll
    for (int box = begin / kValuesPerBox; box < (kWholeBoxes ? end / kValuesPerBox : kBoxes); ++box)
      store_box(tile, accumulators, box);
  }

  // Waits until TMA has read all but the newest kNewest boxes, and tells the warpgroup.
  template <int kNewest = 0>
  CUTLASS_DEVICE void wait_for_boxes() {
    cute::tma_store_wait<kNewest>();
    cutlass::arch::NamedBarrier::sync(kWarpgroup, barrier_);
  }

  // Waits until TMA has read all boxes. Called when nothing more will be stored.
  CUTLASS_DEVICE void finish() { cute::tma_store_wait<0>(); }

  // From now on every box has its own place in `memory`, which the main loop no longer uses, and waits for no other.
  template <class Storage>
  CUTLASS_DEVICE void spread(Storage& memory) {
    static_assert(alignof(Storage) % 128 == 0 && sizeof(Storage) >= kBoxes * kBoxBytes);
    if constexpr (kBoxes == kStages) return;
    at_ += cute::cast_smem_ptr_to_uint(&memory) - cute::cast_smem_ptr_to_uint(boxes_);
    boxes_ = reinterpret_cast<char*>(&memory);
    spread_ = true;
  }

 protected:
  static constexpr bool kWholeBoxes = kTileN % kColumns == 0;
  static constexpr int kValues = Accumulators::kValues, kValuesPerBox = kColumns / 2;  // of a thread

 private:
  template <class Tile>
  CUTLASS_DEVICE void store_box(Tile const& tile, Accumulators const& accumulators, int box) {
    if (box >= kStages && !spread_) wait_for_boxes<kStages - 1>();
    fill(accumulators, box);
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(kWarpgroup, barrier_);
    // A warp issues a TMA store once. Electing a thread would move its operands out of uniform registers.
    if (thread_ / 32 % 4 != 0) return;
    int const warpgroup = thread_ / kWarpgroup, mma = box / kBoxesPerMma;
    int32_t const m = tile.m * kTileM + (mma * kWarpgroups + warpgroup) * kRows;
    int32_t const n = tile.n * kTileN + first_column(box);
    if constexpr (kRun) {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        tile.run.store(map_, boxes_ + box_offset(box) + part * (kBoxBytes / kParts), m + part * (kRows / kParts),
                       first_column(box));
      return cute::tma_store_arrive();
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      cute::SM90_TMA_STORE_3D::copy(&map_, boxes_ + box_offset(box) + part * (kBoxBytes / kParts),
                                    kSwap ? m + part * (kRows / kParts) : n, kSwap ? n : m, tile.batch);
    cute::tma_store_arrive();
  }

  // Writes a box's accumulators to shared memory. The swizzle turns steps within a row into XORs.
  CUTLASS_DEVICE void fill(Accumulators const& accumulators, int box) {
    uint32_t at = at_ + box_offset(box);
    if (kBoxes > 2) asm volatile("" : "+r"(at));  // opaque, or all boxes' addresses would be in registers
    int const begin = kWholeBoxes ? box * kValuesPerBox : (box / kBoxesPerMma * kTileN + first_column(box)) / 2;
    if constexpr (kSize == 2) {
      fill_16_bit(accumulators, begin, at);
    } else {
      fill_32_bit(accumulators, begin, at);
    }
  }

  // stmatrix stores two blocks of 8 columns, transposed with swap_ab. Only with swap_ab may a last block be alone.
  CUTLASS_DEVICE void fill_16_bit(Accumulators const& accumulators, int begin, uint32_t at) {
#pragma unroll
    for (int block = 0; block < kColumns / 8; block += 2) {
      bool const alone = block + 1 == kColumns / 8;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < (alone ? 2 : 4); ++i) {
        cutlass::Array<float, 2> two;
        two[0] = accumulators(begin + block * 4 + i * 2), two[1] = accumulators(begin + block * 4 + i * 2 + 1);
        auto const converted = cutlass::NumericArrayConverter<Element, float, 2>{}(two);
        std::memcpy(&words[i], &converted, 4);
      }
      if constexpr (kSwap) {
        uint32_t const to = at + block * 8 * kRowBytes;
        if (alone) {
          asm volatile("stmatrix.sync.aligned.x2.trans.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(words[0]),
                       "r"(words[1])
                       : "memory");
        } else {
          asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                       "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                       : "memory");
        }
      } else {
        asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at ^ block * 16),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
      }
    }
  }

  CUTLASS_DEVICE void fill_32_bit(Accumulators const& accumulators, int begin, uint32_t at) {
#pragma unroll
    for (int i = 0; i < kValuesPerBox; i += 2) {
      int const block = i / 4, lower = i / 2 % 2;  // of 8 columns; whether 8 rows below
      Sum const x = accumulators(begin + i), y = accumulators(begin + i + 1);
      if constexpr (kSwap) {
        uint32_t const first = (at ^ lower * 32) + block * 8 * kRowBytes;
        store_shared(first, x);
        store_shared(first ^ kRowBytes + 16, y);
      } else {
        store_shared((at ^ block * 32) + lower * 8 * kRowBytes, x, y);
      }
    }
  }

  static CUTLASS_DEVICE void store_shared(uint32_t to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
  }
  static CUTLASS_DEVICE void store_shared(uint32_t to, int32_t x) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
  }
  static CUTLASS_DEVICE void store_shared(uint32_t to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
  }
  static CUTLASS_DEVICE void store_shared(uint32_t to, int32_t x, int32_t y) {
    asm volatile("st.shared.v2.s32 [%0], {%1, %2};" ::"r"(to), "r"(x), "r"(y) : "memory");
  }

  // The tile's column at which a box begins. Without overlap it must stay a plain product: if ptxas cannot tell which
  // accumulators a box has, it puts all of them in local memory.
  static CUTLASS_DEVICE int first_column(int box) {
    int const first = box % kBoxesPerMma * kColumns;
    return kWholeBoxes ? first : min(first, kTileN - kColumns);
  }

  CUTLASS_DEVICE int box_offset(int box) const { return (spread_ ? box : box % kStages) * kBoxBytes; }

  cute::TmaDescriptor const& map_;
  char* boxes_;  // of this warpgroup
  bool spread_ = false;
  int const thread_;
  uint32_t const barrier_;
  uint32_t at_;  // where this thread's part of the first box begins
};

}  // namespace jax_streamk::sm90
