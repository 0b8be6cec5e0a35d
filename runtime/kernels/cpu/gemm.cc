#include "runtime/kernels/cpu/gemm.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "planner/base/check.h"
#include "planner/base/divide.h"

namespace tessera {
namespace {

// A tile of kTileRows rows by two registers of columns is summed in registers:
// as many as leave room for two registers of B and an element of A.
#if defined(__AVX512F__)  // 32 registers
constexpr int kRegisterBytes = 64;
constexpr int kTileRows = 14;
#elif defined(__AVX__)  // 16
constexpr int kRegisterBytes = 32;
constexpr int kTileRows = 6;
#else                   // 16 in SSE2 and AArch64's 32
constexpr int kRegisterBytes = 16;
constexpr int kTileRows = 6;
#endif

template <typename T>
struct Tile {
  typedef T Register __attribute__((vector_size(kRegisterBytes)));
  static constexpr int kLanes = kRegisterBytes / static_cast<int>(sizeof(T));
  static constexpr int kColumns = 2 * kLanes;
};

// A block of A of kDepth columns and at most kBlockRows rows is packed once and
// used by all threads, which pack blocks of B of at most kBlockColumns columns:
// a panel of A (28 KiB in fp32) lies in the first cache while the block of B
// (1 MiB) passes by from the second.
constexpr int64_t kDepth = 512;
constexpr int64_t kBlockRows = 128 * kTileRows;
constexpr int64_t kBlockColumns = 512;

// Memory to pack a block into, kept by the process for the next who packs. A
// rank's kernels run on whichever of its threads is free: if each asked the C
// library, each would keep a block of its own. Pages that nobody touches are
// not there, so all blocks are as large as the largest.
template <int64_t kBytes>
class PackMemory {
 public:
  PackMemory() {
    const std::lock_guard lock(kept().mutex);
    if (kept().blocks.empty()) {
      data_ = ::operator new (kBytes, std::align_val_t{64});
    } else {
      data_ = kept().blocks.back();
      kept().blocks.pop_back();
    }
  }
  ~PackMemory() {
    const std::lock_guard lock(kept().mutex);
    kept().blocks.push_back(data_);
  }
  PackMemory(const PackMemory&) = delete;
  PackMemory& operator=(const PackMemory&) = delete;

  // REQUIRES: `elements` take at most kBytes. Not initialized.
  template <typename T>
  T* Get(int64_t elements) const {
    TESSERA_CHECK(elements * static_cast<int64_t>(sizeof(T)) <= kBytes)
        << elements;
    return static_cast<T*>(data_);
  }

 private:
  struct Kept {
    std::mutex mutex;
    std::vector<void*> blocks;
  };
  static Kept& kept() {
    static auto* const kept = new Kept();  // threads may outlast a destructor
    return *kept;
  }

  void* data_ = nullptr;
};
using PackOfA = PackMemory<kBlockRows * kDepth * sizeof(double)>;
using PackOfB = PackMemory<kDepth * kBlockColumns * sizeof(double)>;

// Row i of a panel has `kWidth` elements: column i of the matrix's rows [first,
// first + width), with zeros behind them.
template <int kWidth, typename T>
void PackPanel(const MatrixView<T>& m, int64_t first, int64_t width,
               int64_t depth_first, int64_t depth, T* panel) {
  const T* const from =
      m.data + first * m.row_stride + depth_first * m.column_stride;
  if (width < kWidth) std::fill_n(panel, depth * kWidth, T{0});
  if (m.row_stride == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* const row = from + k * m.column_stride;
      if (width == kWidth) {
        std::memcpy(panel + k * kWidth, row, kWidth * sizeof(T));
      } else {
        std::copy_n(row, width, panel + k * kWidth);
      }
    }
    return;
  }
  // A few rows at a time, which their pages and lines outlast.
  constexpr int64_t kRun = 16;
  for (int64_t begin = 0; begin < depth; begin += kRun) {
    const int64_t end = std::min(begin + kRun, depth);
    for (int64_t i = 0; i < width; ++i) {
      const T* const row = from + i * m.row_stride;
      for (int64_t k = begin; k < end; ++k) panel[k * kWidth + i] = row[k];
    }
  }
}

// tile (row-major) = the product of a panel of A and one of B.
template <typename T>
void MultiplyPanels(int64_t depth, const T* a, const T* b, T* tile) {
  using Register = typename Tile<T>::Register;
  constexpr int kLanes = Tile<T>::kLanes;
  Register sum[kTileRows][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    Register b0;
    Register b1;
    std::memcpy(&b0, b, sizeof(b0));
    std::memcpy(&b1, b + kLanes, sizeof(b1));
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      sum[i][0] += a[i] * b0;
      sum[i][1] += a[i] * b1;
    }
    a += kTileRows;
    b += 2 * kLanes;
  }
  std::memcpy(tile, sum, sizeof(sum));
}

