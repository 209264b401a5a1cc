// Both passes over the tensor in one launch, of blocks that all run at once: the blocks of a strip wait for each other where
// launches would follow each other, and a thread keeps of its vectors what fits in shared memory for the second pass. The
// same pieces, and so the same bits, as in launches of their own.
#pragma once

#include "batch_norm/batch_norm_finish.cuh"

namespace normswap {
namespace {

// In which order a thread's vectors come again, by the place q: first those that are not held, from the last one, which the
// L2 still has; then those that are.
template <class Words>
struct HeldOrder {
  using Raw = decltype(Words::raw);
  int count, levels, loaded;  // vectors; those for which there is room; those that are not held

  // `each` tensors.
  __device__ HeldOrder(int vectors, int each)
      : count(vectors), levels(kBatchHeldBytes / (kBatchNormThreads * each * static_cast<int>(sizeof(Raw)))),
        loaded(max(0, vectors - levels)) {}
  __device__ int index(int q) const { return q < loaded ? count - 1 - q : q - loaded; }
  // Where this thread's first vector is held; the others follow a block's apart.
  __device__ Raw* mine(char* memory) const { return reinterpret_cast<Raw*>(memory) + thread(); }
};

// The block waits until all blocks of its strip call this, and sees what they have written; `which`: the first or second time.
template <int V>
__device__ inline void wait_for_strip(const Vectors<V>& of, int which) {
  __syncthreads();
  if (thread() == 0) {
    unsigned* const counter = of.a.counters + 2 * of.strip + which;
    const unsigned blocks = static_cast<unsigned>(of.a.p.pieces);
    unsigned seen;
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < blocks);
  }
  __syncthreads();
}

// Shares out the channels of a strip among its blocks: calls with(channel, whether there is one) by the warps that unite it.
template <int V, class With>
__device__ inline void for_channels_of_block(const Vectors<V>& of, With with) {
  const int at_once = kBatchNormThreads / 32 / of.a.finish_warps, own = thread() / 32 / of.a.finish_warps;
  const int step = static_cast<int>(of.a.p.pieces) * at_once;
  for (int first = of.piece * at_once; first < of.channels(); first += step) {
    with(of.first_channel() + first + own, first + own < of.channels());
    __syncthreads();
  }
}

template <auto kernel>
cudaError_t launch_held(const BatchNormArgs& a, cudaStream_t stream) {
  const size_t bytes = 2 * static_cast<size_t>(a.p.strips) * sizeof(unsigned);
  const cudaError_t error = cudaMemsetAsync(a.counters, 0, bytes, stream);
  if (error != cudaSuccess) return error;
  return launch_at_once<kernel>(a, {grid_of(a.p.items), a.p.threads, kBatchHeldBytes, 1, false}, stream);
}

}  // namespace
}  // namespace normswap
