// What the blocks of a cluster share. Where there are no clusters (before sm_90) a block is alone.
#pragma once

#include "device/barrier.cuh"

namespace normswap {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kClusters = false;
#else
constexpr bool kClusters = true;
#endif

// The barrier of a cluster in two halves; all threads call. What was stored before the first is seen after the second.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The first half, of which only what was said of the inboxes (below) is seen after the second.
__device__ inline void cluster_arrive_with_inboxes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// The address in the shared memory of block `rank` of the cluster of what is at `at` in this one's.
__device__ inline unsigned address_in_block(const void* at, int rank) {
  unsigned to = shared_address(at);
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(rank));
#endif
  return to;
}

// Stores in the shared memory of block `rank` of the cluster, where `at` is in this one's.
template <class S>
__device__ inline void store_in_block(S* at, int rank, const S& value) {
  static_assert(sizeof(S) % 4 == 0);
#if __CUDA_ARCH__ >= 900
  const unsigned to = address_in_block(at, rank);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(S) / 4); ++i) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to + 4 * i), "r"(reinterpret_cast<const unsigned*>(&value)[i])
                 : "memory");
  }
#else
  *at = value;
#endif
}

// --- messages between the blocks of a cluster --------------------------------------------------------------------
// Cheaper than cluster_arrive, which waits for all that the block stored or loads.

// Counts the bytes that others store in this block's shared memory.
struct Inbox {
  Barrier barrier;

  // The first warp; `bytes` that will come. The others may send after cluster_arrive_with_inboxes and cluster_wait.
  __device__ void open(unsigned bytes) {
    const bool first = threadIdx.x == 0;
    if (first) barrier.init(1);
    __syncwarp();
    if (first) barrier.arrive_expecting(bytes);
  }
  // Until all bytes have come.
  __device__ void wait() const { barrier.wait(0); }
};

// Stores in block `rank`, where `at` and `inbox` are in this one's shared memory.
template <class S>
__device__ inline void send_to_block(S* at, const Inbox& inbox, int rank, const S& value) {
  static_assert(sizeof(S) % 4 == 0);
#if __CUDA_ARCH__ >= 900
  const unsigned to = address_in_block(at, rank), barrier = address_in_block(&inbox, rank);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(S) / 4); ++i) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to + 4 * i),
                 "r"(reinterpret_cast<const unsigned*>(&value)[i]), "r"(barrier)
                 : "memory");
  }
#endif
}

}  // namespace
}  // namespace normswap
