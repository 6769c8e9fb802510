// A of numbers of four or eight bits with scales. TMA loads them as they lie, and a warpgroup makes a tile of 16-bit
// numbers of them, which wgmma reads as any other: each is multiplied and rounded, as if A had been dequantized.
#pragma once

#include "cutlass_kernels/scaled/blocks.cuh"
#include "cutlass_kernels/sm90/operands/stage_layout.h"
#include "cutlass_kernels/sm90/tma.h"

namespace jax_streamk::sm90 {

// A piece is eight numbers in a row: 4 or 8 bytes become 16. Thread t of the warpgroup makes pieces t, t + 128, ... of
// the tile as TMA has loaded it, so that its place in rows of 128 bytes, and with it the swizzle, stays the same.
template <class Stage, class T, Type kType>
struct NumbersA {
  using Decoder = scaled::DecoderOf<T, kType>;
  static constexpr bool kDecodes = true, kAlongM = Stage::kAIsMMajor,
                        kHasZeros = kType == Type::kS4 || kType == Type::kS8;
  static constexpr int kTileM = Stage::kTileM, kTileK = Stage::kTileK, kThreads = 128, kBits = Stage::kNumberBits;
  static constexpr int kRowBytes = (kAlongM ? kTileM : kTileK) * kBits / 8,  // as TMA loads it
      kLoadedBytes = Stage::kBytesOfNumbers;
  static constexpr int kPieceBytes = kBits, kPiecesOfRow = kRowBytes / kPieceBytes,
                       kPieces = kTileM * kTileK / 8 / kThreads,  // of a thread
      kAtOnce = 4;                                                // pieces between two rounds of stores
  static_assert(kTileM == 128 && kTileK == 64 && Stage::kClusterN == 1);

  struct Params {
    cute::TmaDescriptor codes;
    scaled::Blocks blocks;
    int32_t extent_m, extent_k;
  };

  static CUresult set_up(Params& params, MainloopArguments const& x) {
    params.blocks = scaled::blocks_of(x.problem, x.buffers, Decoder::flip_of(!x.is_unsigned));
    params.extent_m = x.m, params.extent_k = x.k;
    return encode_tensor_map<uint8_t>(params.codes, x.a.data, int64_t{kAlongM ? x.m : x.k} * kBits / 8,
                                      kAlongM ? x.k : x.m, x.batch, x.a.ld * kBits / 8, x.a.batch_stride * kBits / 8,
                                      kRowBytes, kAlongM ? kTileK : kTileM, kRowBytes);
  }
  static CUTLASS_DEVICE void prefetch(Params const& params) { cute::prefetch_tma_descriptor(&params.codes); }

  template <class Tile, class Place>
  static CUTLASS_DEVICE auto loader(Params const& params, Tile const& tile, Place const&,
                                    typename Stage::Storage& storage) {
    return [&params, &storage, m = tile.m * kTileM, batch = tile.batch](
               uint64_t& barrier, uint64_t hint, int32_t k_tile, int stage) CUTLASS_LAMBDA_FUNC_INLINE {
      int32_t const k = k_tile * kTileK;
      cute::SM90_TMA_LOAD_3D::copy(&params.codes, &barrier, hint, storage.numbers + stage * kLoadedBytes,
                                   (kAlongM ? m : k) * kBits / 8, kAlongM ? k : m, batch);
    };
  }

  // Of eight blocks along K and each row of the tile, in T: what numbers are multiplied by, and what is subtracted
  // before, or added then. M-major pieces read those of eight rows, others one of them, twice.
  static constexpr int kBlocks = 8;
  struct Tables {
    using Entry = std::conditional_t<kAlongM, uint16_t, uint32_t>;
    alignas(16) Entry factors[kBlocks][kTileM];
    alignas(16) Entry others[kBlocks][kTileM];
  };

