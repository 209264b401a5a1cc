// Copies from global to shared memory that arrive later.
#pragma once

#include "device/barrier.cuh"

namespace normswap {
namespace {

// 16 bytes, which arrive later.
__device__ inline void copy_async(unsigned to, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ inline void copy_async(void* shared, const void* global) { copy_async(shared_address(shared), global); }

// The same of 8 bytes, through the L1, and of 4.
__device__ inline void copy_async_pair(unsigned to, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(global) : "memory");
}
__device__ inline void copy_async_word(unsigned to, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

// The copies of a thread are counted in batches, which arrive in the order in which they were started.
__device__ inline void end_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int Newest>
__device__ inline void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newest) : "memory");
}

// Of this thread's batches all but the `newest` last ones have arrived, of which there are at most Most. Where the number is
// known when this is compiled, no branches.
template <int Most>
__device__ inline void wait_for_all_but(int newest) {
  if constexpr (Most == 0) {
    wait_for_all_but<0>();
  } else if (newest >= Most) {
    wait_for_all_but<Most>();
  } else {
    wait_for_all_but<Most - 1>(newest);
  }
}

// This thread's copies, of all batches, have arrived.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace
}  // namespace normswap
