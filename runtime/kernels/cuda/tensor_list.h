#pragma once
// One launch for the elements of several tensors. For .cu files.
//
// The table of the tensors is an argument of the kernel: it needs no memory of
// the device, and a graph that captures the launch keeps it. Every tensor has
// blocks of its own, as many as its size asks for; a block finds its tensor in
// the prefix sums of their numbers.

#include <algorithm>
#include <cstdint>
#include <span>

#include "runtime/kernels/cuda/elements.h"

namespace tessera {

// Longer lists are several launches. So many of the largest item, that of AdamW
// with a copy, leave kOtherArgumentBytes.
inline constexpr size_t kMostListed = 36;
// Kernels have 4 KiB of arguments on every device (CUDA C++ Programming Guide
// 13.0, "__global__ Function Parameters"), of which this is left to others.
inline constexpr size_t kOtherArgumentBytes = 256;

// Item: the tensors that are worked on together, and their `n` elements.
template <typename Item>
struct TensorList {
  int count = 0;
  int64_t block_elements = 0;  // at most; a multiple of kVector
  int first_block[kMostListed + 1] = {};
  Item items[kMostListed];

  // The item of a block.
  __device__ int ItemOf(int block) const {
    int least = 0;
    int most = count - 1;
    while (least < most) {
      const int middle = (least + most + 1) / 2;
      if (first_block[middle] <= block) {
        least = middle;
      } else {
        most = middle - 1;
      }
    }
    return least;
  }
};

// Calls f(item, first, span) for the vectors of this block.
template <typename Item, typename F>
__device__ void ForEachListedVector(const TensorList<Item>& list, F f) {
  const auto block = static_cast<int>(blockIdx.x);
  const int i = list.ItemOf(block);
  const Item item = list.items[i];
  const int64_t begin =
      int64_t{block - list.first_block[i]} * list.block_elements;
  const int64_t end = begin + list.block_elements < item.n
                          ? begin + list.block_elements
                          : item.n;
#pragma unroll 2
  for (int64_t first = begin + threadIdx.x * int64_t{kVector}; first < end;
       first += blockDim.x * int64_t{kVector}) {
    f(item, first, FirstOf(end - first));
  }
}

// Calls enqueue(list, calls, blocks) for the lists that the calls make up; make
// gives an item of a call. Blocks have `block_elements` elements each, or where
// that is 0 as many as make some waves of blocks (BlocksFor).
template <typename Item, typename Make, typename Enqueue>
void InLists(std::span<const KernelCall> calls, int64_t block_elements,
             Make make, Enqueue enqueue) {
  static_assert(sizeof(TensorList<Item>) + kOtherArgumentBytes <= 4096);
  for (size_t begin = 0; begin < calls.size(); begin += kMostListed) {
    const auto part =
        calls.subspan(begin, std::min(kMostListed, calls.size() - begin));
    TensorList<Item> list;
    int64_t elements = 0;
    for (const KernelCall& call : part) {
      list.items[list.count] = make(call);
      elements += list.items[list.count++].n;
    }
    list.block_elements = block_elements;
    if (block_elements == 0) {
      constexpr int64_t kAtOnce = int64_t{kThreads} * kVector;
      const int64_t most =
          std::max(1U, BlocksForVectors(*calls[0].queue, elements));
      const int64_t rounds = DivideUp(elements, most * kAtOnce);
      list.block_elements = std::max<int64_t>(1, rounds) * kAtOnce;
    }
    int blocks = 0;
    for (int i = 0; i < list.count; ++i) {
      list.first_block[i] = blocks;
      blocks +=
          static_cast<int>(DivideUp(list.items[i].n, list.block_elements));
    }
    list.first_block[list.count] = blocks;
    enqueue(list, part, static_cast<unsigned>(blocks));
  }
}

// Kernel::run of a kernel whose Kernel::run_list is kRunList.
template <void (*kRunList)(std::span<const KernelCall>)>
void RunAlone(const KernelCall& call) {
  kRunList(std::span(&call, 1));
}

}  // namespace tessera