  // Called by kThreads threads, for the same tiles as the producer's. `decoded`: each warp arrives for a stage. A tile
  // outside of all groups becomes zeros.
  template <class Tile, class StageState>
  static CUTLASS_DEVICE void decode(Params const& params, Tile tile, bool is_outside, FullBarrier* full,
                                    FullBarrier* decoded, StageState& stage, typename Stage::Storage& storage,
                                    Tables& tables, uint32_t barrier) {
    int32_t const end = is_outside ? 0 : params.extent_k;
    if (is_outside) tile.batch = 0;
    if (params.blocks.adds) {
      decode<false, true>(params, tile, end, full, decoded, stage, storage, tables, barrier);
    } else if (kHasZeros && params.blocks.other.data != nullptr) {
      decode<kHasZeros, false>(params, tile, end, full, decoded, stage, storage, tables, barrier);
    } else {
      decode<false, false>(params, tile, end, full, decoded, stage, storage, tables, barrier);
    }
  }

 private:
  static CUTLASS_DEVICE int thread() { return threadIdx.x % kThreads; }

  // Fills the tables. Each thread loads what belongs to its row, eight blocks before they are needed.
  class Filler {
   public:
    template <class Tile>
    CUTLASS_DEVICE Filler(Params const& params, Tile const& tile, Tables& tables, uint32_t barrier)
        : blocks_(params.blocks), tables_(tables), barrier_(barrier) {
      int32_t const row = min(tile.m * kTileM + thread(), params.extent_m - 1);
      of_row_ = tile.batch * blocks_.batch_stride + blocks_.by_block_n.divide(row) * blocks_.stride_n;
      last_ = blocks_.by_block_k.divide(params.extent_k - 1);
      end_ = blocks_.by_block_k.divide(tile.k_begin * kTileK);
      load();
    }

    // The place in the tables of the block that has this k.
    CUTLASS_DEVICE int32_t at(int32_t k) {
      int32_t const block = blocks_.by_block_k.divide(k);
      if (block >= end_) {
        cutlass::arch::NamedBarrier::sync(kThreads, barrier_);  // all have read the tables
        store();
        cutlass::arch::NamedBarrier::sync(kThreads, barrier_);
        end_ += kBlocks;
        load();
      }
      return block - (end_ - kBlocks);
    }

   private:
    CUTLASS_DEVICE void load() {
      auto const index = [&](int i) { return of_row_ + min(end_ + i, last_) * blocks_.stride_k; };
      scaled::load_numbers<kBlocks>(blocks_.scale, index, [&](int i, uint32_t raw) { factors_[i] = raw; });
      if (blocks_.other.data != nullptr)
        scaled::load_numbers<kBlocks>(blocks_.other, index, [&](int i, uint32_t raw) { others_[i] = raw; });
    }
    CUTLASS_DEVICE void store() const {
      using Entry = typename Tables::Entry;
      auto const store_all = [&](auto& table, uint32_t const(&raw)[kBlocks], auto const& entry) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBlocks; ++i) table[i][thread()] = static_cast<Entry>(entry(raw[i]));
      };
      auto const as_floats = [&](auto& table, uint32_t const(&raw)[kBlocks], Type type) {
        scaled::with_type(type, [&](auto to_float) {
          store_all(table, raw, [&](uint32_t x) { return scaled::twice<T>(to_float(x)); });
        });
      };
      as_floats(tables_.factors, factors_, blocks_.scale.type);
      if (blocks_.other.data == nullptr) return;
      if (blocks_.adds) return as_floats(tables_.others, others_, blocks_.other.type);
      store_all(tables_.others, others_, [&](uint32_t code) { return Decoder::zero_of(code, blocks_.flip); });
    }

