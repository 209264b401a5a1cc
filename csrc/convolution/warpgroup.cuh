// Matrix products of a warpgroup, four warps, whose operands lie in shared memory and which run beside what follows them: on
// sm_90 alone, by name sm_90a.
#pragma once

#include <type_traits>

#include "device/barrier.cuh"

namespace normswap {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kWarpgroups = true;
#else
constexpr bool kWarpgroups = false;
#endif

// Rows of 128 bytes, one behind the other from a multiple of 1024 on, whose 16-byte chunks are swizzled(row, chunk).
__device__ inline uint64_t operand_at(const void* shared) {
  constexpr uint64_t eight_rows = 1024 / 16, swizzle_of_128 = 1;
  const uint64_t at = (shared_address(shared) & 0x3ffff) / 16;
  return at | uint64_t{1} << 16 | eight_rows << 32 | swizzle_of_128 << 62;
}

// Sixteen channels further in such rows.
constexpr uint64_t kNextDepth = 32 / 16;

// What this thread wrote to shared memory is there for products that are started after the block's next barrier.
__device__ inline void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Nothing is read of the sums before this.
template <int Fragments>
__device__ inline void settled(float (&sums)[Fragments][4]) {
#pragma unroll
  for (int j = 0; j < Fragments; ++j) {
    asm volatile("" : "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3])::"memory");
  }
}

// The operands of a product: 4 * Fragments sums by number, and the places of the two others.
#define NORMSWAP_OF(j) "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3])
#define NORMSWAP_FOUR(j) NORMSWAP_OF(j), NORMSWAP_OF(j + 1), NORMSWAP_OF(j + 2), NORMSWAP_OF(j + 3)
#define NORMSWAP_SUMS_16 NORMSWAP_FOUR(0)
#define NORMSWAP_SUMS_32 NORMSWAP_FOUR(0), NORMSWAP_FOUR(4)
#define NORMSWAP_SUMS_64 NORMSWAP_SUMS_32, NORMSWAP_FOUR(8), NORMSWAP_FOUR(12)
#define NORMSWAP_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NORMSWAP_NAMES_32 NORMSWAP_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NORMSWAP_NAMES_64                                                                                      \
  NORMSWAP_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53" \
                    ",%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NORMSWAP_PRODUCT(across, type, count, a_name, b_name, add_name)                                                         \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add_name ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #across "k16.f32." type \
               "." type " {" NORMSWAP_NAMES_##count "}, " a_name ", " b_name ", p, 1, 1, 0, 0;\n\t}"                   \
               : NORMSWAP_SUMS_##count                                                                                   \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)))

// sums = a b^T, or += where `add`, over sixteen channels, of 64 rows at `a` and 8 * Fragments at `b`: a warp's are those of 16 of the 64 rows,
// over its lanes as those of multiply_add. Between begin_products and end_products, all four warps.
template <class T, int Fragments>
__device__ inline void start_product(uint64_t a, uint64_t b, bool add, float (&sums)[Fragments][4]) {
  static_assert(Fragments == 4 || Fragments == 8 || Fragments == 16);
  constexpr bool half = std::is_same_v<T, Half>;
  if constexpr (Fragments == 4 && half) NORMSWAP_PRODUCT(32, "f16", 16, "%16", "%17", "%18");
  if constexpr (Fragments == 4 && !half) NORMSWAP_PRODUCT(32, "bf16", 16, "%16", "%17", "%18");
  if constexpr (Fragments == 8 && half) NORMSWAP_PRODUCT(64, "f16", 32, "%32", "%33", "%34");
  if constexpr (Fragments == 8 && !half) NORMSWAP_PRODUCT(64, "bf16", 32, "%32", "%33", "%34");
  if constexpr (Fragments == 16 && half) NORMSWAP_PRODUCT(128, "f16", 64, "%64", "%65", "%66");
  if constexpr (Fragments == 16 && !half) NORMSWAP_PRODUCT(128, "bf16", 64, "%64", "%65", "%66");
}

#undef NORMSWAP_OF
#undef NORMSWAP_FOUR
#undef NORMSWAP_SUMS_16
#undef NORMSWAP_SUMS_32
#undef NORMSWAP_SUMS_64
#undef NORMSWAP_NAMES_16
#undef NORMSWAP_NAMES_32
#undef NORMSWAP_NAMES_64
#undef NORMSWAP_PRODUCT

}  // namespace
}  // namespace normswap