template <typename T>
void GemmOf(int64_t rows, int64_t columns, int64_t depth, MatrixView<T> a,
            MatrixView<T> b, const T* bias, bool accumulate, T* c,
            ThreadPool* pool) {
  constexpr int64_t kColumns = Tile<T>::kColumns;
  const auto parallel_for = [pool](int64_t n, const auto& f) {
    if (pool != nullptr) return pool->For(n, f);
    for (int64_t i = 0; i < n; ++i) f(i);
  };
  const int64_t threads = pool != nullptr ? pool->threads() : 1;
  // Blocks of columns, as even as whole panels allow.
  const int64_t column_panels = DivideUp(columns, kColumns);
  int64_t blocks = DivideUp(columns, kBlockColumns);
  blocks = std::min(RoundUp(blocks, threads), column_panels);
  const MatrixView<T> b_transposed = b.Transposed();
  const PackOfA a_memory;
  T* const a_block = a_memory.template Get<T>(
      std::min(RoundUp(rows, kTileRows), kBlockRows) * std::min(depth, kDepth));

  if (depth == 0) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        T& element = c[i * columns + j];
        element = (accumulate ? element : T{0}) + (bias ? bias[j] : T{0});
      }
    }
  }
  for (int64_t row = 0; row < rows; row += kBlockRows) {
    const int64_t block_rows = std::min(kBlockRows, rows - row);
    const int64_t row_panels = DivideUp(block_rows, kTileRows);
    for (int64_t k = 0; k < depth; k += kDepth) {
      const int64_t block_depth = std::min(kDepth, depth - k);
      const bool first = k == 0;
      constexpr int64_t kPanelsAtOnce = 8;
      parallel_for(DivideUp(row_panels, kPanelsAtOnce), [&](int64_t run) {
        for (int64_t p = run * kPanelsAtOnce;
             p < std::min((run + 1) * kPanelsAtOnce, row_panels); ++p) {
          const int64_t i = p * kTileRows;
          PackPanel<kTileRows>(a, row + i,
                               std::min<int64_t>(kTileRows, block_rows - i), k,
                               block_depth, &a_block[i * block_depth]);
        }
      });
      parallel_for(blocks, [&](int64_t block) {
        const int64_t begin = block * column_panels / blocks;
        const int64_t end = (block + 1) * column_panels / blocks;
        const PackOfB b_memory;
        T* const b_block =
            b_memory.template Get<T>((end - begin) * kColumns * block_depth);
        for (int64_t p = begin; p < end; ++p) {
          const int64_t j = p * kColumns;
          PackPanel<kColumns>(b_transposed, j, std::min(kColumns, columns - j),
                              k, block_depth,
                              &b_block[(p - begin) * kColumns * block_depth]);
        }
        alignas(64) T tile[kTileRows * kColumns];
        for (int64_t i = 0; i < block_rows; i += kTileRows) {
          const int64_t tile_rows =
              std::min<int64_t>(kTileRows, block_rows - i);
          for (int64_t p = begin; p < end; ++p) {
            const int64_t j = p * kColumns;
            const int64_t tile_columns = std::min(kColumns, columns - j);
            MultiplyPanels(block_depth, &a_block[i * block_depth],
                           &b_block[(p - begin) * kColumns * block_depth],
                           tile);
            for (int64_t y = 0; y < tile_rows; ++y) {
              T* const out = c + (row + i + y) * columns + j;
              const T* const sum = tile + y * kColumns;
              if (!first || accumulate) {
                for (int64_t x = 0; x < tile_columns; ++x) out[x] += sum[x];
              } else {
                for (int64_t x = 0; x < tile_columns; ++x) out[x] = sum[x];
              }
              if (first && bias != nullptr) {
                for (int64_t x = 0; x < tile_columns; ++x)
                  out[x] += bias[j + x];
              }
            }
          }
        }
      });
    }
  }
}

}  // namespace

void Gemm(int64_t rows, int64_t columns, int64_t depth, MatrixView<float> a,
          MatrixView<float> b, const float* bias, bool accumulate, float* c,
          ThreadPool* threads) {
  GemmOf(rows, columns, depth, a, b, bias, accumulate, c, threads);
}

void Gemm(int64_t rows, int64_t columns, int64_t depth, MatrixView<double> a,
          MatrixView<double> b, const double* bias, bool accumulate, double* c,
          ThreadPool* threads) {
  GemmOf(rows, columns, depth, a, b, bias, accumulate, c, threads);
}

}  // namespace tessera