    scaled::Blocks const& blocks_;
    Tables& tables_;
    uint32_t const barrier_;
    uint32_t of_row_;
    int32_t last_, end_;  // blocks along K: the last one of all, and the first one that is in registers
    uint32_t factors_[kBlocks], others_[kBlocks];
  };

  // Four pairs for a piece: of the rows that it has, or of its only row.
  static CUTLASS_DEVICE void read_table(uint32_t (&pairs)[4], typename Tables::Entry const (&table)[kTileM], int row) {
    if constexpr (kAlongM) {
      uint4 const x = *reinterpret_cast<uint4 const*>(&table[row]);
      pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
    } else {
      pairs[0] = pairs[1] = pairs[2] = pairs[3] = table[row];
    }
  }

  template <bool kSubtracts, bool kAdds, class Tile, class StageState>
  static CUTLASS_DEVICE void decode(Params const& params, Tile const& tile, int32_t end, FullBarrier* full,
                                    FullBarrier* decoded, StageState& stage, typename Stage::Storage& storage,
                                    Tables& tables, uint32_t barrier) {
    // Rows of 128 bytes along M or along K, the 16-byte piece p of row r at p ^ r % 8. Of an M-major A, columns 64 to
    // 127 are a box of their own.
    static_assert(Stage::A::kRowBytes == 128);
    int const own = thread(), row = own / kPiecesOfRow, piece = own % kPiecesOfRow;
    constexpr int kRowStep = kThreads / kPiecesOfRow;  // rows from a piece of a thread to its next
    static_assert(kRowStep % 8 == 0);
    uint32_t const at = own * kPieceBytes,
                   from = cute::cast_smem_ptr_to_uint(storage.numbers) + (at ^ ((at >> 3) & (kRowBytes - 16))),
                   to = cute::cast_smem_ptr_to_uint(storage.a) + piece / 8 * (Stage::A::kBoxElements * 2) + row * 128 +
                        (piece % 8 ^ row % 8) * 16;
    // Blocks that are shorter than the tile: log2 of how many pieces along K share one.
    int32_t const shift = params.blocks.block_k == 16 ? 1 : params.blocks.block_k == 32 ? 2 : 3;
    uint32_t const zero = Decoder::zero_of(0, params.blocks.flip), flip = params.blocks.flip;
    Filler filler(params, tile, tables, barrier);
    int32_t k = tile.k_begin * kTileK;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t count = tile.k_count; count > 0; --count, k += kTileK, ++stage) {
      int32_t const block = filler.at(k);
      int const s = stage.index();
      full[s].wait(stage.phase());
      uint32_t codes[kPieces][kBits / 4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        uint32_t const source = from + s * kLoadedBytes + i * (kThreads * kPieceBytes);
        if constexpr (kBits == 4) {
          asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes[i][0]) : "r"(source));
        } else {
          asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(codes[i][0]), "=r"(codes[i][1]) : "r"(source));
        }
      }
      uint32_t const target = to + s * (kTileM * kTileK * 2);
      uint32_t factors[kAtOnce][4], others[kAtOnce][4];
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kPieces; first += kAtOnce) {
        // Eight rows of an M-major A are one piece along K.
        if (!kAlongM || first == 0 || shift < 3) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            int32_t const entry = block + ((kAlongM ? (first + i) * kRowStep / 8 : piece) >> shift),
                          at_row = kAlongM ? piece * 8 : row + (first + i) * kRowStep;
            read_table(factors[i], tables.factors[entry], at_row);
            if (kSubtracts || kAdds) read_table(others[i], tables.others[entry], at_row);
          }
        }
        // A piece is a chain of dependent instructions, and stores keep their order: several pieces take turns.
        uint32_t out[kAtOnce][4];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kAtOnce; ++i) {
            uint32_t const x = Decoder::pair(halves(codes[first + i], j), kSubtracts ? others[i][j] : zero, flip);
            auto const number = scaled::as_pair<T>(x), factor = scaled::as_pair<T>(factors[i][j]);
            out[i][j] = scaled::bits_of(kAdds ? __hfma2(number, factor, scaled::as_pair<T>(others[i][j]))
                                              : __hmul2(number, factor));
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) store(target + (first + i) * (kRowStep * 128), out[i]);
      }
      // A scale that is infinite would make NaN of what is beyond the last k.
      if (k + kTileK > end) {
        int32_t const left = end - k - (kAlongM ? row : piece * 8);
        for (int i = 0; i < kPieces; ++i) {
          if (left <= (kAlongM ? i * kRowStep : 0)) store(target + i * (kRowStep * 128), {0, 0, 0, 0});
        }
      }
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (cute::elect_one_sync()) decoded[s].arrive();
    }
  }

  // Stores are volatile, so that they keep their places before the fence, but clobber no memory that is loaded.
  static CUTLASS_DEVICE void store(uint32_t to, uint32_t const (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]));
  }

  // Codes 2j and 2j + 1, in the low bits of halves.
  static CUTLASS_DEVICE uint32_t halves(uint32_t const (&codes)[kBits / 4], int j) {
    if constexpr (kBits == 4) return __byte_perm(codes[0], codes[0] >> 4, j | (4 + j) << 8);
    return __byte_perm(codes[j / 2], 0, 2 * (j % 2) | (2 * (j % 2) + 1) << 8);
  }
};

}  // namespace jax_streamk::sm90
