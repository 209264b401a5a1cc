// What blocks and warps share while they work: copies to shared memory under way, and clusters of blocks.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

namespace normswap {
namespace {

// --- copies ------------------------------------------------------------------------------------------------------

// 16 bytes, which arrive later.
__device__ inline void copy_async(void* shared, const void* global) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

// The copies of a thread are counted in batches, which arrive in the order in which they were started.
__device__ inline void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Newest>
__device__ inline void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newest) : "memory");
}

// This thread's copies, of all batches, have arrived.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --- clusters ----------------------------------------------------------------------------------------------------
// Where there are none (before sm_90) a block is alone.

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

// Stores in the shared memory of block `rank` of the cluster, where `at` is in this one's.
template <class S>
__device__ inline void store_in_block(S* at, int rank, const S& value) {
#if __CUDA_ARCH__ >= 900
  *cooperative_groups::this_cluster().map_shared_rank(at, rank) = value;
#else
  *at = value;
#endif
}

#if __CUDA_ARCH__ >= 900
// --- messages between the blocks of a cluster --------------------------------------------------------------------
// Cheaper than cluster_arrive where stores to global memory are under way, for which that waits.

// Counts the bytes that others store in this block's shared memory, phase after phase.
struct Inbox {
  uint64_t barrier;

  __device__ unsigned address() const { return static_cast<unsigned>(__cvta_generic_to_shared(&barrier)); }
  // One thread; the other blocks may send after cluster_arrive and cluster_wait.
  __device__ void open() {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address()) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // One thread, once a phase: the bytes that will come.
  __device__ void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  // Until all bytes of the `phase`-th phase have come.
  __device__ void wait(int phase) const {
    unsigned done = 0;
    while (done == 0) {
      asm volatile(
          "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(address()), "r"(phase & 1)
          : "memory");
    }
  }
};

__device__ inline unsigned address_in_block(unsigned address, int rank) {
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Stores in block `rank`, where `at` and `inbox` are in this one's shared memory.
template <class S>
__device__ inline void send_to_block(S* at, Inbox& inbox, int rank, const S& value) {
  static_assert(sizeof(S) % 4 == 0);
  const unsigned to = address_in_block(static_cast<unsigned>(__cvta_generic_to_shared(at)), rank);
  const unsigned barrier = address_in_block(inbox.address(), rank);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(S) / 4); ++i) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to + 4 * i),
                 "r"(reinterpret_cast<const unsigned*>(&value)[i]), "r"(barrier)
                 : "memory");
  }
}
#endif

}  // namespace
}  // namespace normswap
