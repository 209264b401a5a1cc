// Barriers in shared memory, at which some threads arrive and others wait.
#pragma once

#include <cstdint>

namespace normswap {
namespace {

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Whenever all that it expects have arrived, who waits goes on and the next arrivals count anew.
struct Barrier {
  uint64_t state;

  // One thread; the others after a barrier of another kind.
  __device__ void init(unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(arrivals) : "memory");
  }
  // One of the arrivals: what this thread stored before is seen by who waits.
  __device__ void arrive() {
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(shared_address(&state))
                 : "memory");
  }
  // The same, and so many bytes are expected too, which are still to come.
  __device__ void arrive_expecting(unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes) : "memory");
#endif
  }
  // Until all have arrived. `parity`: 0 when this is waited for the first, the third, ... time, else 1. At the scope of the
  // block: at that of the cluster the L1 would be emptied.
  __device__ void wait(unsigned parity) const {
    unsigned done = 0;
    while (done == 0) {
#if __CUDA_ARCH__ >= 900
      asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                   : "=r"(done)
                   : "r"(shared_address(&state)), "r"(parity)
                   : "memory");
#else
      asm volatile("{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                   : "=r"(done)
                   : "r"(shared_address(&state)), "r"(parity)
                   : "memory");
#endif
    }
  }
};

}  // namespace
}  // namespace normswap
